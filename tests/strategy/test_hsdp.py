"""hsdp: shards inside a node, replicas across, the numbers of one process."""

from functools import partial

from pool import resident
from small import PARTS, STRATEGIES, agree, few_steps, on_resident_mesh
from torch.distributed.tensor import Replicate, Shard

from dtrain.build import build
from dtrain.mesh import Mesh
from dtrain.model import construct
from dtrain.parallel.order import parallelize
from dtrain.strategy.hsdp import HSDP

HYBRID = {"dp_replicate": 2, "dp_shard": 2}


def test_four_ranks_are_one_process() -> None:
    (reference,) = resident(1, few_steps, PARTS, {})
    for microbatch in (2, 1):
        runs = resident(
            4,
            partial(few_steps, PARTS | {"strategy": STRATEGIES["fsdp"]}, HYBRID, microbatch=microbatch),
        )
        agree(runs[0], reference)
        assert all(run["weights"] == runs[0]["weights"] for run in runs)


def placed(mesh: Mesh) -> tuple[bool, list[float]]:
    model = construct(PARTS["model"], facts={"vocab": 16}, seed=0)
    parallelize(model, mesh, HSDP(reshard="forward", offload="none"), precision=build(PARTS["precision"]), seed=0)
    embed = model.embed.weight
    right = all(tuple(type(place) for place in p.placements) == (Replicate, Shard) for p in model.parameters())
    return right, embed.to_local().flatten().tolist()


def test_neighbours_hold_shards_and_nodes_hold_copies() -> None:
    answers = on_resident_mesh(placed, **HYBRID)
    assert all(right for right, _ in answers)
    shards = [held for _, held in answers]
    assert shards[0] == shards[2] != shards[1] == shards[3], "ranks 0 and 1 are one node"
