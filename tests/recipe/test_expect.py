"""Bands, and the figures of a run held against them."""

import json
from pathlib import Path

import pytest

from dtrain.config.sections import Expect
from dtrain.errors import WordsError
from dtrain.recipe.expect import asked, band, judge

ROWS = [
    {
        "step": n,
        "loss": 10.0 - n,
        "accuracy": n / 10,
        "samples_per_second": 1.0 if n < 6 else 100.0 + n,
        "tokens_per_second": 7.0,
    }
    for n in range(1, 9)
]
RESULT = {"metrics": {"eval_loss": 3.0}, "peak_bytes": 3 << 29}


@pytest.fixture
def out(tmp_path: Path) -> str:
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    (tmp_path / "result.json").write_text(json.dumps(RESULT))
    return str(tmp_path)


@pytest.mark.parametrize(
    ("expect", "figure", "verdict"),
    [
        (Expect(loss=[1.9, 2.1]), 2.0, "ok"),
        (Expect(loss=[2, 2]), 2.0, "ok"),
        (Expect(loss=[None, 1.9]), 2.0, "outside"),
        (Expect(loss=[2.1, None]), 2.0, "outside"),
        (Expect(accuracy=[0.8, 1]), 0.8, "ok"),
        (Expect(eval_loss=[2, 4]), 3.0, "ok"),
        (Expect(eval_accuracy=[0, 1]), None, "absent"),
        (Expect(memory=[None, 1.5]), 1.5, "ok"),
        (Expect(memory=[None, 1.4]), 1.5, "outside"),
        (Expect(samples_per_second=[107, 107]), 107.0, "ok"),
        (Expect(samples_per_second=[200, None], hardware="this"), 107.0, "outside"),
        (Expect(samples_per_second=[200, None], hardware="that"), 107.0, "elsewhere"),
        (Expect(loss=[9, None], hardware="that"), 2.0, "outside"),
    ],
)
def test_a_figure_is_judged(out: str, expect: Expect, figure: float | None, verdict: str) -> None:
    (finding,) = judge(expect, out, here="this")
    assert (finding.found, finding.verdict, finding.bad) == (figure, verdict, verdict in ("outside", "absent"))


def test_a_loss_that_is_no_number_is_outside(tmp_path: Path, out: str) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": NaN}\n')
    assert judge(Expect(loss=[0, 9]), out, here="this")[0].verdict == "outside"
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": null}\n')
    assert judge(Expect(loss=[0, 9]), out, here="this")[0].bad


@pytest.mark.parametrize("limits", [[], [1], [1, 2, 3], [2, 1], ["a", 2], [True, 2], [None, None]])
def test_a_band_has_two_ends(limits: list[object]) -> None:
    with pytest.raises(WordsError, match=r"expect.loss=.*a band is \[lowest, highest\]"):
        asked(Expect(loss=limits))


def test_a_band_is_read_by_a_person() -> None:
    assert (band([1, 2]), band([None, 2]), band([1, None])) == ("1 to 2", "2 or less", "1 or more")
