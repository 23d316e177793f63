"""60 jobs of a sweep, of which the command or a worker is killed 20 times at random: all results, and the same best."""

import contextlib
import json
import os
import random
import signal
import time
from pathlib import Path

import commands
import pytest
from killing import family, mentioning
from sweep.test_engine import SMALL, begin, finished, jobs, result
from sweep.test_searches import KNOWN, SPACE, best, drawn
from until import until

pytestmark = pytest.mark.campaign("kills")

KILLS = 20
WORDS = {
    "grid": [*SMALL, "seed=range(0,60)"],
    "tpe": [*KNOWN, *SPACE, "sweep.search=tpe", "sweep.trials=60"],
}


@pytest.mark.often("tpe-disk")
@pytest.mark.parametrize("storage", ["disk", "flaky"])
@pytest.mark.parametrize("search", ["grid", "tpe"])
def test_whatever_is_killed_every_job_finishes_and_none_begins_again_after_that(
    search: str, storage: str, tmp_path: Path
) -> None:
    """The command, the process that forks its jobs, or a job; on flaky storage the command and all with it."""
    chance, kills, written = random.Random(f"{search} {storage}"), 0, dict[Path, int]()
    targets = ["command"] if storage == "flaky" else ["command", "zygote", "server", "server"]  # here, servers are jobs
    words = [*WORDS[search], "steps=150", "checkpoint.every=50", "sweep.retries=20", "sweep.parallel=3"]
    calm = commands.run("-m", *words, "sweep.out=calm", cwd=tmp_path, timeout=400)
    assert calm.returncode == 0, calm.stderr
    root, place = tmp_path / "killed", ["sweep.out=killed"]
    if storage == "flaky":
        place = [
            f"sweep.out=flaky://file/{root}",
            "out_options.share=0.03",
            "out_options.kinds=[503,timeout,unanswered]",
        ]
    deadline = time.monotonic() + 900
    while kills < KILLS and len(finished(root)) < 60:
        assert time.monotonic() < deadline
        sweep = begin(tmp_path, *words, *place)
        while sweep.poll() is None and kills < KILLS and time.monotonic() < deadline:
            time.sleep(chance.uniform(0.1, 0.6))
            victims = family(sweep.pid)[chance.choice(targets)]
            if victims and sweep.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(chance.choice(victims), signal.SIGKILL)
                    kills += 1
        sweep.kill()
        sweep.communicate(timeout=60)
        until(lambda: not mentioning(str(tmp_path)))
        for lease in root.glob("*/lease/*.json"):  # an empty one is watched for half a minute
            if not lease.stat().st_size:
                lease.unlink()
        written = _results(root) | written
    last = commands.run("-m", *words, *place, cwd=tmp_path, timeout=400)
    assert last.returncode == 0, last.stderr
    assert kills == KILLS and len(finished(root)) == 60
    assert written.items() <= _results(root).items(), "a finished job began again"
    for job in jobs(root).values():
        events = [json.loads(line)["event"] for line in (job / "events.jsonl").read_text().splitlines()]
        assert [event for event in events if event in ("started", "finished")][-1] == "finished", (job, events)
    assert best(tmp_path, "killed") == best(tmp_path, "calm")
    assert search == "grid" or drawn(root) == drawn(tmp_path / "calm")
    assert {name: result(job)[0] for name, job in jobs(root).items()} == {
        name: result(job)[0] for name, job in jobs(tmp_path / "calm").items()
    }


def _results(root: Path) -> dict[Path, int]:
    """The result of each finished job -> when it was written."""
    return {path: path.stat().st_mtime_ns for path in finished(root)}
