"""Degrees of the axes: an axis of the strategy absorbs unassigned ranks, and nothing is bent to fit."""

import re
from pathlib import Path

import pytest
from small import plan

from dtrain.errors import WordsError
from dtrain.planned import MeshShape
from dtrain.resolve.mesh import divisors


def shape(*words: str) -> MeshShape:
    return plan("batch=48", *with_strategy(words)).mesh


def with_strategy(words: tuple[str, ...]) -> tuple[str, ...]:
    """What `auto` picks is the concern of test_auto."""
    return words if any(word.startswith("strategy=") for word in words) else ("strategy=ddp", *words)


@pytest.mark.parametrize(
    ("words", "replicate", "shard"),
    [
        (("strategy=single",), 1, 1),
        (("devices=4",), 4, 1),
        (("strategy=ddp", "nodes=2", "devices=3"), 6, 1),
        (("strategy=fsdp", "devices=4"), 1, 4),
        (("strategy=fsdp",), 1, 1),
        (("strategy=fsdp", "devices=4", "mesh.dp_replicate=2"), 2, 2),
        (("strategy=hsdp", "nodes=2", "devices=4"), 2, 4),
        (("strategy=hsdp", "devices=4"), 2, 2),
        (("strategy=hsdp", "devices=6", "mesh.dp_replicate=3"), 3, 2),
        (("strategy=hsdp", "nodes=2", "devices=4", "mesh.dp_shard=2"), 4, 2),
        (("mesh.tp=1", "devices=2"), 2, 1),
        (("strategy=zero1", "devices=2"), 1, 2),
        (("strategy=zero2", "devices=2"), 1, 2),
        (("strategy=zero3", "devices=4", "mesh.dp_replicate=2"), 2, 2),
    ],
)
def test_the_strategy_fills_the_mesh(words: tuple[str, ...], replicate: int, shard: int) -> None:
    assert shape(*words) == MeshShape(dp_replicate=replicate, dp_shard=shard)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("devices=4", "mesh.tp=2"), MeshShape(dp_replicate=2, tp=2)),
        (("strategy=fsdp", "devices=4", "mesh.tp=2"), MeshShape(dp_shard=2, tp=2)),
        (("strategy=fsdp", "devices=8", "mesh.tp=2", "mesh.cp=2"), MeshShape(dp_shard=2, cp=2, tp=2)),
        (
            ("strategy=fsdp", "devices=8", "mesh.pp=2", "mesh.dp_replicate=2"),
            MeshShape(pp=2, dp_replicate=2, dp_shard=2),
        ),
        (("strategy=pipeline", "devices=4"), MeshShape(pp=4)),
        (("strategy=pipeline", "devices=8", "mesh.dp_replicate=2"), MeshShape(pp=4, dp_replicate=2)),
        (("devices=4", "mesh.tp=4"), MeshShape(tp=4)),
        (("strategy=hsdp", "nodes=2", "devices=8", "mesh.tp=2"), MeshShape(dp_replicate=2, dp_shard=4, tp=2)),
        (("model=moe", "devices=4", "mesh.ep=2"), MeshShape(dp_replicate=4, ep=2)),
        (("model=moe", "strategy=fsdp", "devices=8", "mesh.cp=2", "mesh.ep=8"), MeshShape(dp_shard=4, cp=2, ep=8)),
    ],
)
def test_axes_multiply_to_the_ranks(words: tuple[str, ...], expected: MeshShape) -> None:
    decided = plan("batch=48", "data=synthetic", *with_strategy(words))
    assert decided.mesh == expected
    assert decided.mesh.ranks == decided.world, "ep makes no ranks of its own"


