"""The screen of a run before it starts, a dozen lines: what was asked, what `auto` decided, memory, time and place.
`dtrain plan` says all of it.
"""

import re
from collections import defaultdict
from collections.abc import Iterator

from dtrain import secrets
from dtrain.compose import layers, provenance
from dtrain.config.schema import Config
from dtrain.config.word import typed_at
from dtrain.launcher import apart
from dtrain.planned import AXES, Plan
from dtrain.predict import formulas, reference, report
from dtrain.predict.prediction import predict
from dtrain.secrets import screen
from dtrain.verb import plan as plans

LONGEST = 160
"""Length at which a row is cut, in characters: two lines of most terminals."""
SAID = ("model", "data", "objective", "optim", "schedule", "precision", "strategy", "adapter")
"""Groups that are named even where they are the default, but for what is none."""
REASONED = ("strategy", "objective", "precision", "launcher")
"""Groups whose reasons are told."""


def overview(plan: Plan, config: Config) -> str:
    rows = [
        ("run", _run(plan)),
        ("ranks", _ranks(plan)),
        *_asked(config),
        *_decided(plan),
        *plans.exceptions(plan),
        *_predicted(plan),
        ("out", screen.on_one_line(plan.out)),
    ]
    return screen.rows((name, _cut(text)) for name, text in rows)


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 25]}... (dtrain plan says all)"


def _run(plan: Plan) -> str:
    words = (plans.part_name(getattr(plan, group)) for group in SAID)
    length = f"{plan.steps:,} steps of {plan.batch.size:,} samples"
    stop = f", stops after {plan.stop_after:,}" if plan.stop_after else ""
    return screen.on_one_line(
        f"{', '.join(word for word in words if word != 'none')}: {length}{stop}, seed {plan.seed}"
    )


def _ranks(plan: Plan) -> str:
    mesh, batch = plan.mesh, plan.batch
    degrees = [f"{axis}={size}" for axis in (*AXES, "ep") if (size := getattr(mesh, axis)) > 1]
    nodes = f"{plan.nodes} nodes x {plan.devices}" if plan.nodes > 1 else f"{plan.devices}"
    threads = f", {plan.threads} thread(s) each" if plan.device == "cpu" else ""
    forwards = f"{batch.microbatch} a forward x {batch.data} x {batch.accumulate} accumulated"
    return f"{nodes} on {plan.device}{threads}{', mesh ' * bool(degrees)}{' '.join(degrees)}; {forwards}"


def _asked(config: Config) -> Iterator[tuple[str, str]]:
    """The words of the command line, and how many each file set."""
    values = provenance.asked(config)
    files = defaultdict[str, list[str]](list)
    for key, source in config.sources.items():
        if key in values and key != "out":
            files[re.sub(r":\d+$", "", source)].append(key)
    typed = files.pop(typed_at(), [])
    if typed:
        yield (
            "asked",
            screen.on_one_line(" ".join(layers.as_typed(key, provenance.shown(key, values[key])) for key in typed)),
        )
    for file, keys in files.items():
        yield "from", screen.on_one_line(f"{secrets.masked(file)}: {', '.join(keys)}")


def _decided(plan: Plan) -> Iterator[tuple[str, str]]:
    """The words that `auto` stands for, with their reasons."""
    reasons = [f"{group}={plan.why[group]}" for group in REASONED if group in plan.why]
    if reasons:
        yield "decided", screen.on_one_line(", ".join(reason.replace("(auto: ", "(") for reason in reasons))


def _predicted(plan: Plan) -> Iterator[tuple[str, str]]:
    """Memory and time, and a warning if it does not fit. A model that only torch can measure is not built for it."""
    reason = "beside a teacher" if reference.is_teacher(plan) else ""
    shapes = None if reason else formulas.shapes(plan) or apart.known(plan)
    if shapes is None:
        yield "memory", f"not predicted {reason or formulas.unknown(plan)}: dtrain plan does it"
        return
    prediction = predict(plan, shapes)
    yield from report.short(plan, prediction)
    if not prediction.fits:
        yield "warning", report.warning(prediction)
