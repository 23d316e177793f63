"""A save on its way, beside the loop: what the others are told, whoever fails, and that nobody waits for the dead."""

import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from checkpoint.test_sharded import alone, kept, sharded, state_on, whole
from small import STRATEGIES, on_mesh
from until import until

from dtrain.checkpoint import commit as commits
from dtrain.checkpoint import writer
from dtrain.checkpoint.commit import find
from dtrain.checkpoint.retention import Retention
from dtrain.checkpoint.sharded import Sharded
from dtrain.checkpoint.writer import SaveResult
from dtrain.errors import ChangedError, LeaseError, StoreError, WordsError
from dtrain.mesh import Mesh
from dtrain.storage import lease, mapped, patience, store
from dtrain.storage.attempts import listed

FSDP = STRATEGIES["fsdp"]


def held_up(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """No file is put before the event is set."""
    go, put = threading.Event(), store.put

    def slow(*arguments: Any) -> None:
        assert go.wait(60)
        put(*arguments)

    monkeypatch.setattr(store, "put", slow)
    return go


def full(*_: Any) -> None:
    raise StoreError("the disk is full")


def last(checkpoint: Sharded) -> SaveResult:
    (one,) = checkpoint.finished_saves()
    return one


def test_the_loop_goes_on_while_bytes_travel_and_what_is_saved_is_what_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(mesh: Mesh) -> None:
        go = held_up(monkeypatch)
        state, checkpoint = state_on(mesh, FSDP), sharded(mesh, tmp_path)
        before = whole(state)
        url = checkpoint.save(state)
        assert checkpoint.finished_saves() == []
        assert not store.exists(store.join(url, commits.NAME))
        with torch.no_grad():
            for parameter in state.model.parameters():
                parameter.zero_()
        state.scale.value, state.step = 3.0, 3
        go.set()
        checkpoint.wait()
        assert (last(checkpoint).kind, checkpoint.finished_saves()) == ("committed", [])
        other = state_on(mesh, FSDP, seed=1, steps=0)
        sharded(mesh, tmp_path).restore(other)
        assert (other.step, other.scale.value, whole(other)) == (2, 8.0, before)

    on_mesh(work, dp_shard=2)


def test_a_save_waits_for_the_one_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(mesh: Mesh) -> list[int]:
        go = held_up(monkeypatch)
        state, checkpoint = state_on(mesh), sharded(mesh, tmp_path)
        checkpoint.save(state)
        threading.Timer(0.2, go.set).start()
        state.step += 1
        checkpoint.save(state)
        assert 2 in [
            commits.read(url)["step"] for url in [one.url for one in listed(str(tmp_path)) if one.is_committed]
        ]
        assert [one.step for one in checkpoint.finished_saves()][:1] == [2]
        checkpoint.wait()
        return kept(tmp_path)

    assert alone(work) == [2, 3]


def test_blocking_returns_when_it_is_committed(tmp_path: Path) -> None:
    def work(mesh: Mesh) -> None:
        checkpoint = Sharded(out=str(tmp_path), mesh=mesh, resume="auto", every=1, keep=1, mode="blocking")
        url = checkpoint.save(state_on(mesh, FSDP))
        assert commits.read(url)["step"] == 2

    on_mesh(work, dp_shard=2)
    with pytest.raises(ValueError, match="mode is background or blocking"):
        Sharded(out="x", mesh=cast(Mesh, None), resume="auto", every=1, keep=1, mode=cast(Any, "async"))


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_cannot_write_costs_this_save_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """All ranks know, nothing of it is left, and the next save tries again."""

    def work(mesh: Mesh) -> None:
        state, checkpoint = state_on(mesh, FSDP), sharded(mesh, tmp_path)
        with monkeypatch.context() as patch:
            if mesh.rank == failing:
                patch.setattr(store, "put", full)
            checkpoint.save(state)
            with pytest.raises(StoreError, match=f"rank {failing}: the disk is full"):
                checkpoint.wait()
        one = last(checkpoint)
        assert (one.kind, one.step, one.error) == ("failed", 2, f"rank {failing}: the disk is full")
        mesh.barrier()
        assert not any((tmp_path / "checkpoints").rglob("*.safetensors"))
        mesh.barrier()
        checkpoint.save(state)  # the same step
        checkpoint.wait()
        assert last(checkpoint).kind == "committed"

    on_mesh(work, dp_shard=2)
    assert kept(tmp_path) == [2]


def test_what_must_be_durable_first_is_and_when_it_cannot_be_nothing_is_committed(tmp_path: Path) -> None:
    def work(mesh: Mesh) -> None:
        state, seen = state_on(mesh), []

        def before() -> None:
            seen.append(len(list(tmp_path.rglob("COMMIT.json"))))
            if len(seen) == 2:
                raise StoreError("no rows")

        checkpoint = Sharded(out=str(tmp_path), mesh=mesh, resume="auto", every=1, keep=None, before_commit=before)
        for kind in ("committed", "failed", "committed"):
            checkpoint.save(state)
            checkpoint._settle()
            assert last(checkpoint).kind == kind
            state.step += 1
        assert seen == [0, 1, 1]
        checkpoint.wait()

    alone(work)
    assert [find(str(tmp_path))[1]["step"], kept(tmp_path)] == [4, [2, 4]]


@pytest.mark.parametrize("leaves", ["nothing", "an empty folder"])
def test_nothing_is_committed_where_the_files_are_not(leaves: str, tmp_path: Path) -> None:
    """As when storage goes away between the files and the commit, and other storage shows at its place."""

    def work(mesh: Mesh) -> None:
        state, out = state_on(mesh), tmp_path / "out"

        def before() -> None:
            (attempt,) = (path.parent for path in out.rglob("*.safetensors"))
            out.rename(tmp_path / "away")
            if leaves == "an empty folder":
                attempt.mkdir(parents=True)

        checkpoint = Sharded(out=str(out), mesh=mesh, resume="auto", every=1, keep=None, before_commit=before)
        checkpoint.save(state)
        with pytest.raises(StoreError):
            checkpoint.wait()

    alone(work)
    assert not list(tmp_path.rglob("COMMIT.json"))


def test_a_rank_that_gives_no_sign_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "BEAT_SECONDS", 0.05)

    def work(mesh: Mesh) -> str:
        state, checkpoint = state_on(mesh, FSDP), sharded(mesh, tmp_path)
        checkpoint._attempt()
        mesh.barrier()
        assert mesh.timeout == 60
        mesh._letters.set_timeout(timedelta(seconds=1))
        if mesh.rank == 1:  # it lives, and never saves
            until(lambda: mesh.kv_get(["over"]) is not None)
            return ""
        checkpoint.save(state)
        with pytest.raises(StoreError) as caught:
            checkpoint.wait()
        mesh.kv_set("over", "")
        return str(caught.value)

    assert "rank 1 has given no sign for 1 s" in on_mesh(work, dp_shard=2)[0]


