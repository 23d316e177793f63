"""Token files that change under a run: it ends with their name, and no checkpoint holds what it learnt of other tokens."""

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import COMMAND, Forked
from launching import wait_for_step

from dtrain.checkpoint.commit import find

WORDS = [
    "model=gpt", "model.layers=1", "model.width=16", "model.heads=2", "data=tokens", "data.vocab=64", "data.sequence=16",
    "objective=next_token", "batch=4", "backend=gloo", "logger=[]", "log.every=1",
]  # fmt: skip
RANKS = {"one rank": [], "two ranks": ["devices=2", "launcher=local"]}


def started(tmp_path: Path, *words: str) -> Forked:
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    (tmp_path / "scratch").mkdir(exist_ok=True)
    named = {"data.path": f"{tmp_path}/tokens.bin", "out": f"{tmp_path}/out", "steps": "1000000"}
    named |= dict(word.split("=", 1) for word in words)
    asked = [*COMMAND, *WORDS, *(f"{key}={value}" for key, value in named.items())]
    return Forked(asked, env={**os.environ, "TMPDIR": str(tmp_path / "scratch")}, **pipes)


def ends(tmp_path: Path, cut: bool, words: Sequence[str]) -> tuple[int, str]:
    """(exit code, output) of a run whose tokens are cut, or written anew, after some steps."""
    path = tmp_path / "tokens.bin"
    tokens = np.random.default_rng(0).integers(0, 64, 4_000_000).astype(np.uint16)
    tokens.tofile(path)
    process = started(tmp_path, *words)
    wait_for_step(tmp_path / "out", 10)
    if cut:
        os.truncate(path, 4096)
    else:
        with path.open("r+b") as file:
            file.write(np.roll(tokens, 1).tobytes())
    output, _ = process.communicate(timeout=120)
    return process.returncode, output


@pytest.mark.parametrize("ranks", RANKS)
def test_tokens_written_anew_end_the_run_before_its_next_commit(ranks: str, tmp_path: Path) -> None:
    code, output = ends(tmp_path, False, ["checkpoint.every=5", *RANKS[ranks]])
    assert code == 3, output
    assert f"{tmp_path}/tokens.bin was written to while the run reads it" in output
    assert json.loads((tmp_path / "out/failure.json").read_text())["step"] > find(str(tmp_path / "out"))[1]["step"]
    again = started(tmp_path)
    output, _ = again.communicate(timeout=120)
    assert again.returncode == 2 and "was trained on other data" in output, output


@pytest.mark.parametrize("form", ["bin", "npy"])
def test_tokens_changed_between_two_starts_are_refused_and_no_checkpoint_is_blamed(form: str, tmp_path: Path) -> None:
    path = tmp_path / f"tokens.{form}"
    tokens = np.random.default_rng(0).integers(0, 64, 4_000_000).astype(np.uint16)

    def save() -> None:
        tokens.tofile(path) if form == "bin" else np.save(path, tokens)

    def run(*words: str) -> tuple[int, str]:
        asked = ["steps=40", "checkpoint.every=10", f"data.path={path}", *words]
        process = started(tmp_path, *asked)
        output, _ = process.communicate(timeout=120)
        return process.returncode, output

    save()
    assert run("stop_after=20")[0] == 0
    os.utime(path, (7, 7))
    assert run("stop_after=15")[0] == 0, "its time is no content"
    with path.open("r+b") as file:
        file.seek(4_000_300)
        file.write(bytes(64))
    os.utime(path, (7, 7))
    code, output = run()
    assert code == 2 and "passed over" not in output, output
    assert f"the checkpoint was trained on other data: {path} has as many bytes, and other content" in output
    save()
    code, output = run()
    assert code == 0 and find(str(tmp_path / "out"))[1]["step"] == 40, output


@pytest.mark.parametrize("ranks", RANKS)
def test_tokens_that_are_cut_are_named_where_the_process_would_end_by_a_signal(ranks: str, tmp_path: Path) -> None:
    code, output = ends(tmp_path, True, ["checkpoint.every=0", *RANKS[ranks]])
    assert code == 1, output
    assert f"SIGBUS: {tmp_path}/tokens.bin was cut from 8000000 to 4096 bytes, at dtrain/data/windows.py" in output
    assert "start again" not in output
