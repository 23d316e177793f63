"""A batch of samples of any kind: numbers become tensors, rows of several lengths are padded so that nothing added counts, one's own collate is called."""

import json
from collections import namedtuple
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from data.rows import LENGTHS, Rows, by_hand
from pool import resident
from small import plan

from dtrain.data import jsonl, parquet
from dtrain.data.collate import joined, stack, tensors
from dtrain.data.dataset import Dataset
from dtrain.data.replayed import Streamed
from dtrain.errors import WordsError
from dtrain.objective import check_padded
from dtrain.objective.next_token import NextToken
from dtrain.objective.regression import Regression
from dtrain.train import train


def take(source: Dataset, *index: int) -> dict[str, Any]:
    return source.take(np.array(index), np.zeros(len(index), dtype=np.int64))


# numbers


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        ([1, 2, 3], torch.int64), ((1.5, 2.0), torch.float32), ([[1, 2], [3, 4]], torch.int64), (3, torch.int64), (True, torch.bool), (np.bool_(True), torch.bool),
        (np.float64(2.0), torch.float32), (np.int32(2), torch.int64), (np.arange(3, dtype=np.uint16), torch.int64), (np.arange(3, dtype=np.uint32), torch.int64),
        (np.arange(3, dtype=np.uint8), torch.int64), (torch.zeros(3, dtype=torch.int32), torch.int64), (np.ones((2, 2)), torch.float32),
        (np.ones(2, dtype=np.float16), torch.float32), (torch.ones(2, dtype=torch.bfloat16), torch.float32), ([np.float32(1), np.float32(2)], torch.float32),
        (np.zeros((3, 4, 4), dtype=np.uint8), torch.uint8), (np.arange(3, dtype=">f4"), torch.float32), (np.arange(3, dtype=">i2"), torch.int64),
        (np.arange(3, dtype=">u8"), torch.int64), (np.arange(3)[::-1], torch.int64), (np.broadcast_to(np.float64(2), (2, 2)), torch.float32),
        (np.array(7, dtype=">u2"), torch.int64), (np.zeros((0, 2)), torch.float32),
        (torch.ones(2, requires_grad=True), torch.float32),
    ],
    ids=str,
)  # fmt: skip
def test_numbers_of_any_kind_become_tensors(value: Any, dtype: torch.dtype) -> None:
    converted = tensors(value, "the input")
    assert converted.dtype == dtype and not converted.requires_grad
    assert converted.tolist() == (value.tolist() if hasattr(value, "tolist") else torch.tensor(value).tolist())


def test_what_is_no_number_is_refused_with_what_to_return() -> None:
    for value, message in (
        ("abc", "encode it first"),
        (None, "for a class or a token that does not count -100. objective=regression knows no such number"),
        ([[1], [2, 3]], "is not an array of numbers: "),
        ([1, None], "is not an array of numbers: "),
        ([1, "a"], "is not an array of numbers: "),
        (2**70, "is not an array of numbers: "),
        (np.arange(3, dtype=np.longdouble), "is not an array of numbers: "),
        (np.array([1, "a"], dtype=object), "an array of the type object"),
        (np.array(["a"]), "an array of the type <U1"),
        (np.datetime64("2026-01-01"), r"an array of the type datetime64\[D\]"),
        (np.array([2**63], dtype=np.uint64), "the largest of int64"),
        ([], "an empty list"),
        (date(2026, 1, 1), "a date. Return several parts"),
        ({1, 2}, "names"),
        ((torch.ones(2),), "names"),
    ):
        with pytest.raises(WordsError, match=f"^the input .*{message}"):
            tensors(value, "the input")


def test_what_is_no_number_is_named_with_its_sample_and_its_part() -> None:
    rows = [({"ids": [1, 2], "mask": None if index == 5 else [1, 1]}, 0) for index in range(8)]
    rows[3] = ({"ids": [1, 2], "mask": [1, 1]}, "cat")  # type: ignore[assignment]
    source = Dataset(rows, holdout=0)
    for sample, part in ((5, "the input 'mask' is None"), (3, "the target is text")):
        with pytest.raises(WordsError, match=rf"data\.dataset: sample {sample}: {part}"):
            take(source, source.original(np.arange(8)).tolist().index(sample))


