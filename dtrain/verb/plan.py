"""`dtrain plan <words>`: what would happen, without torch and without doing it."""

from collections.abc import Iterable, Sequence

from dtrain.build import build
from dtrain.cluster import look
from dtrain.compose import compose
from dtrain.plan import AXES, Plan
from dtrain.resolve import resolve


def run(words: Sequence[str]) -> int:
    print(show(resolve(compose(words), look())))
    return 0


def show(plan: Plan) -> str:
    """The plan as a person reads it."""
    shape = plan.mesh
    rows = [
        ("ranks", f"{plan.nodes} node(s) x {plan.devices} device(s) = {plan.world} rank(s) on {plan.device}, {plan.threads} thread(s) each"),
        ("mesh", "  ".join(f"{axis}={getattr(shape, axis)}" for axis in AXES) + (f"  ep={shape.ep}" if shape.ep > 1 else "")),
        *_axes(plan),
        (
            "batch",
            f"{plan.batch.size} samples = {plan.batch.microbatch} per forward x {plan.batch.data} data-parallel rank(s) x {plan.batch.accumulate} accumulated",
        ),
        *_fewer(plan),
        ("run", f"{plan.steps} steps, seed {plan.seed}, clip {plan.clip}" + (f", stops after {plan.stop_after}" if plan.stop_after else "")),
        ("spike", plan.why.get("spike", f"{plan.on_spike} above {plan.spike['sigma']} deviations")),
        *_parts(plan),
        ("launch", build(plan.launcher).command(plan)),
        ("out", plan.out),
        ("digest", plan.digest),
    ]
    return "\n".join(f"{name:<10} {text}" for name, text in rows)


def _fewer(plan: Plan) -> Iterable[tuple[str, str]]:
    """What runs when not all nodes are there."""
    for other in plan.others:
        mesh = " ".join(f"{axis}={degree}" for axis, degree in vars(other.mesh).items() if degree > 1) or "one rank"
        yield (
            f"on {other.nodes}",
            f"{mesh}, {other.batch.microbatch} per forward x {other.batch.data} data-parallel rank(s) x {other.batch.accumulate} accumulated",
        )


def _axes(plan: Plan) -> Iterable[tuple[str, str]]:
    """How the axes that are used are used."""
    if plan.mesh.pp > 1:
        pipeline = plan.pipeline
        split = pipeline.split if isinstance(pipeline.split, str) else list(pipeline.split)
        yield "pipeline", f"{pipeline.schedule}, {plan.mesh.pp} x {pipeline.stages} stages split by {split}, {plan.batch.accumulate} microbatches"
    for axis, name in (("tp", "tensor"), ("cp", "context")):
        if getattr(plan.mesh, axis) > 1:
            yield name, "  ".join(f"{key}={value}" for key, value in getattr(plan, name).items())


def _parts(plan: Plan) -> Iterable[tuple[str, str]]:
    for group in (
        "launcher",
        "backend",
        "strategy",
        "precision",
        "remat",
        "compile",
        "model",
        "data",
        "objective",
        "optim",
        "schedule",
        "checkpoint",
    ):
        part = getattr(plan, group)
        target = str(part["_target_"])
        word = target.split(".")[-2] if target.startswith("dtrain.") else target
        arguments = " ".join(f"{name}={value}" for name, value in part.items() if name not in ("_target_", "_about_") and value is not None)
        yield group, plan.why.get(group, word) + (f"  {arguments}" if arguments else "")
    for group, parts in (("logger", plan.loggers), ("hook", plan.hooks)):
        yield group, plan.why.get(group, ", ".join(parts) or "none")
