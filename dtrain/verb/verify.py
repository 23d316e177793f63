"""`dtrain verify <words>`: compares a few steps of the requested run with the same steps in one process that takes the
whole batch at once.

    dtrain verify strategy=fsdp mesh.pp=2 mesh.tp=2 devices=8
    dtrain verify model._target_=mypkg.Net trust=[mypkg] strategy=ddp devices=2 verify.steps=20

All are real runs (verify_runs.py), with the real loop and checkpoints, under <out>/verify. Exit code 0: the same;
1: not. verify.json gives the likely cause.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from dtrain.cluster import detect
from dtrain.compose import compose
from dtrain.config.schema import Config
from dtrain.errors import DtrainError, WordsError
from dtrain.launcher import apart, preflight, zygote
from dtrain.planned import Plan
from dtrain.recipe import expect, requires
from dtrain.resolve import loop, resolve
from dtrain.result import versions
from dtrain.secrets import redact_arg, screen
from dtrain.secrets.as_json import clean
from dtrain.storage import store
from dtrain.verb import verify_causes as causes
from dtrain.verb import verify_runs
from dtrain.verb.verify_runs import Failed, Refused, Runs


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
    quiet = verify_runs.quiet(small, store.join(plan.out, "verify", "small"))
    small = replace(quiet, stop_after=last, others=(), **evaluation)
    here = expect.machine(detect())
    screen.say(f"expect     {last} steps on {small.world} rank(s), {here}")
    try:
        verify_runs.launch(small)
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


def _judge(runs: Runs) -> dict[str, Any]:
    """Run and compare: the rows, the first difference, and its likely cause."""
    try:
        runs.asked("asked", stops=runs.stop > 0)
    except Refused as error:
        runs.one()
        return causes.refused(runs, error)
    runs.one()
    from dtrain.evaluation import parity  # with torch, which the ranks have loaded by now in processes of their own

    asked, one, again = map(runs.where, ("asked", "one", "again"))
    built = _events(asked)
    rows = parity.compare(asked, one, built["computed"], parts=runs.parts)
    noise = parity.compare(again, one, built["computed"])
    first, unstable = parity.first_difference(rows), parity.first_difference(noise)
    call = parity.other_call(runs.where("calls"))
    record = parity.first(asked)
    drawn = record.drawn if record else []
    report = {
        "same": first is None and unstable is None and call is None,
        "first": first or unstable or (f"forward {call}" if call else None),
        "rows": parity.to_json(rows),
        "whole": runs.whole,
        "drawn": drawn,
    }
    if unstable:
        report["kinds"] = [causes.unstable(runs, unstable, built["computed"])]
    elif first:
        report["kinds"] = list(causes.kinds(runs, drawn, built["computed"]))
    elif call:
        report["kinds"] = [causes.counted(call)]
    return report | built


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