REFUSED = [
    (("strategy=single", "devices=2"), "Type strategy=ddp"),
    (("mesh.dp_shard=3", "strategy=fsdp", "devices=4"), "dp_shard=3 is 3 ranks, but nodes x devices = 1 x 4 = 4"),
    (("mesh.dp_shard=2", "mesh.dp_replicate=1", "strategy=fsdp", "devices=4"), "is 2 ranks"),
    (("mesh.dp_shard=0", "strategy=fsdp"), "mesh.dp_shard is an integer >= 1"),
    (("mesh.ep=0",), "mesh.ep is an integer >= 1 or null. Type mesh.ep=1"),
    (("mesh.tp=2",), "tp=2 is 2 ranks, but nodes x devices = 1 x 1 = 1"),
    (("mesh.tp=2", "devices=3"), "= 3. Type devices=2 or mesh.tp=1."),
    (("mesh.tp=2", "devices=3", "model.heads=6", "model.width=96"), "Type devices=2 or mesh.tp=3 or mesh.tp=1."),
    (("mesh.pp=2", "devices=3"), "pp=2 is 2 ranks, but nodes x devices = 1 x 3 = 3"),
    (("mesh.pp=4", "nodes=2", "devices=3"), "pp=4 is 4 ranks, but nodes x devices = 2 x 3 = 6"),
    (("mesh.pp=2", "mesh.tp=4", "devices=4"), "pp=2 x tp=4 is 8 ranks, but nodes x devices = 1 x 4 = 4"),
    (("mesh.pp=3", "mesh.tp=2", "mesh.cp=2", "devices=4"), "pp=3 x cp=2 x tp=2 is 12 ranks"),
    (
        ("mesh.pp=2", "mesh.dp_replicate=2", "mesh.dp_shard=1", "devices=8"),
        "pp=2 x dp_replicate=2 x dp_shard=1 is 4 ranks",
    ),
    (("strategy=pipeline", "mesh.pp=1", "devices=2"), "pp=1 is 1 ranks, but nodes x devices = 1 x 2 = 2"),
    (("strategy=hsdp", "devices=2"), "type nodes=2 devices=2"),
    (("strategy=hsdp", "devices=2", "mesh.pp=2"), "type nodes=4 devices=2"),
    (("strategy=hsdp", "nodes=2", "mesh.dp_shard=1"), "type nodes=1 devices=4 mesh.dp_replicate=2 mesh.dp_shard=2"),
    (
        ("strategy=hsdp", "cluster=h100x8", "mesh.tp=8", "model.heads=8", "model.kv_heads=8"),
        "type nodes=4 devices=8 mesh.dp_replicate=2 mesh.dp_shard=2",
    ),
    (("cluster=h100x8", "mesh.pp=3", "mesh.tp=4"), "Type nodes=3"),
    (("cluster=h100x8", "strategy=pipeline", "mesh.pp=3", "mesh.dp_replicate=3"), "Type nodes=3 devices=3."),
    (("nodes=2", "devices=2", "mesh.pp=3"), "Type devices=3 "),
    (("strategy=hsdp",), "is not hybrid"),
    (("strategy=hsdp", "devices=4", "mesh.tp=2"), "is not hybrid"),
    (("strategy=ddp", "devices=2", "mesh.dp_shard=2"), "Type strategy=fsdp"),
    (
        ("strategy=pipeline", "devices=4", "mesh.dp_shard=2"),
        "mesh.dp_shard=2: strategy=pipeline shards nothing. Type strategy=fsdp",
    ),
    (
        ("model=moe", "mesh.ep=4", "devices=2"),
        "dp_replicate=2 x dp_shard=1 x cp=1 = 2, which 4 does not divide. Type mesh.ep=2.",
    ),
    (
        ("model=moe", "mesh.ep=3", "devices=8", "mesh.tp=2"),
        "= 4, which 3 does not divide. Type mesh.ep=2 or mesh.ep=4.",
    ),
]


@pytest.mark.parametrize(("words", "message"), REFUSED)
def test_a_mesh_that_cannot_be_is_refused_with_the_product(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(WordsError) as caught:
        shape(*words)
    assert message in str(caught.value)


@pytest.mark.parametrize("words", [words for words, _ in REFUSED], ids=" ".join)
def test_what_is_advised_works(words: tuple[str, ...]) -> None:
    """Every `key=number` after `Type` is an alternative; those with a blank between them go together, an axis goes in the place of the accused."""
    with pytest.raises(WordsError) as caught:
        shape(*words)
    (problem,) = caught.value.problems
    _, _, advice = problem.lower().partition("type ")
    alternatives = re.findall(r"(?:[a-z_.]+=\w+ ?)+", advice)
    for alternative in alternatives:
        message = alternative.split()
        keys = {word.split("=")[0] for word in message} | (
            {problem.split("=")[0]} if alternative.startswith("mesh.") else set()
        )
        layers = () if any(word.startswith("model=") for word in words) else ("model.layers=16",)
        plan(
            "batch=48",
            "data=synthetic",
            *layers,
            *(word for word in with_strategy(words) if word.split("=")[0] not in keys),
            *message,
        )


def test_divisors_of_small_and_of_large_worlds() -> None:
    assert [list(divisors(of)) for of in (1, 2, 12, 49)] == [[1], [1, 2], [1, 2, 3, 4, 6, 12], [1, 7, 49]]
    assert divisors(999_999_937) == [1, 999_999_937], "a prime"
    assert len(divisors(735_134_400)) == 1344


def test_a_strategy_of_ones_own_that_states_no_axis_is_told_how(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "axispkg.py").write_text("class Plain:\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        WordsError,
        match=r"strategy=axispkg.Plain does not state fill.*Type mesh.dp_replicate=2, or give its class about",
    ):
        plan("strategy._target_=axispkg.Plain", "devices=2", "trust=[axispkg]")


def test_more_ranks_than_a_node_has_gpus_are_more_nodes() -> None:
    words = ("cluster=h100x8", "strategy=fsdp", "model.heads=16", "model.width=256", "model.layers=8", "batch=64")
    with pytest.raises(WordsError, match=r"nodes x devices = 2 x 8 = 16\. Type nodes=8 or"):
        plan(*words, "nodes=2", "mesh.tp=16", "mesh.pp=4")
    assert plan(*words, "nodes=8", "mesh.tp=16", "mesh.pp=4").world == 64
