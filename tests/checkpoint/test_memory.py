"""Copies in the memory of the nodes: the newest whole step comes back, from what is left, on any mesh; half a copy never does."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.test_sharded import commit, state_on, whole
from pool import RankFailed
from small import PARTS, STRATEGIES, on_mesh

from dtrain.checkpoint import memory
from dtrain.checkpoint.sharded import Sharded
from dtrain.checkpoint.state import TrainState
from dtrain.mesh import Mesh

SINGLE, FSDP = PARTS["strategy"], STRATEGIES["fsdp"]


def at_node(mesh: Mesh, folder: Path, ranks_per_node: int) -> None:
    """What the launcher tells this rank."""
    node, local = divmod(mesh.rank, ranks_per_node)
    (folder / str(node)).mkdir(parents=True, exist_ok=True)
    mesh.barrier()
    os.environ.update(DTRAIN_MEMORY=str(folder / str(node)), GROUP_RANK=str(node), LOCAL_RANK=str(local))


def checkpoint(mesh: Mesh, out: Path) -> Sharded:
    return Sharded(out=str(out), mesh=mesh, resume="auto", every=10, keep=1, memory=1)


def advance(state: TrainState) -> None:
    """Other values, after one more step."""
    with torch.no_grad():
        for parameter in state.model.parameters():
            parameter.add_(1.0)
    state.step += 1


def train(
    mesh: Mesh,
    tmp: Path,
    per_node: int,
    upto: int,
    during: Callable[[int, Sharded], None] = lambda step, checkpoint: None,
) -> Any:
    """A commit of step 2, and copies of the steps after it: what the ranks held at the last one."""
    at_node(mesh, tmp / "memory", per_node)
    state, saving = state_on(mesh, FSDP), checkpoint(mesh, tmp / "out")
    assert saving.restore(state) is None
    assert saving.due(3)
    commit(saving, state)
    while state.step < upto:
        advance(state)
        during(state.step, saving)
        assert saving.save(state, last=False) == ""
    return whole(state)


def come_back(mesh: Mesh, tmp: Path, per_node: int, strategy: Any) -> tuple[int, Any, bool]:
    at_node(mesh, tmp / "memory", per_node)
    state, saving = state_on(mesh, strategy, seed=1, steps=0), checkpoint(mesh, tmp / "out")
    restored = saving.restore(state)
    assert restored is not None
    assert state.scale
    assert state.scale.value == 8.0
    return state.step, whole(state), "memory" in restored["url"]


@pytest.mark.parametrize(
    ("degrees", "strategy"), [({"dp_shard": 2}, FSDP), ({"dp_shard": 1}, SINGLE), ({"tp": 2}, STRATEGIES["ddp"])]
)
def test_the_newest_step_comes_back_on_any_mesh(tmp_path: Path, degrees: dict[str, int], strategy: Any) -> None:
    values = on_mesh(lambda mesh: train(mesh, tmp_path, 2, 5), dp_shard=2)[0]
    for step, tensors, from_memory in on_mesh(lambda mesh: come_back(mesh, tmp_path, 2, strategy), **degrees):
        assert (step, from_memory) == (5, True)
        assert tensors == values


def test_two_copies_are_kept_and_what_died_before_goes(tmp_path: Path) -> None:
    on_mesh(lambda mesh: train(mesh, tmp_path, 2, 6), dp_shard=2)
    folder = tmp_path / "memory" / "0"
    assert len(list(folder.iterdir())) == 2 * 2 * 2, "two ranks, two copies, bytes and what they are"

    def go_on(mesh: Mesh) -> list[int]:
        at_node(mesh, tmp_path / "memory", 2)
        state, saving, counts = state_on(mesh, FSDP, seed=1, steps=0), checkpoint(mesh, tmp_path / "out"), []
        saving.restore(state)
        for _ in range(3):
            mesh.barrier()
            counts.append(len(list(folder.iterdir())))
            mesh.barrier()
            advance(state)
            saving.save(state, last=False)
        mesh.barrier()
        return [*counts, len(list(folder.iterdir()))]

    assert on_mesh(go_on, dp_shard=2)[0] == [4, 8, 8, 8], "what they came from stays until there are two new ones"


@pytest.mark.parametrize("at", [(torch, "_foreach_copy_"), (memory, "_write_atomically")], ids=["bytes", "description"])
def test_a_rank_killed_in_the_middle_of_a_copy_costs_that_copy_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: Any
) -> None:
    """Step 4 is whole; of step 5 there is the copy of the other rank."""

    def dies(step: int, saving: Sharded) -> None:
        if step == 5 and os.environ["LOCAL_RANK"] == "1":
            monkeypatch.setattr(*at, lambda *_, **__: os._exit(9))

    with pytest.raises(RankFailed):
        on_mesh(lambda mesh: train(mesh, tmp_path, 2, 5, dies), dp_shard=2)
    for step, _, from_memory in on_mesh(lambda mesh: come_back(mesh, tmp_path, 2, FSDP), dp_shard=2):
        assert (step, from_memory) == (4, True)


@pytest.mark.often("0")
@pytest.mark.campaign("kills")
@pytest.mark.parametrize("lost", ["0", "1"])
def test_a_node_may_die_with_all_it_held(tmp_path: Path, lost: str) -> None:
    """Its copies lie at the other one too; the bytes travel to the node that comes in its place, and to a world of one node."""
    values = on_mesh(lambda mesh: train(mesh, tmp_path, 2, 4), dp_shard=4)[0]
    shutil.rmtree(tmp_path / "memory" / lost)
    shutil.copytree(tmp_path, tmp_path.with_name(f"{tmp_path.name}-smaller"))
    for step, tensors, from_memory in on_mesh(lambda mesh: come_back(mesh, tmp_path, 2, FSDP), dp_shard=4):
        assert (step, tensors, from_memory) == (4, values, True)
    smaller = tmp_path.with_name(f"{tmp_path.name}-smaller")
    left = smaller / "memory" / str(1 - int(lost))
    if lost == "0":
        left.rename(smaller / "memory" / "0")
    for step, tensors, from_memory in on_mesh(lambda mesh: come_back(mesh, smaller, 2, FSDP), dp_shard=2):
        assert (step, tensors, from_memory) == (4, values, True)


def test_without_both_nodes_the_commit_is_what_is_left(tmp_path: Path) -> None:
    on_mesh(lambda mesh: train(mesh, tmp_path, 1, 4), dp_shard=2)
    shutil.rmtree(tmp_path / "memory")
    for step, _, from_memory in on_mesh(lambda mesh: come_back(mesh, tmp_path, 1, FSDP), dp_shard=2):
        assert (step, from_memory) == (2, False)


def test_no_room_on_one_rank_costs_the_copies_and_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(mesh: Mesh) -> None:
        at_node(mesh, tmp_path / "memory", 1)

        def full(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        if mesh.rank == 1:
            monkeypatch.setattr(os, "posix_fallocate", full)
        state, saving = state_on(mesh, FSDP), checkpoint(mesh, tmp_path / "out")
        saving.save(state, last=False)
        (one,) = saving.finished_saves()
        assert (one.kind, "No space left on device. Type checkpoint.memory=0" in str(one.error)) == ("failed", True)
        assert not saving.due(3)
        commit(saving, state)

    on_mesh(work, dp_shard=2)


def test_a_run_that_goes_back_forgets_where_it_was(tmp_path: Path) -> None:
    """A second restore in the same process is a rewind: to what is committed, for good."""

    def work(mesh: Mesh) -> None:
        at_node(mesh, tmp_path / "memory", 2)
        state, saving = state_on(mesh, FSDP), checkpoint(mesh, tmp_path / "out")
        saving.restore(state)
        commit(saving, state)
        for _ in range(3):
            advance(state)
            saving.save(state, last=False)
        fresh = state_on(mesh, FSDP, seed=1, steps=0)
        saving.restore(fresh)
        assert fresh.step == 2
        mesh.barrier()
        assert not list((tmp_path / "memory" / "0").iterdir())
        mesh.barrier()
        advance(fresh)
        saving.save(fresh, last=False)

    on_mesh(work, dp_shard=2)
    for step, _, from_memory in on_mesh(lambda mesh: come_back(mesh, tmp_path, 2, FSDP), dp_shard=2):
        assert (step, from_memory) == (3, True)
