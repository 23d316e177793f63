"""Small models on a GPU run as they are written, in fp32, on every mesh."""

from pathlib import Path

import pytest
from small import plan

from dtrain.resolve.small import SECONDS, block_seconds

LARGE = "model.width=4096", "batch=256"
MLP = "data=synthetic", "model=mlp", "objective=classification", "batch=256"


def test_small_blocks_are_neither_compiled_nor_cast_and_large_ones_are() -> None:
    small, large = plan("cluster=h100x8", *MLP), plan("cluster=h100x8", *LARGE)
    assert block_seconds(small) < SECONDS < block_seconds(large)
    chosen = [[Path(part["_target_"]).name for part in (each.compile, each.precision)] for each in (small, large)]
    assert chosen == [
        ["dtrain.compile.none.build", "dtrain.precision.fp32.build"],
        ["dtrain.compile.blocks.build", "dtrain.precision.bf16.build"],
    ]
    assert all(
        small.why[name].startswith(f"{word} (auto: small blocks")
        for name, word in (("compile", "none"), ("precision", "fp32"))
    )


@pytest.mark.parametrize("words", [MLP, LARGE], ids=["small", "large"])
def test_no_mesh_changes_the_choice(words: tuple[str, ...]) -> None:
    meshes = ("devices=1",), ("devices=8",), ("nodes=4",), ("microbatch=1", "devices=2"), ("strategy=fsdp",)
    assert len({str(plan("cluster=h100x8", *words, *mesh).precision["_target_"]) for mesh in meshes}) == 1


def test_words_that_are_typed_stay() -> None:
    assert (
        plan("cluster=h100x8", "precision=bf16", "compile=blocks", *MLP).precision["_target_"]
        == "dtrain.precision.bf16.build"
    )


def test_a_model_whose_shapes_are_not_known_is_taken_for_a_large_one() -> None:
    assert plan("cluster=h100x8", "model.freeze=[embed]").precision["_target_"] == "dtrain.precision.bf16.build"
