"""What is told of files of rows before a run: both ends of each file, or every row where they are few."""

from pathlib import Path
from typing import Any

import fsspec
import pytest
from data.files import rows, write

from dtrain.files import rowfile, rowindex
from dtrain.files.rowfile import Reader, problem
from dtrain.launcher import preflight

DATA = {"inputs": ["a", "b"], "targets": "label"}


def told(path: str, format: str, cache: Path, **given: Any) -> str:
    reader = Reader(format, cache)
    return problem(reader, reader.found(path), {"path": path} | DATA | given, trained=given.pop("trained", None))


@pytest.mark.parametrize("format", ["jsonl", "csv", "parquet"])
def test_nothing_is_told_of_good_files(format: str, tmp_path: Path) -> None:
    assert told(write(tmp_path / f"a.{format}", rows()), format, tmp_path / "cache") == ""


@pytest.mark.parametrize("early", [0, 1 << 26])
@pytest.mark.parametrize(
    ("format", "cut", "sentence"),
    [
        ("jsonl", 9, "its last row, line 60, is torn: this is no JSON"),
        ("csv", 16, "its last row, line 121, is torn: a row has 4 columns, and this one 1"),
        ("csv", 1, ""),
        ("parquet", 9, "its end is missing, so it is torn"),
    ],
)
def test_a_torn_end_is_told_with_its_line(
    format: str, cut: int, sentence: str, early: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rowfile, "EARLY", early)
    path = Path(write(tmp_path / f"a.{format}", rows()))
    path.write_bytes(path.read_bytes()[:-cut])
    text = told(str(path), format, tmp_path / "cache")
    assert text.startswith(f"data.path={path}: {sentence}") if sentence else text == ""


def test_a_torn_end_elsewhere_is_told_without_its_line(tmp_path: Path) -> None:
    data = Path(write(tmp_path / "a.jsonl", rows())).read_bytes()[:-9]
    fsspec.filesystem("memory").pipe_file("/torn/a.jsonl", data)
    assert "its last row is torn" in told("memory://torn/a.jsonl", "jsonl", tmp_path / "cache")


def test_a_file_that_changed_is_told_to_a_run_with_checkpoints(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", rows())
    (file,) = Reader("jsonl", tmp_path / "cache").opened([path], ["a", "b", "label"])
    trained = rowfile.fingerprint([file], 60)
    write(tmp_path / "a.jsonl", rows(61))
    assert told(path, "jsonl", tmp_path / "cache", trained=trained) == "", "the run goes on with the rows that it has"
    write(tmp_path / "a.jsonl", rows(61, first=1))
    for _ in range(2):
        text = told(path, "jsonl", tmp_path / "cache", trained=trained)
        assert "the files changed since this run began" in text and "other 60 first rows" in text
    assert told(path, "jsonl", tmp_path / "cache") == "", "another run makes an index of it"
    write(tmp_path / "a.jsonl", rows())
    assert told(path, "jsonl", tmp_path / "cache", trained=trained) == "", "it was put back"
    write(tmp_path / "a.jsonl", rows(61, first=1))
    assert told(path, "jsonl", tmp_path / "cache") == "", "a new run makes a new one"


def test_the_words_of_a_folder_are_its_files_of_that_kind(tmp_path: Path) -> None:
    write(tmp_path / "d/a.jsonl", rows())
    (tmp_path / "d/readme.txt").write_text("not rows")
    assert rowindex.found(str(tmp_path / "d"), [".jsonl"]) == [f"{tmp_path}/d/a.jsonl"]
    assert len(rowindex.found(str(tmp_path / "d"))) == 2


def test_preflight_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from small import plan

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path, words = write(tmp_path / "a.jsonl", rows()), ("model=mlp", "objective=regression", "data=jsonl")
    made = plan(*words, f"data.path=[{path}]", "data.inputs=x", "data.targets=lable", f"out={tmp_path}/run")
    assert preflight.missing(made) == [f"data.path={path} has no column lable. Did you mean label?"]
    made = plan(*words, f"data.path=[{path},{tmp_path}/*.none]", "data.targets=label", f"out={tmp_path}/run")
    assert preflight.missing(made) == [f"data.path={tmp_path}/*.none: no file is there."]
    made = plan("data=text", f"data.path={path}", "data.column=ids", f"out={tmp_path}/run")
    assert preflight.missing(made) == ["data.column=ids: the column holds lists of whole numbers. Name one of text."]
