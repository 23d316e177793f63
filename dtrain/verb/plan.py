"""`dtrain plan <words>`: shows the plan of a run and predicts its cost, without starting it.

dtrain plan strategy=fsdp nodes=2 devices=2                       here
dtrain plan cluster=h100x8 nodes=16 strategy=fsdp batch=256       on other machines
dtrain plan json strategy=fsdp devices=2                          the same for tools
dtrain plan why optim mesh strategy=fsdp devices=2                who set each value, and what it overrode
dtrain plan best cluster=h100x8 nodes=16 batch=256                the fastest layouts of all that words leave open
dtrain plan -m cluster=h100x8 nodes=8,16 batch=256               the jobs of a sweep, with their predictions
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from dtrain import secrets
from dtrain.build import GIVEN, build
from dtrain.cluster import Cluster, detect
from dtrain.compose import compose, provenance
from dtrain.config import files
from dtrain.config.facts import Part, fact
from dtrain.config.period import COUNTED
from dtrain.config.permission import code_of
from dtrain.config.schema import GROUPS, LISTS, Config, default
from dtrain.config.word import cut, spelling
from dtrain.errors import PreflightError, WordsError
from dtrain.planned import AXES, BatchShape, Plan, without_facts
from dtrain.predict import price, report
from dtrain.predict.advice import Change, advise
from dtrain.predict.prediction import Prediction, predict
from dtrain.recipe import requires
from dtrain.resolve import best, resolve
from dtrain.resolve.auto import spelled
from dtrain.resolve.space import is_free
from dtrain.secrets import screen
from dtrain.secrets.as_json import clean
from dtrain.storage import store
from dtrain.verb.shapes import shapes_of

STOP = "metric", "patience", "least"
"""Words of `stop` that a plan shows."""
NO_ARGUMENTS = "_target_", "_about_"
"""Keys of a part."""
PERIODS = dict(zip(COUNTED, ("evaluates", "saves"), strict=True))
"""Key -> its row in a plan that decided it."""


def run(words: Sequence[str]) -> int:
    if {"-m", "--multirun"} & set(words):
        return _sweep([word for word in words if word not in ("-m", "--multirun")])
    if words[:1] == ["best"]:
        from dtrain.verb import best as verb

        return verb.run(words[1:])
    if words[:1] == ["why"] or "--why" in words:
        from dtrain.verb import plan_why

        return plan_why.run([word for word in words if word not in ("why", "--why")])
    for_tools = list(words[:1]) == ["json"]
    words = words[for_tools:]
    config, cluster = compose(words), detect()
    say_left_out(config)

    def attempt(more: Sequence[str] = ()) -> tuple[Plan, Prediction]:
        plan = resolve(compose([*words, *more]) if more else config, cluster, shapes_of)
        return plan, predict(plan, shapes_of(plan))

    plan, prediction = attempt()
    if absent := [*_absent(plan)]:
        raise PreflightError(*absent)
    changes = [] if prediction.fits else advise(plan, attempt, [*_searched(config, cluster)])
    if for_tools:
        instead = [{"words": list(change.words), "prediction": change.prediction.to_dict()} for change in changes]
        screen.say(
            json.dumps(
                clean(
                    {
                        "plan": plan.decided(),
                        "prediction": prediction.to_dict(),
                        **price.stated(plan, prediction),
                        "changes": instead,
                    }
                ),
                indent=1,
            )
        )
        return 0
    refused = [secrets.masked(prediction.shapes.refused)] * bool(prediction.shapes.refused)
    unmet = [*requires.unmet(config, cluster), *_lacking(plan), *refused]
    missing = [("stops it", screen.on_one_line(sentence)) for sentence in dict.fromkeys(unmet)]
    code = [("code", sentence) for sentence in commands_in(config)]
    screen.say(show(plan), screen.rows([*report.rows(plan, prediction, width=screen.width()), *missing, *code]))
    for note in notes_of_job(plan):
        screen.complain(note, begin="note: ")
    if not prediction.fits:
        screen.say(screen.rows(report.advice(changes, plan)))
    return 0


def _searched(config: Config, cluster: Cluster) -> Iterator[Change]:
    """The words of the fastest layout that fits, of all that the words leave open."""
    if config.choices["strategy"] is None:
        return
    try:
        found = best(config, cluster, shapes_of, keep=1)
    except WordsError:  # what the model holds is not known
        return
    for layout in found.layouts[:1]:
        words = {key: value for key, value in layout.words.items() if is_free(config, key)}
        yield Change(tuple(spelled({key: value}) for key, value in words.items()), layout.plan, layout.prediction)


def _absent(plan: Plan) -> Iterator[str]:
    """A sentence for each local path of data without a file, of a run on this machine. Another may have it."""
    if fact(plan.launcher, "where") == "elsewhere" or "cluster" not in plan.why:
        return
    sets = {f"evaluate.sets.{name}": part for name, part in plan.evaluate_sets.items()}
    for place, part in {"data": plan.data, **sets}.items():
        is_ours = str(part["_target_"]).startswith("dtrain.") and fact(part, "files") != "hf"
        asked = secrets.opened(part.get("path")) if is_ours else None
        for path in [asked] if isinstance(asked, str) else asked or []:
            if path != "stdlib" and store.is_local(path) and not (store.exists(path) or store.find(path)):
                yield f"{place}.path={cut(path)}: no file is there."


def _lacking(plan: Plan) -> list[str]:
    """Problems that would stop a run on this machine, which the plan itself does not need: of its rows, and of the
    checkpoint that it begins with.
    """
    if "cluster" not in plan.why or fact(plan.launcher, "where") == "elsewhere":
        return []
    paths = [part.get(name) for part in (plan.data, *plan.evaluate_sets.values()) for name in ("path", "holdout_path")]
    given = [path for path in paths if path not in (None, "stdlib")]
    is_here = bool(given) and all(isinstance(path, str) and store.is_local(path) for path in given)
    if not (is_here or plan.init or plan.fork):
        return []
    from dtrain.launcher import preflight  # it reads weights of others

    return [*(preflight.rows(plan) if is_here else ()), *(preflight.begins(plan) if plan.init or plan.fork else [])]


def _sweep(words: Sequence[str]) -> int:
    from dtrain.verb import plan_sweep

    for act in {"best", "why"} & set(words[:1]) or {"--why"} & set(words):
        raise WordsError(f"plan -m: {act} is about one run. Leave it or -m out.")
    for_tools = words[:1] == ["json"]
    return plan_sweep.run(words[for_tools:], for_tools=for_tools)


def say_left_out(config: Config) -> None:
    """Notes about the arguments that were dropped with the parts they belong to."""
    for sentence in provenance.left_out(config):
        screen.complain(screen.on_one_line(sentence), begin="note: ")


def notes_of_job(plan: Plan) -> Iterable[str]:
    """Sentences of the scheduler of a plan about its words; nothing where it has none."""
    launcher = build(plan.launcher) if fact(plan.launcher, "detached") else None
    return launcher.notes(plan) if launcher else ()


def commands_in(config: Config) -> Iterator[str]:
    """A sentence for each word of a recipe that is run as a command."""
    for key, value, source in code_of(config):
        yield screen.on_one_line(f"{key}={provenance.shown(key, value)} ({source}) is run as it stands. Read it.")


def explained(plan: Plan) -> str:
    """The plan with its predicted cost, as text."""
    return f"{show(plan)}\n{screen.rows(report.rows(plan, predict(plan, shapes_of(plan)), width=screen.width()))}"


def show(plan: Plan) -> str:
    """The plan as text."""
    mesh, batch = plan.mesh, plan.batch
    ranks = f"{plan.nodes} node(s) x {plan.devices} device(s) = {plan.world} rank(s) on {plan.device}"
    degrees = [f"{axis}={getattr(mesh, axis)}" for axis in AXES] + [f"ep={mesh.ep}"] * (mesh.ep > 1)
    counted = plan.why.get("steps", "").partition(" (auto: ")[2]
    length = f"{plan.steps} steps" + f" ({counted}" * bool(counted) + f", seed {plan.seed}, clip {plan.clip}"
    rows = [
        ("ranks", f"{ranks}, {plan.threads} thread(s) each"),
        ("mesh", "  ".join(degrees)),
        *_axes(plan),
        ("batch", f"{batch.size} samples = {_forwards(batch)}"),
        *_fewer(plan),
        ("cluster", plan.why.get("cluster") or f"{plan.cluster['gpus']} x {plan.cluster['gpu']} a node"),
        ("run", length + (f", stops after {plan.stop_after}" if plan.stop_after else "")),
        *_loop(plan),
        *_measured(plan),
        ("spike", _spike(plan)),
        *((row, plan.why[key]) for key, row in PERIODS.items() if key in plan.why),
        *_parts(plan),
        *_warmup(plan),
        ("launch", _launch(plan)),
        ("out", screen.on_one_line(plan.out)),
        ("digest", plan.digest),
    ]
    return screen.rows(rows)


def exceptions(plan: Plan) -> Iterator[tuple[str, str]]:
    """Rows that a run shows too, where they are not the default."""
    yield from _loop(plan)
    if plan.spike["sigma"] is not None:
        yield "spike", _spike(plan)
    yield from _measured(plan)
    yield from _warmup(plan)
    yield from _fewer(plan)


def _spike(plan: Plan) -> str:
    return plan.why.get("spike", f"{plan.on_spike} above {plan.spike['sigma']} deviations")


def _forwards(batch: BatchShape) -> str:
    return f"{batch.microbatch} per forward x {batch.data} data-parallel rank(s) x {batch.accumulate} accumulated"


def _launch(plan: Plan) -> str:
    """The command, script or manifest that launches it, or why this machine cannot, where the ranks run here."""
    here = fact(plan.launcher, "where") != "elsewhere" and plan.cluster and "cluster" not in plan.why
    missing = build(plan.cluster).missing(detect()) if here else ""
    return f"not from here: {missing}" if missing else build(plan.launcher).describe(plan)


def _loop(plan: Plan) -> Iterable[tuple[str, str]]:
    """A row for a loop of the user's own."""
    if plan.loop != default("loop"):
        yield "loop", f"{plan.loop}, which decides about metrics, evaluation, spikes, loggers and hooks"


