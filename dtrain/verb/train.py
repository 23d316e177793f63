"""`dtrain [train] <words>`: trains; with -m, once for every combination of the swept values.

dtrain recipe=digits out=runs/a optim.lr=1e-3              the same words continue a stopped run
dtrain -m optim.lr=1e-3,3e-3 seed=0,1 sweep.out=runs/s     four runs, and a table of their results
"""

from collections.abc import Iterable, Sequence

from dtrain import recipe
from dtrain.build import build
from dtrain.cluster import detect
from dtrain.compose import compose
from dtrain.config.facts import fact
from dtrain.config.schema import Config
from dtrain.errors import PreflightError, why
from dtrain.launcher import zygote
from dtrain.launcher.external import is_first, is_rank
from dtrain.launcher.run import finished, no_longer_kept, other_length
from dtrain.launcher.run import run as run_plan
from dtrain.planned import Plan
from dtrain.predict import price
from dtrain.recipe import requires
from dtrain.result import Result, note_code
from dtrain.secrets import screen
from dtrain.storage import store
from dtrain.verb.decide import decide
from dtrain.verb.plan import notes_of_job, say_left_out

SPENT = {
    "step": "steps",
    "data_wait": "waiting for samples",
    "checkpoint_stall": "waiting for saves",
    "evaluate": "evaluation",
    "start": "start",
    "other": "logs and hooks",
}
"""Part of `spent` in result.json -> its words."""


def run(words: Sequence[str]) -> int:
    if "-m" in words or "--multirun" in words:
        from dtrain.verb import sweep

        return sweep.multirun([word for word in words if word not in ("-m", "--multirun")])
    with zygote.kept():
        return one(compose(words)).exit_code


def one(config: Config) -> Result:
    """Resolve, check and run one training."""
    cluster = detect()
    plan = decide(config, cluster)
    first = is_first(plan, cluster)
    with store.starting():
        done = already_finished(plan, say=first)
    if done:
        return done
    forks = first and plan.world > 1 and not is_rank(plan, cluster) and not fact(plan.launcher, "detached")
    zygote.begin() if forks else zygote.kill()  # a trace may have begun one
    if first:
        from dtrain.launcher import preflight  # it reads weights of others; the words are right by now
        from dtrain.verb.overview import overview

        requires.check(config, cluster)
        build(plan.launcher).describe(plan)  # it refuses words before anything is written
        with store.starting():
            preflight.check(plan)
            notes = [*_notes(config, plan)]
        screen.say(overview(plan, config))
        say_left_out(config)
        for note in (*notes, *notes_of_job(plan)):
            screen.complain(note, begin="note: ")
        if full := screen.full():
            raise PreflightError(f"standard output: {why(full)}. Send it elsewhere: > <another file>.")
        note_code()
    result = run_plan(plan, recipe.write(config), first=first) or already_finished(plan, say=True)
    assert result
    if first:
        screen.say(farewell(plan, result))
    return result


def _notes(config: Config, plan: Plan) -> Iterable[str]:
    if config.sweep.space:
        yield f"sweep.space ({config.sources['sweep.space']}): this is one run. Type -m to sweep."
    if kept := no_longer_kept(plan):
        yield (
            f"{' '.join(kept)} was asked of this run before. The checkpoints that it kept are removed by the next "
            "saves: type it again to keep them."
        )
    if steps := other_length(plan, config.epochs):
        yield (
            f"epochs={config.epochs:g} counts the rows that are there now: {plan.steps} steps. This run began with "
            f"{steps} steps, and keeps its rows. Type steps={steps} instead to end it so, or out=<another place> to "
            "train on all rows."
        )


def already_finished(plan: Plan, *, say: bool) -> Result | None:
    """The result under `out` if the run has finished."""
    result = finished(plan)
    if result and say:
        screen.say(
            f"already finished: {plan.out} has done {result.step} steps, loss {result.loss}. Type "
            f"{_to_continue(plan, result)} to continue, or out=<another place>."
        )
    return result


def _to_continue(plan: Plan, result: Result) -> str:
    """The word that the run was ended by, which is epochs where those gave the steps."""
    if result.stop:
        return f"stop.patience=<more than {result.stop['patience']}>"
    return "epochs=<more>" if "steps" in plan.why else "steps=<more>"


def _measured(result: Result, name: str) -> str:
    """The step after which a metric was measured, if it is not the last."""
    step = result.measured.get(name, result.step)
    return "" if step == result.step else f" of step {step}"


def figure(value: float) -> str:
    """Four decimals; of a smaller number than these show, three digits."""
    return f"{value:.3g}" if 0 < abs(value) < 1e-3 else f"{value:.4f}"


def _spent(result: Result) -> str:
    """Where the time of this start went, from 1% on."""
    whole = sum(result.spent.values())
    shares = {SPENT[part]: seconds / whole for part, seconds in result.spent.items() if seconds > whole / 100}
    parts = sorted(shares, key=shares.__getitem__, reverse=True)
    return f"\ntime: {', '.join(f'{shares[part]:.0%} {part}' for part in parts)}" if parts else ""


def farewell(plan: Plan, result: Result) -> str:
    if result.status == "submitted":
        follow = f"the same words with launcher.detach=false follow it, dtrain stop {plan.out} ends it"
        return f"{result.reason} runs it · {plan.out}\n{follow}"
    loss = "" if result.loss is None else f", last step's loss {figure(result.loss)}"
    evaluation = "".join(
        f", held-out {name.removeprefix('eval_')} {figure(value)}{_measured(result, name)}"
        for name, value in result.metrics.items()
    )
    evaluation += "".join(
        f", best {name.removeprefix('eval_')} {figure(best['value'])} of step {best['step']}"
        for name, best in result.best.items()
    )
    is_early = result.status == "finished" and result.step < plan.steps
    why = f"\n{result.reason}" if result.stop or is_early else ""
    line = screen.on_one_line(
        f"{result.status} after {result.step} steps in {result.wall_seconds:.1f} s"
        f"{price.clause(plan, result.wall_seconds)}{loss}{evaluation} · {plan.out}"
    )
    line += _spent(result)
    return (
        f"{line}{why}"
        if result.status == "finished"
        else f"{line}\ngo on with the same words and {screen.typed(f'out={plan.out}')}"
    )
