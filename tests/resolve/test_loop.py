"""A loop of one's own gets only words that it reads."""

import re
from pathlib import Path

import pytest
from small import plan

from dtrain.errors import WordsError
from dtrain.planned import Plan
from dtrain.resolve.loop import READ_AS

ALL = (
    "ema=0.9",
    "clip=0.5",
    "init=a",
    "stop_after=5",
    "time_limit=90",
    "evaluate.every=5",
    "log.every=3",
    "on_spike=skip",
)
MINE = {
    "deaf": "def train(plan):\n    while plan.steps: pass\n",
    "asking": "def train(plan):\n    getattr(plan, 'ema'), plan.clip, plan.init, plan.last_step\n    plan.stop_seconds, plan.evaluate_every, plan.log_every, plan.on_spike\n",
    "handing": "from helpers import loop\n\n\ndef train(plan):\n    return loop(plan)\n",
    "around": "import dtrain.train\n\n\ndef train(plan):\n    return dtrain.train.train(plan)\n",
    "logging": "from dtrain.loop.metrics import Log\nfrom dtrain.loop.assemble import prepare\n",
}


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Five loops, as modules of a folder whose name Python has not seen before."""
    package = f"loops_{tmp_path.name}".replace("-", "_")
    (tmp_path / package).mkdir()
    for name, text in MINE.items():
        text = text.replace("from helpers", f"from {package}.helpers")
        (tmp_path / package / f"{name}.py").write_text(text if "def" in text else f"{text}\n\ndef train(plan): ...\n")
    (tmp_path / package / "helpers.py").write_text(MINE["asking"].replace("train", "loop"))
    monkeypatch.syspath_prepend(tmp_path)
    return package


def unread(package: str, name: str, *words: str) -> set[str]:
    """The keys that are refused, from the words."""
    try:
        plan("data=synthetic", f"loop={package}.{name}.train", f"trust=[{package}]", *words)
    except WordsError as error:
        return set(re.findall(r"([a-z_.]+)=", str(error).partition("read ")[2].partition("(")[0]))
    return set()


def test_words_that_the_loop_does_not_read_are_refused_together(mine: str) -> None:
    assert unread(mine, "deaf", *ALL) == {word.split("=")[0] for word in ALL}


@pytest.mark.parametrize("name", ["asking", "handing", "around"])
def test_words_that_it_reads_or_hands_on_are_taken(mine: str, name: str) -> None:
    assert not unread(mine, name, *ALL)


def test_what_dtrains_own_parts_read_counts_only_where_they_act_on_it(mine: str) -> None:
    assert unread(mine, "logging", "log.every=5", "stop_after=5") == {"stop_after"}


def test_words_that_ask_for_nothing_are_taken(mine: str) -> None:
    assert not unread(mine, "deaf", "logger=[]", "hook=[]", "evaluate.every=0", "clip=null", "log.every=10", "ema=null")
    assert not unread(mine, "deaf", "logger=[console,tensorboard]", "hook=auto", "data=text", "grace=30.0")
    assert unread(mine, "deaf", "logger=[console]", "hook=[sample]", "data=text") == {"logger", "hook"}


def test_a_loss_scale_that_nobody_divides_by_is_refused(mine: str) -> None:
    with pytest.raises(WordsError, match=r"precision=fp16: .* does not read parts\.precision\.scale"):
        plan("data=synthetic", f"loop={mine}.deaf.train", f"trust=[{mine}]", "precision=fp16")


def test_a_loop_that_its_module_does_not_have_is_refused(mine: str) -> None:
    with pytest.raises(WordsError, match=rf"{mine}\.deaf has no trian\. Did you mean train\?"):
        plan("data=synthetic", f"loop={mine}.deaf.trian", f"trust=[{mine}]")


def test_the_plan_has_every_attribute_that_is_looked_for() -> None:
    assert all(name in {*Plan.__dataclass_fields__, *vars(Plan)} for names in READ_AS.values() for name in names)
