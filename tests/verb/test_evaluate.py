"""evaluate and generate: a run's checkpoint, from any mesh."""

import json
from pathlib import Path

import commands
import pytest

SMALL = [
    "steps=6",
    "model.layers=1",
    "model.width=32",
    "model.heads=2",
    "data.sequence=16",
    "hook=[]",
    "evaluate.samples=21",
    "generate.tokens=20",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    (folder / "corpus.txt").write_text("".join(f"line {number} says {number * number}\n" for number in range(2000)))
    dtrain("train", *SMALL, f"data.path={folder / 'corpus.txt'}", f"out={folder / 'out'}", "strategy=fsdp", "devices=2")
    return folder / "out"


def dtrain(*words: str) -> str:
    done = commands.run(*words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_mesh_sees_the_loss_that_training_saw(run: Path) -> None:
    trained = json.loads((run / "result.json").read_text())["metrics"]["eval_loss"]
    for words in ([], ["strategy=ddp", "devices=2"], ["strategy=fsdp", "devices=2", "precision=fp32"]):
        dtrain("evaluate", f"out={run}", *words)
        assert json.loads((run / "evaluate.json").read_text())["metrics"]["eval_loss"] == pytest.approx(
            trained, rel=1e-5
        )


def test_a_checkpoint_is_found_by_its_url(run: Path) -> None:
    step = next((run / "checkpoints").iterdir())
    output = dtrain("evaluate", f"out={run}")
    assert dtrain("evaluate", f"init={step}") == output
    assert dtrain("evaluate", f"init={next(step.iterdir())}") == output


def test_every_mesh_writes_the_same_text(run: Path) -> None:
    alone = dtrain("generate", f"out={run}", "generate.prompt='line '")
    assert alone.startswith("line ")
    assert dtrain("generate", f"out={run}", "generate.prompt='line '", "strategy=fsdp", "devices=2") == alone
    assert dtrain("generate", f"out={run}", "generate.prompt='line '", "mesh.tp=2", "devices=2") == alone
    assert dtrain("generate", f"out={run}", "generate.prompt='line '", "seed=5") != alone


def test_no_run_is_named() -> None:
    done = commands.run("evaluate")
    assert done.returncode == 2
    assert "out=<the run>" in done.stderr


def test_no_run_is_there(tmp_path: Path) -> None:
    done = commands.run("evaluate", "out=gone", cwd=tmp_path)
    assert (done.returncode, len(done.stderr.splitlines())) == (3, 1)
    assert "gone" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_rows_that_were_trained_on_are_told(tmp_path: Path) -> None:
    for name in ("rows", "dev"):
        (tmp_path / f"{name}.csv").write_text("a,y\n" + "".join(f"{n},{2 * n}\n" for n in range(30)))
    out = f"out={tmp_path / 'run'}"
    dtrain("train", "data=csv", f"data.path={tmp_path / 'rows.csv'}", "data.targets=y", "data.holdout=0", "model=mlp",
           "objective=regression", "steps=2", out)  # fmt: skip
    refused = commands.run("evaluate", out)
    assert refused.returncode == 3
    assert "evaluate.sets.dev.path=dev.jsonl" in refused.stderr
    assert "data.holdout=0.1" not in refused.stderr
    told = "it was trained on rows that are held out now. Name data it has not seen: evaluate.sets.dev.path"
    for verb in ("evaluate", "predict"):
        assert told in commands.run(verb, out, "data.holdout=0.1").stderr
    assert "note: data" not in commands.run("evaluate", out, f"evaluate.sets.dev.path={tmp_path / 'dev.csv'}").stderr