def test_whoever_lost_the_lease_commits_nothing_and_ends_on_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(mesh: Mesh) -> None:
        def lost(_: str) -> None:
            raise LeaseError("another run has taken over")

        monkeypatch.setattr(lease, "verify", lost)
        checkpoint = sharded(mesh, tmp_path)
        checkpoint.save(state_on(mesh, FSDP))
        with pytest.raises(LeaseError, match="another run has taken over"):
            checkpoint.wait()

    on_mesh(work, dp_shard=2)
    assert not list(tmp_path.rglob("COMMIT.json"))


def test_a_run_that_takes_over_while_journals_are_written_is_not_followed_by_a_commit(tmp_path: Path) -> None:
    def work(mesh: Mesh) -> None:
        with lease.hold(str(tmp_path)) as token:

            def taken_over() -> None:
                record = {**lease._record(), "id": "another run"}
                lease._write(str(tmp_path), token + 1, record)

            checkpoint = Sharded(out=str(tmp_path), mesh=mesh, resume="auto", every=1, keep=1, before_commit=taken_over)
            checkpoint.save(state_on(mesh))
            with pytest.raises(LeaseError, match="taken over by another run"):
                checkpoint.wait()

    alone(work)
    assert not list(tmp_path.rglob("COMMIT.json"))


