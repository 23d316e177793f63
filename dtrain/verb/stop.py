"""`dtrain stop <out>`: ask the job of a run to save and stop, and wait until it has ended."""

import time
from collections.abc import Sequence

from dtrain.errors import WordsError
from dtrain.launcher import detached
from dtrain.launcher.queued import Watch
from dtrain.secrets import screen
from dtrain.storage import attempts, store

LOOK_SECONDS = 1.0


def run(words: Sequence[str]) -> int:
    if len(words) != 1 or "=" in words[0]:
        raise WordsError("stop: it takes the place of one submitted run. Type dtrain stop <out>.")
    out = words[0]
    with store.starting():
        launcher, job = detached.job_of(out)
    if job not in launcher.jobs(out):
        screen.say(f"job {job} has ended already · {out}")
        return 0
    detached.ask_to_stop(launcher, out, job, "stopped")
    watch = Watch(launcher, out, job)
    while watch.is_there():
        time.sleep(LOOK_SECONDS)
    screen.say(f"job {job} {_outcome(out)} · {out}")
    return 0


def _outcome(out: str) -> str:
    """The end of a job that was asked to stop."""
    if store.exists(store.join(out, "sweep.yaml")):
        return "has saved and ended; the same words go on"
    if not detached.has_begun(out):
        return "was taken out of the queue before it began; nothing was trained, and the same words submit it anew"
    saved = max((each.step for each in attempts.listed(out) if each.is_committed), default=0)
    if not saved:
        return "has ended before there was anything to save; the same words begin anew"
    return f"has saved and ended at step {saved:,}; the same words go on"
