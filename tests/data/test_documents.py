"""Documents in an order that depends on their names; from any of them on."""

from pathlib import Path

import pytest
from data.files import rows, write

from dtrain.data.documents import documents_of


@pytest.mark.parametrize("format", ["txt", "jsonl", "parquet"])
def test_documents_are_read_from_any_of_them_on(format: str, tmp_path: Path) -> None:
    if format == "txt":
        for number in range(30):
            (tmp_path / f"{number}.txt").write_text(f"text {number}")
        found = documents_of(str(tmp_path / "*.txt"), None, tmp_path / "cache")
    else:
        path = write(tmp_path / f"rows.{format}", rows(30))
        found = documents_of(str(path), "text", tmp_path / "cache")
    whole = list(found.read(0))
    assert found.count == len(whole) == len({each.text for each in whole}) == 30
    assert [each.text for each in whole] != sorted(each.text for each in whole)
    for first in (1, 17, 29, 30):
        assert list(found.read(first)) == whole[first:]


def test_a_row_has_a_name(tmp_path: Path) -> None:
    table = rows(5)
    path = write(tmp_path / "rows.jsonl", table)
    for name, text in documents_of(str(path), "text", tmp_path / "cache").read(0):
        number = int(name.removeprefix(f"{path}, row "))
        assert table[number - 1]["text"].encode() == text


def test_half_of_a_pair_of_surrogates_comes_through_as_no_text(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a\\ud800"}\n')
    (only,) = documents_of(str(tmp_path / "rows.jsonl"), "text", tmp_path / "cache").read(0)
    with pytest.raises(UnicodeDecodeError):
        only.text.decode()
