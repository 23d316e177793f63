"""Rows of files as samples: the same from every format, wherever they lie, and a sentence for what cannot be one."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from data.files import rows, write
from torch.utils.data import TensorDataset

from dtrain.__main__ import main
from dtrain.data import csv, jsonl, parquet
from dtrain.data.dataset import Dataset
from dtrain.data.mixture import Mixture
from dtrain.errors import DtrainError
from dtrain.files import parquetfile
from dtrain.files.parquetfile import Groups, ParquetFile
from dtrain.files.rowfile import Reader, problem
from dtrain.model import construct
from dtrain.model.mlp import MLP

GIVEN: dict[str, Any] = {"shift": False, "pad": None, "length": None, "packing": "none", "sequence": None}
BUILD: dict[str, Any] = {
    "jsonl": lambda **given: jsonl.build(**GIVEN | given),
    "csv": lambda **given: csv.build(**{"separator": "comma"} | given),
    "parquet": lambda **given: parquet.build(**GIVEN | given),
}
FORMATS = tuple(BUILD)


@pytest.fixture
def source(tmp_path: Path) -> Any:
    def make(format: str, path: Any = None, **given: Any) -> Any:
        path = path or write(tmp_path / f"rows.{format}", rows())
        words = {
            "inputs": ["a", "b"],
            "targets": "label",
            "holdout": 0.2,
            "outputs": None,
            "cache": str(tmp_path / "cache"),
        }
        return BUILD[format](path=path, **words | given)

    return make


def everything(source: Any) -> list[tuple[Any, Any]]:
    """(input, target) of all samples that are trained on and held out."""
    batches = [part.take(np.arange(len(part)), np.zeros(len(part), int)) for part in (source, source.holdout()) if part]
    return [
        (tuple(x), y)
        for batch in batches
        for x, y in zip(batch["inputs"].tolist(), batch["targets"].tolist(), strict=True)
    ]


@pytest.mark.parametrize("format", FORMATS)
def test_each_row_is_one_sample(format: str, source: Any) -> None:
    made = source(format)
    assert (len(made), len(made.holdout())) == (48, 12)
    assert sorted(everything(made)) == sorted(((row["a"], row["b"]), row["label"]) for row in rows())
    batch = made.take(np.arange(5), np.zeros(5, int))
    assert batch["inputs"].dtype == torch.float32 and batch["targets"].dtype == torch.int64
    assert made.facts == {"inputs": [2], "kind": "float32", "outputs": 4, "vocab": 4}
    assert made.loading == "thread"


@pytest.mark.parametrize(
    ("smallest", "why"),
    [
        (-1, "column label has -1, and classes are whole numbers from 0 on (-100: a target that does not count)"),
        (-100, "column label has -100, a target that does not count. Type data.outputs=<number of classes>."),
    ],
)
@pytest.mark.parametrize("format", FORMATS)
def test_a_target_that_is_no_class_is_named(format: str, smallest: int, why: str, source: Any, tmp_path: Path) -> None:
    table = [{**row, "label": smallest if number == 7 else row["label"]} for number, row in enumerate(rows())]
    made = source(format, write(tmp_path / f"odd.{format}", table))
    assert why in made.facts["unknown"]
    with pytest.raises(DtrainError, match=r"model\.outputs=auto: column label has -1"):
        construct({"_target_": "dtrain.model.mlp.MLP", "outputs": "auto"}, facts=made.facts, seed=0)


def test_lines_are_samples_in_the_order_of_the_same_rows_in_memory(source: Any) -> None:
    table = rows()
    x, y = torch.tensor([row["x"] for row in table]), torch.tensor([row["label"] for row in table])
    mine, other = source("jsonl", inputs="x"), Dataset(TensorDataset(x, y), holdout=0.2)
    index = np.arange(48)
    one, two = mine.take(index, index * 0), other.take(index, index * 0)
    assert torch.equal(one["inputs"], two["inputs"]) and torch.equal(one["targets"], two["targets"])


@pytest.mark.parametrize("format", FORMATS)
def test_files_of_a_list_and_a_glob_are_one_dataset(format: str, source: Any, tmp_path: Path) -> None:
    for number, (first, count) in enumerate([(0, 20), (20, 1), (21, 39)]):
        write(tmp_path / f"many/{number}.{format}", rows(count, first=first))
    (tmp_path / "many/_SUCCESS").touch()
    whole = everything(source(format, inputs=["b"]))
    for path in (
        f"{tmp_path}/many/*.{format}",
        f"{tmp_path}/many",
        [f"{tmp_path}/many/{n}.{format}" for n in (2, 0, 1)],
    ):
        assert sorted(everything(source(format, path, inputs=["b"]))) == sorted(whole)


@pytest.mark.parametrize("format", FORMATS)
def test_rows_come_from_any_url(format: str, source: Any, tmp_path: Path) -> None:
    local = write(tmp_path / f"rows.{format}", rows())
    fsspec.filesystem("memory").pipe_file(f"/rows/a.{format}", Path(local).read_bytes())
    assert everything(source(format, f"memory://rows/a.{format}")) == everything(source(format, local))


@pytest.mark.parametrize("format", FORMATS)
def test_the_index_is_made_once_and_again_when_the_file_changes(format: str, source: Any, tmp_path: Path) -> None:
    path = write(tmp_path / f"rows.{format}", rows())
    first = source(format, path)
    index = {file: file.stat().st_mtime_ns for file in (tmp_path / "cache").iterdir() if file.suffix != ".lock"}
    assert index and source(format, path).fingerprint == first.fingerprint
    assert {file: file.stat().st_mtime_ns for file in index} == index
    write(tmp_path / f"rows.{format}", rows(61))
    assert len(source(format, path)) == 49 and source(format, path).fingerprint != first.fingerprint


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("damage", ["", "[]", "{}", None])
def test_a_damaged_index_is_made_again(damage: str | None, format: str, source: Any, tmp_path: Path) -> None:
    whole = everything(source(format))
    for file in (tmp_path / "cache").iterdir():
        if damage is None and file.suffix in (".npy", ".copy"):
            file.unlink()
        elif damage is not None and file.suffix == ".json":
            file.write_text(damage)
    assert everything(source(format)) == whole


@pytest.mark.parametrize("format", FORMATS)
def test_the_data_is_the_same_in_another_folder(format: str, source: Any, tmp_path: Path) -> None:
    path = write(tmp_path / f"elsewhere/other.{format}", rows())
    assert source(format, path, cache=str(tmp_path / "other")).fingerprint == source(format).fingerprint


@pytest.mark.parametrize("format", FORMATS)
def test_a_file_that_changes_while_it_is_read_is_refused(format: str, source: Any, tmp_path: Path) -> None:
    path = write(tmp_path / f"rows.{format}", rows())
    made = source(format, path)
    write(tmp_path / f"rows.{format}", rows(first=9))
    with pytest.raises(DtrainError, match="changed since its index was made"):
        everything(made)


def test_no_inputs_are_all_columns_but_the_target(source: Any, tmp_path: Path) -> None:
    table = [{"a": row["a"], "b": row["b"], "label": row["label"]} for row in rows()]
    path = write(tmp_path / "numbers.csv", table)
    assert source("csv", path, inputs=None).facts["inputs"] == [2]
    assert everything(source("csv", path, inputs=None)) == everything(source("csv", path))


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_columns_of_lists_keep_their_names_and_are_padded(format: str, source: Any) -> None:
    made = source(format, inputs=["ids", "x"], targets="ids", holdout=0, pad=0)
    batch = made.take(np.arange(60), np.zeros(60, int))
    assert batch["inputs"]["x"].shape == (60, 3) and batch["inputs"]["ids"].shape == batch["targets"].shape == (60, 3)
    assert sorted(row[0] for row in batch["inputs"]["ids"].tolist()) == [*range(60)]
    assert int((batch["targets"] == -100).sum()) == 60
    with pytest.raises(DtrainError, match=r"ids have different lengths, 1 to 3\. Type data\.pad="):
        source(format, inputs="ids").take(np.arange(9), np.zeros(9, int))


@pytest.mark.parametrize("format", FORMATS)
def test_what_cannot_be_a_sample_is_named(format: str, source: Any, tmp_path: Path) -> None:
    for given, sentence in (
        ({"targets": "lable"}, "has no column lable. Did you mean label?"),
        (
            {"inputs": "text"},
            "column text holds text. For a class or number of each row type data.inputs=text data.tokenizer=<",
        ),
        ({"path": f"{tmp_path}/none*"}, "no file is there"),
    ):
        with pytest.raises(DtrainError) as error:
            source(format, **given)
        assert sentence in str(error.value)


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_a_value_that_is_missing_is_named(format: str, source: Any, tmp_path: Path) -> None:
    path = write(tmp_path / f"holes.{format}", [{"a": 1.0, "b": 2, "label": 0}, {"a": 1.0, "b": None, "label": 0}])
    with pytest.raises(
        DtrainError, match="line 2: column b is empty" if format == "jsonl" else "column b has a null in row 2."
    ):
        everything(source(format, path))
    if format == "parquet":
        for hole in ([1, None], None):
            write(tmp_path / "lists.parquet", [{"a": [1, 2], "label": 0}] * 4 + [{"a": hole, "label": 0}], group=3)
            made = source("parquet", f"{tmp_path}/lists.parquet", inputs="a")
            with pytest.raises(DtrainError, match=f"column a has a null{' in a list' if hole else ''} in row 5. Drop"):
                everything(made)


@pytest.mark.parametrize(("first", "second", "float_"), [("jsonl", "jsonl", True), ("parquet", "parquet", True)])
def test_a_column_has_one_type_in_all_files(first: str, second: str, float_: bool, source: Any, tmp_path: Path) -> None:
    one = write(tmp_path / f"1.{first}", [{"a": 1, "b": 1, "label": 1}] * 4)
    two = write(tmp_path / f"2.{second}", [{"a": 1, "b": 1, "label": 1.5}] * 4)
    made = source(first, [one, two], holdout=0)
    assert made.take(np.arange(1), np.zeros(1, int))["targets"].is_floating_point() == float_
    three = write(tmp_path / f"3.{second}", [{"a": 1, "b": 1, "label": [1]}] * 4)
    with pytest.raises(DtrainError, match="label holds lists of whole numbers and whole numbers in different files"):
        source(first, [one, three])


def test_a_row_group_is_read_once_for_a_window_of_rows(source: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of a pass in order: each column of a group once, not for every row."""
    made, reads = source("parquet"), list[tuple[int, str]]()
    plain = pq.ParquetFile.read_row_group

    def read(self: Any, group: int, *, columns: Sequence[str], **given: Any) -> Any:
        reads.extend((group, name) for name in columns)
        return plain(self, group, columns=columns, **given)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", read)
    for start in range(0, 48, 8):
        made.take(*made.order(np.arange(start, start + 8), seed=1))
    assert sorted(reads) == [(group, name) for group in range(9) for name in ("a", "b", "label")]


