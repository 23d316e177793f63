"""The live mesh: who this rank is, and what ranks tell each other."""

import torch
from small import on_mesh

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
    for rank, said in enumerate(on_mesh(talk, dp_replicate=3)):
        assert said == {"who": (rank, 3, rank, 3, "cpu"), "sum": [3.0, 3.0], "max": [2, 0], "gather": [{"rank": 0}, {"rank": 1}, {"rank": 2}]}


def test_one_rank_talks_to_itself() -> None:
    (said,) = on_mesh(talk, dp_shard=1)
    assert said == {"who": (0, 1, 0, 1, "cpu"), "sum": [1.0, 0.0], "max": [0, 0], "gather": [{"rank": 0}]}


def axes(mesh: Mesh) -> dict[str, list[int]]:
    found = {name: mesh.axis(name).mesh.tolist() for name in ("dp_replicate", "dp_shard")}
    both = mesh.axis("dp_replicate", "dp_shard")
    return {**found, "both": both.mesh.tolist(), "names": list(both.mesh_dim_names or ())}  # type: ignore[dict-item]


def test_inner_axes_are_neighbours() -> None:
    for rank, found in enumerate(on_mesh(axes, dp_replicate=2, dp_shard=2)):
        assert found["both"] == [[0, 1], [2, 3]]
        assert found["names"] == ["dp_replicate", "dp_shard"]
        assert found["dp_shard"] == ([0, 1] if rank < 2 else [2, 3])
        assert found["dp_replicate"] == [rank % 2, rank % 2 + 2]
