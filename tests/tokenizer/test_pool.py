"""Documents are encoded in their order, whatever the processes do."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tokenizer.vocabulary import written

from dtrain.errors import PreflightError
from dtrain.tokenizer import Vocabulary, pool
from dtrain.tokenizer.pool import Document, Pool, encode


@pytest.fixture
def vocabulary(tmp_path: Path) -> Vocabulary:
    return Vocabulary(Path(written(tmp_path / "t.json")).read_bytes(), "tokenizer")


def documents(count: int) -> Iterator[Document]:
    return (Document(f"{number}.txt", f"text {number} é ".encode() * (number % 40)) for number in range(count))


def tokens(groups: Iterator[pool.Encoded]) -> tuple[list[int], list[int]]:
    made = list(groups)
    return np.concatenate([each.tokens for each in made]).tolist(), np.concatenate([g.lengths for g in made]).tolist()


def test_processes_give_the_same_in_the_same_order(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "ALONE", 1)
    monkeypatch.setattr(pool, "GROUP_DOCUMENTS", 7)
    alone = tokens(encode(documents(200), vocabulary, processes=1))
    assert tokens(encode(documents(200), vocabulary, processes=2)) == alone
    assert alone[1] == [len(vocabulary.encode(each.text)) for each in documents(200)]


def test_the_group_of_a_process_that_dies_is_encoded_again(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "GROUP_DOCUMENTS", 5)
    groups = list(pool._groups(documents(100)))
    expected = tokens(encode(documents(100), vocabulary, processes=1))
    made = []
    with Pool(vocabulary, 1) as processes:
        for number, each in enumerate(processes.encoded(iter(groups))):
            if number in (3, 9):
                os.kill(processes.pids[0], signal.SIGKILL)
            made.append(each)
        (last,) = processes.pids
    assert tokens(iter(made)) == expected
    with pytest.raises(ProcessLookupError):
        os.kill(last, 0)  # it ended with the context


def test_a_group_at_which_processes_die_is_named(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "TRIES", 1)
    monkeypatch.setattr(pool, "GROUP_DOCUMENTS", 3)
    with Pool(vocabulary, 1) as processes:
        answers = processes.encoded(pool._groups(documents(30)))
        next(answers)
        os.kill(processes.pids[0], signal.SIGKILL)
        with pytest.raises(PreflightError, match=r"1 processes died while they encoded the 3 texts from \d+\.txt on"):
            list(answers)


@pytest.mark.parametrize("processes", [1, 2])
def test_text_that_is_none_is_told_with_file_and_offset(
    vocabulary: Vocabulary, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "ALONE", 1)
    monkeypatch.setattr(pool, "GROUP_DOCUMENTS", 1)
    bad = [Document("a.txt", b"fine"), Document("b.txt", b"fine"), Document("c.txt", b"12345\xe9")]
    with pytest.raises(PreflightError, match=r"c\.txt: byte 5 is 0xe9, which is not UTF-8\. Write it again as UTF-8"):
        list(encode(bad, vocabulary, processes=processes))
