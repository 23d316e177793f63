"""Storage that fills, turns read-only, goes away and comes back, or loses its journals while a run is on its way: training goes on, and when it can
be written again nothing is missing: rows, weights and optimizer are those of the run that nobody disturbed.

Real filesystems: a tmpfs in a mount namespace of the rank's own.
"""

import ctypes
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mounts
import pytest
from commands import COMMAND
from killing import leavings
from launching import plan_of, started, steps_of
from pool import ranks

from dtrain.errors import MovedError
from dtrain.hook import StepInfo
from dtrain.train import train

STEPS, BEGIN, END = 48, 12, 33


def obey_permissions() -> None:
    """From now on what a file's mode forbids is forbidden to root too: without CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH (capabilities(7))."""
    libc, version = ctypes.CDLL(None), (ctypes.c_uint32 * 2)(0x20080522, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; then the same of higher numbers
    assert libc.capget(version, sets) == 0
    sets[0] &= ~0b110
    assert libc.capset(version, sets) == 0


def away(out: Path) -> None:
    out.rename(out.with_name("away"))
    out.write_text("no folder")


def back(out: Path) -> None:
    out.unlink()
    out.with_name("away").rename(out)


def lock(out: Path) -> None:
    for path in (out, *out.rglob("*")):
        path.chmod(0o500 if path.is_dir() else 0o400)


def unlock(out: Path) -> None:
    for path in (out, *out.rglob("*")):
        path.chmod(0o700)


def rotate(out: Path) -> None:
    for name in ("metrics.jsonl", "events.jsonl"):
        (out / name).rename(out / f"{name}.1")
        (out / name).touch()


def remove(out: Path) -> None:
    for name in ("metrics.jsonl", "events.jsonl"):
        (out / name).unlink()


def cut(out: Path) -> None:
    for name in ("metrics.jsonl", "events.jsonl"):
        os.truncate(out / name, 100)


def nothing(out: Path) -> None:
    pass


def a_folder_instead(out: Path) -> None:
    (out / "metrics.jsonl").unlink()
    (out / "metrics.jsonl").mkdir()


TROUBLES: dict[str, tuple[Callable[[Path], None], Callable[[Path], None], str]] = {
    "full": (
        lambda out: mounts.fill(out.parent),
        lambda out: (out.parent / "filler").unlink(),
        "No space left on device",
    ),
    "read-only": (mounts.cover, mounts.uncover, "Read-only file system"),
    "away": (away, back, "Not a directory"),
    "locked": (lock, unlock, "Permission denied"),
    "removed": (remove, nothing, "removed or cut: it is made again"),
    "cut": (cut, nothing, "removed or cut: it is made again"),
    "rotated": (rotate, nothing, "removed or cut: it is made again"),
    "all removed": (shutil.rmtree, nothing, "removed or cut: it is made again"),
    "a folder instead": (a_folder_instead, lambda out: (out / "metrics.jsonl").rmdir(), "Is a directory"),
}


class Trouble:
    """A hook that does something to the storage after step BEGIN, and undoes it after step END."""

    every = 1

    def __init__(self, out: str, name: str) -> None:
        self.out, (self.begin, self.end, _) = Path(out), TROUBLES[name]

    def __call__(self, info: StepInfo) -> None:
        if info.step == BEGIN:
            self.begin(self.out)
        if info.step == END:
            self.end(self.out)


def run(place: Path, name: str | None) -> dict[str, Any]:
    """A run of one rank; what it left, its events, and which steps its failed saves were of."""
    if name in ("full", "read-only"):
        mounts.alone()
        mounts.small(place)
    if name == "locked":
        obey_permissions()
    plan = plan_of(place / "out", f"steps={STEPS}", "checkpoint.every=6", "checkpoint.mode=blocking", "log.every=4")
    hooks = {"trouble": {"_target_": "faults.test_bad_storage.Trouble", "out": plan.out, "name": name}} if name else {}
    result = train(replace(plan, hooks=hooks))
    events = [json.loads(line) for line in (place / "out/events.jsonl").read_text().splitlines()]
    return leavings(plan.out) | {"result": result.status, "events": events}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    (left,) = ranks(1, run, tmp_path_factory.mktemp("undisturbed"), None)
    return left


@pytest.mark.often("full", "away", "cut", "all removed", others=pytest.mark.campaign("kills"))
@pytest.mark.parametrize("name", TROUBLES)
def test_training_goes_on_and_nothing_is_missing_at_the_end(
    name: str, tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    if name in ("full", "read-only") and not mounts.are_allowed():
        pytest.skip("this user may make no mount namespace")
    (left,) = ranks(1, run, tmp_path, name)
    assert left["result"] == "finished"
    for part in ("rows", "step", "facts", "tensors"):
        assert left[part] == undisturbed[part], part
    sentence = TROUBLES[name][2]
    told = [event["text"] for event in left["events"] if event["event"] == "caveat" and sentence in event["text"]]
    assert (
        sorted(text.split()[0] for text in told) == ["metrics.jsonl"]
        if name == "a folder instead"
        else ["events.jsonl", "metrics.jsonl"]
    )
    failed = [event["step"] for event in left["events"] if event["event"] == "save_failed"]
    assert failed == ([18, 24, 30] if name in ("full", "read-only", "away", "locked") else [])
    assert all(event["event"] != "failed" for event in left["events"])


def come_back(out: Path) -> None:
    shutil.rmtree(out)
    out.with_name("away").rename(out)


class ComesBack(Trouble):
    """What lay at the place of the run before it began comes back after step BEGIN."""

    def __init__(self, out: str) -> None:
        self.out, self.begin, self.end = Path(out), come_back, nothing


def begun_elsewhere(place: Path) -> tuple[str, dict[str, Any]]:
    """A start that finds an empty folder, as storage is not mounted yet that has the run up to step 30; the next one finds all. How the first ended."""
    words = [f"steps={STEPS}", "checkpoint.every=6", "checkpoint.mode=blocking", "log.every=4"]
    train(plan_of(place / "out", *words, "stop_after=30"))
    (place / "out").rename(place / "away")
    plan = plan_of(place / "out", *words)
    try:
        train(replace(plan, hooks={"trouble": {"_target_": "faults.test_bad_storage.ComesBack", "out": plan.out}}))
    except MovedError as error:
        return str(error), leavings(train(plan) and plan.out)
    return "", {}


def test_a_start_that_is_behind_what_comes_to_the_place_ends_and_the_next_goes_on_from_there(
    tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    ((said, left),) = ranks(1, begun_elsewhere, tmp_path)
    assert "a checkpoint of step 30 is there" in said
    for part in ("rows", "step", "facts", "tensors"):
        assert left[part] == undisturbed[part], part
    assert steps_of(tmp_path / "out") == list(range(1, STEPS + 1))


SMALL = ["unshare", "-m", "bash", "-c", 'mount -t tmpfs -o size=1m none "$TMPDIR" && exec "$@"', "bash"]


@pytest.mark.often("False", others=pytest.mark.campaign("kills"))
@pytest.mark.skipif(not mounts.are_allowed(), reason="this user may make no mount namespace")
@pytest.mark.parametrize("always", [False, True])
def test_a_full_folder_for_temporary_files_hides_no_error_and_keeps_nobody_from_starting_again(
    always: bool, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    fills = [
        "model=mlp",
        "model._target_=launching.Fills",
        "model.rank=1",
        f"model.always={str(always).lower()}",
        "checkpoint.every=2",
    ]
    process = started(
        out, *fills, "devices=2", "batch=8", "launcher=local", "launcher.restarts=1", by=[*SMALL, *COMMAND]
    )
    said = process.communicate(timeout=300)[0]
    assert "ValueError: planned" in said
    assert "ended without a report" not in said
    assert process.returncode == (1 if always else 0), said
    if always:
        facts = json.loads((out / "failure.json").read_text())
        assert facts["rank"] == 1 and "in fail" in facts["traceback"]
    else:
        assert steps_of(out) == list(range(1, 13))
