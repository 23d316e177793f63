"""diff shows what differs, from the first step on at which it does, and nothing else."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from dtrain import secrets
from dtrain.errors import StoreError, WordsError
from dtrain.verb import diff, train

WORDS = [
    "model=mlp",
    "data=synthetic",
    "data.samples=256",
    "steps=12",
    "log.every=1",
    "logger=[]",
    "launcher=inline",
    "devices=1",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run of twelve steps."""
    out = tmp_path_factory.mktemp("diff") / "run"
    assert train.run([*WORDS, f"out={out}"]) == 0
    return out


@pytest.fixture
def copied(run: Path, tmp_path: Path) -> Callable[..., Path]:
    """The run again, with one of its files changed."""

    def copy(name: str = "", change: Callable[[str], str] = str) -> Path:
        other = tmp_path / "other"
        shutil.copytree(run, other)
        if name:
            (other / name).write_text(change((other / name).read_text()))
        return other

    return copy


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, list[str]]:
    capsys.readouterr()
    code = diff.run(words)
    return code, capsys.readouterr().out.splitlines()


def row(lines: list[str], key: str) -> list[str]:
    return next(line for line in lines if line.startswith(f"  {key} ")).removeprefix(f"  {key} ").split()


def test_a_run_that_was_done_again_is_no_difference(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train.run([*WORDS, f"out={tmp_path}/again"]) == 0
    code, lines = shown(capsys, str(run), f"{tmp_path}/again")
    assert (code, lines[-1]) == (0, "no difference")
    assert {line.split()[0] for line in lines[:-1] if line.startswith("  ")} <= {
        "step_seconds",
        "samples_per_second",
        "wall_seconds",
        "peak_bytes",
        str(run),
    }


def test_the_first_step_and_the_largest_difference_are_found(
    run: Path, copied: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    def change(text: str) -> str:
        rows = [json.loads(line) for line in text.splitlines()]
        rows[6]["loss"], rows[8]["loss"], rows[8]["norm"] = rows[6]["loss"] * 1.25, rows[8]["loss"] * 2, None
        return "".join(json.dumps(row) + "\n" for row in rows[:-1]) + '{"step": 12, "lo'

    code, lines = shown(capsys, str(run), str(copied("metrics.jsonl", change)))
    assert code == 1
    assert [part for part in ("words", "plan", "code", "results") if part in lines] == ["results"]
    loss = " ".join(row(lines, "loss from step 7"))
    assert loss.endswith("2.0e-01 relative; largest at step 9: 5.0e-01 relative; differs at 2 of 11 steps")
    assert row(lines, "norm from step 9")[1] == "-" and row(lines, "steps")[:2] == ["12", "11"]


def test_more_than_two_stand_beside_each_other(
    run: Path, copied: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def change(text: str) -> str:
        rows = [json.loads(line) for line in text.splitlines()]
        rows[6]["loss"] *= 2
        return "".join(json.dumps(row) + "\n" for row in rows)

    other = str(copied("metrics.jsonl", change))
    code, lines = shown(capsys, str(run), other, str(run))
    assert code == 1 and lines[0].split() == [str(run), other, str(run)]
    one, two, three, *note = row(lines, "loss from step 7")
    assert (
        one == three != two
        and " ".join(note).startswith("5.0e-01 relative")
        and note[-5:] == ["differs", "at", "1", "of", "12", "steps"][-5:]
    )
    code, lines = shown(capsys, "digits", "recipe=digits", "recipe=digits seed=5")
    assert (
        code == 1 and row(lines, "seed").count("5") == 1 and [line for line in lines[1:] if line[0] != " "] == ["words"]
    )
    assert shown(capsys, "digits", "recipe=digits", "digits") == (0, ["no difference"])


def test_code_and_the_end_are_compared(
    run: Path, copied: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    def change(text: str) -> str:
        document: dict[str, Any] = json.loads(text)
        (
            document["versions"]["torch"],
            document["status"],
            document["metrics"]["eval_loss"],
            document["wall_seconds"],
        ) = (
            "0.1",
            "stopped",
            2.0,
            1e6,
        )
        return json.dumps(document)

    code, lines = shown(capsys, str(run), str(copied("result.json", change)))
    assert (
        code == 1
        and row(lines, "torch")[1] == "0.1"
        and row(lines, "status") == ["finished", "stopped"]
        and row(lines, "eval_loss")[1] == "2"
    )
    assert lines.index("measured") > lines.index("results") and row(lines, "wall_seconds")[1] == "1000000"


def test_only_the_clock_is_no_difference(
    run: Path, copied: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    other = copied("result.json", lambda text: json.dumps({**json.loads(text), "wall_seconds": 1e6}))
    code, lines = shown(capsys, str(run), str(other))
    assert (code, lines[-1]) == (0, "no difference") and row(lines, "wall_seconds")[1] == "1000000"


def test_words_and_recipes_are_compared_with_who_said_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.yaml").write_text("optim: {lr: 0.5}\nseed: 3\n")
    code, lines = shown(capsys, f"{tmp_path}/mine.yaml", "seed=3 strategy=ddp devices=2")
    assert code == 1
    assert " ".join(row(lines, "optim.lr")).startswith(f"0.5 ({tmp_path}/mine.yaml") and row(lines, "optim.lr")[
        -2:
    ] == ["0.001", "(default)"]
    assert not any(line.startswith("  seed ") for line in lines), "it is the same, whoever said it"
    assert row(lines, "mesh.dp_replicate") == ["1", "2"] and lines.index("words") < lines.index("plan")
    assert shown(capsys, "digits", "recipe=digits") == (0, ["no difference"])


def test_a_run_is_compared_with_words_that_nobody_ran(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, str(run), " ".join(WORDS))[0] == 0
    code, lines = shown(capsys, str(run), " ".join([*WORDS, "optim.lr=0.5"]))
    assert (
        code == 1
        and row(lines, "optim.lr") == ["0.001", "(default)", "0.5", "(command", "line)"]
        and "results" not in lines
    )


def test_what_lies_elsewhere_is_read_and_not_written(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fs = fsspec.filesystem("memory")
    for path in ("config.yaml", "plan.yaml", "metrics.jsonl", "events.jsonl", "result.json"):
        fs.pipe_file(f"/diff/run/{path}", (run / path).read_bytes())
    before = {path: fs.cat_file(path) for path in fs.find("/diff")}
    assert shown(capsys, "memory://diff/run", str(run)) == (0, ["no difference"])
    assert {path: fs.cat_file(path) for path in fs.find("/diff")} == before


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (["digits"], WordsError, "diff takes two or more, not 1"),
        (["digits", "digitss"], WordsError, "there is no such recipe. Did you mean digits"),
        (["digits", "/nowhere/at/all"], StoreError, "cannot find a run at /nowhere/at/all"),
        (["digits", "optim.lrr=1 model=gpt"], WordsError, "optim.lrr"),
        (["memory://nothing", "digits"], WordsError, "memory://nothing"),
    ],
)
def test_a_side_that_is_none_is_told(words: list[str], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        diff.run(words)


def test_no_secret_is_shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "_kept", {})
    monkeypatch.setattr(secrets, "_known", {})
    part = "logger.mine._target_=builtins.dict logger.mine.api_key="
    code, lines = shown(capsys, f"{part}abcdef123456", f"{part}123456abcdef seed=1", "trust=[builtins]")
    assert code == 1 and row(lines, "seed")[0] == "0"
    assert "123456" not in "".join(lines) and f"{part}***" in lines[0]


def test_a_folder_beside_is_a_run(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.parent)
    assert diff.run([run.name, str(run)]) == 0


def test_a_choice_is_told_with_who_said_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.yaml").write_text("# one\nstrategy: ddp\n")
    _, lines = shown(capsys, f"{tmp_path}/a.yaml", "strategy=fsdp devices=2")
    assert row(lines, "strategy") == ["ddp", f"({tmp_path}/a.yaml:2)", "fsdp", "(command", "line)"]


def test_what_is_wrong_is_told_with_its_side(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("data: tokens\n")
    with pytest.raises(
        WordsError, match=r"a\.yaml: data=tokens needs data\.path\..* \"recipe=.*a\.yaml <key>=<value>\""
    ):
        diff.run([f"{tmp_path}/a.yaml", "seed=1"])
    assert diff.run([f"recipe={tmp_path}/a.yaml data.path=x", f"recipe={tmp_path}/a.yaml data.path=x"]) == 0


def test_words_that_were_not_run_have_their_predicted_time_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    large = "cluster=h100x8 data=synthetic model.layers=32 model.width=4096 batch=64"
    code, lines = shown(capsys, f"{large} strategy=fsdp", f"{large} strategy=ddp microbatch=1")
    assert code == 1
    assert float(row(lines, "peak_bytes")[0]) < float(row(lines, "peak_bytes")[2])
    assert row(lines, "step_seconds")[-1].endswith("x")
    code, lines = shown(capsys, large, f"{large} seed=0")
    assert not any("predicted" in line for line in lines), "the same time and memory"
