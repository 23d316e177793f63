"""`dtrain tokenize` as a user types it: the same shards whatever the processes, killed or not, on disk or S3."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import commands
import numpy as np
import pytest
from data.files import rows, write
from killing import descendants
from pool import ranks
from tokenizer.vocabulary import texts, written

from dtrain.__main__ import main
from dtrain.data.text import encoded
from dtrain.errors import LeaseError, StoreError, WordsError
from dtrain.storage import lease, store
from dtrain.tokenizer import load, shards
from dtrain.verb.tokenize import run


def tokens(to: Path | str) -> list[int]:
    manifest = shards.read(str(to))
    parts = [np.frombuffer(store.read(manifest.url(each)), manifest.facts["dtype"]) for each in manifest.shards]
    return np.concatenate(parts).tolist()


def test_shards_are_the_tokens_of_data_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, to = texts(tmp_path / "texts", 30), tmp_path / "to"
    tokenizer = written(tmp_path / "t.json")
    run([str(folder), f"to={to}", f"tokenizer={tokenizer}", "shard=5KB", "workers=1"])
    manifest = shards.read(str(to))
    cached = encoded(str(folder), load(tokenizer, ""), tmp_path / "cache")
    assert tokens(to) == cached.tokens.tolist()
    ends = np.concatenate([[0], np.cumsum([each["tokens"] for each in manifest.shards])])
    documents = [begin + shards.ends_of(manifest, each) for begin, each in zip(ends, manifest.shards, strict=False)]
    assert np.concatenate(documents).tolist() == cached.ends.tolist()
    printed = capsys.readouterr().out
    assert f"digest {manifest.digest}" in printed
    assert f"next  dtrain data=tokens data.path={to} data.vocab=300" in printed


def test_bytes_are_parted_by_zeros_over_shards_too(tmp_path: Path) -> None:
    to = tmp_path / "to"
    run([write(tmp_path / "rows.jsonl", rows(3000)), f"to={to}", "column=text", "shard=10KB"])
    assert len(shards.read(str(to)).shards) > 1
    assert {*bytes(tokens(to)).split(b"\0")} == {row["text"].encode() for row in rows(3000)}
    cached = encoded(str(tmp_path / "rows.jsonl"), load("bytes", ""), tmp_path / "cache", "text")
    assert tokens(to) == cached.tokens.tolist()


def test_the_same_words_again_change_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(texts(tmp_path / "texts", 5)), f"to={tmp_path / 'to'}"]
    assert run(words) == run(words) == 0
    first, second = (line for line in capsys.readouterr().out.splitlines() if line.startswith("digest"))
    assert first == second
    with pytest.raises(WordsError, match=r"to=.* holds tokens of other text, another tokenizer or another size"):
        run([*words, "shard=7KB"])


def test_a_second_one_at_the_same_place_is_refused(tmp_path: Path) -> None:
    to = str(tmp_path / "to")
    with lease.hold(to), pytest.raises(LeaseError, match=r"to=.* is being written by another run.*to=<another place>"):
        run([str(texts(tmp_path / "texts", 2)), f"to={to}"])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["texts"], "tokenize needs text and a place. Type dtrain tokenize <path or URL> to=<folder or URL>."),
        (["texts", "to=a", "colum=x"], "colum: tokenize does not take it. Did you mean column?"),
        (["texts", "to=a", "shard=big"], "shard=big: it is no size. Type shard=100MB."),
        (["texts", "to=a", "workers=0"], "workers=0: it is a number of processes >= 1. Type workers=4."),
        (["texts", "to=texts/tokens"], "to=texts/tokens: it is a part of texts, so the shards would be text."),
        (["texts", "to=a", "tokenizer="], "tokenizer=: it is empty."),
    ],
)
def test_words_that_are_wrong(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tokenize", *words]) == 2
    assert sentence in capsys.readouterr().err


def test_what_cannot_be_read_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    to = f"to={tmp_path / 'to'}"
    assert main(["tokenize", str(tmp_path / "none.txt"), to]) == 3
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    assert main(["tokenize", str(tmp_path / "a.txt"), to, f"tokenizer={written(tmp_path / 't.json')}"]) == 3
    (tmp_path / "empty.txt").write_bytes(b"")
    assert main(["tokenize", str(tmp_path / "empty.txt"), f"{to}2"]) == 3
    assert main(["tokenize", write(tmp_path / "r.jsonl", rows(3)), f"{to}3", "column=txt"]) == 2
    assert main(["tokenize", str(tmp_path / "a.txt"), f"{to}4", "column=text"]) == 3
    no_file, no_text, nothing, no_column, no_rows = capsys.readouterr().err.strip().splitlines()
    assert "none.txt: no file is there" in no_file
    assert "a.txt: byte 3 is 0xe9, which is not UTF-8" in no_text
    assert "there is no text in 1 file(s)" in nothing
    assert "has no column txt. Did you mean text?" in no_column
    assert "data.column is a column of files" in no_rows or "column is a column of files" in no_rows
    assert not (tmp_path / "to2" / shards.MANIFEST).exists()


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [str(texts(tmp_path / "texts", 4)), f"to={tmp_path / 'to'}"]
    real = store.write

    def full(url: str, data: bytes) -> None:
        if url.endswith(".bin"):
            raise StoreError.during("write", url, "No space left on device", kind="full")
        real(url, data)

    monkeypatch.setattr(store, "write", full)
    with pytest.raises(StoreError, match=r"no space is left there\. Free some and type it again"):
        run(words)
    monkeypatch.undo()
    assert run(words) == 0


def test_s3_gets_the_same(tmp_path: Path, s3: str) -> None:
    """From a fork: a client of S3 starts threads."""
    words = [str(texts(tmp_path / "texts", 8)), "shard=4KB"]
    run([*words, f"to={tmp_path / 'to'}"])
    to = f"{s3}/{tmp_path.name}"
    done = commands.run("tokenize", *words, f"to={to}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr

    def digest() -> None:
        assert shards.read(to).digest == shards.read(str(tmp_path / "to")).digest
        assert tokens(to) == tokens(tmp_path / "to")

    ranks(1, digest)


def test_a_tokenizer_of_another_vocabulary_is_refused_before_launch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to = tmp_path / "to"
    run([str(texts(tmp_path / "texts", 30)), f"to={to}", f"tokenizer={written(tmp_path / 't.json')}"])
    words = ["data=tokens", f"data.path={to}", "model.layers=1", "data.sequence=16", f"out={tmp_path / 'run'}"]
    assert main([*words, "data.vocab=50257"]) == 3
    assert "its tokens are of a tokenizer with 300, not of data.vocab=50257. Type data.vocab=300" in (
        capsys.readouterr().err
    )
    (to / "tokens-00000.bin").write_bytes(b"torn")
    assert main([*words, "data.vocab=320"]) == 3
    assert "tokens-00000.bin has 4 bytes, and tokens.json says" in capsys.readouterr().err


@pytest.mark.campaign("network")
def test_shards_on_s3_train_as_those_on_disk(tmp_path: Path, s3: str) -> None:
    """Two ranks, resumed as one; every block comes by a range of its file."""
    words = [str(texts(tmp_path / "texts", 60)), f"tokenizer={written(tmp_path / 't.json')}"]
    losses = []
    for to in (str(tmp_path / "to"), f"{s3}/{tmp_path.name}-tokens"):
        assert commands.run("tokenize", *words, f"to={to}", cwd=tmp_path).returncode == 0
        out = tmp_path / f"run{len(losses)}"
        train = [
            "data=tokens",
            f"data.path={to}",
            "data.vocab=300",
            "data.sequence=16",
            "model.layers=1",
            "model.width=16",
        ]
        train += ["model.heads=2", "hook=[]", "steps=6", "batch=4", f"out={out}", f"data.cache={tmp_path / 'cache'}"]
        several = ["devices=2", "strategy=ddp", "stop_after=3"] if losses else ["devices=1"]
        for each in (several, ["devices=1"]) if losses else (several,):
            done = commands.run(*train, *each, cwd=tmp_path)
            assert done.returncode == 0, done.stderr
        losses.append([json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()])
    assert len(losses[0]) == len(losses[1]) == 6
    assert losses[1] == pytest.approx(losses[0], abs=2e-6)
    assert list((tmp_path / "cache").rglob("*.block"))


@pytest.mark.campaign("kills")
def test_killed_twenty_times_it_ends_with_the_same_digest(tmp_path: Path) -> None:
    """Nine times in ten all of it, else one process that encodes; as with one process that nobody kills."""
    folder, tokenizer = texts(tmp_path / "texts", 620, 30_000), written(tmp_path / "t.json", 1000)
    words = [str(folder), f"tokenizer={tokenizer}", "shard=400KB"]
    assert run([*words, f"to={tmp_path / 'one'}", "workers=1"]) == 0
    to, random_ = tmp_path / "many", random.Random(0)
    kills = starts = 0
    deadline = time.monotonic() + 600
    while not (to / shards.MANIFEST).exists():
        assert time.monotonic() < deadline
        starts += 1
        program = subprocess.Popen(
            [sys.executable, "-m", "dtrain", "tokenize", *words, f"to={to}", "workers=2"],
            start_new_session=True, stdout=subprocess.DEVNULL, cwd=tmp_path,
        )  # fmt: skip
        seen = len(list(to.glob("*.bin"))) if to.exists() else 0
        while kills < 20 and program.poll() is None and time.monotonic() < deadline:
            time.sleep(random_.uniform(0.05, 0.4))
            workers = sorted(descendants(program.pid) - {program.pid})
            if workers and random_.random() < 0.3:
                os.kill(random_.choice(workers), signal.SIGKILL)
                kills += 1
            elif to.exists() and len(list(to.glob("*.bin"))) > seen:  # so that the next one goes on
                os.killpg(program.pid, signal.SIGKILL)
                kills += 1
                break
        program.wait(120)
        assert program.returncode in (0, -signal.SIGKILL)
    assert kills == 20 and starts > 5
    assert shards.read(str(to)).digest == shards.read(str(tmp_path / "one")).digest
    assert tokens(to) == tokens(tmp_path / "one")
    assert json.loads((to / shards.MANIFEST).read_text())["documents"] == 620