def test_an_image_of_pil_is_refused_with_what_to_return() -> None:
    image = pytest.importorskip("PIL.Image").fromarray(np.zeros((2, 2), dtype=np.uint8))
    with pytest.raises(WordsError, match="ToTensor"):
        tensors(image, "the input")


def test_lists_of_numbers_train() -> None:
    batch = take(Dataset([([1, 2, 3], [2, 3, 4])] * 4), 0, 1)
    assert batch["inputs"].tolist() == [[1, 2, 3]] * 2 and batch["targets"].dtype == torch.int64


def test_a_sample_with_names_is_read_by_them() -> None:
    Sample = namedtuple("Sample", ("image", "label"))
    source = Dataset([Sample(torch.ones(2), 1)] * 3, inputs="image", targets="label")
    assert take(source, 0)["targets"].tolist() == [1]
    assert take(Dataset([Sample(torch.ones(2), 1)] * 3), 0)["inputs"].shape == (1, 2)


@pytest.mark.parametrize(
    ("classes", "outputs"), [(10, 10), (np.int64(7), 7), (("a", "b"), 2), (None, None), (lambda: 3, None)], ids=str
)
def test_classes_may_be_their_number(classes: Any, outputs: int | None) -> None:
    data = type("Labelled", (list,), {"classes": classes})([(torch.ones(2), 1)] * 3)
    assert Dataset(data).facts.get("outputs") == outputs


def test_fewer_outputs_than_classes_are_refused() -> None:
    data = type("Labelled", (list,), {"classes": 10})([(torch.ones(2), 1)] * 3)
    with pytest.raises(WordsError, match=r"data\.outputs=3: the dataset has 10 classes"):
        Dataset(data, outputs=3).facts  # noqa: B018
    assert Dataset(data, outputs=1).facts["outputs"] == 1, "a regression"


def test_targets_that_are_names_tell_no_number_of_classes() -> None:
    data = type("Labelled", (list,), {"targets": ["cat", "dog"]})([(torch.ones(2), 1)] * 3)
    assert "outputs" not in Dataset(data).facts


# rows of several lengths


@pytest.mark.parametrize("index", [(0, 1), (0, 1, 2)])
def test_rows_of_several_lengths_are_refused_without_padding(index: tuple[int, ...]) -> None:
    with pytest.raises(WordsError, match=r"data\.pad=<the padding token>"):
        take(Dataset(Rows(), inputs="input_ids", targets="labels"), *index)


def test_rows_are_padded_to_the_longest_of_the_batch() -> None:
    source = Dataset(Rows(), inputs="input_ids", targets="labels", pad=12, holdout=0)
    batch, longest = take(source, 0, 1, 2), max(LENGTHS[int(i) % 8] for i in source.original(np.arange(3)))
    assert batch["inputs"].shape == batch["targets"].shape == (3, longest)
    for index, inputs, targets in zip(source.original(np.arange(3)), batch["inputs"], batch["targets"], strict=True):
        size = LENGTHS[int(index) % 8]
        assert inputs[:size].tolist() == Rows()[int(index)]["input_ids"] and set(inputs[size:].tolist()) <= {12}
        assert targets[:size].tolist() == Rows()[int(index)]["labels"] and set(targets[size:].tolist()) <= {-100}
    assert (source.holdout() or source) is source


@pytest.mark.parametrize("padded", [True, False])
def test_a_mask_that_is_not_as_long_as_its_row_is_refused(padded: bool) -> None:
    """Padded, it would hide the last token without a word."""
    rows = [{"input_ids": [5, 6, 7], "attention_mask": [1] * (2 if row == 3 else 3), "labels": 0} for row in range(6)]
    source = Dataset(
        rows, inputs=["input_ids", "attention_mask"], targets="labels", pad=0 if padded else None, holdout=0
    )
    at = source.original(np.arange(6)).tolist().index(3)
    with pytest.raises(WordsError, match="sample 3: attention_mask has 2 entries and input_ids has 3"):
        take(source, at)


