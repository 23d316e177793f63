"""A teacher for tests, a run of a GPT with other sizes than the student, and parts that learn from it."""

from functools import partial
from pathlib import Path
from typing import Any

import small
import torch
from pool import ranks, resident
from small import PARTS, UNEVEN, few_steps
from torch import Tensor

from dtrain.train import train

TEACHER = (
    "data=synthetic", "data.vocab=13", "data.sequence=10", "model.layers=3", "model.width=24", "model.heads=2", "steps=3", "batch=4", "hook=[]", "logger=[]",
    "checkpoint.every=3", "optim.lr=0.02", "evaluate.every=0", "schedule.warmup=0",
)  # fmt: skip
STUDENT = (
    "objective=distill", "data=dataset", "data.dataset._target_=taught.Rows", "data.outputs=13", "data.holdout=0.2", "trust=[taught]", "steps=6", "batch=4",
    "model.layers=2", "model.width=16", "model.heads=2", "hook=[]", "logger=[]", "checkpoint.every=1", "checkpoint.keep=null", "optim.lr=0.01",
    "evaluate.every=0", "schedule.warmup=0",
)  # fmt: skip


class Rows:
    """Ten tokens of which some do not count."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row = torch.randint(13, (11,), generator=torch.Generator().manual_seed(index))
        return row[:-1], torch.where(torch.arange(10) < index % 7, -100, row[1:])


def teach(out: Path, *words: str) -> Path:
    """Train a teacher, as the launcher leaves it."""
    decided = small.plan(*TEACHER, f"out={out}", *words)
    ranks(1, train, decided)
    (out / "plan.yaml").write_text(decided.document())
    return out


def distill(teacher: Path | str, **changed: Any) -> dict[str, Any]:
    arguments = {"teacher": str(teacher), "temperature": 2.0, "hard": 0.3, **changed}
    return {"_target_": "dtrain.objective.distill.Distill", **arguments, "_about_": {"reference": "teacher"}}


def parts_of(teacher: Path) -> dict[str, Any]:
    """A GPT in which no matrix is zero, and rows with different counts."""
    model = PARTS["model"] | {"_target_": "adapted.filled"}
    return PARTS | {"model": model, "objective": distill(teacher), "data": UNEVEN}


def steps_of(teacher: Path, mesh: tuple[Any, dict[str, int]], **more: Any) -> dict[str, Any]:
    """Eight steps on a mesh."""
    strategy, degrees = mesh
    world = 1
    for degree in degrees.values():
        world *= degree
    work = partial(few_steps, parts_of(teacher) | {"strategy": strategy}, degrees, steps=8, **more)
    return dict(resident(world, work)[0])