@pytest.mark.parametrize("part", [1, 1 << 22])
def test_columns_are_those_of_pyarrow(part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every type that numbers have, read together and in parts, in an order with repetitions."""
    monkeypatch.setattr(parquetfile, "PART", part)
    types = [pa.int8(), pa.uint64(), pa.float16(), pa.float32(), pa.float64(), pa.bool_(), pa.decimal128(5, 2)]
    numbers = pa.array([number % 2 for number in range(9)])
    arrays = [numbers.cast(pa.float32()).cast(types[number % len(types)]) for number in range(21)]
    arrays.append(pa.array([[1, 2], [3], []] * 3, pa.large_list(pa.int16())))
    arrays.append(pa.array([[True, False]] * 9, pa.list_(pa.bool_(), 2)))
    names = [f"c{number}" for number in range(len(arrays))]
    pq.write_table(pa.Table.from_arrays(arrays, names=names), tmp_path / "a.parquet", row_group_size=6)
    file = ParquetFile(str(tmp_path / "a.parquet"), names, tmp_path / "cache", Groups(1 << 20))
    index = np.array([5, 0, 0, 3])
    theirs = pq.read_table(tmp_path / "a.parquet").take(index)
    for name, column in file.read(0, index).items():
        rows_there = theirs.column(name).to_pylist()
        assert [np.asarray(row, float).tolist() for row in column] == [
            np.asarray(row, float).tolist() for row in rows_there
        ]


def test_rows_are_read_without_pandas(tmp_path: Path) -> None:
    """pyarrow's own conversions import it, which takes half a second and 50 MB."""
    path = write(tmp_path / "rows.parquet", [{"a": 1, "b": [1.5, 2], "c": True, "label": "x"}] * 4)
    program = (
        "import sys, numpy, pathlib; from dtrain.files.parquetfile import Groups, ParquetFile\n"
        f"file = ParquetFile({path!r}, 'a b c label'.split(), pathlib.Path({str(tmp_path)!r}), Groups(1 << 20))\n"
        "print(len(file.read(0, numpy.arange(2))), 'pandas' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout == "4 False\n", done.stderr


def test_lines_of_json_may_begin_with_a_byte_order_mark(source: Any, tmp_path: Path) -> None:
    path = Path(write(tmp_path / "rows.jsonl", rows()))
    plain = everything(source("jsonl", str(path)))
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert everything(source("jsonl", str(path))) == plain
    path.write_bytes(path.read_bytes().splitlines()[0])
    Reader("jsonl", tmp_path / "cache").check(str(path), ["a"])


def test_a_transform_that_fails_is_told_with_the_file_and_line(source: Any) -> None:
    made = source("jsonl", transform=lambda sample, generator: 1 / 0)
    index = made.original(np.array([3]))
    with pytest.raises(
        DtrainError, match=rf"data.transform fails for .*rows.jsonl, line {index[0] + 1}, epoch 0 \(ZeroDiv"
    ):
        made.take(np.array([3]), np.array([0]))


@pytest.mark.parametrize("format", FORMATS)
def test_rows_are_transformed_one_by_one(format: str, source: Any, tmp_path: Path) -> None:
    from data.rows import noisy

    path = write(tmp_path / f"rows.{format}", rows())
    plain, made = source(format, path), source(format, path, transform=noisy)
    index = np.arange(len(made))
    before, first, again, later = (
        each.take(index, index * 0 + epoch) for each, epoch in ((plain, 0), (made, 0), (made, 0), (made, 1))
    )
    assert torch.equal(first["inputs"], again["inputs"]) and not torch.equal(first["inputs"], later["inputs"])
    assert bool((first["inputs"] >= before["inputs"]).all()) and torch.equal(first["targets"], before["targets"])
    assert made.fingerprint == plain.fingerprint and made.loading == "step"
    held = np.arange(len(made.holdout()))
    assert torch.equal(*(each.holdout().take(held, held * 0)["inputs"] for each in (plain, made)))


@pytest.mark.parametrize("label", [9, -100, 1.5])
def test_rows_that_were_added_with_another_class_change_no_fact_of_the_first_rows(
    label: float, source: Any, tmp_path: Path
) -> None:
    path = write(tmp_path / "rows.jsonl", rows())
    before = source("jsonl", path)
    samples, facts = everything(before), before.facts
    write(tmp_path / "rows.jsonl", [*rows(), {**rows(1, first=60)[0], "label": label}])
    after = source("jsonl", path)
    assert after.facts != facts and after.as_of(before.fingerprint)
    assert after.facts == facts and everything(after) == samples
    mixed, grown = (Mixture(of={"a": one}, weights={"a": 1}) for one in (before, source("jsonl", path)))
    assert grown.as_of(mixed.fingerprint) and grown.facts == facts
    assert grown.as_of(mixed.fingerprint), "it says so again"


def test_a_run_goes_on_when_rows_with_a_new_class_were_added(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", rows())
    words = [
        "model=mlp", "data=jsonl", f"data.path={path}", "data.inputs=x", "data.targets=label", "strategy=single", "batch=6",
        "objective=classification", f"data.cache={tmp_path}/cache", "hook=[]", "logger=[]", f"out={tmp_path}/run",
    ]  # fmt: skip
    assert main([*words, "steps=2"]) == 0
    write(tmp_path / "rows.jsonl", [*rows(), {**rows(1)[0], "label": 9}])
    assert main(["evaluate", f"out={tmp_path}/run"]) == 0
    assert main([*words, "steps=3"]) == 0
    assert "1 rows were added since this run began" in (tmp_path / "run/events.jsonl").read_text()


@pytest.mark.parametrize(
    ("name", "text", "given", "sentence"),
    [
        ("a.jsonl", '{"a": 1, "b": NaN, "label": 0}', {}, "line 1: column b is nan: numbers are finite"),
        ("a.jsonl", '{"a": 1, "b": 1e400, "label": 0}', {}, "line 1: column b is inf: numbers are finite"),
        ("a.jsonl", f'{{"a": 1, "b": 2, "label": {2**70}}}', {}, "whole ones have 64"),
        ("a.jsonl", f'{{"a": [1, {2**70}], "b": 2, "label": 1}}', {}, "whole ones have 64"),
        ("a.jsonl", '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", {}, "line 1: this is JSON that is nested too deeply"),
        ("a.jsonl", '{"label": 1}', {"inputs": []}, "there is no input column beside label"),
        ("a.csv", "a,b,label\n1,1_000,0", {}, "column b holds text"),
    ],
)  # fmt: skip
def test_numbers_that_cannot_be_trained_on_are_named(
    name: str, text: str, given: Any, sentence: str, source: Any, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text + "\n")
    with pytest.raises(DtrainError) as error:
        source(name.split(".")[1], **{"path": str(tmp_path / name)} | given)
    assert sentence in str(error.value)
    with pytest.raises(DtrainError, match=r"data\.path is empty"):
        Reader("jsonl", tmp_path).found([])


def test_rows_are_as_long_as_they_are_and_files_have_any_name(source: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "rows [1].jsonl", [{**row, "text": "é" * 600_000} for row in rows(2)])
    assert len(source("jsonl", path, holdout=0)) == 2 and Reader("jsonl", tmp_path).names(path)[0] == "x"
    table = write(tmp_path / "rows.csv", [{**row, "text": "x" * 1_200_000} for row in rows(2)])
    Reader("csv", tmp_path).check(table, ["label"])
    assert len(source("csv", table, holdout=0)) == 2
    with (tmp_path / "rows.csv").open("a") as file:
        file.write("  \n\n")
    Reader("csv", tmp_path).check(table, ["label"])


def test_any_column_of_parquet_has_its_classes(source: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "rows.parquet")
    columns = {"a": [1.0, 2.0], "b.c": [1, 0], "yes": [True, False], "big": pa.array([1, 2**63], pa.uint64())}
    pq.write_table(pa.table({**columns, "text": pa.array(["a", "b"], pa.string_view())}), path)
    assert [source("parquet", path, inputs="a", targets=name).facts["outputs"] for name in ("b.c", "yes")] == [2, 2]
    assert source("parquet", path, inputs="a", targets="text", holdout=0).facts["class_names"] == ["a", "b"]
    with pytest.raises(DtrainError, match="column big has 9223372036854775808"):
        source("parquet", path, inputs="a", targets="big")
    pq.write_table(pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"]), path)
    with pytest.raises(DtrainError, match="has 2 columns of the name a"):
        source("parquet", path, inputs="a", targets="a")


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_an_empty_row_would_be_padding_alone_and_is_refused(format: str, source: Any, tmp_path: Path) -> None:
    path = write(tmp_path / f"empty.{format}", [{"ids": [1, 2], "y": 1}, {"ids": [], "y": 0}, {"ids": [3], "y": 1}])
    words = {"inputs": "ids", "targets": "y", "pad": 0, "path": path, "cache": str(tmp_path / "cache")}
    made = source(format, path, inputs="ids", targets="y", pad=0, holdout=0)
    with pytest.raises(DtrainError, match=r"empty\.\w+, .*2 has an empty row of inputs.* Leave the sample out\."):
        made.take(np.arange(3), np.zeros(3, int))
    told = problem(Reader(format, tmp_path / "cache"), [path], words, trained=None)
    assert f"data.path={path} has 1 of 3 rows without an entry in ids (the first: " in told


@pytest.mark.parametrize("format", FORMATS)
def test_whole_numbers_stay_whole_numbers(format: str, source: Any, tmp_path: Path) -> None:
    table = [{"user": 16777216 + i, "item": i, "price": i / 2, "label": i % 2} for i in range(4)]
    path = write(tmp_path / f"ids.{format}", table)

    def inputs(*names: str, one: bool = False) -> torch.Tensor:
        made = source(format, path, inputs=names[0] if one else [*names], holdout=0)
        taken: torch.Tensor = made.take(np.arange(4), np.zeros(4, int))["inputs"]
        return taken

    assert sorted(inputs("user", "item").tolist()) == [[16777216 + i, i] for i in range(4)]
    assert inputs("user", "item").dtype == torch.int64 and inputs("user").shape == (4, 1)
    assert sorted(inputs("user", one=True).tolist()) == [16777216 + i for i in range(4)], "an id as it is"
    assert inputs("price", one=True).shape == (4, 1) and inputs("user", "price").dtype == torch.float32
    (note,) = source(format, path, inputs=["user", "price"], holdout=0).notes
    assert "column user has 16777219, and beside fractions whole numbers become fp32" in note
    assert not source(format, path, inputs=["item", "price"], holdout=0).notes
    small = MLP(inputs=1, outputs=2, width=4, layers=1)
    assert small(inputs("item", one=True)).shape == (4, 2), "the mlp makes fractions of them itself"


def test_whole_numbers_that_fp32_rounds_are_told_in_lists_and_beside_fractions_of_a_column(
    source: Any, tmp_path: Path
) -> None:
    big = 2**24 + 1
    for format, values, is_told in (
        ("jsonl", [[1.5, 2], [big, 2.5]], True), ("jsonl", [[1.5, 2], [-big, 2]], True), ("jsonl", [[1, 2], [big, 2]], False),
        ("jsonl", [1.5, big], True), ("jsonl", [[1.5, 2], [float(big), 2.5]], False), ("csv", [1.5, big], True), ("csv", [1, big], False),
    ):  # fmt: skip
        path = write(tmp_path / f"{len(str(values))}.{format}", [{"a": value, "label": 0} for value in values])
        notes = source(format, path, inputs=["a"], holdout=0).notes
        assert [f"column a has {big}" in note for note in notes] == [True] * is_told, values


def test_numbers_that_are_not_finite_or_do_not_fit_are_told_with_their_place(source: Any, tmp_path: Path) -> None:
    for value, sentence in (
        ("[[3, NaN]]", "line 2: column a is nan"), ("[1e39]", "line 2: column a is 1e+39"), ("[1.5, NaN]", "column a is nan"),
        ("[[1, 2], [3, -1e300]]", "column a is -1e+300"), ("1e300", "fractions have 32 bits"),
    ):  # fmt: skip
        good = value.replace("NaN", "1").replace("1e300", "1").replace("1e39", "1.5")
        (tmp_path / "a.jsonl").write_text("".join(f'{{"a": {each}, "label": 0}}\n' for each in (good, value)))
        with pytest.raises(DtrainError) as error:
            source("jsonl", str(tmp_path / "a.jsonl"), inputs="a")
        assert sentence in str(error.value)
    (tmp_path / "a.csv").write_text("a,label\n1,0\n1e300,0\n")
    with pytest.raises(DtrainError, match=r"line 3: column a is 1e\+300"):
        source("csv", str(tmp_path / "a.csv"), inputs="a")
    for column, what in (
        ([1.0, 2.0, float("nan")], "NaN"), ([1.0, 2.0, 1e300], "too large for 32 bits"), ([[1.0], [2.0], [float("inf")]], "infinite"),
        ([[[1.0]], [[2.0]], [[float("nan")]]], "NaN"),
    ):  # fmt: skip
        path = str(tmp_path / "a.parquet")
        pq.write_table(pa.table({"a": column, "label": [0, 1, 2]}), path, row_group_size=2)
        made = source("parquet", path, inputs="a", holdout=0)
        with pytest.raises(DtrainError, match=f"column a has .*{what}.* in row 3"):
            made.take(np.arange(3), np.zeros(3, int))


def test_files_that_are_hidden_are_left_out_and_named(tmp_path: Path) -> None:
    folder = tmp_path / ".cache" / "rows"
    for name, value in (
        ("a.csv", 1.5),
        (".a.csv", 8.5),
        (".ipynb_checkpoints/a-checkpoint.csv", 9.5),
        ("sub/b.csv", 2.5),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"x,y\n{value},0\n")
    source = BUILD["csv"](
        path=str(folder), inputs=None, targets="y", holdout=0, outputs=None, cache=str(tmp_path / "cache")
    )
    assert sorted(source.take(np.arange(2), np.zeros(2, dtype=int))["inputs"].flatten().tolist()) == [1.5, 2.5]
    assert len(source) == 2
    assert "2 file(s) that it matches are not read: .a.csv, a-checkpoint.csv" in " ".join(source.notes)


@pytest.mark.parametrize("format", FORMATS)
def test_a_column_that_only_some_rows_have_is_refused_unless_inputs_are_named(
    format: str, source: Any, tmp_path: Path
) -> None:
    plain, more = {"a": 1.5, "b": 2, "label": 1}, {"a": 1.5, "c": 7, "b": 2, "label": 1}
    one, two = write(tmp_path / f"1.{format}", [plain] * 3), write(tmp_path / f"2.{format}", [more] * 3)
    for path in [[one, two], *([write(tmp_path / "3.jsonl", [plain, plain, more])] if format == "jsonl" else [])]:
        with pytest.raises(DtrainError) as error:
            source(format, path, inputs=None)
        assert "has a column c, which" in str(error.value) and "Type 'data.inputs=[a,b]'" in str(error.value)
        assert isinstance(path, list) or f"{path}: line 3: " in str(error.value)
        given = {"path": path, "inputs": None, "targets": "label"}
        paths = path if isinstance(path, list) else [path]
        assert "a column c, which" in problem(Reader(format, tmp_path / "cache"), paths, given, trained=None)
        assert len(source(format, path, holdout=0).facts["inputs"]) == 1, "inputs that are named are read alone"
