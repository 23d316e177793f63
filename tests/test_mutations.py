"""Ten thousand slips of the pen: a message of a few lines and exit code 2 or 3, or a valid plan; never a traceback, a hang or a launched process.

python -m pytest tests/test_mutations.py -m slow
"""

import contextlib
import io
import re
import shutil
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mutants import Mutant, mutant, write
from pool import ranks

from dtrain.__main__ import main
from dtrain.cluster import Cluster
from dtrain.compose import compose
from dtrain.errors import WordsError
from dtrain.launcher import preflight
from dtrain.launcher.external import External
from dtrain.launcher.inline import Inline
from dtrain.launcher.local import Local
from dtrain.lifecycle import failure
from dtrain.planned import Plan
from dtrain.resolve import resolve
from dtrain.sweep.engine import Engine
from dtrain.sweep.workers import Workers
from dtrain.train import train

MOST_LINES = 12
SECONDS = 20
PARTS = 10
MET = (2950, 4176, 6808, 8346, 8986, 9031, 20507, 23864, 24377, 26942)
"""Seeds beyond the first 500 that were answered badly once."""


class Launched(BaseException):
    """The words were taken, and ranks would start now."""


@pytest.fixture(autouse=True)
def _nothing_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder to be in, and a launch that only says so."""

    def launch(*_: Any) -> Any:
        raise Launched

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    for launcher in (Inline, Local, External):
        monkeypatch.setattr(launcher, "launch", launch)
    monkeypatch.setattr(Engine, "run", launch)
    monkeypatch.setattr(Workers, "run", launch)
    monkeypatch.setattr(preflight, "check", lambda *_, **__: None)
    monkeypatch.setattr(failure, "save", lambda *_: None)
    monkeypatch.setattr("dtrain.storage.patience.PATIENCE", 0.2)
    monkeypatch.setattr("dtrain.storage.patience.UNREACHED", 0.2)


@contextlib.contextmanager
def limit(seconds: float) -> Iterator[None]:
    def late(*_: Any) -> None:
        raise TimeoutError

    before = {number: signal.signal(number, late) for number in (signal.SIGALRM, signal.SIGPROF)}
    signal.setitimer(
        signal.ITIMER_PROF, seconds
    )  # of computing, which a busy machine does not stretch; and many more of waiting
    signal.setitimer(signal.ITIMER_REAL, 20 * seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def typed(words: tuple[str, ...]) -> tuple[int, str]:
    """Exit code, and what was said of mistakes; a launch is 0."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()), limit(SECONDS):
        try:
            code = main(words)
        except Launched:
            code = 0
    return code, said.getvalue()


def judge(one: Mutant, folder: Path) -> str | None:
    """What is wrong with the answer to a mutant."""
    write(one, folder)
    try:
        code, said = typed(one.words)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    lines = said.splitlines()
    errors = [line for line in lines if line.startswith("dtrain: ")]
    if code not in (0, 2, 3):
        return f"exit code {code}: {said}"
    if code == 0:
        return None
    if not errors or "Traceback" in said or "fault of dtrain" in said or len(lines) > MOST_LINES * len(errors):
        return said or "silence"
    if max(map(len, lines)) > 1500:
        return f"a line of {max(map(len, lines))} characters: {said[:300]}"
    return None


def run(seeds: Sequence[int], folder: Path) -> None:
    wrong = [
        f"{seed}: {mutant(seed)}\n   {problem[:600]}" for seed in seeds if (problem := judge(mutant(seed), folder))
    ]
    assert not wrong, f"{len(wrong)} of {len(seeds)}\n" + "\n".join(wrong[:20])