def test_the_mask_of_a_decoder_is_padded_with_0() -> None:
    names = ("input_ids", "decoder_input_ids", "decoder_attention_mask")
    rows = [{**{name: [1] * (row + 1) for name in names}, "labels": 0} for row in range(3)]
    given = take(Dataset(rows, inputs=names, targets="labels", pad=7, holdout=0), 0, 1, 2)["inputs"]
    assert (given["decoder_input_ids"] == 7).equal(given["decoder_attention_mask"] == 0)
    assert (given["decoder_input_ids"] == 7).sum() == 3


def test_an_attention_mask_is_made_where_it_is_asked_for() -> None:
    batch = take(Dataset(Rows(), inputs=["input_ids", "attention_mask"], targets="labels", pad=12, length=10), 0, 1, 2)[
        "inputs"
    ]
    assert batch["attention_mask"].shape == (3, 10)
    assert torch.equal(batch["input_ids"] == 12, batch["attention_mask"] == 0) or bool(
        (batch["attention_mask"].sum(1) <= 8).all()
    )
    assert batch["attention_mask"].dtype == torch.int64


def test_a_row_longer_than_the_length_is_refused() -> None:
    with pytest.raises(WordsError, match=r"data\.length=4: a row has \d entries"):
        take(Dataset(Rows(), inputs="input_ids", targets="labels", pad=0, length=4, holdout=0), *range(16))


def test_what_is_no_row_is_not_padded() -> None:
    samples = [
        ({"tokens": torch.arange(n), "image": torch.ones(3, 2, 2), "age": torch.tensor(1.0)}, torch.tensor(n))
        for n in (2, 4)
    ]
    inputs, targets, sizes = stack(samples, pad=0, length=6)
    assert {name: list(value.shape) for name, value in inputs.items()} == {
        "tokens": [2, 6],
        "image": [2, 3, 2, 2],
        "age": [2],
    }
    assert targets.tolist() == [2, 4] and sizes["inputs"].tolist() == [2, 4] and "targets" not in sizes


