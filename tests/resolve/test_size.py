"""How large a model is: the arithmetic against the model itself."""

from typing import Any

import pytest
from small import plan

from dtrain.model import blocks, construct
from dtrain.resolve.size import size_of

GPT = {"vocab": 100, "layers": 3, "heads": 4, "kv_heads": None, "width": 32, "hidden": None, "tied": False, "rope_base": 1e4}
MOE = {"vocab": 100, "layers": 2, "heads": 4, "kv_heads": None, "width": 32, "experts": 8, "active": 2, "shared": 0, "hidden": None,
       "balance": 0.001, "tied": False, "rope_base": 1e4}  # fmt: skip
MLP = {"inputs": 20, "outputs": 7, "width": 16, "layers": 3}


@pytest.mark.parametrize(
    ("word", "part"),
    [
        ("gpt", GPT),
        ("gpt", GPT | {"kv_heads": 2, "hidden": 48, "tied": True}),
        ("gpt", GPT | {"layers": 1, "width": 128}),
        ("moe", MOE),
        ("moe", MOE | {"shared": 1, "hidden": 24, "kv_heads": 2}),
        ("moe", MOE | {"experts": 4, "active": 1, "tied": True}),
        ("mlp", MLP),
        ("mlp", MLP | {"inputs": [1, 4, 5], "layers": 1}),
    ],
)
def test_parameters_and_blocks_are_those_of_the_model(word: str, part: dict[str, Any]) -> None:
    name = {"gpt": "GPT", "moe": "MoE", "mlp": "MLP"}[word]
    model = construct({"_target_": f"dtrain.model.{word}.{name}", **part}, facts={}, seed=0)
    size = size_of(word, part, {"sequence": 16}, {})
    assert size is not None
    assert size.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert size.blocks == len({id(block) for block in blocks(model)})


def test_what_the_data_says_stands_for_auto() -> None:
    said = size_of("gpt", GPT | {"vocab": "auto"}, {"sequence": 16}, {"vocab": 100})
    assert said == size_of("gpt", GPT, {"sequence": 16}, {})


def test_work_grows_with_the_sequence_and_the_layers() -> None:
    def work(sequence: int, **changed: Any) -> int:
        size = size_of("gpt", GPT | changed, {"sequence": sequence}, {})
        assert size is not None
        return size.work

    assert work(64) > 2 * work(32), "attention is quadratic"
    assert work(32, layers=6) < 2 * work(32) + 1
    dense, sparse = size_of("gpt", GPT | {"layers": 2}, {"sequence": 16}, {}), size_of("moe", MOE, {"sequence": 16}, {})
    assert dense and sparse
    assert sparse.work < 1.2 * dense.work and sparse.parameters > 2 * dense.parameters, "most experts see only some tokens"


@pytest.mark.parametrize(
    ("word", "part"), [("cnn", {}), (None, {}), ("gpt", {"width": 4}), ("gpt", GPT | {"width": "wide"}), ("gpt", GPT | {"heads": 0})]
)
def test_what_is_not_known_has_no_size(word: str | None, part: dict[str, Any]) -> None:
    assert size_of(word, part, {"sequence": 16}, {}) is None


def test_a_plan_counts_no_weights() -> None:
    """The size is arithmetic: a model that no host could hold is planned in no time."""
    assert plan("data=synthetic", "devices=2", "model.layers=1000", "model.width=65536", "model.heads=64").world == 2
