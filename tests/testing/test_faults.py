"""Faults are the real thing: processes die, bytes that were not synced are gone, files rot."""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import commands
import pytest

from dtrain.errors import StoreError
from dtrain.launcher.process import fork
from dtrain.storage import store
from dtrain.testing import faults


def status(act: Callable[[], Any]) -> int:
    """How a forked process that does it ends: an exit code, or minus a signal; a stopped one is minus SIGSTOP."""
    pid = fork(act)
    _, code = os.waitpid(pid, os.WUNTRACED)
    if os.WIFSTOPPED(code):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return -os.WSTOPSIG(code)
    return os.waitstatus_to_exitcode(code)


@pytest.mark.parametrize(
    ("action", "code"), [("kill", -signal.SIGKILL), ("stop", -signal.SIGSTOP), ("sigterm", -signal.SIGTERM)]
)
def test_a_process_is_struck(action: str, code: int) -> None:
    def act() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        faults.strike(action)

    assert status(act) == code


def test_errors_are_raised_and_unknown_words_told() -> None:
    with pytest.raises(faults.FaultError):
        faults.strike("raise")
    with pytest.raises(OSError, match="No space left"):
        faults.strike("ENOSPC")
    with pytest.raises(ValueError, match=r"there is no fault explode\. Allowed: kill"):
        faults.strike("explode")


def test_who_hangs_never_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def wake(_: float) -> None:
        raise TimeoutError

    monkeypatch.setattr(time, "sleep", wake)
    with pytest.raises(TimeoutError):
        faults.strike("hang")


def struck(hook: faults.AtStep, step: int) -> bool:
    try:
        hook(SimpleNamespace(step=step))
    except faults.FaultError:
        return True
    return False


def test_at_its_step_on_its_rank_and_not_after_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    hook = faults.AtStep(action="raise", step=5, rank=1)
    assert not struck(hook, 5)
    monkeypatch.setenv("RANK", "1")
    assert (struck(hook, 4), struck(hook, 5), struck(hook, 6)) == (False, True, False)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert not struck(hook, 5)


def test_once_in_all_runs_that_name_the_marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hook = faults.AtStep(action="raise", step=5, rank=None, once=str(tmp_path / "struck"))
    assert [struck(hook, 5), struck(hook, 5)] == [True, False]
    monkeypatch.setenv("RANK", "1")
    assert [struck(hook, 5), struck(hook, 5)] == [True, False], "each rank has its turn"


def test_a_word_of_any_run(tmp_path: Path) -> None:
    words = [
        "model=mlp",
        "data=synthetic",
        "objective=regression",
        "steps=4",
        f"out={tmp_path}/run",
        "logger=[]",
        "hook.fault.action=raise",
    ]
    words += ["hook.fault._target_=dtrain.testing.faults.AtStep", "hook.fault.step=2"]
    done = commands.run(*words)
    assert done.returncode == 1
    assert "an injected fault" in done.stderr + (tmp_path / "run" / "failure.json").read_text()


def work(root: Path) -> None:
    store.publish(f"{root}/a", b"first")
    store.put(f"{root}/deep/er/b", [b"some", b"thing"])
    store.sync_folder(f"{root}/deep/er")
    store.write(f"{root}/a", b"second")
    store.remove(f"{root}/deep")


