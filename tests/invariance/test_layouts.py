"""Same seed, same loss on every mesh: every layout of the table against one process on the same batches, without a tolerance relaxed."""

import math

import pytest
import torch
from invariance.layouts import BITWISE, FAST, MODELS, REFUSED, SLOW, Combination, combinations
from invariance.run import reference, run, worst
from pool import RankFailed
from small import plan

from dtrain.errors import WordsError

LOSS, GRADIENT, NORM, WEIGHT = 2e-6, 2e-6, 2e-6, 1e-4
ROUGH = {"bf16": 3e-2, "bf16_true": 6e-2, "fp16": 5e-3}
"""Of losses, where numbers have 8 or 11 bits and are added in another order."""


def cases(table: dict[str, tuple[str, ...]]) -> list[tuple[str, str]]:
    return [(model, words) for model, listed in table.items() for words in listed]


def holds(model: str, words: str, steps: int) -> None:
    if torch.__version__ < "2.13" and ("zbv" in words or "dualpipev" in words):
        with pytest.raises(RankFailed, match=r"needs torch 2\.13 or newer"):
            run(MODELS[model], words, steps=1)
        return
    found = worst(run(MODELS[model], words, steps=steps), reference(MODELS[model], steps))
    assert (
        found["losses"] <= LOSS
        and found["gradients"] <= GRADIENT
        and found["norm"] <= NORM
        and found["weights"] <= WEIGHT
    ), found


@pytest.mark.parametrize(("model", "words"), cases(FAST))
def test_a_layout_gives_the_numbers_of_one_process(model: str, words: str) -> None:
    pytest.importorskip("transformers") if model == "llama" else None
    holds(model, words, steps=3)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "words"), cases(FAST) + cases(SLOW))
def test_more_layouts_give_the_numbers_of_one_process_for_longer(model: str, words: str) -> None:
    pytest.importorskip("transformers") if model == "llama" else None
    holds(model, words, steps=3 if "devices=8" in words or "nodes=2" in words else 20)


@pytest.mark.parametrize(("model", "words"), cases(BITWISE))
def test_one_rank_is_the_same_to_the_last_bit(model: str, words: str) -> None:
    pytest.importorskip("transformers") if model == "llama" else None
    here, there = run(MODELS[model], words, steps=3), reference(MODELS[model], 3)
    assert here == there


@pytest.mark.slow
@pytest.mark.parametrize("case", list(combinations()), ids=lambda case: f"{case.strategy}-{case.axis}-{case.precision}")
def test_every_strategy_on_every_axis_in_every_precision(case: Combination) -> None:
    found = worst(run(MODELS[case.model], case.words, steps=5), reference(MODELS[case.model], 5, case.precision))
    if case.precision == "fp32":
        assert found["losses"] <= LOSS and found["gradients"] <= GRADIENT and found["weights"] <= WEIGHT, found
    else:
        assert found["losses"] <= ROUGH[case.precision], found


@pytest.mark.parametrize(("words", "said"), REFUSED.values(), ids=["-".join(key) for key in REFUSED])
def test_what_is_not_proven_is_refused(words: str, said: str) -> None:
    with pytest.raises(WordsError, match=said):
        plan("data=synthetic", *words.split())


def test_there_are_sixty_layouts_of_two_four_and_eight_ranks() -> None:
    listed = {(model, words) for model, words in cases(FAST) + cases(SLOW)}
    worlds = {
        math.prod(int(word.split("=")[1]) for word in words.split() if word.startswith(("nodes=", "devices=")))
        for _, words in listed
    }
    assert len(listed) >= 60 and worlds == {2, 4, 8}
