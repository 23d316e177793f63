"""Killed at random moments, again and again, a run ends as if nobody had touched it: weights, optimizer, data order and rows, bit for bit.

What is killed is a rank, an agent, the keeper of the rendezvous, the server, the command, or all of them; after the last two the same
words are typed again. The moments are random: while ranks meet, load, train, save and write rows. `slow`: a thousand kills.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from killing import leavings, nothing_left, survive
from pool import ranks

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
"""Eight runs of them are a hundred."""


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


def killed(strategy: str, mode: str, out: Path, url: str, untouched: dict[str, dict[str, object]], *, seed: int, kills: int = KILLS) -> None:
    every = 10 if "://" not in url else 50  # the server of S3 takes half a second for each
    words = [*WORDS, *STRATEGIES[strategy], f"checkpoint.mode={mode}", f"checkpoint.every={every}"]
    done = survive(words, out, url=url, kills=kills, seed=seed, seconds=300, longest=0.5)
    assert sum(done.values()) > kills // 2, "the run was over before it was killed"
    left = ranks(1, leavings, url)[0]  # in a process of its own: a client of S3 starts threads
    assert left["rows"] == untouched[strategy]["rows"], done
    assert left == untouched[strategy], done
    assert nothing_left(out)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_killed_run_equals_the_untouched_one(strategy: str, mode: str, tmp_path: Path, untouched: dict[str, dict[str, object]], request) -> None:
    remote = (strategy, mode) in (("single", "background"), ("fsdp", "blocking"), ("pipeline", "background"))
    url = f"{request.getfixturevalue('s3')}/{tmp_path.name}" if remote else str(tmp_path / "run")
    killed(strategy, mode, tmp_path / "run", url, untouched, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize("storage", ["local", "s3"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_thousand_kills(
    strategy: str, mode: str, storage: str, seed: int, tmp_path: Path, untouched: dict[str, dict[str, object]], request
) -> None:
    url = f"{request.getfixturevalue('s3')}/{tmp_path.name}" if storage == "s3" else str(tmp_path / "run")
    killed(strategy, mode, tmp_path / "run", url, untouched, seed=seed)