def found(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def operations(root: Path) -> list[str]:
    with faults.crashing(root) as disk:
        work(root)
    assert found(root) == {"a": b"second"}
    return disk.operations


def test_every_operation_is_counted(tmp_path: Path) -> None:
    names = [line.split()[0] for line in operations(tmp_path / "x")]
    assert names[:7] == ["create", "write", "fsync", "link", "unlink", "sync", "sync"]
    assert set(names) == {"mkdir", "create", "write", "fsync", "link", "replace", "unlink", "rmdir", "sync"}


def test_nothing_is_done_after_a_crash_and_what_was_done_is_whole_or_absent(tmp_path: Path) -> None:
    for at in range(len(operations(tmp_path / "all"))):
        root = tmp_path / str(at)
        with faults.crashing(root, at=at) as disk, pytest.raises(faults.Crash):
            work(root)
        assert len(disk.operations) == at + 1
        files = found(root)
        assert files.get("a", b"first") in (b"first", b"second"), "published and written files are never half there"
        assert len(list(root.rglob(".a.*"))) <= 1


@pytest.mark.parametrize("seed", [None, *range(8)])
def test_what_was_synced_survives_a_power_cut(tmp_path: Path, seed: int | None) -> None:
    total = len(operations(tmp_path / "all"))
    for at in range(total):
        root = tmp_path / str(at)
        done = []
        with faults.crashing(root, at=at) as disk, contextlib.suppress(faults.Crash):
            for act in (
                lambda: store.publish(f"{root}/a", b"first"),  # noqa: B023 - called at once
                lambda: (store.put(f"{root}/deep/er/b", [b"some", b"thing"]), store.sync_folder(f"{root}/deep/er")),  # noqa: B023
                lambda: store.write(f"{root}/a", b"second"),  # noqa: B023
            ):
                act()
                done.append(act)
        disk.cut_power(seed)
        files = found(root)
        assert "a" in files or not done, (at, files)
        assert files.get("a", b"first") in ((b"second",) if len(done) == 3 else (b"first", b"second")), (at, files)
        assert len(done) < 2 or files["deep/er/b"] == b"something", (at, files)


def test_a_name_that_was_not_synced_is_lost_and_bytes_too(tmp_path: Path) -> None:
    store.write(f"{tmp_path}/old", b"old")
    with faults.crashing(tmp_path) as disk:
        store.put(f"{tmp_path}/new", [b"new"])
        store.disk.unlink(tmp_path / "old")
        (tmp_path / "log").write_text("past the store")
        disk.cut_power()
    assert found(tmp_path) == {"old": b"old", "log": b"past the store"}
    with faults.crashing(tmp_path) as disk:
        descriptor = store.disk.create(tmp_path / "torn")
        store.disk.write(descriptor, memoryview(b"never synced"))
        os.close(descriptor)
        store.disk.sync(tmp_path)
        (tmp_path / "log").write_text("past the store, again")
        disk.cut_power()
    assert found(tmp_path) == {"old": b"old", "log": b"past the store, again", "torn": b""}


def test_the_parts_that_survive_differ_from_seed_to_seed(tmp_path: Path) -> None:
    seen = set()
    for seed in range(40):
        root = tmp_path / str(seed)
        with faults.crashing(root) as disk:
            for name in "ab":
                descriptor = store.disk.create(root / name)
                store.disk.write(descriptor, memoryview(b"1234"))
                os.close(descriptor)
            disk.cut_power(seed)
        seen.add(tuple(sorted(found(root).items())))
    names = {tuple(name for name, _ in files) for files in seen}
    assert names == {(), ("a",), ("b",), ("a", "b")}
    assert {data for files in seen for _, data in files} >= {b"", b"1234", b"\0\0\0\0"}


def test_a_full_disk_at_any_write_leaves_no_part(tmp_path: Path) -> None:
    for at in range(4):
        root = tmp_path / str(at)
        with faults.crashing(root, at=at, action="ENOSPC"), contextlib.suppress(StoreError):
            store.publish(f"{root}/a", b"something")
        assert found(root) in ({}, {"a": b"something"})


def test_a_kill_at_an_operation_ends_the_process(tmp_path: Path) -> None:
    def act() -> None:
        with faults.crashing(tmp_path, at=1, action="kill"):
            store.put(f"{tmp_path}/a", [b"something"])

    assert status(act) == -signal.SIGKILL
    assert (tmp_path / "a").read_bytes() == b"some"


def test_files_rot(tmp_path: Path) -> None:
    one, other = str(tmp_path / "a"), f"flaky://file/{tmp_path}/b"
    store.write(one, b"\0\0\0")
    faults.flip(one, bit=9)
    assert store.read(one) == b"\0\2\0"
    store.write(other, b"12345")
    faults.truncate(other, -2)
    faults.swap(one, other)
    assert (store.read(one), store.read(other)) == (b"123", b"\0\2\0")
    faults.empty(one)
    faults.lose(other)
    assert (store.size(one), store.exists(other)) == (0, False)
