"""One rank, in this very process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from launching import plan_of

from dtrain.errors import DtrainError, RankError, WordsError
from dtrain.launcher.inline import Inline
from dtrain.launcher.run import finished, run


def test_a_result_comes_back(tmp_path) -> None:
    result = Inline().launch(plan_of(tmp_path, "steps=3"))
    assert (result.status, result.step, result.exit_code) == ("finished", 3, 0)
    assert result.loss is not None


def test_a_rank_that_raises_shows_its_traceback(tmp_path) -> None:
    with pytest.raises(RankError, match=r"(?s)rank 0 failed.*ValueError: planned"):
        Inline().launch(plan_of(tmp_path, "model._target_=launching.Raises", "model.rank=0"))


def test_a_loop_that_returns_no_result_is_named(tmp_path) -> None:
    with pytest.raises(DtrainError, match=r"loop=launching\.nothing returned NoneType"):
        Inline().launch(plan_of(tmp_path, "loop=launching.nothing", "log.every=10"))


LOADS = """
import gc, weakref
from dtrain.launcher.rank import loading_torch

class Circle:
    def __init__(self):
        self.itself = self

with loading_torch():
    import torch
assert gc.isenabled() and gc.get_freeze_count() > 100_000
circle = weakref.ref(Circle())
assert circle() is not None
gc.collect()
assert circle() is None
with loading_torch():
    before = gc.get_freeze_count()
assert gc.isenabled() and gc.get_freeze_count() == before
print("as before")
"""


def test_what_a_run_makes_is_collected_and_torch_is_not_walked() -> None:
    """In a process of its own, which has no torch."""
    said = subprocess.run([sys.executable, "-c", LOADS], capture_output=True, text=True, timeout=300)
    assert said.stdout == "as before\n", said.stderr


def test_the_threads_of_the_plan_are_those_of_the_rank_whatever_the_environment_says(tmp_path) -> None:
    before = torch.get_num_threads()
    try:
        for number in (3, 2):
            words = (f"threads={number}", "loop=launching.threads", "log.every=10")
            assert Inline().launch(plan_of(tmp_path, *words)).step == number
    finally:
        torch.set_num_threads(before)


def test_another_run_to_begin_with_is_another_run_wherever_it_lies(tmp_path: Path) -> None:
    for name in ("a", "b"):
        plan = plan_of(tmp_path / name, "steps=2")
        run(plan, "")
    for key in ("init", "fork"):
        words = ("steps=4", f"{key}={tmp_path}/a")
        run(plan_of(tmp_path / key, *words), "")
        assert finished(plan_of(tmp_path / key, *words)) is not None
        for other in (f"{key}={tmp_path}/b", "seed=0"):
            with pytest.raises(WordsError, match=f"holds a run with another {key}"):
                finished(plan_of(tmp_path / key, "steps=4", other))
    (tmp_path / "moved").mkdir()
    (tmp_path / "a").rename(tmp_path / "moved/a")
    assert finished(plan_of(tmp_path / "init", "steps=4", f"init={tmp_path}/moved/a")) is not None


@pytest.mark.parametrize(
    ("word", "difference"),
    [
        ("optim.betas=[0.9,0.99]", "optim.betas[1] is 0.95 there, 0.99 here."),
        ("optim.lr_of={layers.0.weight: 0.5}", "optim.lr_of.layers.0.weight is 0.1 there, 0.5 here."),
        (
            "model.freeze=[layers.0.*,layers.1.*]",
            "model.freeze is ['layers.0.*'] there, ['layers.0.*', 'layers.1.*'] here.",
        ),
    ],
)
def test_the_value_that_differs_is_shown(word: str, difference: str, tmp_path: Path) -> None:
    words = ["steps=2", "optim.lr_of={layers.0.weight: 0.1}", "model.freeze=[layers.0.*]"]
    plan = plan_of(tmp_path, *words)
    (tmp_path / "checkpoints/step-00000001").mkdir(parents=True)
    (tmp_path / "plan.yaml").write_text(plan.document())
    with pytest.raises(WordsError) as raised:
        finished(plan_of(tmp_path, *words, word))
    assert difference in str(raised.value)


@pytest.mark.parametrize(
    ("word", "goes_on"), [("optim.lr=0.5", True), ("schedule=constant", True), ("optim=sgd", False), ("seed=3", False)]
)
def test_a_run_with_other_values_is_begun_elsewhere_from_what_is_there(
    word: str, goes_on: bool, tmp_path: Path
) -> None:
    out = tmp_path / "my runs"
    run(plan_of(out, "steps=2"), "")
    with pytest.raises(WordsError) as raised:
        finished(plan_of(out, "steps=2", word))
    assert f"'init={out}" in str(raised.value) and (f"'fork={out}" in str(raised.value)) == goes_on


def test_an_average_that_comes_or_goes_at_a_resume_is_told(tmp_path: Path) -> None:
    def caveats() -> list[str]:
        events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
        return [event["text"] for event in events if event["event"] == "caveat"]

    run(plan_of(tmp_path, "steps=2"), "")
    assert caveats() == []
    run(plan_of(tmp_path, "steps=4", "ema=0.9"), "")
    assert caveats() == ["ema: the checkpoint of step 2 has no average of the weights, so it begins there"]
    run(plan_of(tmp_path, "steps=6", "ema=0.9"), "")
    assert len(caveats()) == 1
    run(plan_of(tmp_path, "steps=8"), "")
    assert caveats()[1:] == [
        "ema: the checkpoint of step 6 has an average of the weights, which is dropped. Type ema=<its decay> to go on with it"
    ]


def test_rows_that_were_removed_between_starts_are_told_without_a_logger_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(plan_of(tmp_path, "steps=4"), "")
    (tmp_path / "metrics.jsonl").unlink()
    run(plan_of(tmp_path, "steps=6"), "")
    assert "note: metrics.jsonl lacks the rows of 4 of the 4 steps that are done" in capsys.readouterr().err