def _measured(plan: Plan) -> Iterable[tuple[str, str]]:
    """Rows for the evaluation and for the metric that ends the run, where they are not the default."""
    asked = {"every": plan.evaluate_every, "samples": plan.evaluate_samples}
    named = {"metrics": [*plan.evaluate_metrics], "sets": [*plan.evaluate_sets]}
    more = {name: names for name, names in named.items() if names}
    if more or any(value != default(f"evaluate.{name}") for name, value in asked.items()):
        listed = (f"{name}={spelling(value)}" for name, value in (asked | more).items())
        yield "evaluate", screen.on_one_line(" ".join(listed))
    if plan.stop:
        yield "stop", " ".join(argument for name in STOP for argument in _arguments(name, plan.stop.get(name)))


def _fewer(plan: Plan) -> Iterable[tuple[str, str]]:
    """A row for each smaller number of nodes that the run may continue on."""
    for other in plan.others:
        mesh = " ".join(f"{axis}={degree}" for axis, degree in vars(other.mesh).items() if degree > 1) or "one rank"
        yield f"on {other.nodes}", f"{mesh}, {_forwards(other.batch)}"


def _axes(plan: Plan) -> Iterable[tuple[str, str]]:
    """Rows for the pipeline, tensor and context axes in use."""
    if plan.mesh.pp > 1:
        pipeline = plan.pipeline
        split = pipeline.split if isinstance(pipeline.split, str) else list(pipeline.split)
        stages = f"{pipeline.schedule}, {plan.mesh.pp} x {pipeline.stages} stages split by {split}"
        yield "pipeline", f"{stages}, {plan.batch.accumulate} microbatches"
    for axis, name in (("tp", "tensor"), ("cp", "context")):
        if getattr(plan.mesh, axis) > 1:
            words = (argument for key, value in getattr(plan, name).items() for argument in _arguments(key, value))
            yield name, "  ".join(words)