@pytest.mark.campaign("fuzz")
def test_slips_are_answered(tmp_path: Path) -> None:
    run([*range(500), *MET], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_ten_thousand_slips_are_answered(part: int, tmp_path: Path) -> None:
    run(range(part * 1000, (part + 1) * 1000), tmp_path)


SMALL = ("steps=2", "evaluate.samples=4", "checkpoint.every=0", "stop_after=null", "time_limit=null", "resume=auto")
SMALLER = [(model, word) for model in ("model=gpt", "model=moe") for word in ("model.layers=2", "model.width=32")] + [
    ("data=text", "data.sequence=16"),
    ("data=tokens", "data.sequence=16"),
    ("data=tokens", "data.vocab=256"),
]
MOST_RANKS = 4


def shrunk(one: Mutant, folder: Path, corpus: Path) -> Plan | None:
    """The plan of a mutant that was taken, short and small; None when it was not, or has more ranks than a test may start."""
    write(one, folder)
    words = [word for word in one.words[1:] if word.split("=")[0].lstrip("+") not in ("out", "schedule.warmup", "init")]
    if one.words[0] not in ("plan", "train"):
        return None
    try:
        choices = compose(words).choices
        small = [word for group, word in SMALLER if choices[group.split("=")[0]] == group.split("=")[1]]
        config = compose([*small, *words, *SMALL, f"out={folder}/run-{one.seed}"])
        if config.choices["data"] == "text":
            config.data["path"] = str(corpus)
        plan = resolve(config, Cluster(gpus=0, cpus=4))
    except WordsError:
        return None
    weights = plan.model.get("width", 0) * plan.model.get("layers", 1)
    small_enough = plan.world <= MOST_RANKS and plan.batch.size <= 64 and weights <= 1024
    return plan if small_enough and not preflight.missing(plan) else None


def train_some(count: int, seeds: range, folder: Path, corpus: Path) -> None:
    """The first `count` mutants that are taken train two steps."""
    np.save(folder / "tokens.npy", np.arange(5000, dtype=np.uint16) % 251)
    trained, wrong = 0, []
    for seed in seeds:
        plan = shrunk(mutant(seed), folder, corpus)
        if plan is None or trained == count:
            continue
        trained += 1
        try:
            results = ranks(plan.world, train, plan)
            if any(
                (result.status, result.step) != ("finished", 2) and result.status != "spiked" for result in results
            ):  # optim.lr=3e33
                wrong.append(f"{mutant(seed)}: {results[0]}")
        except Exception as error:
            wrong.append(f"{mutant(seed)}: {str(error)[-600:]}")
        shutil.rmtree(folder / f"run-{seed}", ignore_errors=True)
    assert not wrong, "\n".join(wrong[:10])
    assert trained == count


@pytest.mark.campaign("fuzz")
def test_what_was_taken_trains(tmp_path: Path, corpus: Path) -> None:
    train_some(8, range(10_000, 10_500), tmp_path, corpus)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_a_thousand_that_were_taken_train(part: int, tmp_path: Path, corpus: Path) -> None:
    train_some(100, range(part * 2000, (part + 1) * 2000), tmp_path, corpus)


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("startegy=fsdp", "strategy"), ("optm.lr=1", "optim.lr"), ("stesp=3", "steps"), ("mesh.dp_shrad=2", "mesh.dp_shard"), ("checkpoint.evry=3", "checkpoint.every"),
        ("model.layrs=3", "model.layers"), ("model=gtp", "gpt"), ("optim=adamv", "adamw"), ("+stratgy=fsdp", "strategy"), ("++optim.lrr=1", "optim.lr"),
        ("strategy=fsdp strategy.reshrad=never", "strategy.reshard"), ("strategy=fsdp strategy.reshard=nevr", "never"), ("resume=nevr", "never"),
        ("--learning-rate=3", "optim.lr"), ("--optim.lr 3", "optim.lr=3"), ("pipeline.schedul=gpipe", "pipeline.schedule"), ("sequence=32", "data.sequence"),
    ],
)  # fmt: skip
def test_a_near_miss_is_told_the_right_word(words: str, key: str) -> None:
    code, said = typed(("plan", *words.split()))
    assert code == 2
    assert re.search(rf"(Did you mean|Type) (\S*[ =])?{re.escape(key)}", said), said
