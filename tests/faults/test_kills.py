"""Killed at random moments, again and again, a run ends as if nobody had touched it: weights, optimizer, data order and rows, bit for bit.

What is killed is a rank, an agent, the store process, the server, the command, or all of them; after the last two the same
words are typed again. The moments are random: while ranks meet, load, train, save and write rows. The storage is a local disk, S3, or one that at random
moments fills, is covered by another, is unmounted under a run, and comes back: what was committed stays, whatever comes to an end. `slow`: a thousand kills.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mounts
import pytest
from commands import COMMAND
from killing import leavings, nothing_left, survive
from pool import ranks

from dtrain.storage.attempts import listed

pytestmark = pytest.mark.campaign("kills")

WORDS = ("model=mlp", "checkpoint.every=10", "launcher=local", "launcher.restarts=1000")
STRATEGIES = {
    "single": ("strategy=single", "steps=2000"),
    "ddp": ("strategy=ddp", "nodes=2", "steps=600"),
    "fsdp": ("strategy=fsdp", "devices=2", "steps=600"),
    "pipeline": ("strategy=pipeline", "devices=2", "model.layers=4", "steps=600"),
}
"""Long enough to be killed again and again."""
MODES = ("blocking", "background")
KILLS = 13
"""Eight runs of them are a hundred, and four are run often. Those that save while the run waits begin with a new interpreter, the others with a fork."""
QUICK = {
    ("single", "blocking"): "unsteady", ("ddp", "blocking"): "local", ("fsdp", "blocking"): "s3", ("pipeline", "blocking"): "unsteady",
    ("single", "background"): "s3", ("ddp", "background"): "unsteady", ("fsdp", "background"): "local", ("pipeline", "background"): "s3",
}  # fmt: skip
"""Where each of the eight writes."""


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, dict[str, object]]]:
    """strategy -> what a run leaves that nobody kills; made when it is first asked for."""
    folder = tmp_path_factory.mktemp("untouched")
    made: dict[str, dict[str, object]] = {}

    class Made(dict[str, dict[str, object]]):
        def __missing__(self, strategy: str) -> dict[str, object]:
            survive([*WORDS, *STRATEGIES[strategy]], folder / strategy, kills=0, seed=0)
            made[strategy] = self[strategy] = leavings(folder / strategy)
            return made[strategy]

    yield Made()


def killed(
    strategy: str,
    mode: str,
    storage: str,
    place: Path,
    request: pytest.FixtureRequest,
    *,
    seed: int,
    kills: int = KILLS,
) -> None:
    untouched: dict[str, dict[str, object]] = request.getfixturevalue("untouched")
    every = 50 if storage == "s3" else 10  # the server of S3 takes half a second for each
    words = [*WORDS, *STRATEGIES[strategy], f"checkpoint.mode={mode}", f"checkpoint.every={every}"]
    by = COMMAND if mode == "blocking" else ()
    if storage == "unsteady":
        if not mounts.are_allowed():
            pytest.skip("this user may make no mount namespace")
        ((done, troubles, left),) = ranks(1, in_trouble, words, place, seed, kills, by, seconds=900)
        assert sum(troubles.values()) > 1, "the storage was never in trouble"
    else:
        url = f"{request.getfixturevalue('s3')}/{place.name}" if storage == "s3" else str(place / "run")
        done = survive(words, place / "run", url=url, kills=kills, seed=seed, seconds=600, longest=0.5, by=by)
        left = ranks(1, leavings, url)[0]  # in a process of its own: a client of S3 starts threads
    assert sum(done.values()) > kills // 2, "the run was over before it was killed"
    assert left["rows"] == untouched[strategy]["rows"], done
    assert left == untouched[strategy], done
    assert nothing_left(place / "run")


def in_trouble(
    words: list[str], place: Path, seed: int, kills: int, by: tuple[str, ...]
) -> tuple[dict[str, int], dict[str, int], dict[str, Any]]:
    """A process of its own has the mounts: how often what was killed, and which trouble there was, and what is left."""
    for name in (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_USE_AGENT_STORE",
    ):
        del os.environ[name]
    storage, url = mounts.Unsteady(place / "disk"), str(place / "disk/run")
    done = survive(
        words, place / "run", url=url, kills=kills, seed=seed, seconds=600, longest=0.5, storage=storage, by=by
    )
    return done, storage.begun, leavings(url)


@pytest.mark.often("single-blocking", "fsdp-blocking", "ddp-background")
@pytest.mark.parametrize(("strategy", "mode"), QUICK)
def test_a_killed_run_equals_the_untouched_one(
    strategy: str, mode: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    killed(strategy, mode, QUICK[strategy, mode], tmp_path, request, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize("storage", ["local", "s3", "unsteady"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_thousand_kills(
    strategy: str, mode: str, storage: str, seed: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    killed(strategy, mode, storage, tmp_path, request, seed=seed)


def test_the_best_checkpoint_is_that_of_a_run_that_was_not_killed(tmp_path: Path) -> None:
    """Saved where it was measured, which is no step of `checkpoint.every`."""
    words = ["model=mlp", "data=synthetic", "objective=classification", "steps=400", "optim.lr=0.02", "evaluate.every=10", "logger=[]", "hook=[]",
             "checkpoint.every=70", "checkpoint.best=eval_accuracy", *WORDS[2:], "strategy=ddp", "devices=2"]  # fmt: skip
    survive(words, tmp_path / "untouched", kills=0, seed=0)
    done = survive(words, tmp_path / "killed", kills=8, seed=1, longest=0.5)
    one, other = (json.loads((tmp_path / name / "result.json").read_text())["best"] for name in ("untouched", "killed"))
    assert one == other and one["eval_accuracy"]["step"] % 70, done
    assert {one["eval_accuracy"]["step"], 400} <= {
        attempt.step for attempt in listed(str(tmp_path / "killed")) if attempt.is_committed
    }
