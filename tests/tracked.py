"""The files of a run, for its trackers, and a run that is killed once and started again, as each tracker must see it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from until import until

from dtrain.logger import Facts
from dtrain.logger.tracker import Tracker

STEPS = (5, 10, 15, 20)
"""The steps whose rows a tracker has at the end."""


class Files:
    """The files that a run writes."""

    def __init__(self, out: Path) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.out, self.rows, self.events = out, out / "metrics.jsonl", out / "events.jsonl"

    def facts(self, every: int = 5) -> Facts:
        settings = {"optim.lr": 0.5, "model._target_": "mlp"}
        return Facts("name", "", str(self.out), {"steps": "9"}, settings, every, str(self.rows), str(self.events))

    def train(self, begin: int, end: int, *, evaluate: Sequence[int] = ()) -> None:
        """Steps after `begin`, whose rows are written anew."""
        kept = self.rows.read_text().splitlines(keepends=True)[:begin] if self.rows.exists() else []
        new = self.out / "new"
        new.write_text("".join(kept))
        new.replace(self.rows)
        for step in range(begin + 1, end + 1):
            with self.rows.open("a") as file:
                file.write(json.dumps({"step": step, "seen": 8 * step, "loss": 1 / step, "norm": None}) + "\n")
            if step in evaluate:
                self.event("evaluated", step, eval_loss=2 / step)

    def event(self, name: str, step: int, **more: Any) -> None:
        with self.events.open("a") as file:
            file.write(json.dumps({"event": name, "step": step, **more}) + "\n")


def killed_and_ended(kind: type[Tracker], out: Path, **arguments: Any) -> Files:
    """A run that is killed after step 12, goes on after step 7, and ends at step 20; a checkpoint is at step 10."""
    files = Files(out)
    files.train(0, 12, evaluate=(10,))
    killed = kind(out=str(out), steps=20, **arguments)
    killed.begin(files.facts())
    killed.back(0)
    process = killed._process
    assert process and process.stdin and process.stdout
    until(lambda: (out / "trackers").exists())
    process.stdin.close()  # as if the rank had been killed
    process.wait(30)
    process.stdout.close()
    files.train(7, 20, evaluate=(10,))
    files.event("sample", 10, text="def f")
    (out / "checkpoint").mkdir()
    (out / "checkpoint/COMMIT.json").touch()
    files.event("committed", 10, url=str(out / "checkpoint"))
    again = kind(out=str(out), steps=20, **arguments)
    again.begin(files.facts())
    again.back(7)
    again.scalars(20, {})
    again.end({"status": "finished", "step": 20, "loss": 0.05, "metrics": {"eval_loss": 0.2}})
    return files
