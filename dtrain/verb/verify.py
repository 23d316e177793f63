"""`dtrain verify <words>`: a few steps of the asked run, and of one process on the same batches, held against each other.

    dtrain verify strategy=fsdp mesh.pp=2 mesh.tp=2 devices=8
    dtrain verify model._target_=mypkg.Net trust=[mypkg] strategy=ddp devices=2 verify.steps=20

Both are real runs, with the real loop and checkpoint, under <out>/verify. Exit code 0: the same; 1: not; and verify.json says why.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import yaml

from dtrain import preflight, store
from dtrain.build import build
from dtrain.cluster import look
from dtrain.compose import compose
from dtrain.config import Config
from dtrain.errors import DtrainError, WordsError
from dtrain.journal import clean
from dtrain.plan import BatchShape, MeshShape, PipelineShape, Plan
from dtrain.recipe import expect, requires
from dtrain.resolve import resolve
from dtrain.result import versions
from dtrain.secrets import shown

PLAIN: Mapping[str, Any] = {
    "strategy": {"_target_": "dtrain.strategy.single.Single"},
    "remat": {"_target_": "dtrain.remat.none.build"},
    "compile": {"_target_": "dtrain.compile.none.build"},
    "launcher": {"_target_": "dtrain.launcher.local.Local", "restarts": 0, "silence": 15, "wait": 60, "address": None, "here": None},
}
"""What one process runs with: nothing that splits, recomputes or compiles."""


def run(words: Sequence[str]) -> int:
    config, cluster = compose(words), look()
    if cluster.external is not None:
        raise WordsError("verify starts its own ranks, and is one of someone else's here. Start it without torchrun.")
    plan = replace(resolve(config, cluster), others=())
    figures = expect.asked(config.expect)
    requires.check(config, cluster)
    preflight.check(plan)
    store.remove(store.join(plan.out, "verify"))
    report: dict[str, Any] = {"words": list(map(shown, words)), "plan": plan.digest, "versions": versions()}
    report |= _expected(words, config, plan) if figures else {}
    report |= _parity(plan, config) if plan.world > 1 or not figures else {}
    written = store.join(plan.out, "verify.json")
    store.write(written, json.dumps(clean(report), indent=1).encode())
    for key, sentence in (("expected", "what was expected was not found"), ("same", f"{report.get('first')} differs")):
        if report.get(key) is False:
            print(f"dtrain: verify: {sentence}. See {written}.", file=sys.stderr)
    return 0 if report.get("same", True) and report.get("expected", True) else 1


def _expected(words: Sequence[str], config: Config, plan: Plan) -> dict[str, Any]:
    """The run made small, and its figures against those that its recipe expects."""
    small = resolve(compose([*config.expect.small, *words]), look())
    last = min(config.expect.step or small.steps, small.steps, small.stop_after or small.steps)
    small = replace(_quiet(small, store.join(plan.out, "verify", "small")), stop_after=last, others=(), evaluate_samples=small.evaluate_samples)
    small = replace(small, evaluate_every=last if any(name in expect.HELD_OUT for name in expect.asked(config.expect)) else 0)
    here = expect.machine(look())
    print(f"expect     {last} steps on {small.world} rank(s), {here}", flush=True)
    try:
        _launch(small)
    except WordsError:
        raise
    except DtrainError as error:
        print(f"{error}\nNOT as expected", flush=True)
        return {"expected": False, "error": str(error), "figures": []}
    findings = expect.judge(config.expect, small.out, here=here)
    good = not any(finding.bad for finding in findings)
    print(f"{expect.table(findings, config.expect.hardware)}\n{'as expected' if good else 'NOT as expected'}", flush=True)
    return {"expected": good, "figures": [{**asdict(finding), "machine": here} for finding in findings]}


def _parity(plan: Plan, config: Config) -> dict[str, Any]:
    """The asked run against one process."""
    asked, one = _short(plan, config, "asked"), _short(_on_one(plan), config, "one")
    print(f"verify     {asked.stop_after} steps on {plan.world} rank(s), then on one, each of batch {plan.batch.size}", flush=True)
    report = {"steps": asked.stop_after, **_judge(asked, one, config)}
    print(_table(report), flush=True)
    return report


def _launch(plan: Plan) -> None:
    store.write(store.join(plan.out, "plan.yaml"), yaml.safe_dump(plan.to_dict(), sort_keys=False).encode())
    build(plan.launcher).launch(plan)


def _judge(asked: Plan, one: Plan, config: Config) -> dict[str, Any]:
    """The rows of the comparison; a run that fails is the first thing that differs."""
    for plan, name in ((asked, "the asked run"), (one, "the run on one process")):
        try:
            _launch(plan)
        except WordsError:
            raise
        except DtrainError as error:
            return {"same": False, "first": f"{name} failed: it", "error": str(error), "rows": [], "built": []}
    from dtrain import verify  # with torch, which the ranks have loaded by now in processes of their own

    built = _events(asked)
    rows = verify.compare(asked.out, one.out, built["computed"])
    first = verify.first_difference(rows)
    return {"same": first is None, "first": first, "rows": verify.to_json(rows), **built}


def _short(plan: Plan, config: Config, name: str) -> Plan:
    """The same run, stopped after a few steps."""
    return replace(_quiet(plan, store.join(plan.out, "verify", name)), stop_after=min(config.verify.steps, plan.steps), log_every=1)


def _quiet(plan: Plan, out: str) -> Plan:
    """The same run elsewhere, that shows nothing and leaves its last checkpoint alone."""
    checkpoint = {**plan.checkpoint, "every": 0}
    return replace(plan, out=out, resume="auto", evaluate_every=0, evaluate_samples=1, checkpoint=checkpoint, loggers={}, hooks={})


def _on_one(plan: Plan) -> Plan:
    """The same plan on one rank, with nothing that could change numbers switched on."""
    micro = plan.batch.microbatch
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


def _events(plan: Plan) -> dict[str, Any]:
    """What the ranks of a run said they had built, and the type in which they multiply matrices."""
    lines = store.read(store.join(plan.out, "events.jsonl")).decode().splitlines()
    events = [json.loads(line) for line in lines]
    built = next(event for event in events if event["event"] == "built")
    return {"built": built["ranks"], "computed": built["compute"], "caveats": [event["text"] for event in events if event["event"] == "caveat"]}


def _table(report: dict[str, Any]) -> str:
    lines = [f"{'quantity':<10} {'largest difference':<20} {'where':<34} {'allowed':<9}"]
    for row in report["rows"]:
        verdict = "ok" if row["first"] is None else f"first at {row['first']}"
        lines.append(f"{row['quantity']:<10} {row['difference']:<20.1e} {row['where']:<34.34} {row['allowed']:<9.0e} {verdict}")
    for found in report["built"][:8]:
        split = ", ".join(f"{count} over {axis}" for axis, count in found["split"].items() if axis != "experts") or "nothing"
        stages = f", stages {found['stages']} of {found['schedule']}" if found["stages"] else ""
        lines.append(f"rank {found['rank']:<5} {found['wrapper']}: holds {found['held']} of {found['parameters']}, split {split}{stages}")
    lines += [f"note       {sentence}" for sentence in report.get("caveats", ())]
    if "error" in report:
        lines.append(str(report["error"]))
    return "\n".join([*lines, "same" if report["same"] else "NOT the same"])
