"""The code that a sweep began with, and a note when it has changed."""

from pathlib import Path

import commands

MODULE = """
from torch import nn


class Net(nn.Linear):
    def __init__(self) -> None:
        super().__init__(16, 1)

    def forward(self, inputs):
        return super().forward(inputs) * {factor}
"""
WORDS = (
    "-m", "trust=[own]", "model._target_=own.Net", "data=synthetic", "data.inputs=[16]", "data.outputs=1",
    "objective=regression", "steps=2", "hook=[]", "logger=[]", "sweep.out=s",
)  # fmt: skip


def test_a_sweep_that_goes_on_with_other_code_says_so(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(MODULE.format(factor=1))
    first = commands.run(*WORDS, "seed=0", "optim.lr=1e-3,1e-2", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    same = commands.run(*WORDS, "seed=0", "optim.lr=1e-3,1e-2", cwd=tmp_path)
    assert "the source of" not in first.stderr + same.stderr
    (tmp_path / "own.py").write_text(MODULE.format(factor=2))
    other = commands.run(*WORDS, "seed=0", "optim.lr=1e-3,1e-2,1e-1", cwd=tmp_path)
    assert other.returncode == 0, other.stderr
    assert "note: the source of own is not that with which this sweep began" in other.stderr
