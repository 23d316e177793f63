"""batch = microbatch x data-parallel ranks x accumulate: any two give the third."""

import pytest
from small import plan

from dtrain.errors import WordsError
from dtrain.planned import BatchShape


def batch(*words: str) -> BatchShape:
    """With the strategy that the words name, or with ddp: what `auto` picks is the concern of test_auto."""
    return plan(*words if any(word.startswith("strategy=") for word in words) else ("strategy=ddp", *words)).batch


@pytest.mark.parametrize(
    ("words", "shape"),
    [
        (("batch=16",), BatchShape(16, 16, 1, 1)),
        (("batch=12", "devices=2"), BatchShape(12, 6, 2, 1)),
        (("batch=12", "microbatch=2"), BatchShape(12, 2, 1, 6)),
        (("batch=12", "accumulate=2", "devices=3"), BatchShape(12, 2, 3, 2)),
        (("microbatch=2", "accumulate=5", "devices=3"), BatchShape(30, 2, 3, 5)),
        (("batch=30", "microbatch=2", "accumulate=5", "devices=3"), BatchShape(30, 2, 3, 5)),
        (("batch=6", "microbatch=3", "accumulate=2"), BatchShape(6, 3, 1, 2)),
    ],
)
def test_two_give_the_third(words: tuple[str, ...], shape: BatchShape) -> None:
    assert batch(*words) == shape
    assert shape.size == shape.local * shape.data


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("batch=16", "devices=3"), "Nearest: batch=15 or batch=18."),
        (("batch=2", "devices=3"), "Nearest: batch=3."),
        (("batch=16", "microbatch=3"), "Nearest: batch=15 or batch=18."),
        (("batch=10", "accumulate=2", "devices=2"), "Nearest: batch=8 or batch=12."),
        (("batch=16", "microbatch=2", "accumulate=2"), "= 4. Leave one of the three out."),
    ],
)
def test_what_does_not_divide_is_refused_with_the_nearest(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(WordsError) as caught:
        batch(*words)
    assert message in str(caught.value)


def test_a_range_of_nodes_is_one_mistake_and_the_nearest_fits_all_of_it() -> None:
    with pytest.raises(WordsError) as caught:
        plan("strategy=fsdp", "nodes='2:5'", "batch=20")
    assert caught.value.problems == (
        "with nodes=3: batch=20 does not split over 3 data-parallel ranks. Nearest: batch=60. (batch: command line)",
    )
    assert plan("strategy=fsdp", "nodes='2:5'", "batch=60").allowed == [2, 3, 4, 5]
    with pytest.raises(WordsError, match=r"(?s)\Awith nodes=999: batch=1000 [^\n]*Type nodes=1000[^\n]*\Z"):
        plan("strategy=fsdp", "nodes='1:1000'", "batch=1000")


@pytest.mark.parametrize(
    "words", [("batch=1000000000", "devices=4"), ("batch=1000000000", "strategy=fsdp", "mesh.pp=2", "devices=4")]
)
def test_the_largest_batch_is_divided_as_the_smallest(words: tuple[str, ...]) -> None:
    assert plan(*words).batch.size == 10**9


def test_more_than_the_largest_batch_is_refused() -> None:
    for words in (("batch=1000000001",), ("microbatch=1000000", "accumulate=1000000")):
        with pytest.raises(WordsError, match="1000000000"):
            batch(*words)


def test_the_nearest_is_accepted() -> None:
    assert batch("batch=18", "devices=3").microbatch == 6


PIPELINE = ("data=synthetic", "devices=2", "mesh.pp=2")


@pytest.mark.parametrize(
    ("words", "shape"),
    [
        (("batch=16", "devices=4", "mesh.tp=2"), BatchShape(16, 8, 2, 1)),
        (("batch=16", "devices=4", "mesh.tp=4"), BatchShape(16, 16, 1, 1)),
        (("batch=16", "devices=8", "strategy=fsdp", "mesh.tp=2", "mesh.cp=2"), BatchShape(16, 8, 2, 1)),
    ],
)
def test_ranks_of_tp_and_cp_see_the_same_samples(words: tuple[str, ...], shape: BatchShape) -> None:
    assert batch("data=synthetic", *words) == shape


@pytest.mark.parametrize(
    ("words", "microbatches"),
    [
        (("batch=8",), 4),
        (("batch=6",), 6),
        (("batch=12",), 4),
        (("batch=7",), 7),
        (("batch=2",), 2),
        (("batch=8", "accumulate=2"), 2),
        (("batch=8", "microbatch=1"), 8),
        (("microbatch=2", "accumulate=3"), 3),
        (("batch=8", "devices=4", "strategy=fsdp"), 4),
        (("batch=9", "pipeline.schedule=interleaved_1f1b"), 3),
        (("batch=8", "pipeline.schedule=dualpipev"), 4),
    ],
)
def test_a_pipeline_gets_enough_microbatches_to_fill_it_twice(words: tuple[str, ...], microbatches: int) -> None:
    """Twice as many as it has ranks, or as many as the batch allows."""
    decided = batch(
        *(word for word in PIPELINE if word.split("=")[0] not in {given_word.split("=")[0] for given_word in words}),
        *words,
    )
    assert decided.accumulate == microbatches
    assert decided.size == decided.local * decided.data


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("batch=8", "accumulate=1"),
            "1f1b over mesh.pp=2 needs at least 2 microbatches per step, here are 1. Type accumulate=2.",
        ),
        (("batch=8", "microbatch=8"), "needs at least 2 microbatches per step, here are 1"),
        (("batch=1",), "needs at least 2 microbatches"),
        (
            ("batch=4", "accumulate=2", "pipeline.schedule=dualpipev"),
            "dualpipev over mesh.pp=2 needs at least 4 microbatches per step, here are 2",
        ),
        (
            ("batch=9", "accumulate=9", "pipeline.schedule=interleaved_1f1b"),
            "runs rounds of mesh.pp=2 microbatches, which 9 do not fill",
        ),
        (("batch=5", "devices=4", "strategy=fsdp"), "Nearest: batch=4 or batch=6."),
    ],
)
def test_too_few_microbatches_are_refused_by_the_schedule(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(WordsError) as caught:
        batch(
            *(
                word
                for word in PIPELINE
                if word.split("=")[0] not in {given_word.split("=")[0] for given_word in words}
            ),
            *words,
        )
    assert message in str(caught.value)
