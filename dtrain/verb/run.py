"""`dtrain run <out>`: what a job executes on its first node, or on each. It runs the plan that was submitted under
`out`, and reads no word; people type the words of the run instead.
"""

from collections.abc import Sequence

from dtrain.cluster import detect
from dtrain.errors import FOR_GOOD, DtrainError, WordsError
from dtrain.launcher import detached, zygote
from dtrain.launcher.external import is_first
from dtrain.launcher.run import run as run_plan
from dtrain.secrets import screen
from dtrain.storage import store
from dtrain.verb.train import already_finished


def run(words: Sequence[str]) -> int:
    if len(words) != 1 or "=" in words[0]:
        raise WordsError("run: it takes the place of one submitted run. Type dtrain run <out>, or the words of a run.")
    out = words[0]
    plan = detached.read(out)
    if plan.out != out:
        raise WordsError(
            f"run: the run under {out} was submitted with out={plan.out}. Type dtrain run {screen.typed(plan.out)}"
        )
    first = is_first(plan, detect())
    if already_finished(plan, say=first):
        return 0
    with zygote.kept():
        if first and plan.world > 1:
            zygote.begin()
        config = store.read(store.join(out, "config.yaml")).decode()
        try:
            result = run_plan(plan, config, first=first, submitted=True)
        except DtrainError as error:
            error.exit_code = FOR_GOOD if detached.would_repeat(error) else error.exit_code
            raise
    if result is None:
        return 0 if already_finished(plan, say=True) else 1
    return result.exit_code