def test_what_cannot_be_removed_does_not_undo_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(mesh: Mesh) -> None:
        state, checkpoint = state_on(mesh), sharded(mesh, tmp_path, keep=1)
        for error in (None, "it is not yours"):
            checkpoint.save(state)
            checkpoint.wait()
            assert (one := last(checkpoint)).kind == "committed"
            assert one.error == error
            state.step += 1

            def stubborn(url: str) -> None:
                raise StoreError("it is not yours")

            monkeypatch.setattr(store, "remove", stubborn)

    alone(work)


def test_removals_that_fail_hold_up_neither_the_next_save_nor_the_end_and_one_at_a_time_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The storage takes everything and removes nothing for as long as it has patience with it: each removal is tried again, again and again."""
    monkeypatch.setattr("dtrain.checkpoint.sharded.TIDY_SECONDS", 0.2)
    monkeypatch.setattr("dtrain.storage.patience.PATIENCE", 600.0)
    out, running, most = f"flaky://file/{tmp_path}", [0], [0]
    store.use(out, {"share": 1, "on": ["remove"], "kinds": ["503"]})
    apply = Retention._apply

    def counted(self: Retention, step: int) -> None:
        running[0] += 1
        most[0] = max(most[0], running[0])
        try:
            apply(self, step)
        finally:
            running[0] -= 1

    monkeypatch.setattr(Retention, "_apply", counted)

    def work(mesh: Mesh) -> tuple[list[SaveResult], float]:
        state, checkpoint, landed = state_on(mesh), sharded(mesh, out, keep=1), list[SaveResult]()
        began = time.monotonic()
        for _ in range(4):
            checkpoint.save(state)
            state.step += 1
        checkpoint.wait()
        seconds, landed = time.monotonic() - began, checkpoint.finished_saves()
        assert (running[0], most[0]) == (1, 1)
        assert threading.active_count() < 8
        return landed, seconds

    landed, seconds = alone(work)
    assert seconds < patience.PATIENCE / 2
    assert [one.kind for one in landed] == ["committed"] * 4
    assert "old checkpoints are still there" in landed[-1].error
    assert kept(tmp_path) == [2, 3, 4, 5]


def test_what_waits_while_another_removal_is_under_way_is_removed_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(mesh: Mesh) -> list[int]:
        go, remove = threading.Event(), store.remove

        def slow(url: str) -> None:
            assert go.wait(60)
            remove(url)

        monkeypatch.setattr(store, "remove", slow)
        state, checkpoint = state_on(mesh), sharded(mesh, tmp_path, keep=1)
        for _ in range(4):
            checkpoint.save(state)
            state.step += 1
        checkpoint._settle()
        before = kept(tmp_path)
        go.set()
        checkpoint.wait()
        assert [one.error for one in checkpoint.finished_saves()] == [None] * 4
        return before

    assert alone(work) == [2, 3, 4, 5]
    assert kept(tmp_path) == [5]


def test_no_letter_stays_at_the_rendezvous(tmp_path: Path) -> None:
    """A run saves for months."""

    def work(mesh: Mesh) -> list[int]:
        state, checkpoint, counts = state_on(mesh, FSDP), sharded(mesh, tmp_path, keep=1), []
        for _ in range(4):
            checkpoint.save(state)
            checkpoint.wait()
            state.step += 1
            mesh.barrier()
            counts.append(mesh._letters.num_keys())
            mesh.barrier()
        return counts

    counts = on_mesh(work, dp_shard=2)[0]
    assert counts[1] == counts[3]


def test_an_error_elsewhere_does_not_wait_long_for_the_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dtrain.checkpoint.sharded.END_SECONDS", (0.1, 0.1))

    def work(mesh: Mesh) -> None:
        held_up(monkeypatch)
        with pytest.raises(RuntimeError, match="planned"), sharded(mesh, tmp_path) as checkpoint:
            checkpoint.save(state_on(mesh))
            raise RuntimeError("planned")

    alone(work)
    assert not list(tmp_path.rglob("COMMIT.json"))


def test_the_best_is_known_however_late_its_figure_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(mesh: Mesh) -> None:
        state, go = state_on(mesh, FSDP), held_up(monkeypatch)
        checkpoint = Sharded(out=str(tmp_path), mesh=mesh, resume="auto", every=1, keep=1, best="eval_loss")
        for loss in (3.0, 1.0, 2.0, 4.0):
            checkpoint.save(state)
            checkpoint.scored(state, {"eval_loss": loss})  # while it is on its way
            go.set()
            state.step += 1
        checkpoint.wait()

    on_mesh(work, dp_shard=2)
    assert kept(tmp_path) == [3, 5]


def test_the_loop_goes_on_while_the_best_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(mesh: Mesh) -> None:
        state, go = state_on(mesh, FSDP), held_up(monkeypatch)
        checkpoint = Sharded(out=str(tmp_path), mesh=mesh, resume="auto", every=0, keep=1, best="eval_loss")
        checkpoint.scored(state, {"eval_loss": 1.0})
        assert not checkpoint.finished_saves() and not list(tmp_path.rglob(commits.NAME))
        go.set()
        state.step += 1
        checkpoint.scored(state, {"eval_loss": 2.0})  # no better, and so not saved
        checkpoint.wait()

    on_mesh(work, dp_shard=2)
    assert kept(tmp_path) == [2]


def test_a_figure_that_no_evaluation_gives_is_named(tmp_path: Path) -> None:
    def work(mesh: Mesh) -> None:
        checkpoint = Sharded(out=str(tmp_path), mesh=mesh, resume="auto", every=1, keep=1, best="eval_los")
        with pytest.raises(WordsError, match=r"checkpoint\.best=eval_los: .* Did you mean eval_loss\?"):
            checkpoint.scored(state_on(mesh), {"eval_loss": 1.0})

    alone(work)


def test_what_could_not_be_read_is_not_committed(tmp_path: Path) -> None:
    """A state that ranks do not hold alike fails its save by the name of the tensor; the next one is saved."""

    def work(mesh: Mesh) -> None:
        state, checkpoint = state_on(mesh, FSDP), sharded(mesh, tmp_path)
        assert state.optimizer
        lost, kept_back = state.optimizer.inner.state, {}  # type: ignore[attr-defined]
        if mesh.rank == 1:
            piece = next(iter(lost))
            kept_back = {piece: lost.pop(piece)}
        url = checkpoint.save(state)
        with pytest.raises(
            StoreError, match=r"cannot save to .*: the pieces of optim\.[\w.]+ do not cover it exactly once"
        ):
            checkpoint.wait()
        assert last(checkpoint).kind == "failed"
        assert not store.exists(store.join(url, commits.NAME))
        lost.update(kept_back)
        state.step += 1
        checkpoint.save(state)
        checkpoint.wait()
        assert last(checkpoint).kind == "committed"

    on_mesh(work, dp_shard=2)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_file_of_samples_that_changes_on_one_rank_ends_all_before_the_commit(tmp_path: Path, failing: int) -> None:
    def work(mesh: Mesh) -> None:
        path = tmp_path / f"tokens-{mesh.rank}"
        path.write_bytes(bytes(10))
        with sharded(mesh, tmp_path / "out") as checkpoint:
            mapped.note(path)
            state = state_on(mesh, FSDP)
            checkpoint.save(state)
            checkpoint.wait()
            if mesh.rank == failing:
                path.write_bytes(bytes(20))
            state.step += 1
            checkpoint.save(state)
            with pytest.raises(ChangedError, match=f"rank {failing}: .*tokens-{failing} was extended"):
                checkpoint.wait()

    on_mesh(work, dp_shard=2)
    assert kept(tmp_path / "out") == [2]
