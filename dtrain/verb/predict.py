"""`dtrain predict out=<run> [predict.to=...] [predict.data=...]`: the answers of its newest checkpoint, or of the one
at `init=`, to its held-out rows or to other ones, in their order and on any mesh.

dtrain predict out=runs/a predict.to=answers.jsonl 'predict.data={path: new.csv}'   the same words continue after a kill
"""

from collections.abc import Sequence

from dtrain.config.facts import about
from dtrain.errors import PreflightError, StoreError, WordsError
from dtrain.files.predictions import Predictions
from dtrain.files.targetless import targetless
from dtrain.launcher import preflight
from dtrain.planned import Part, Plan
from dtrain.secrets import screen
from dtrain.storage import store
from dtrain.verb.evaluate import check_place, look_back


def run(words: Sequence[str]) -> int:
    _, result = look_back(words, loop="dtrain.evaluation.predict.predict", check=_check)
    if result is None:
        return 0
    said = f"step {result.step}  {result.metrics['rows']} rows · {result.metrics['to']}"
    screen.say(said if result.status == "finished" else f"{said}\n{result.reason}: go on with the same words")
    return result.exit_code


def _check(plan: Plan) -> None:
    """Refuse rows that are not there, and a place with other rows, before ranks start."""
    asked = plan.predict
    if problems := [*preflight.files_of("predict.data", _rows(plan), plan)] if asked["data"] else []:
        raise PreflightError(*problems)
    to = asked["to"] or store.join(plan.out, "predictions.jsonl")
    state = Predictions(to).look({name: asked[name] for name in ("scores", "part", "batch", "columns")})
    folder = to.rstrip("/").rpartition("/")[0]
    if state == "new" and folder:
        check_place(f"predict.to={to}", folder)


def _rows(plan: Plan) -> Part:
    """The data to predict, as the ranks will read it; as it was asked for if it cannot be read at all."""
    asked: Part = plan.predict["data"]
    try:
        return targetless(asked, task=about(plan.objective).get("task"), trained=plan.data)
    except (PreflightError, StoreError, WordsError):
        return asked
