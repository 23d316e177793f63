"""`dtrain evaluate out=<run> [words]`: held-out loss of its newest checkpoint, or of the one at `init=`, on any
mesh.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace

from dtrain.build import build
from dtrain.cluster import detect
from dtrain.compose import compose, run_at, value_of
from dtrain.config.schema import default
from dtrain.config.word import text
from dtrain.errors import StoreError, WordsError
from dtrain.launcher import zygote
from dtrain.launcher.external import is_first, is_rank
from dtrain.planned import Plan
from dtrain.resolve import resolve
from dtrain.result import Result
from dtrain.secrets import screen
from dtrain.storage import store
from dtrain.storage.jsonl import clean


def run(words: Sequence[str]) -> int:
    plan, result = look_back(words, loop="dtrain.evaluation.evaluate.evaluate")
    if result is not None:
        screen.say(f"step {result.step}  " + "  ".join(f"{name} {value:.4f}" for name, value in result.metrics.items()))
        store.write(store.join(plan.out, "evaluate.json"), json.dumps(clean(result.to_dict()), indent=1).encode())
    return 0


def look_back(
    words: Sequence[str], *, loop: str, check: Callable[[Plan], None] = lambda plan: None
) -> tuple[Plan, Result | None]:
    """Run `loop` with the words of the run that `out` or `init` names, then the user's own. Returns the result on the
    first rank only.

    `check` is called with the plan before ranks start. Everything but the mesh is taken from the run. Raises WordsError
    if no run is named, StoreError if it does not exist.
    """
    key = "out" if value_of(words, "out") else "init"
    named = value_of(words, key)
    if not named:
        raise WordsError("which run? Type out=<the run>, or init=<the URL of a checkpoint>.")
    source = run_at(words, named)
    if not store.children(source):
        raise StoreError.during("find a checkpoint at", source, "nothing is there")
    root = source.split("/checkpoints/")[0]
    run = root if store.exists(store.join(root, "config.yaml")) else None
    cluster = detect()
    places = [f"out={text(root)}"] * (key == "init") + [f"{key}={text(source)}"] * (source != named)
    config = compose([*words, *places], run=run)
    plan = resolve(replace(config, loop=default("loop")), cluster).with_loop(loop)
    plan = replace(plan, init=config.init)  # not the weights that the model of the run began with
    if is_first(plan, cluster):
        check(plan)
    with zygote.kept():
        if plan.world > 1 and is_first(plan, cluster) and not is_rank(plan, cluster):
            zygote.begin()
        result: Result = build(plan.launcher).launch(plan)
    return plan, result if is_first(plan, cluster) else None
