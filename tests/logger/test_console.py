"""What a person sees, off a terminal and on one."""

import io
import sys
from pathlib import Path
from typing import Any

import pytest

from dtrain.logger.console import Console, curve


def row(loss: float, **more: float) -> dict[str, float]:
    return {"seen": 8, "loss": loss, "lr": 0.1, "norm": 1.0, "step_seconds": 0.5, "samples_per_second": 16.0, **more}


def test_lines_say_where_it_is_and_how_long_it_takes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    console = Console(out=str(tmp_path), steps=100)
    console.scalars(10, row(2.5))
    assert capsys.readouterr().out == "step 10/100  loss 2.5  16 samples/s  left 0:00:45\n"
    console.end({"status": "finished"})


def test_the_name_of_a_figure_forges_no_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    Console(out=str(tmp_path), steps=100).scalars(10, {"eval_f1\n\x1b[31mdtrain: FORGED": 0.5})
    assert capsys.readouterr().out == "step 10: held-out f1\\n\\x1b[31mdtrain: FORGED 0.5\n"


def test_tokens_are_counted_where_there_are_any(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    Console(out=str(tmp_path), steps=100).scalars(10, row(2.5, tokens_per_second=12345.6, accuracy=0.25))
    assert "accuracy 0.25  12,346 tokens/s" in capsys.readouterr().out


def test_fast_steps_do_not_flood_and_the_last_line_is_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    console = Console(out=str(tmp_path), steps=1000)
    for step in range(1, 1001):
        console.scalars(step, row(1000.0 / step))
    console.end({"status": "finished"})
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert len(lines) < 5
    assert lines[-1].startswith("step 1000/1000  loss 1 ")


def test_notes_and_held_out_losses_come_at_once_and_in_order(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    console = Console(out=str(tmp_path), steps=10)
    console.scalars(1, row(3.0))
    console.scalars(2, row(2.0))
    console.scalars(2, {"eval_loss": 2.25, "eval_accuracy": 0.5})
    console.text(2, "sample", "a [bold]sample[/bold] of text")
    assert capsys.readouterr().out.splitlines()[1:] == [
        "step 2/10  loss 2  16 samples/s  left 0:00:04",
        "step 2: held-out loss 2.25  accuracy 0.5",
        "a [bold]sample[/bold] of text",
    ]


def test_the_curve_falls_when_the_loss_does(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    console = Console(out=str(tmp_path), steps=64)
    for step in range(1, 65):
        console.scalars(step, row(4.0 - step / 32))
    console.end({"status": "finished"})
    drawn = [line.split("│")[1] for line in capsys.readouterr().out.splitlines() if "│" in line]
    marks = [line.index("•") for line in drawn]
    assert marks == sorted(marks)
    assert (marks[0], len(drawn)) == (0, 8)


def test_a_flat_curve_and_a_single_step_are_drawn_too(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "•" in curve([(1, 2.0), (2, 2.0)])
    console = Console(out=str(tmp_path), steps=1)
    console.scalars(1, row(2.0))
    console.end({"status": "finished"})
    assert "│" not in capsys.readouterr().out, "one point is no curve"


@pytest.mark.parametrize("place", [0, 2, 3])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_one_loss_that_is_no_number_does_not_hide_the_others(place: int, bad: float) -> None:
    losses = [4.0, 3.0, 2.5, 2.0]
    losses[place] = bad
    drawn = curve(list(enumerate(losses)))
    assert drawn.count("•") >= 3
    assert "nan" not in drawn
    assert "inf" not in drawn


def test_a_missing_loss_is_no_error(tmp_path: Path) -> None:
    console = Console(out=str(tmp_path), steps=10)
    console.scalars(1, {"loss": None, "step_seconds": 0.1, "samples_per_second": 10.0})  # type: ignore[dict-item]
    console.end({"status": "finished"})


def test_on_a_terminal_there_is_a_bar(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen: Any = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    console = Console(out=str(tmp_path), steps=10)
    console.scalars(5, row(2.5))
    console.text(2, "sample", "[red]not markup[/red]")
    console.end({"status": "finished"})
    assert "loss 2.5" in screen.getvalue()
    assert "5/10" in screen.getvalue()
    assert "[red]not markup[/red]" in screen.getvalue()


def test_the_labels_of_small_losses_differ() -> None:
    labels = [row.split("│")[0] for row in curve([(1, 3e-4), (2, 1e-5)]).splitlines() if "│" in row]
    assert len({*labels}) == len(labels) and labels[0].strip() == "3.0e-04"
