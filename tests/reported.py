"""Folders of runs as a sweep leaves them, written by hand, and the data of the page that `dtrain report` makes of them."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dtrain.verb import report

CONFIG = "defaults:\n  - override /model: mlp  # command line\nsteps: 10  # command line\n{}"


def job(
    folder: Path, lr: str, *, losses: Sequence[float] = (3.0, 2.0), eval_loss: float | None = 2.0, status: str = "finished",
    files: Mapping[str, str] | None = None,
) -> Path:  # fmt: skip
    """A run with one row for each loss, an evaluation, and its end."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(CONFIG.format(f"optim:\n  lr: {lr}  # command line\n"))
    rows = [{"step": step, "seen": 8 * step, "loss": loss, "lr": 0.1, "norm": 1.0, "step_seconds": 0.1, "samples_per_second": 80.0,
             "peak_bytes": 1 << 28} for step, loss in enumerate(losses, 1)]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    events: list[dict[str, Any]] = [
        {"time": 1000.0, "event": "started", "step": 0, "ranks": 1, "versions": {"torch": "2.13.0"}}
    ]
    if eval_loss is not None:
        events.append({"time": 1010.0, "event": "evaluated", "step": len(losses), "eval_loss": eval_loss})
    if status:
        events.append({"time": 1012.0, "event": status, "step": len(losses), "loss": losses[-1], "wall_seconds": 12.0})
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    plan = "device: cpu\nsteps: 10\nfigures: {eval_loss: lowest}\n"
    for name, text in {"plan.yaml": plan, **(files or {})}.items():
        (folder / name).write_text(text)
    return folder


def many(root: Path, count: int) -> None:
    """A sweep of so many jobs, of 200 steps each, every twentieth of which has failed."""
    first = job(root / "optim.lr-0_seed-0-0123abcd", "0.0", losses=[1 + 1 / step for step in range(1, 201)])
    files = {path.name: path.read_text() for path in first.iterdir()}
    for number in range(1, count):
        folder = root / f"optim.lr-{number}_model.width-64_optim.weight_decay-0.1_seed-{number % 5}-0123abcd"
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_text(
                text.replace("lr: 0.0 ", f"lr: {number / 1000} ").replace("2.0}", f"{1 + number % 97 / 50}}}")
            )
        if number % 20 == 0:
            (folder / "events.jsonl").write_text(files["events.jsonl"].replace('"finished"', '"failed"'))
            (folder / "failure.json").write_text('{"error": "ValueError: planned", "traceback": "Traceback"}')


def shown(place: str | Path, *words: str) -> dict[str, Any]:
    """The data of the page of a run or sweep."""
    assert report.run([str(place), *words]) == 0
    target = next((word.removeprefix("to=") for word in words if word.startswith("to=")), f"{place}/report.html")
    return data(Path(target).read_text())


def data(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">([^<]*)</script>', page)
    assert found, "the data holds no <"
    read: dict[str, Any] = json.loads(found[1])
    return read
