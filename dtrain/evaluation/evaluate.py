"""One rank of `dtrain evaluate`: a checkpoint's loss on held-out data, on any mesh."""

import time

from dtrain.errors import PreflightError
from dtrain.evaluation.heldout import evaluate as heldout_loss
from dtrain.evaluation.session import look_at
from dtrain.plan import Plan
from dtrain.result import Result, versions
from dtrain.secrets import screen


def evaluate(plan: Plan) -> Result:
    """`metrics` holds `eval_loss` and the objective's own."""
    began = time.perf_counter()
    with look_at(plan) as seen:
        source = seen.source.holdout()
        if source is None:
            raise PreflightError("evaluate: nothing is held out. Type data.holdout=0.1, or name held-out data.")
        metrics = heldout_loss(
            seen.model,
            source,
            seen.objective,
            seen.mesh,
            precision=seen.precision,
            samples=plan.evaluate_samples,
            microbatch=plan.batch.microbatch,
            context=seen.context,
            tell=lambda text: screen.say(text) if seen.mesh.rank == 0 else None,
        )
    return Result(
        "finished", seen.commit["step"], metrics["eval_loss"], time.perf_counter() - began, metrics, versions()
    )
