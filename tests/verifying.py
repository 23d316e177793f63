"""`dtrain verify` whose ranks are forked from the test process, which holds torch: the same runs as with the launcher, in a tenth of its time."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from pool import RankFailed, ranks

from dtrain.errors import RankError, WordsError
from dtrain.launcher.rank import run_rank
from dtrain.planned import Plan
from dtrain.storage import store
from dtrain.verb import verify, verify_runs

WORDS = (
    "batch=8",
    "verify.steps=4",
    "schedule.warmup=0",
    "optim.lr=3e-3",
    "trust=[wrong_models,right_models,invariance,planted]",
    "clip=10",
)


def verified(out: Path, words: str, monkeypatch: pytest.MonkeyPatch, *, fresh: bool = False) -> dict[str, Any]:
    """verify.json of these words. `fresh`: with an interpreter of its own, which takes seconds."""
    monkeypatch.setattr(verify_runs, "launch", _launch)
    monkeypatch.setattr(verify_runs, "FRESH", fresh)
    said = words.split()
    keys = {word.split("=")[0] for word in said}
    optim = ("optim._target_" in keys) * ("optim.lr",)
    verify.run([*said, *(word for word in WORDS if word.split("=")[0] not in {*keys, *optim}), f"out={out}"])
    report: dict[str, Any] = json.loads((out / "verify.json").read_text())
    return report


def _launch(plan: Plan) -> None:
    store.write(store.join(plan.out, "plan.yaml"), plan.document().encode())
    try:
        ranks(plan.world, _rank, plan, seconds=600)
    except RankFailed as error:
        kind = WordsError if "dtrain.errors.WordsError:" in str(error) else RankError
        raise kind(str(error)) from error


def _rank(plan: Plan) -> None:
    warnings.resetwarnings()  # those of a user's model are no errors where a user runs it
    run_rank(plan, forked=True)