class Mixed:
    """Rows of 1 to 5 ids beside three features, in the first of which there are three ids, and a target that is 2 numbers."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        return {"ids": [index] * (1 + (index + 2) % 5), "feat": [1.0, 2.0, 3.0], "y": [1.0, 2.0]}


def test_what_is_padded_to_a_length_is_decided_by_the_column() -> None:
    """By the batch alone, features would be [1, 8] beside three ids, and the target beside two."""
    source = Dataset(Mixed(), inputs=["ids", "feat"], targets="y", pad=0, length=8, holdout=0.2)
    for part in (source, source.holdout()):
        assert part is not None
        for index in range(len(part)):
            batch = part.take(np.array([index]), np.array([0]))
            assert [*batch["inputs"]["ids"].shape] == [1, 8] and "target_mask" not in batch
            assert [*batch["inputs"]["feat"].shape] == [1, 3] and [*batch["targets"].shape] == [1, 2]
    # one that has the length of no row is padded too, if it differs from sample to sample
    rows = [({"ids": [1] * (2 + i % 3), "more": [1] * (1 + i % 4)}, [1] * (1 + i % 2)) for i in range(12)]
    source = Dataset(rows, inputs=0, targets=1, pad=0, length=6, holdout=0)
    batch = source.take(np.array([0]), np.array([0]))
    assert [*batch["inputs"]["more"].shape] == [*batch["targets"].shape] == [1, 6]


def test_padding_counts_in_no_regression(tmp_path: Path) -> None:
    """Of whole-number targets -100 may be one; of rows that are padded those that a sample has count, in any source."""
    table = [([1, 2, 3], [2, 3, 4]), ([4], [5]), ([5, 6], [6, -100]), ([7, 8, 9, 10], [8, 9, 10, 11])]
    path, true = tmp_path / "r.jsonl", (9 + 106**2) / 10
    path.write_text("".join(json.dumps({"x": x, "y": y}) + "\n" for x, y in table))
    pq.write_table(pa.table({"x": [x for x, _ in table], "y": [y for _, y in table]}), tmp_path / "r.parquet")
    given: dict[str, Any] = {
        "inputs": "x",
        "targets": "y",
        "holdout": 0.0,
        "shift": False,
        "outputs": None,
        "pad": 0,
        "length": None,
        "packing": "none",
        "sequence": None,
        "cache": str(tmp_path),
    }
    named = [{"x": x, "y": y} for x, y in table]
    streamed = Streamed(
        stream=named,
        path=None,
        holdout_dataset=named,
        inputs="x",
        targets="y",
        shift=False,
        outputs=None,
        pad=0,
        length=6,
        collate=None,
    )
    streamed.begin(0, 1, 4)
    kept = streamed.holdout()
    floats = Dataset([(x, [float(each) for each in y]) for x, y in table], pad=0, holdout=0)
    mixed = Dataset([(x, [float(each) for each in y] if len(x) == 1 else y) for x, y in table], pad=0, holdout=0)
    sources = [
        jsonl.build(path=str(path), **given),
        parquet.build(path=str(tmp_path / "r.parquet"), **given),
        Dataset(table, pad=0, holdout=0, length=7),
        streamed,
        kept,
        floats,
        mixed,
    ]
    for source in sources:
        assert source is not None
        batch = source.take(np.arange(4), np.zeros(4, int))
        objective = Regression()
        assert objective.count(batch) == 10, source
        outputs = batch["inputs"].float().requires_grad_()
        loss = objective.loss(outputs, batch).sum
        loss.backward()  # type: ignore[no-untyped-call]
        assert loss.item() / 10 == pytest.approx(true) and outputs.grad is not None
        assert bool(outputs.grad.isfinite().all()) and bool((outputs.grad[~batch["target_mask"]] == 0).all())
    with pytest.raises(WordsError, match=r"targets are floats, .* NextToken does not read the target_mask"):
        check_padded(NextToken(), floats.take(np.arange(4), np.zeros(4, int)))
    with pytest.raises(WordsError, match=r"of several targets floats cannot be marked"):
        stack([(torch.ones(n), {"a": torch.ones(n), "b": torch.ones(n)}) for n in (2, 4)], pad=0, length=None)


def test_whole_numbers_that_fp32_rounds_are_told_of_own_samples() -> None:
    big = 2**24 + 1

    def notes(sample: Any) -> list[str]:
        return Dataset([(sample, 1)] * 3, holdout=0, outputs=2).notes

    for told in ([0.5, big], np.array([0.5, big]), {"a": torch.tensor([big, 0.5], dtype=torch.float64)}):
        (note,) = notes(told)
        assert f"sample 0 has {big}, which fp32 rounds to {big - 1}" in note
    for kept in ([1, big], np.array([big]), {"a": 0.5, "b": big}, np.array([0.5, 2.0**30]), [0.1, 2.0**30]):
        assert not notes(kept)


def test_masked_arrays_are_refused_where_they_hide_numbers() -> None:
    hidden = np.ma.array([1.0, 2.0], mask=[False, True])
    with pytest.raises(WordsError, match=r"sample 2: the input is a masked array.*filled"):
        Dataset([(hidden, 1)] * 3, holdout=0, outputs=2).take(np.array([0]), np.array([0]))
    plain = Dataset([(np.ma.array([1.0, 2.0]), 1)] * 3, holdout=0, outputs=2).take(np.array([0]), np.array([0]))
    assert plain["inputs"].tolist() == [[1.0, 2.0]]


def test_parts_of_several_processes_are_joined() -> None:
    parts = [
        {"input_ids": np.ones((2, 3)), "attention_mask": np.ones((2, 3))},
        {"input_ids": np.ones((1, 5)), "attention_mask": np.ones((1, 5))},
    ]
    whole = joined(parts, 9)
    assert whole["input_ids"].tolist() == [[1, 1, 1, 9, 9]] * 2 + [[1] * 5] and whole["attention_mask"][0].tolist() == [
        1,
        1,
        1,
        0,
        0,
    ]
    with pytest.raises(WordsError, match=r"data\.pad="):
        joined(parts, None)


@pytest.mark.campaign("commands")
def test_loading_processes_pad_as_one_process_does() -> None:
    options: dict[str, Any] = {"inputs": "input_ids", "targets": "labels", "holdout": 0}
    here = take(Dataset(Rows(), pad=0, **options), *range(8))
    for source in (
        Dataset(Rows(), pad=0, workers=1, **options),
        Dataset(Rows(), pad=0, collate=by_hand, workers=1, **options),
    ):
        there = take(source, *range(8))
        source._processes.close()
        assert torch.equal(here["inputs"], there["inputs"]) and torch.equal(here["targets"], there["targets"])


# on meshes

MODEL = "model=gpt model.vocab=13 model.layers=2 model.heads=2 model.width=16 data=dataset data.inputs=input_ids data.targets=labels data.outputs=13 objective=next_token "
COMMON = (
    "data.holdout=0.25 batch=8 steps=3 optim.eps=1e-5 schedule.warmup=0 logger=[] hook=[] trust=[data] model.layers=2"
)


def losses(words: str, out: Path) -> tuple[float, float]:
    asked = plan(*MODEL.split(), *COMMON.split(), *words.split(), f"out={out}")
    results = resident(asked.world, train, asked)
    loss = results[0].loss
    assert loss is not None
    return loss, results[0].metrics["eval_loss"]


PADDED = "data.dataset._target_=data.rows.Rows data.pad=0"
OWN = "data.dataset._target_=data.rows.Rows data.collate._target_=data.rows.by_hand"
OBJECT = "data.dataset._target_=data.rows.Rows data.collate._target_=data.rows.ByHand data.collate.fill=-100"


def test_padding_changes_no_number_on_any_mesh(tmp_path: Path) -> None:
    """The loss of rows that were filled up by hand, in one process."""
    expected = losses("data.dataset._target_=data.rows.Filled devices=1", tmp_path / "whole")
    for number, words in enumerate((
        f"{PADDED} devices=1", f"{OWN} devices=1 microbatch=2", f"{OBJECT} devices=1", f"{PADDED} strategy=ddp devices=2 accumulate=2", f"{PADDED} strategy=fsdp devices=2",
        f"{PADDED} strategy=ddp mesh.tp=2 devices=2", f"{PADDED} data.length=8 mesh.pp=2 strategy=ddp devices=2", f"{PADDED} data.length=8 mesh.cp=2 strategy=ddp devices=2",
    )):  # fmt: skip
        result = losses(words, tmp_path / str(number))
        assert result == pytest.approx(expected, rel=2e-6), words


def test_a_number_that_fp32_would_make_infinite_is_named(tmp_path: Path) -> None:
    for rows in (
        [([1.0, 2.0], 0), ([1.0, 1e300], 1)],
        [(np.ones(2), 0), (np.array([1.0, -1e39]), 1)],
        [(1.0, 0), (1e39, 1)],
        [({"a": torch.ones(2, dtype=torch.float64)}, 0), ({"a": torch.tensor([1.0, 1e300], dtype=torch.float64)}, 1)],
    ):
        with pytest.raises(
            WordsError, match=r"data\.dataset: sample 1: the input has .*e\+\d+, which is too large for fp32"
        ):
            take(Dataset(rows, holdout=0), 0, 1)
    assert take(Dataset([(float("inf"), 0), (1.0, 1)], holdout=0), 0, 1)["inputs"].isinf().any(), "as the user gives it"
    with pytest.raises(WordsError, match="an input has 1e"):
        take(
            Dataset(
                torch.utils.data.TensorDataset(torch.tensor([1.0, 1e300], dtype=torch.float64), torch.ones(2)),
                holdout=0,
            ),
            0,
            1,
        )
