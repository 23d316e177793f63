"""Degrees of the axes: the strategy takes the ranks nobody asked for, and nothing is bent to fit."""

import pytest
from small import plan

from dtrain.errors import WordsError
from dtrain.plan import MeshShape


def shape(*words: str) -> MeshShape:
    return plan("batch=48", *words).mesh


@pytest.mark.parametrize(
    ("words", "replicate", "shard"),
    [
        ((), 1, 1),
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
    ],
)
def test_the_strategy_fills_the_mesh(words: tuple[str, ...], replicate: int, shard: int) -> None:
    assert shape(*words) == MeshShape(dp_replicate=replicate, dp_shard=shard)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("strategy=single", "devices=2"), "Type strategy=ddp"),
        (("mesh.dp_shard=3", "strategy=fsdp", "devices=4"), "dp_shard=3 is 3 ranks, but nodes x devices = 1 x 4 = 4"),
        (("mesh.dp_shard=2", "mesh.dp_replicate=1", "strategy=fsdp", "devices=4"), "is 2 ranks"),
        (("mesh.dp_shard=0", "strategy=fsdp"), "a degree is at least 1"),
        (("mesh.tp=2", "devices=2"), "the axis tp is not built yet"),
        (("mesh.pp=2", "devices=2"), "dp_replicate and dp_shard"),
        (("strategy=hsdp", "devices=2"), "type nodes=2 devices=2"),
        (("strategy=hsdp",), "is not hybrid"),
        (("strategy=ddp", "devices=2", "mesh.dp_shard=2"), "Type strategy=fsdp"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused_with_the_product(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(WordsError) as caught:
        shape(*words)
    assert said in str(caught.value)
