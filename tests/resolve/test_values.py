"""Plain numbers in range, or refused; all of them at once."""

import pytest
from small import plan

from dtrain.errors import WordsError


@pytest.mark.parametrize(
    "word",
    ["nodes=0", "steps=0", "batch=0", "microbatch=0", "accumulate=-1", "stop_after=0", "seed=-1", "log.every=0",
     "evaluate.every=-1", "evaluate.samples=0", "clip=0", "clip=-1.0", "ema=1.0", "ema=-0.1", "resume=always", "generate.tokens=0", "generate.temperature=-1", "checkpoint.every=-1", "data.path="],
)  # fmt: skip
def test_a_number_out_of_range_is_refused_by_its_key(word: str) -> None:
    with pytest.raises(WordsError) as caught:
        plan(word)
    assert word.split("=")[0] in str(caught.value)


@pytest.mark.parametrize(
    ("group", "word"),
    [("backend=gloo", "backend.timeout=1e15"), ("strategy=ddp", "strategy.bucket_mb=1e13"),
     ("optim=adamw", "optim.eps=0"), ("optim=muon", "optim.eps=0")],
)  # fmt: skip
def test_a_number_that_torch_overflows_or_divides_by_is_refused(group: str, word: str) -> None:
    with pytest.raises(WordsError, match=word.split("=")[0]):
        plan(group, word, "devices=2", "backend=gloo")


@pytest.mark.parametrize("key", ["out", "generate.prompt"])
@pytest.mark.parametrize("control", ["\\0", "\\r", "\\e", "\\x7f"])
def test_a_text_with_a_control_character_is_refused(key: str, control: str) -> None:
    with pytest.raises(WordsError, match=f"{key} is text.*, without control characters. Type {key}=ab."):
        plan(f'{key}="a{control}b"')


def test_a_text_may_have_lines_but_no_place() -> None:
    assert plan('generate.prompt="a\\n\\tb"').generate["prompt"] == "a\n\tb"
    with pytest.raises(WordsError, match=r"out=runs/a\\n is no place for a run. Type out=runs/a."):
        plan('out="runs/a\\n"')


def test_every_mistake_is_told_and_no_echo_of_one() -> None:
    with pytest.raises(WordsError) as caught:
        plan("steps=0", "seed=-1", "devices=x", "resume=mst")
    assert len(caught.value.problems) == 4
    assert "Type resume=must." in str(caught.value)


@pytest.mark.parametrize(
    ("word", "instead"),
    [("sweep.stop=asha", "sweep.stop=halving"), ("sweep.search=Bayes", "sweep.search=tpe"), ("sweep.stop=medan", "sweep.stop=median")],
)  # fmt: skip
def test_a_value_of_another_tool_is_answered_with_ours(word: str, instead: str) -> None:
    with pytest.raises(WordsError, match=f"Type {instead}."):
        plan(word)


@pytest.mark.parametrize(
    "word",
    [
        "evaluate.every=0",
        "evaluate.samples=null",
        "clip=null",
        "ema=null",
        "ema=0",
        "stop_after=null",
        "seed=0",
        "generate.temperature=0",
    ],
)
def test_the_ends_of_a_range_are_allowed(word: str) -> None:
    plan(word)


def test_what_a_spike_is_follows_from_the_answer_to_it() -> None:
    assert plan().spike == {"sigma": None, "window": 128} and plan().on_spike == "stop"
    assert plan("on_spike=skip").spike["sigma"] == plan("on_spike=rewind").spike["sigma"] == 6.0
    assert (
        plan("spike.sigma=4").spike["sigma"] == 4.0 and plan("on_spike=skip", "spike.sigma=null").spike["sigma"] is None
    )
    assert "6 standard deviations" in plan("on_spike=skip").why["spike"]
    with pytest.raises(WordsError) as caught:
        plan("on_spike=skp", "spike.sigma=-1", "spike.window=2")
    assert len(caught.value.problems) == 3 and "Type on_spike=skip." in str(caught.value)
