"""The reference of an objective: exactly what the run began with, after any restart, on any mesh, or the run is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import small
import torch
from pool import ranks, resident

from dtrain.checkpoint.commit import find
from dtrain.checkpoint.load import Reading
from dtrain.errors import StoreError
from dtrain.evaluation.evaluate import evaluate
from dtrain.planned import Plan
from dtrain.train import train

TINY = (
    "objective=dpo", "data=dataset", "data.dataset._target_=paired.Pairs", "data.outputs=13", "data.holdout=0.2", "trust=[paired]", "steps=6", "batch=4",
    "model.layers=2", "model.width=16", "model.heads=2", "hook=[]", "logger=[]", "checkpoint.every=1", "checkpoint.keep=null", "optim.lr=0.01",
    "objective.beta=0.5", "evaluate.every=0", "schedule.warmup=0",
)  # fmt: skip
SFT = ("objective=next_token", "data=synthetic", "data.vocab=13", "data.sequence=10", "steps=3", "optim.lr=0.02")


def run(out: Path, *words: str) -> Any:
    decided = small.plan(*TINY, f"out={out}", *words)
    return resident(decided.world, train, decided)[0]


def sft(out: Path) -> None:
    words = [word for word in TINY if not word.startswith(("data", "trust", "objective", "steps", "optim"))]
    ranks(1, train, small.plan(*words, *SFT, f"out={out}"))


def rows(out: Path) -> list[dict[str, Any]]:
    """What depends on no clock."""
    listed = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{name: row[name] for name in row if name in ("step", "loss", "norm") or name.startswith("reward")} for row in listed]  # fmt: skip


def weights(out: Path) -> dict[str, torch.Tensor]:
    url, commit = find(str(out))
    found = {name: torch.zeros(facts["shape"]) for name, facts in commit["tensors"].items()}
    Reading(url, commit, found).fill()
    return found


def same(one: Path, other: Path) -> None:
    assert rows(one) == rows(other) and len(rows(one)) == 6
    first, second = map(weights, (one, other))
    assert all(torch.equal(second[name], tensor) for name, tensor in first.items())


FSDP = ("strategy=fsdp", "devices=2")


@pytest.mark.parametrize(
    ("begins", "mesh"),
    [
        ("seed", FSDP),
        ("init", ()),
        pytest.param("seed", (), marks=pytest.mark.campaign("kills")),
        pytest.param("init", FSDP, marks=pytest.mark.campaign("kills")),
    ],
)
def test_a_restart_compares_with_the_same_bits(begins: str, mesh: tuple[str, ...], tmp_path: Path) -> None:
    if begins == "init":
        sft(tmp_path / "sft")
    init = (f"init={tmp_path / 'sft'}",) if begins == "init" else ()
    run(tmp_path / "whole", *mesh, *init)
    for stop in (2, 3, 6):
        run(tmp_path / "parts", *mesh, *init, f"stop_after={stop}")
    assert rows(tmp_path / "whole")[-1]["reward_margin"] != 0
    same(tmp_path / "whole", tmp_path / "parts")
    _, commit = find(str(tmp_path / "parts"))
    assert not any("reference" in name for name in commit["tensors"]), "its weights are saved once, where they were"
    assert (commit["facts"]["reference"]["url"] is None) == (begins == "seed")


def test_another_mesh_goes_on_with_the_same_reference(tmp_path: Path) -> None:
    run(tmp_path / "whole")
    run(tmp_path / "parts", "stop_after=3")
    run(tmp_path / "parts", "strategy=fsdp", "devices=2")
    for here, there in zip(rows(tmp_path / "parts"), rows(tmp_path / "whole"), strict=True):
        assert here == pytest.approx(there, rel=2e-6, abs=1e-6)


def refusal(out: Path, *words: str) -> str:
    decided = small.plan(*TINY, f"out={out}", *words)

    def work(plan: Plan) -> str:
        try:
            train(plan)
        except StoreError as error:
            return str(error)
        return ""

    return str(ranks(1, work, decided)[0])


def test_a_reference_that_changed_moved_or_is_gone(tmp_path: Path) -> None:
    base = tmp_path / "sft"
    sft(base)
    run(tmp_path / "dpo", f"init={base}", "stop_after=2")
    shutil.move(base, tmp_path / "moved/sft")
    text = refusal(tmp_path / "dpo", "stop_after=3")
    assert text.startswith("cannot load the weights that the run began with, which its objective compares with: ")
    assert "or type init=<where they are now>." in text and str(base) in text
    assert refusal(tmp_path / "dpo", "stop_after=3", f"init={tmp_path / 'moved/sft'}") == ""
    other = tmp_path / "sft"
    sft(other)
    assert refusal(tmp_path / "dpo", "stop_after=4", f"init={other}") == "", "the same words train the same bits"
    assert rows(tmp_path / "dpo")[-1]["step"] == 4
    shutil.rmtree(other)
    ranks(1, train, small.plan(*(word for word in TINY if not word.startswith(("data", "trust", "objective", "steps", "optim"))), *SFT, "seed=7", f"out={other}"))  # fmt: skip
    assert "not those of then" in refusal(tmp_path / "dpo", "stop_after=5", f"init={other}")


def test_evaluate_compares_with_what_the_run_began_with(tmp_path: Path) -> None:
    sft(tmp_path / "sft")
    run(tmp_path / "dpo", f"init={tmp_path / 'sft'}", "evaluate.every=6")
    last = json.loads((tmp_path / "dpo/result.json").read_text())["metrics"]
    decided = small.plan(*TINY, f"out={tmp_path / 'dpo'}", "strategy=fsdp", "devices=2")
    found = resident(2, evaluate, decided)[0].metrics
    assert found["eval_reward_margin"] == pytest.approx(last["eval_reward_margin"], rel=1e-5) != 0
    assert found["eval_loss"] == pytest.approx(last["eval_loss"], rel=1e-6)


def test_a_fork_keeps_the_reference_of_the_run_it_forks(tmp_path: Path) -> None:
    sft(tmp_path / "sft")
    run(tmp_path / "dpo", f"init={tmp_path / 'sft'}")
    run(tmp_path / "half", f"init={tmp_path / 'sft'}", "stop_after=3")
    run(tmp_path / "fork", f"fork={tmp_path / 'half'}")
    assert rows(tmp_path / "fork") == rows(tmp_path / "dpo")[3:]
