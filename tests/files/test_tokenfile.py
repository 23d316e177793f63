"""Files of tokens before the launch: what they hold is known without torch, so a run that cannot train on them does not begin."""

from pathlib import Path

import numpy as np
import pytest
from small import plan

from dtrain.files import tokenfile
from dtrain.files.tokenfile import outside
from dtrain.launcher import preflight


def problems(path: Path | str, *words: str) -> list[str]:
    return preflight.missing(plan("model=gpt", "data=tokens", f"data.path={path}", "data.sequence=8", *words))


def test_a_vocabulary_smaller_than_the_tokens_is_refused_before_the_launch(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(5000, dtype=np.uint16) % 251)
    np.save(tmp_path / "b.npy", np.full(5000, 260, dtype=np.uint16))
    assert problems(tmp_path / "a.npy", "data.vocab=251") == []
    assert problems(tmp_path / "a.npy", "data.vocab=100") == [
        f"data.path={tmp_path / 'a.npy'}: token 250 is outside data.vocab=100. Type data.vocab=251 or more."
    ]
    assert problems(tmp_path / "a.npy", "data.vocab=251", f"data.holdout_path={tmp_path / 'b.npy'}") == [
        f"data.holdout_path={tmp_path / 'b.npy'}: token 260 is outside data.vocab=251. Type data.vocab=261 or more."
    ]


@pytest.mark.parametrize(
    ("name", "array", "problem"),
    [
        ("square", np.ones((5, 5), dtype=np.uint16), "one row of integers is expected, not 2 dims of uint16"),
        ("float", np.ones(50), "one row of integers is expected, not 1 dims of float64"),
        ("negative", np.full(50, -1, dtype=np.int32), "token -1 is negative"),
    ],
    ids=["square", "float", "negative"],
)
def test_what_is_no_token_file_is_refused_before_the_launch(
    tmp_path: Path, name: str, array: np.ndarray, problem: str
) -> None:
    np.save(tmp_path / f"{name}.npy", array)
    (sentence,) = problems(tmp_path / f"{name}.npy", "data.vocab=300")
    assert sentence.startswith(f"data.path={tmp_path / name}.npy: ") and problem in sentence


def test_a_bin_that_is_read_as_another_type_is_refused(tmp_path: Path) -> None:
    np.arange(200, dtype=np.uint32).tofile(tmp_path / "a.bin")
    assert problems(tmp_path / "a.bin", "data.vocab=200", "data.dtype=uint32") == []
    np.full(101, 9, dtype=np.uint8).tofile(tmp_path / "b.bin")
    (sentence,) = problems(tmp_path / "b.bin", "data.vocab=200")
    assert "cannot read tokens of" in sentence


@pytest.mark.parametrize("most", [None, 100, 7, 1000])
def test_of_many_tokens_some_of_every_part_are_looked_at(monkeypatch: pytest.MonkeyPatch, most: int | None) -> None:
    monkeypatch.setattr(tokenfile, "CHUNK", 64)
    arrays = [np.arange(300), np.arange(300, 1000), np.arange(0)]
    assert outside(arrays, 1000, most=most) == ""
    assert outside(arrays, 200, most=most).startswith("token ")
    if most is None:
        assert outside(arrays, 999) == "token 999 is outside data.vocab=999. Type data.vocab=1000 or more."
