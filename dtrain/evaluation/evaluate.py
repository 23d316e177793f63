"""One rank of `dtrain evaluate`: a checkpoint's loss on held-out data, on any mesh."""

import time

from dtrain.errors import PreflightError
from dtrain.evaluation.heldout import each
from dtrain.evaluation.metrics import metrics_of
from dtrain.evaluation.session import load, other_data
from dtrain.planned import Plan
from dtrain.result import Result, versions
from dtrain.secrets import screen


def evaluate(plan: Plan) -> Result:
    """Evaluate a checkpoint; the result's `metrics` are `eval_loss` and the objective's own."""
    began = time.perf_counter()
    with load(plan, judged=True) as (parts, commit):
        if not parts.measured:
            raise PreflightError(
                "evaluate: nothing is held out. Name data that the run has not seen: evaluate.sets.dev.path=dev.jsonl"
            )
        if parts.mesh.rank == 0 and (sentence := other_data(parts, commit)):
            screen.complain(sentence, begin="note: ")
        metrics = each(
            *(parts.forward, parts.measured, parts.objective, parts.mesh), precision=parts.precision,
            context=parts.context, reference=parts.reference, samples=plan.evaluate_samples,
            microbatch=plan.batch.microbatch,
            metrics=metrics_of(parts),
            tell=screen.say if parts.mesh.rank == 0 else lambda text: None,
        )  # fmt: skip
    return Result(
        status="finished",
        step=commit["step"],
        loss=metrics.get("eval_loss"),
        wall_seconds=time.perf_counter() - began,
        metrics=metrics,
        versions=versions(),
    )
