"""`dtrain verify <words>`: compares a few steps of the requested run with the same steps in one process that takes the
whole batch at once.

    dtrain verify strategy=fsdp mesh.pp=2 mesh.tp=2 devices=8
    dtrain verify model._target_=mypkg.Net trust=[mypkg] strategy=ddp devices=2 verify.steps=20

    asked   the words, stopped half way and resumed       one     one process, all samples of a step in one forward
    again   `one` a second time                           parts   one process, the batch in parts: effect of rounding
    straight, split   only if `asked` differs: without the stop; one process with the microbatch of `asked`

All are real runs, with the real loop and checkpoints, under <out>/verify. Exit code 0: the same; 1: not. verify.json
gives the likely cause.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from dtrain.build import build
from dtrain.cluster import detect
from dtrain.compose import compose
from dtrain.config.schema import Config
from dtrain.errors import DtrainError, WordsError
from dtrain.launcher import apart, preflight, zygote
from dtrain.planned import BatchShape, MeshShape, PipelineShape, Plan
from dtrain.recipe import expect, requires
from dtrain.resolve import loop, resolve
from dtrain.result import versions
from dtrain.secrets import redact_arg, screen
from dtrain.secrets.as_json import clean
from dtrain.storage import store

PLAIN: Mapping[str, Any] = {
    "strategy": {"_target_": "dtrain.strategy.single.Single"},
    "remat": {"_target_": "dtrain.remat.none.build"},
    "compile": {"_target_": "dtrain.compile.none.build"},
    "launcher": {
        "_target_": "dtrain.launcher.local.Local",
        "restarts": 0,
        "silence": 15,
        "wait": 60,
        "address": None,
        "here": None,
    },
}
"""Config of the run in one process: nothing is split, recomputed or compiled."""


SPLIT = (
    "the split over ranks causes the difference. This happens if a model or objective uses its rank, or keeps sums "
    "over its own rank's samples; if yours does neither, it is a bug in dtrain."
)
MEMORY = re.compile(r"out of memory|can.t allocate memory|MemoryError|SIGKILL", re.IGNORECASE)
"""Messages of a rank that ran out of memory or was killed for it."""


def run(words: Sequence[str]) -> int:
    with zygote.kept():
        return _verify(words)


def _verify(words: Sequence[str]) -> int:
    config, cluster = compose(words), detect()
    if cluster.external and cluster.external.world:
        raise WordsError(
            "verify starts its own ranks, but another launcher started this process as one of its ranks. Start "
            "verify without torchrun."
        )
    plan = replace(resolve(config, cluster, apart.shapes_of), others=())
    if not loop.writes_rows(plan.loop, plan.trust):
        raise WordsError(
            f"loop={plan.loop}: verify compares the rows and records of dtrain's own loop, and this one does not call "
            "dtrain.train.train. Leave loop out to verify the model, the data and the mesh."
        )
    figures = expect.asked(config.expect)
    zygote.begin()
    requires.check(config, cluster)
    preflight.check(plan)
    store.remove(store.join(plan.out, "verify"))
    report: dict[str, Any] = {"words": list(map(redact_arg, words)), "plan": plan.digest, "versions": versions()}
    report |= _expected(words, config, plan) if figures else {}
    report |= _parity(plan, config) if plan.world > 1 or not figures else {}
    written = store.join(plan.out, "verify.json")
    store.write(written, json.dumps(clean(report), indent=1).encode())
    for key, sentence in (
        ("expected", "the expected figures were not reached"),
        ("same", f"{report.get('first')} differs"),
    ):
        if report.get(key) is False:
            screen.complain(f"verify: {sentence}. See {written}.")
    return 0 if report.get("same", True) and report.get("expected", True) else 1


def _expected(words: Sequence[str], config: Config, plan: Plan) -> dict[str, Any]:
    """Run a few steps, and compare the metrics with those that the recipe expects."""
    small = resolve(compose([*config.expect.small, *words]), detect(), apart.shapes_of)
    last = min(config.expect.step or small.steps, small.steps, small.stop_after or small.steps)
    held_out = any(name in expect.HELD_OUT for name in expect.asked(config.expect))
    evaluation: dict[str, Any] = {"evaluate_every": last * held_out, "evaluate_samples": small.evaluate_samples}
    quiet = _quiet(small, store.join(plan.out, "verify", "small"))
    small = replace(quiet, stop_after=last, others=(), **evaluation)
    here = expect.machine(detect())
    screen.say(f"expect     {last} steps on {small.world} rank(s), {here}")
    try:
        _launch(small)
    except WordsError:
        raise
    except DtrainError as error:
        screen.say(f"{error}\nNOT as expected")
        return {"expected": False, "error": str(error), "figures": []}
    findings = expect.judge(config.expect, small.out, here=here)
    good = not any(finding.bad for finding in findings)
    screen.say(f"{expect.table(findings, config.expect.hardware)}\n{'as expected' if good else 'NOT as expected'}")
    return {"expected": good, "figures": [{**asdict(finding), "machine": here} for finding in findings]}


def _parity(plan: Plan, config: Config) -> dict[str, Any]:
    """Compare the requested run with one process."""
    runs = Runs(plan, config)
    half = f", stopped after {runs.stop} and resumed" if runs.stop else ""
    samples = f"{runs.whole} of the" if runs.whole < plan.batch.size else "all"
    screen.say(
        f"verify     {runs.steps} steps on {plan.world} rank(s){half}, then twice on one with {samples} "
        f"{plan.batch.size} samples of a step at once"
    )
    try:
        report = {"steps": runs.steps, **_judge(runs)}
    except Failed as failed:
        report = {
            "steps": runs.steps,
            "same": False,
            "first": f"{failed.name} failed: it",
            "error": str(failed.cause),
            "rows": [],
            "built": [],
        }
    screen.say(_table(report))
    return report


class Failed(Exception):
    """A run of the comparison failed. `name` describes the run, `cause` is its error."""

    def __init__(self, name: str, cause: DtrainError) -> None:
        super().__init__(name)
        self.name, self.cause = name, cause


class Runs:
    """The runs of one comparison, each under its name in <out>/verify."""

    def __init__(self, plan: Plan, config: Config) -> None:
        self._plan, self.steps = plan, min(config.verify.steps, plan.steps)
        self.stop = self.steps // 2
        """The step after which the requested run is stopped and resumed; 0 if it has too few steps."""
        self.micro = plan.batch.microbatch
        self.parts: str | None = None
        self.whole = plan.objective.get("together") or plan.batch.size
        """Samples per forward in one process: the whole batch, unless the objective says how many belong together."""

    def where(self, name: str) -> str:
        return store.join(self._plan.out, "verify", name)

    def asked(self, name: str, *, stops: bool) -> None:
        plan = self._short(self._plan, name)
        if stops:
            self._launch(replace(plan, stop_after=self.stop), "the asked run")
        self._launch(plan, f"the asked run, resumed after step {self.stop}," if stops else "the asked run")

    def one(self) -> None:
        """Run twice in one process, with the largest part of the batch that fits in memory."""
        sizes = [size for size in range(self.whole, 0, -1) if self.whole % size == 0]
        for size in sizes:
            plan = self._short(_on_one(self._plan, size), "one")
            part = max((each for each in range(1, size) if size % each == 0), default=None)
            others = {self.where("again"): size} | ({self.where("parts"): part} if part else {})
            self.parts = self.where("parts") if part else None
            checkpoint = {**plan.checkpoint, "loop": plan.loop, "others": others}
            try:
                self.whole = size
                self._launch(
                    replace(plan, loop="dtrain.launcher.repeat.repeat", checkpoint=checkpoint), "the run on one process"
                )
                break
            except Failed as failed:
                if size == sizes[-1] or not MEMORY.search(str(failed.cause)):
                    raise
                screen.say(f"verify     {size} samples at once do not fit in the memory of one process")
                for name in ("one", "again", "parts"):
                    store.remove(self.where(name))

    def split(self) -> None:
        self._launch(
            self._short(_on_one(self._plan, self.micro), "split"), "the run on one process with the asked microbatch"
        )

    def differ(self, here: str, there: str, compute: str, *, weights: bool = True) -> bool:
        from dtrain.evaluation import parity

        return (
            parity.first_difference(parity.compare(here, there, compute, parts=self.parts, weights=weights)) is not None
        )

    def order(self) -> str:
        """Advice for GPUs, whose fast kernels may add in a different order each time."""
        fast = self._plan.backend.get("kernels") == "fast"
        return (
            " Fast GPU kernels may not be either: type backend=nccl backend.kernels=deterministic, and verify again."
            if fast
            else ""
        )

    def _short(self, plan: Plan, name: str) -> Plan:
        """The same run, stopped after a few steps; its ranks record the first step."""
        plan = _quiet(plan, self.where(name))
        recording = {
            **plan.checkpoint,
            "_target_": "dtrain.evaluation.record.recorded",
            "kind": plan.checkpoint["_target_"],
            "seed": plan.seed,
        }
        return replace(plan, stop_after=self.steps, log_every=1, checkpoint=recording)

    def _launch(self, plan: Plan, name: str) -> None:
        try:
            _launch(plan)
        except WordsError:
            raise
        except DtrainError as error:
            raise Failed(name, error) from error


def _judge(runs: Runs) -> dict[str, Any]:
    """Run and compare: the rows, the first difference, and its likely cause."""
    runs.asked("asked", stops=runs.stop > 0)
    runs.one()
    from dtrain.evaluation import parity  # with torch, which the ranks have loaded by now in processes of their own

    asked, one, again = map(runs.where, ("asked", "one", "again"))
    built = _events(asked)
    rows = parity.compare(asked, one, built["computed"], parts=runs.parts)
    noise = parity.compare(again, one, built["computed"])
    first, unstable = parity.first_difference(rows), parity.first_difference(noise)
    record = parity.first(asked)
    drawn = record.drawn if record else []
    report = {
        "same": first is None and unstable is None,
        "first": first or unstable,
        "rows": parity.to_json(rows),
        "whole": runs.whole,
        "drawn": drawn,
    }
    if unstable:
        culprit = "the samples of the dataset are"
        if not parity.random_data(one):
            culprit = "the model (or its loss, or the data) is"
        sentence = f"two runs of one process differ from each other, {unstable}: {culprit} not deterministic."
        report["kinds"] = [("deterministic", f"{sentence} The mesh is not to blame.{runs.order()}")]
    elif first:
        report["kinds"] = list(_kinds(runs, drawn, built["computed"]))
    return report | built


def _kinds(runs: Runs, drawn: Sequence[str], compute: str) -> Iterator[tuple[str, str]]:
    """(kind, sentence) for each cause of a difference from one process, as further runs show it."""
    from dtrain.evaluation import parity

    asked, one = runs.where("asked"), runs.where("one")
    other = parity.other_sample(asked, one)
    if other:
        sentence = (
            f"sample {other[0]} differs between rank {other[1]} and one process: the dataset depends on the number "
            "of calls, on a random generator shared by the samples, or on its rank. A sample must depend on its "
            "index alone. The mesh is not to blame."
        )
        yield "data", sentence
        return
    lost = False
    if runs.stop:
        runs.asked("straight", stops=False)
        lost, asked = runs.differ(asked, runs.where("straight"), compute), runs.where("straight")
    if not lost or runs.differ(asked, one, compute):
        yield _split(runs, asked, drawn, compute)
    if lost:
        sentence = (
            f"stopped after step {runs.stop} and resumed, the run gives other numbers than without the stop: the "
            "model, the objective or the data keeps state that is not in the checkpoint, such as a plain attribute "
            "or its own random generator."
        )
        yield "resume", sentence


def _split(runs: Runs, asked: str, drawn: Sequence[str], compute: str) -> tuple[str, str]:
    """Why a run without a stop differs from one process."""
    if drawn:
        return "random", (
            f"the forward draws random numbers (dropout, of {', '.join(drawn)}): every sample gets different ones on "
            "another mesh. Set dropout to 0 to compare the rest."
        )
    if runs.micro == runs.whole:
        return "mesh", f"one process sees as many samples in a forward: {SPLIT}"
    runs.split()
    small = f"one process with microbatch={runs.micro}"
    if not runs.differ(asked, runs.where("split"), compute, weights=False):
        return "microbatch", (
            f"{small} gives the numbers of the requested run: they depend on which samples share a forward, as with "
            "batch norm, a mean over a microbatch, or a forward that mixes the samples of its batch. The mesh is not "
            "to blame."
        )
    if not runs.differ(runs.where("split"), runs.where("one"), compute, weights=False):
        return "mesh", f"{small} gives the numbers of {runs.whole} at once: {SPLIT}"
    both = "the numbers depend on which samples share a forward, and on the mesh"
    return "both", f"{small} agrees with neither: {both}."


def _quiet(plan: Plan, out: str) -> Plan:
    """The same run under `out`, without output; its only checkpoint is the last. A fork takes the weights alone."""
    checkpoint = {**plan.checkpoint, "every": 0}
    return replace(
        plan, out=out, resume="auto", init=plan.init or plan.fork, fork=None, evaluate_every=0, evaluate_samples=1,
        checkpoint=checkpoint, loggers={}, hooks={},
    )  # fmt: skip


def _on_one(plan: Plan, micro: int) -> Plan:
    """The same plan on one rank with `micro` samples per forward and every part that could change numbers off."""
    return replace(
        plan,
        nodes=1,
        devices=1,
        mesh=MeshShape(),
        pipeline=PipelineShape(),
        tensor=dict.fromkeys(plan.tensor, "whole"),
        batch=BatchShape(plan.batch.size, micro, 1, plan.batch.size // micro),
        **PLAIN,
    )


def _launch(plan: Plan) -> None:
    store.write(store.join(plan.out, "plan.yaml"), plan.document().encode())
    build(plan.launcher).launch(plan)


def _events(out: str) -> dict[str, Any]:
    """Facts of a run's events: its ranks as built, the dtype of its matrix products, its caveats."""
    lines = store.read(store.join(out, "events.jsonl")).decode().splitlines()
    events = [json.loads(line) for line in lines]
    built = next(event for event in events if event["event"] == "built")
    return {
        "built": built["ranks"],
        "computed": built["compute"],
        "caveats": list(dict.fromkeys(event["text"] for event in events if event["event"] == "caveat")),
    }


