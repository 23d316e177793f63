"""The console: a progress bar on a terminal, plain lines elsewhere, and the loss curve at the end."""

import math
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from dtrain.logger import Logger
from dtrain.secrets import screen

LINE_SECONDS = 2.0
"""Seconds between two lines off a terminal."""
WIDTH, HEIGHT = 64, 8
"""Width and height of the loss curve in characters."""
SMALL = 0.05
"""Losses below are labelled with an exponent: three decimals do not tell them apart."""


class Console(Logger):
    def __init__(self, *, out: str, steps: int) -> None:
        self._steps, self._losses, self._printed, self._row = steps, list[tuple[int, float]](), 0.0, ""
        self._bar: Any = None
        self._task: Any = None
        if sys.stdout.isatty():
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = BarColumn(), MofNCompleteColumn(), TextColumn("{task.description} left"), TimeRemainingColumn()
            self._bar = Progress(*columns, refresh_per_second=4)
            self._task = self._bar.add_task("", total=steps)
            self._bar.start()

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        if any(name.startswith("eval_") for name in values):
            figures = "  ".join(f"{name.removeprefix('eval_')} {value:.4g}" for name, value in values.items())
            self.text(step, "note", screen.on_one_line(f"step {step}: held-out {figures}"))
            return
        if values.get("loss") is not None:
            self._losses.append((step, values["loss"]))
        if self._bar is not None:
            self._bar.update(self._task, completed=step, description=_words(values))
            return
        rate = values.get("samples_per_second") or 0
        left = f"  left {_clock((self._steps - step) * values['step_seconds'])}" if rate else ""
        self._row = f"step {step}/{self._steps}  {_words(values)}{left}"
        if time.monotonic() - self._printed > LINE_SECONDS:
            self._print_row()

    def text(self, step: int, name: str, text: str) -> None:
        if self._bar is not None:
            self._bar.console.print(screen.visible(text), markup=False, highlight=False)
        else:
            self._print_row()
            screen.say(text)

    def end(self, result: Mapping[str, Any]) -> None:
        if self._bar is not None:
            self._bar.stop()
        self._print_row()
        if len(self._losses) > 1:
            screen.say(curve(self._losses))

    def _print_row(self) -> None:
        if self._row:
            screen.say(self._row)
        self._row, self._printed = "", time.monotonic()


def curve(points: Sequence[tuple[int, float]]) -> str:
    """Draw losses over steps in text: each column is the mean of its part of the run."""
    points = [point for point in points if math.isfinite(point[1])]
    if len(points) < 2:
        return ""
    first, last = points[0][0], points[-1][0]
    columns: list[list[float]] = [[] for _ in range(WIDTH)]
    for step, loss in points:
        columns[min(WIDTH - 1, (step - first) * WIDTH // max(1, last - first))].append(loss)
    means = [sum(column) / len(column) if column else None for column in columns]
    known = [mean for mean in means if mean is not None]
    low, high = min(known), max(known)
    rows = []
    for line in range(HEIGHT):
        level = high - (high - low) * line / (HEIGHT - 1)
        half = (high - low) / (HEIGHT - 1) / 2 or 1.0
        marks = "".join("•" if mean is not None and abs(mean - level) <= half else " " for mean in means)
        rows.append(f"{level:{'8.3f' if high >= SMALL else '8.1e'}} │{marks.rstrip()}")
    axis = f"          step {first}{str(last).rjust(WIDTH - 5 - len(str(first)))}"
    return "\n".join(["", "    loss", *rows, f"         └{'─' * WIDTH}", axis])


def _words(scalars: Mapping[str, float]) -> str:
    shown = [f"{name} {scalars[name]:.4g}" for name in ("loss", "accuracy") if scalars.get(name) is not None]
    for name, unit in (("tokens_per_second", "tokens/s"), ("samples_per_second", "samples/s")):
        if scalars.get(name):
            return "  ".join([*shown, f"{scalars[name]:,.0f} {unit}"])
    return "  ".join(shown)


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02d}:{int(seconds) % 60:02d}"
