"""Whole documents of text and of token shards, packed: each once and by itself, and trained on like padded rows."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data.packs import VOCAB, WINDOW, documents, padded, written
from data.test_packing import GPT, one_step, unlike, windows
from data.test_stream import stream
from small import plan

from dtrain.build import build
from dtrain.data import packing
from dtrain.errors import PreflightError
from dtrain.launcher.preflight import files_of
from dtrain.planned import BatchShape
from dtrain.tokenizer import shards
from dtrain.tokenizer.pool import Encoded

ROWS = documents(42, seed=4)


def text(folder: Path, count: int = 60, **given: Any) -> Any:
    lines = [json.dumps({"text": f"{number}:" + "ab" * (number % 9)}) for number in range(count)]
    (folder / "a.jsonl").write_text("\n".join(lines))
    return build(
        {
            "_target_": "dtrain.data.text.build", "path": str(folder / "a.jsonl"), "column": "text", "sequence": WINDOW,
            "tokenizer": "bytes", "holdout": 0.0, "cache": str(folder / "cache"), "packing": "pack",
        } | given
    )  # fmt: skip


def shard(to: str, rows: list[list[int]] = ROWS, *, size: int = 400) -> str:
    about = {"tokenizer": "t", "vocab": VOCAB, "dtype": "uint16", "path": "texts"}
    groups = (Encoded(np.array([len(row)]), np.array(row, np.uint16)) for row in rows)
    shards.Writer(to, identity="x", size=size, about=about).write(groups, tell=lambda shard: None)
    return to


def tokens(path: str, cache: Path, **given: Any) -> dict[str, Any]:
    return {
        "_target_": "dtrain.data.tokens.build", "path": path, "holdout_path": None, "holdout": 0.0, "vocab": VOCAB, "sequence": WINDOW,
        "dtype": "uint16", "cache": str(cache), "packing": "pack",
    } | given  # fmt: skip


def test_each_document_of_text_is_in_one_window(tmp_path: Path) -> None:
    made = text(tmp_path, holdout=0.2)
    train, held = ([row for window in windows(each) for row in window] for each in (made, made.holdout()))
    texts = [bytes(row).removeprefix(b"\0").decode() for row in train + held]
    assert sorted(texts) == sorted(f"{number}:" + "ab" * (number % 9) for number in range(60))
    assert 0.1 < len(b"".join(map(bytes, held))) / len(b"".join(map(bytes, train + held))) < 0.3
    assert made.decode(made.encode("ab")) == "ab" and made.sequence == WINDOW
    assert {**made.facts} == {"vocab": 256, "kind": "int64", "documents": True}


@pytest.mark.parametrize("storage", ["local", "memory"])
def test_each_document_of_shards_is_in_one_window_wherever_they_are(storage: str, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "BLOCK", 64)
        to = shard(str(tmp_path / "to") if storage == "local" else f"memory://{tmp_path.name}")
        local = shard(str(tmp_path / "local"))
    made, other = (build(tokens(path, tmp_path / "cache")) for path in (to, local))
    whole = [row for window in windows(made) for row in window]
    assert sorted(whole) == sorted(ROWS)
    index, epoch = made.order(np.arange(2 * len(made)), seed=3)
    assert sorted(index.tolist()) == sorted([*range(len(made))] * 2) and epoch.max() == 1
    assert other.fingerprint == made.fingerprint
    assert other.order(np.arange(9), seed=3)[0].tolist() == index[:9].tolist()


def test_documents_that_are_held_out_come_from_their_own_shards_or_the_end(tmp_path: Path) -> None:
    path, other = shard(str(tmp_path / "to")), shard(str(tmp_path / "other"), [[7] * 5, [8] * 9])
    made = build(tokens(path, tmp_path / "cache", holdout=0.3))
    held = sorted(row for window in windows(made.holdout()) for row in window)
    assert held and sorted([*held, *(row for window in windows(made) for row in window)]) == sorted(ROWS)
    assert held == sorted(ROWS[-len(held) :])
    own = build(tokens(path, tmp_path / "cache", holdout_path=other))
    assert windows(own.holdout()) == [[[7] * 5, [8] * 9]]
    assert sum(map(len, windows(own))) == len(ROWS) and own.fingerprint != made.fingerprint


def test_a_step_is_the_same_on_any_ranks_and_after_a_stop(tmp_path: Path) -> None:
    make = partial(build, tokens(shard(str(tmp_path / "to")), tmp_path / "cache"))

    def steps(shape: BatchShape, rank: int, begin: int, count: int) -> list[Any]:
        walking = stream(make(), shape, rank=rank)
        if begin:
            walking.skip((), seen=begin * shape.size)
        parts = [[part["inputs"]["input_ids"].tolist() for part in next(walking).microbatches] for _ in range(count)]
        walking.close()
        return [[row for part in step for row in part] for step in parts]

    whole = steps(BatchShape(4, 4, 1, 1), 0, 0, 9)
    for begin in (0, 5):
        shares = [steps(BatchShape(4, 1, 2, 2), rank, begin, 4) for rank in (0, 1)]
        assert [one + other for one, other in zip(*shares, strict=True)] == whole[begin : begin + 4]


@pytest.mark.parametrize("degrees", [{}, pytest.param({"cp": 2}, marks=pytest.mark.campaign("documents"))])
def test_losses_and_gradients_are_those_of_padded_rows(degrees: dict[str, int], tmp_path: Path) -> None:
    data = tokens(shard(str(tmp_path / "to")), tmp_path / "cache")
    count = len(build(data))
    reference = one_step(GPT, padded(written(tmp_path / "a.jsonl", ROWS)), len(ROWS), {}, microbatch=len(ROWS))
    far = unlike(one_step(GPT, data, count, degrees, microbatch=count), reference)
    assert max(far.values()) < 2e-6, far


def test_files_that_do_not_say_where_documents_end_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(12, dtype=np.uint16))
    path = shard(str(tmp_path / "to"))
    for given in ({"path": str(tmp_path / "a.npy")}, {"holdout_path": str(tmp_path / "a.npy")}):
        with pytest.raises(PreflightError, match=r"a\.npy: data\.packing=pack needs to know where documents end"):
            build(tokens(path, tmp_path / "cache") | given)
    planned = plan("data=tokens", "data.path=a", "data.packing=pack", "data.sequence=1", f"data.vocab={VOCAB}")
    said = [*files_of("data", {**planned.data, "path": str(tmp_path / "a.npy")}, planned)]
    assert "a.npy: data.packing=pack needs to know where documents end" in said[0]
    longer = shard(str(tmp_path / "longer"), [[1, 2], [3, 4, 5]])
    said = [*files_of("data", {**planned.data, "path": longer}, planned)]
    assert "all 2 rows are longer, the shortest has 2 tokens" in said[0]
    with pytest.raises(PreflightError, match="longer, the shortest has"):
        len(text(tmp_path, sequence=1))


def test_packs_of_many_documents_are_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = shard(str(tmp_path / "to"))
    expected = windows(build(tokens(path, tmp_path / "cache")))
    monkeypatch.setattr(packing, "KEPT", 10)
    assert windows(build(tokens(path, tmp_path / "cache"))) == expected
    monkeypatch.setattr(packing, "packed", None)
    again = build(tokens(path, tmp_path / "cache"))
    assert windows(again) == expected and "42 rows are packed" in again.notes[0]
