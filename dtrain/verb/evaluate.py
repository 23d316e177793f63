"""`dtrain evaluate out=<run> [words]`: held-out loss of its newest checkpoint, or of the one at `init=`, on any
mesh.

dtrain evaluate out=<run> as=lm_eval evaluate.tasks=[hellaswag,arc_easy]    # tasks of the lm-evaluation-harness
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from dtrain.build import build
from dtrain.cluster import detect
from dtrain.compose import compose, run_at, value_of
from dtrain.config.facts import about
from dtrain.config.schema import default
from dtrain.config.word import text
from dtrain.errors import PreflightError, StoreError, WordsError
from dtrain.integrations.lm_eval import tasks
from dtrain.launcher import apart, zygote
from dtrain.launcher.external import is_first, is_rank
from dtrain.planned import Plan
from dtrain.resolve import resolve
from dtrain.result import Result
from dtrain.secrets import screen
from dtrain.secrets.as_json import clean
from dtrain.storage import lease, store
from dtrain.storage.jsonl import Journal
from dtrain.verb import untrained
from dtrain.verb.train import figure

HARNESS = "lm_eval"


def run(words: Sequence[str]) -> int:
    kinds = {word.partition("=")[2] for word in words if word.startswith("as=")}
    words = [word for word in words if not word.startswith("as=")]
    if kinds - {HARNESS}:
        raise WordsError(f"as={min(kinds - {HARNESS})}: evaluate knows as={HARNESS}, or none for the held-out loss.")
    return _tasks(words) if kinds else _heldout(words)


def _tasks(words: Sequence[str]) -> int:
    """The tasks of lm_eval: a table, and an event of the run with their figures."""
    plan, result = look_back(words, loop="dtrain.integrations.lm_eval.benchmark.benchmark", check=_check)
    if result is not None:
        screen.say(f"step {result.step}", result.metrics["table"])
        _record(plan, result)
    return 0


def _check(plan: Plan) -> None:
    """Refuse a model that writes no text, and tasks that cannot be loaded. Raises WordsError and PreflightError."""
    _check_out(plan)
    if not plan.tasks["names"]:
        raise WordsError("evaluate as=lm_eval: which tasks? Type evaluate.tasks=[hellaswag,arc_easy].")
    head, task = plan.model.get("task", "causal_lm"), about(plan.objective).get("task", "next_token")
    if head != "causal_lm" or task != "next_token":
        of = f"model.task={head}" if head != "causal_lm" else f"a run of {task}"
        raise WordsError(f"evaluate as=lm_eval: tasks are for models that give the next token, and this is {of}.")
    tasks.check(plan.tasks)


def _check_out(plan: Plan) -> None:
    """Raises PreflightError where the figures cannot be written, before they are computed."""
    check_place(
        f"out={plan.out}", plan.out, ". evaluate writes its figures there: copy the run to a folder, and type out=<it>."
    )


def check_place(word: str, folder: str, mend: str = "") -> None:
    """Raises PreflightError, with the word that names it, for a folder in which nothing can be written."""
    try:
        store.probe(folder)
    except StoreError as error:
        raise PreflightError(f"{word}: {str(error).rstrip('.')}{mend}") from None


def _record(plan: Plan, result: Result) -> None:
    """Write the figures where those of the held-out data are: in the events of the run."""
    state, owner = lease.holder(plan.out)
    if state in ("held", "unknown") and not store.is_local(plan.out):
        screen.complain(
            f"{owner} writes events.jsonl, so these figures are in lm_eval.json alone.", begin="note: "
        )  # a journal is written whole there
        return
    journal = Journal(store.join(plan.out, "events.jsonl"))
    journal.append({"time": time.time(), "event": "evaluated", "step": result.step, **result.metrics["figures"]})
    journal.close()


def _heldout(words: Sequence[str]) -> int:
    plan, result = look_back(words, loop="dtrain.evaluation.evaluate.evaluate", check=_check_out)
    if result is not None:
        screen.say(
            f"step {result.step}  " + "  ".join(f"{name} {figure(value)}" for name, value in result.metrics.items())
        )
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
    verb = loop.split(".")[2].replace("lm_eval", "evaluate as=lm_eval")
    with store.starting():
        words, run, weights = _read(words, verb)
        config = compose(words, run=run)
    cluster = detect()
    with zygote.kept():
        plan = resolve(replace(config, loop=default("loop")), cluster, apart.shapes_of).with_loop(loop)
        plan = replace(plan, init=weights or config.init)  # not the weights that the model of the run began with
        if is_first(plan, cluster):
            check(plan)
        if plan.world > 1 and is_first(plan, cluster) and not is_rank(plan, cluster):
            zygote.begin()
        result: Result = build(plan.launcher).launch(plan)
    return plan, result if is_first(plan, cluster) else None


def _read(words: Sequence[str], verb: str) -> tuple[list[str], str | None, str | None]:
    """The words with the places of what they name, its run if there is one, and the weights of a model that none has
    trained. Raises WordsError and StoreError.
    """
    key = "out" if value_of(words, "out") else "init"
    named, weights = value_of(words, key), untrained.place_of(words)
    if weights and not value_of(words, "init") and not (named and store.children(run_at(words, named))):
        return untrained.with_tokenizer(words, weights), None, weights
    if not named:
        raise WordsError(
            "which run? Type out=<the run>, init=<the URL of a checkpoint>, or model=hf model.name=<a folder of "
            "transformers>."
        )
    source = run_at(words, named)
    if untrained.is_folder(source):
        untrained.check(words, verb, key, source)
        return untrained.with_tokenizer(words, source), None, None
    if not store.children(source):
        raise StoreError.during("find a checkpoint at", source, "nothing is there")
    root = source.split("/checkpoints/")[0]
    run = root if store.exists(store.join(root, "config.yaml")) else None
    key = "init" if source != root else key
    places = [f"out={text(root)}"] * (key == "init") + [f"{key}={text(source)}"] * (source != named)
    return [*words, *places], run, None
