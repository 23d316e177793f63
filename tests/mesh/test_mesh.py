"""The live mesh: who this rank is, and what ranks tell each other."""

from typing import Any

import pytest
import torch
from small import on_mesh

from dtrain.errors import StoreError
from dtrain.mesh import Mesh


def talk(mesh: Mesh) -> dict[str, object]:
    mesh.barrier()
    return {
        "who": (mesh.rank, mesh.world, mesh.data_rank, mesh.data_ranks, str(mesh.device)),
        "sum": mesh.sum(torch.tensor([1.0, float(mesh.rank)])).tolist(),
        "max": mesh.max(torch.tensor([mesh.rank, -mesh.rank])).tolist(),
        "gather": mesh.gather({"rank": mesh.rank}),
    }


def test_ranks_talk() -> None:
    for rank, answers in enumerate(on_mesh(talk, dp_replicate=3)):
        assert answers == {
            "who": (rank, 3, rank, 3, "cpu"),
            "sum": [3.0, 3.0],
            "max": [2, 0],
            "gather": [{"rank": 0}, {"rank": 1}, {"rank": 2}],
        }


def test_one_rank_talks_to_itself() -> None:
    (answers,) = on_mesh(talk, dp_shard=1)
    assert answers == {"who": (0, 1, 0, 1, "cpu"), "sum": [1.0, 0.0], "max": [0, 0], "gather": [{"rank": 0}]}


def axes(mesh: Mesh) -> dict[str, list[int]]:
    neighbours = {name: mesh.axis(name).mesh.tolist() for name in ("dp_replicate", "dp_shard")}
    both = mesh.axis("dp_replicate", "dp_shard")
    return {**neighbours, "both": both.mesh.tolist(), "names": list(both.mesh_dim_names or ())}  # type: ignore[dict-item]


def test_inner_axes_are_neighbours() -> None:
    for rank, view in enumerate(on_mesh(axes, dp_replicate=2, dp_shard=2)):
        assert view["both"] == [[0, 1], [2, 3]]
        assert view["names"] == ["dp_replicate", "dp_shard"]
        assert view["dp_shard"] == ([0, 1] if rank < 2 else [2, 3])
        assert view["dp_replicate"] == [rank % 2, rank % 2 + 2]


def views(mesh: Mesh) -> dict[str, Any]:
    return {
        "coordinate": dict(mesh.coordinate),
        "data": (mesh.data_rank, mesh.data_ranks, mesh.batch_ranks),
        "groups": {
            axis: sorted(torch.distributed.get_process_group_ranks(mesh.group(axis)))
            for axis in ("pp", "cp", "tp", "batch")
        },
        "sum": mesh.sum(torch.tensor([2.0**mesh.rank])).item(),
        "stages": mesh.sum_stages(torch.tensor([2.0**mesh.rank])).item(),
    }


def alike(rank: int, world: int, *same: int) -> list[int]:
    """Ranks of a 2 x 2 x 2 mesh that have these coordinates, of those numbered 0 (outer) to 2 (inner), in common with `rank`."""
    places = [(other >> 2, other >> 1 & 1, other & 1) for other in range(world)]
    return [other for other in range(world) if all(places[other][axis] == places[rank][axis] for axis in same)]


def test_every_axis_is_a_group_of_those_that_differ_in_it_alone() -> None:
    """Outer to inner: pp, dp_shard, tp."""
    for rank, view in enumerate(on_mesh(views, pp=2, dp_shard=2, tp=2)):
        pp, dp, tp = rank >> 2, rank >> 1 & 1, rank & 1
        assert view["coordinate"] == {"pp": pp, "dp_replicate": 0, "dp_shard": dp, "cp": 0, "tp": tp}
        assert view["data"] == (dp, 2, 2)
        assert view["groups"] == {
            "pp": alike(rank, 8, 1, 2),
            "cp": [rank],
            "tp": alike(rank, 8, 0, 1),
            "batch": alike(rank, 8, 0, 2),
        }
        assert view["sum"] == sum(2.0**other for other in alike(rank, 8, 0, 2)), (
            "over the batch of its stage, once for what tp holds alike"
        )
        assert view["stages"] == sum(2.0**other for other in alike(rank, 8, 1, 2))


def test_ranks_of_a_sequence_see_the_same_samples_and_share_their_gradients() -> None:
    for rank, view in enumerate(on_mesh(views, dp_replicate=2, cp=2)):
        assert view["data"] == (rank // 2, 2, 4)
        assert view["groups"] == {
            "pp": [rank],
            "cp": [rank // 2 * 2, rank // 2 * 2 + 1],
            "tp": [rank],
            "batch": [0, 1, 2, 3],
        }
        assert (view["sum"], view["stages"]) == (15.0, 2.0**rank)


def places(mesh: Mesh) -> dict[str, Any]:
    stored, experts = mesh.axis("dp_shard").mesh.tolist(), mesh.axis("ep", view="experts").mesh.tolist()
    return {
        "stored": stored,
        "experts": experts,
        "copies": mesh.axis("expert_shard", view="experts").mesh.tolist(),
        "replica_coords": dict(mesh.replica_coords),
    }


def test_experts_are_shared_out_over_neighbours_and_cp_holds_shards() -> None:
    for rank, view in enumerate(on_mesh(places, dp_shard=2, cp=2, ep=2)):
        assert view["stored"] == [0, 1, 2, 3]
        assert view["experts"] == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert view["copies"] == [rank % 2, rank % 2 + 2]
        assert view["replica_coords"] == {"batch": rank, "tp": 0, "expert_copy": rank // 2}


VALUES = [None, "a much longer text, not ASCII: \u00fc \udcff", {"a": [1, 2.5, True], "b": {}}, ""]


def gathered(mesh: Mesh) -> list[Any]:
    return [mesh.gather(value) for value in VALUES[mesh.rank :] + VALUES[: mesh.rank]]


def test_values_of_any_length_cross_as_text() -> None:
    """Ranks of tests refuse to unpickle."""
    for received in on_mesh(gathered, dp_shard=2):
        assert received == [[VALUES[number], VALUES[(number + 1) % 4]] for number in range(4)]


def refused(mesh: Mesh) -> str:
    def act() -> None:
        if mesh.rank == 1:
            raise PermissionError("the disk is read-only")

    with pytest.raises(StoreError) as caught:
        mesh.on_all("write", act)
    return str(caught.value)


def test_an_error_of_the_disk_on_one_rank_is_raised_on_all() -> None:
    assert on_mesh(refused, dp_shard=2) == ["cannot write: rank 1: the disk is read-only"] * 2