def _parts(plan: Plan) -> Iterable[tuple[str, str]]:
    for group in GROUPS:
        if group in (*LISTS, "cluster"):
            continue
        part = getattr(plan, group)
        word = part_name(part)
        names = [name for name in part if name not in NO_ARGUMENTS]
        if part["_target_"] == GIVEN:
            word = f"{part['of']}, given by the caller"
            names.remove("of")
        arguments = (argument for name in names for argument in _arguments(name, part[name]))
        yield group, "  ".join(filter(None, [screen.on_one_line(plan.why.get(group, word)), " ".join(arguments)]))
    for group, parts in (("logger", plan.loggers), ("hook", plan.hooks)):
        yield group, screen.on_one_line(plan.why.get(group, ", ".join(parts) or "none"))


def _warmup(plan: Plan) -> Iterable[tuple[str, str]]:
    """A row for a warm-up in steps that takes more than half of the run, as a default does in a short one."""
    length = plan.schedule.get("warmup")
    if isinstance(length, int | float) and max(1, plan.steps / 2) < length:
        part = "all" if length >= plan.steps else f"{length:g}"
        yield "warm-up", f"takes {part} of the {plan.steps} steps. Type schedule.warmup=0.1 for a tenth of the run"


def part_name(part: Part) -> str:
    """The word of a part, or the class of the user's own."""
    target = str(part["_target_"])
    if target.startswith("dtrain.integrations."):
        return files.own_word(target)[1]
    return target.split(".")[-2] if target.startswith("dtrain.") else target


def _arguments(name: str, value: Any) -> Iterator[str]:
    """An argument as it is typed, of a mapping each of its own: `of.web=text of.web.path=web`. None if it is null."""
    if isinstance(value, Mapping):
        is_given = value.get("_target_") == GIVEN
        if "_target_" in value:
            yield screen.on_one_line(f"{name}={value['of'] if is_given else part_name(value)}")
        names = [key for key in value if key not in NO_ARGUMENTS and not (is_given and key == "of")]
        for key in names:
            yield from _arguments(f"{name}.{key}", value[key])
    elif value is not None:
        yield screen.on_one_line(f"{name}={spelling(without_facts(value))}")