def _table(report: dict[str, Any]) -> str:
    lines = [f"{'quantity':<10} {'largest difference':<20} {'where':<34} {'allowed':<9}"]
    for row in report["rows"]:
        verdict = "ok" if row["first"] is None else f"first at {row['first']}"
        if row["rounded"]:
            verdict += f"; {row['rounded']} of {row['compared']} tensors differ by rounding alone"
        lines.append(
            f"{row['quantity']:<10} {row['difference']:<20.1e} {row['where']:<34.34} {row['allowed']:<9.0e} {verdict}"
        )
    for rank in report["built"][:8]:
        split = (
            ", ".join(f"{count} over {axis}" for axis, count in rank["split"].items() if axis != "experts") or "nothing"
        )
        stages = f", stages {rank['stages']} of {rank['schedule']}" if rank["stages"] else ""
        lines.append(
            f"rank {rank['rank']:<5} {rank['wrapper']}: holds {rank['held']} of {rank['parameters']}, split "
            f"{split}{stages}"
        )
    lines += [f"note       {sentence}" for sentence in report.get("caveats", ())]
    lines += [f"because    {sentence}" for _, sentence in report.get("kinds", ())]
    if report["same"] and report.get("drawn"):
        lines.append(
            f"note       the forward draws random numbers (of {', '.join(report['drawn'])}): different ones on another "
            "mesh"
        )
    if "error" in report:
        lines.append(str(report["error"]))
    return "\n".join([*lines, "same" if report["same"] else "NOT the same"])
