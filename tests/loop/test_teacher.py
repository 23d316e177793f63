"""The teacher of an objective: the same bits after any restart, on any mesh, or the run is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import small
import torch
from pool import ranks, resident
from taught import STUDENT, teach

from dtrain.checkpoint.commit import find
from dtrain.checkpoint.load import Reading
from dtrain.errors import StoreError
from dtrain.evaluation.evaluate import evaluate
from dtrain.planned import Plan
from dtrain.train import train


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return teach(tmp_path_factory.mktemp("teacher") / "run")


def run(out: Path, teacher: Path, *words: str) -> Any:
    decided = small.plan(*STUDENT, f"out={out}", f"objective.teacher={teacher}", *words)
    return resident(decided.world, train, decided)[0]


def rows(out: Path) -> list[dict[str, Any]]:
    """What depends on no clock."""
    listed = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{name: row[name] for name in ("step", "loss", "norm", "kl", "cross_entropy")} for row in listed]


def weights(out: Path) -> dict[str, torch.Tensor]:
    url, commit = find(str(out))
    found = {name: torch.zeros(facts["shape"]) for name, facts in commit["tensors"].items()}
    Reading(url, commit, found).fill()
    return found


FSDP = ("strategy=fsdp", "devices=2")


@pytest.mark.parametrize("mesh", [(), pytest.param(FSDP, marks=pytest.mark.campaign("kills"))])
def test_a_restart_learns_from_the_same_bits(mesh: tuple[str, ...], teacher: Path, tmp_path: Path) -> None:
    run(tmp_path / "whole", teacher, *mesh)
    for stop in (2, 6):
        run(tmp_path / "parts", teacher, *mesh, f"stop_after={stop}")
    assert rows(tmp_path / "whole") == rows(tmp_path / "parts") and len(rows(tmp_path / "whole")) == 6
    assert all(row["kl"] > 0 for row in rows(tmp_path / "whole"))
    _, commit = find(str(tmp_path / "parts"))
    first, second = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(torch.equal(second[name], tensor) for name, tensor in first.items())
    assert commit["facts"]["reference"]["url"] == str(teacher)
    assert not any("blocks.2." in name for name in commit["tensors"]), "a checkpoint has no tensor of the teacher"


def test_another_mesh_goes_on_with_the_same_teacher(teacher: Path, tmp_path: Path) -> None:
    run(tmp_path / "whole", teacher)
    run(tmp_path / "parts", teacher, "stop_after=3")
    run(tmp_path / "parts", teacher, *FSDP)
    for here, there in zip(rows(tmp_path / "parts"), rows(tmp_path / "whole"), strict=True):
        assert here == pytest.approx(there, rel=2e-6, abs=1e-6)


def refusal(out: Path, teacher: Path, *words: str) -> str:
    def work(plan: Plan) -> str:
        try:
            train(plan)
        except StoreError as error:
            return str(error)
        return ""

    return str(ranks(1, work, small.plan(*STUDENT, f"out={out}", f"objective.teacher={teacher}", *words))[0])


def test_a_teacher_may_move_but_not_change(teacher: Path, tmp_path: Path) -> None:
    shutil.copytree(teacher, tmp_path / "copy")
    run(tmp_path / "out", teacher, "stop_after=2")
    assert refusal(tmp_path / "out", tmp_path / "copy", "stop_after=3") == ""
    other = teach(tmp_path / "other", "seed=7")
    text = refusal(tmp_path / "out", other, "stop_after=4")
    assert text.startswith("cannot load the teacher that the run began with: ") and "not those of then" in text
    assert text.endswith("or type objective.teacher=<where they are now>.")


def test_evaluate_asks_the_teacher(teacher: Path, tmp_path: Path) -> None:
    run(tmp_path / "out", teacher, "evaluate.every=6")
    last = json.loads((tmp_path / "out/result.json").read_text())["metrics"]
    decided = small.plan(*STUDENT, f"out={tmp_path / 'out'}", f"objective.teacher={teacher}", *FSDP)
    found = resident(2, evaluate, decided)[0].metrics
    for name in ("eval_loss", "eval_kl", "eval_cross_entropy", "eval_perplexity"):
        assert found[name] == pytest.approx(last[name], rel=1e-5)
