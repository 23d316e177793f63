"""`dtrain stop <out>`: ask the job of a run to save and stop, and wait until it has ended."""

import time
from collections.abc import Sequence

from dtrain.errors import WordsError
from dtrain.launcher import detached
from dtrain.secrets import screen

LOOK_SECONDS = 1.0


def run(words: Sequence[str]) -> int:
    if len(words) != 1 or "=" in words[0]:
        raise WordsError("stop: it takes the place of one submitted run. Type dtrain stop <out>.")
    out = words[0]
    launcher, job = detached.job_of(out)
    if job not in launcher.jobs(out):
        screen.say(f"job {job} has ended already · {out}")
        return 0
    launcher.cancel(job, save=True)
    while job in launcher.jobs(out):
        time.sleep(LOOK_SECONDS)
    screen.say(f"job {job} has saved and ended; the same words go on · {out}")
    return 0
