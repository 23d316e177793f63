"""`predict`: the rows of one process on any mesh, in their order, and none lost or twice after a kill."""

import json
import math
import os
import shutil
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import commands
import numpy as np
import pytest
import torch
from pool import resident
from small import plan
from until import until

from dtrain.build import build
from dtrain.cluster import Cluster
from dtrain.data.stream import as_source
from dtrain.errors import WordsError
from dtrain.evaluation.predict import columns_of, predict
from dtrain.evaluation.session import weights
from dtrain.planned import Plan
from dtrain.train import train
from dtrain.verb import predict as verb

ONE = Cluster(gpus=0, cpus=1)
LABELS = (
    "model=mlp",
    "data=synthetic",
    "objective=classification",
    "model.layers=2",
    "data.samples=300",
    "data.holdout_part=0.25",
)
KINDS = {
    "classification": LABELS,
    "regression": ("model=mlp", "data=synthetic", "objective=regression", "data.outputs=2", "data.samples=200"),
    "next_token": (
        "data=synthetic",
        "model.layers=2",
        "model.width=16",
        "model.heads=2",
        "data.sequence=8",
        "data.samples=200",
    ),
}
ALWAYS = ("steps=3", "logger=[]", "hook=[]", "evaluate.every=0", "predict.batch=7", "predict.part=30")


def made(out: Path, kind: str, *words: str) -> Plan:
    return plan(*KINDS[kind], *ALWAYS, f"out={out}", *words, on=ONE)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Kind -> a run of a few steps."""
    folder = tmp_path_factory.mktemp("runs")
    for kind in KINDS:
        resident(1, train, made(folder / kind, kind))
    return {kind: folder / kind for kind in KINDS}


def rows(runs: dict[str, Path], kind: str, to: Path, *words: str) -> list[dict[str, Any]]:
    asked = made(runs[kind], kind, f"predict.to={to}", *words)
    result = resident(asked.world, predict, asked)[0]
    read = [json.loads(line) for line in to.read_text().splitlines()]
    assert len(read) == result.metrics["rows"] and result.metrics["to"] == str(to)
    return read


def by_hand(runs: dict[str, Path], kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs of the model for the held-out samples, and their targets."""
    asked = made(runs[kind], kind)
    (given,) = resident(1, _by_hand, asked)
    return torch.tensor(given[0]), torch.tensor(given[1])


def _by_hand(asked: Plan) -> Any:
    held = as_source(build(asked.data)).holdout()
    assert held is not None
    index = np.arange(len(held))
    batch = held.take(index, np.zeros_like(index))
    with torch.no_grad():
        return weights(asked, asked.out)(batch["inputs"]).tolist(), batch["targets"].tolist()


def test_rows_are_what_the_model_says(runs: dict[str, Path], tmp_path: Path) -> None:
    said = rows(runs, "classification", tmp_path / "a.jsonl", "predict.scores=probabilities")
    outputs, _ = by_hand(runs, "classification")
    assert [row["row"] for row in said] == list(range(len(outputs))) and len(outputs) > 60
    assert [row["prediction"] for row in said] == outputs.argmax(1).tolist()
    torch.testing.assert_close(torch.tensor([row["probabilities"] for row in said]), outputs.softmax(1))
    assert [row["probability"] for row in said] == [max(row["probabilities"]) for row in said]
    assert [row["target"] for row in said] == by_hand(runs, "classification")[1].tolist()

    said = rows(runs, "regression", tmp_path / "b.jsonl")
    outputs, targets = by_hand(runs, "regression")
    torch.testing.assert_close(torch.tensor([row["prediction"] for row in said]), outputs)
    torch.testing.assert_close(torch.tensor([row["target"] for row in said]), targets)

    said = rows(runs, "next_token", tmp_path / "c.jsonl")
    outputs, targets = by_hand(runs, "next_token")
    each = outputs.log_softmax(-1).gather(-1, targets[..., None])[..., 0].sum(1)
    assert [row["log_likelihood"] for row in said] == pytest.approx(each.tolist(), rel=1e-5)
    assert {row["tokens"] for row in said} == {8}


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (("strategy=ddp", "devices=3", "batch=6"), "classification"),
        (("strategy=fsdp", "devices=2"), "next_token"),
        (("mesh.tp=2", "devices=2"), "next_token"),
        (("strategy=pipeline", "devices=2"), "classification"),
    ],
)
def test_every_mesh_writes_the_rows_of_one_process(
    runs: dict[str, Path], tmp_path: Path, words: tuple[str, ...], kind: str
) -> None:
    scores = ("predict.scores=logits",) if kind == "classification" else ()
    one = rows(runs, kind, tmp_path / "one.jsonl", *scores)
    many = rows(runs, kind, tmp_path / "many.jsonl", *scores, *words)
    if "strategy=ddp" in words:
        assert (tmp_path / "one.jsonl").read_bytes() == (tmp_path / "many.jsonl").read_bytes()
    for row, other in zip(one, many, strict=True):
        assert row.keys() == other.keys() and row["row"] == other["row"]
        assert np.allclose(*(list(each.get("logits", [each.get("log_likelihood")])) for each in (row, other)), 1e-5)


def test_it_goes_on_behind_what_is_there(runs: dict[str, Path], tmp_path: Path) -> None:
    asked = made(runs["classification"], "classification", f"predict.to={tmp_path}/rows/")
    resident(1, predict, asked)
    whole, names = {path.name: path.read_bytes() for path in (tmp_path / "rows").iterdir()}, range(4)
    assert [name for name in sorted(whole) if "part" in name] == [f"part-{number:06d}.jsonl" for number in names[:3]]
    record = tmp_path / "rows" / "predict.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"done": False}))
    (tmp_path / "rows" / "part-000000.jsonl").write_text("kept\n")
    (tmp_path / "rows" / "part-000002.jsonl").unlink()
    resident(
        2, predict, replace(made(Path(asked.out), "classification", "strategy=ddp", "devices=2"), predict=asked.predict)
    )
    after = {path.name: path.read_bytes() for path in (tmp_path / "rows").iterdir()}
    assert after == whole | {"part-000000.jsonl": b"kept\n"}


def test_rows_of_another_checkpoint_are_not_mixed_with_these(runs: dict[str, Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs["classification"], run)
    first = made(run, "classification", f"predict.to={tmp_path}/a.jsonl")
    resident(1, predict, first)
    resident(1, train, made(run, "classification", "steps=5"))
    with pytest.raises(AssertionError, match=r"holds other rows \(checkpoint step-00000003/.* there, step-00000005"):
        resident(1, predict, first)


def test_other_rows_are_in_the_order_of_their_file(tmp_path: Path) -> None:
    for name, count in ("train", 60), ("new", 23):
        lines = [f"{number % 5},{number % 3},{number % 2}" for number in range(count)]
        (tmp_path / f"{name}.csv").write_text("a,b,y\n" + "\n".join(lines) + "\n")
    words = [
        "model=mlp", "data=csv", f"data.path={tmp_path}/train.csv", "data.targets=y", "objective=classification",
        f"data.cache={tmp_path}/cache",
        *ALWAYS, f"out={tmp_path}/run",
    ]  # fmt: skip
    resident(1, train, plan(*words, on=ONE))
    resident(1, predict, plan(*words, f"predict.data={{path: {tmp_path}/new.csv}}", on=ONE))
    said = [json.loads(line) for line in (tmp_path / "run" / "predictions.jsonl").read_text().splitlines()]
    assert [row["row"] for row in said] == list(range(23))
    assert all(said[number]["probability"] == said[number % 15 % 30]["probability"] for number in (0, 1, 2))
    same = [row["prediction"] for row in said if row["row"] % 30 == 4]
    assert len(set(same)) == 1, "equal rows get equal answers"


def test_rows_need_no_targets_and_their_columns_no_order(tmp_path: Path) -> None:
    rows = [{"a": number % 5, "b": number % 3, "y": number % 2} for number in range(60)]
    for name, columns in ("train", "aby"), ("bare", "ba"):
        lines = [",".join(str(row[each]) for each in columns) for row in rows]
        (tmp_path / f"{name}.csv").write_text("\n".join([",".join(columns), *lines]) + "\n")
    (tmp_path / "null.jsonl").write_text("".join(json.dumps(row | {"y": None}) + "\n" for row in rows))
    words = [
        "model=mlp", "data=csv", f"data.path={tmp_path}/train.csv", "data.targets=y", "objective=classification",
        f"data.cache={tmp_path}/cache", *ALWAYS, f"out={tmp_path}/run",
    ]  # fmt: skip
    resident(1, train, plan(*words, on=ONE))
    said, targets = {}, {}
    for name, data in (
        ("train", f"{{path: {tmp_path}/train.csv}}"),
        ("bare", f"{{path: {tmp_path}/bare.csv}}"),
        ("null", f"{{data: jsonl, path: {tmp_path}/null.jsonl, inputs: [a, b], targets: y}}"),
    ):
        asked = plan(*words, f"predict.data={data}", f"predict.to={tmp_path}/{name}.out.jsonl", on=ONE)
        verb._check(asked)
        resident(1, predict, asked)
        read = [json.loads(line) for line in (tmp_path / f"{name}.out.jsonl").read_text().splitlines()]
        targets[name] = [row.pop("target", "none") for row in read]
        said[name] = read
    assert said["bare"] == said["train"] == said["null"] and len(said["train"]) == 60
    assert targets == {"train": [row["y"] for row in rows], "bare": ["none"] * 60, "null": [None] * 60}
    odd = plan(*words, f"predict.data={{path: {tmp_path}/train.csv, inputs: a}}", on=ONE)
    (tmp_path / "bad.csv").write_text("a,b\n1,2\n1,x\n")
    bad = plan(*words, f"predict.data={{path: {tmp_path}/bad.csv}}", f"predict.to={tmp_path}/bad.jsonl", on=ONE)
    with pytest.raises(AssertionError, match=rf"predict.data.path={tmp_path}/bad.csv: line 3: column b is 'x'"):
        resident(1, predict, bad)
    with pytest.raises(AssertionError, match=r"predict.data: a sample is \[\], and the model .* on \[2\]"):
        resident(1, predict, replace(odd, predict={**odd.predict, "to": f"{tmp_path}/odd.jsonl"}))


def test_classes_have_their_names() -> None:
    answers = torch.tensor([[0.0, 3.0], [2.0, 1.0]])
    columns = columns_of(answers, "classification", ["cat", "dog"], None, "none")
    assert columns["prediction"] == ["dog", "cat"]
    assert columns["probability"] == pytest.approx([1 / (1 + math.exp(-3)), 1 / (1 + math.exp(-1))])
    assert columns_of(answers, "classification", ["cat"], None, "none")["prediction"] == [1, 0], (
        "names that are too few"
    )
    columns = columns_of(answers, "classification", None, ["no", "yes"], "none")
    assert (columns["prediction"], columns["label"]) == ([1, 0], ["yes", "no"]), "targets of the files are numbers too"


@pytest.mark.campaign("kills")
def test_killed_twice_on_four_ranks_it_writes_what_one_writes(tmp_path: Path) -> None:
    """The command, after a Ctrl-C, as parts are written; its ranks end with it."""
    lines = [f"{number % 97},{number % 89},{number % 3}" for number in range(20_000)]
    (tmp_path / "rows.csv").write_text("a,b,y\n" + "\n".join(lines) + "\n")
    words = [
        "model=mlp",
        "data=csv",
        "data.path=rows.csv",
        "data.targets=y",
        "objective=classification",
        "steps=5",
        "out=run",
    ]
    assert commands.run(*words, "logger=[]", cwd=tmp_path).returncode == 0
    asked = ["predict", "out=run", "predict.data.path=rows.csv", "predict.part=200", "predict.batch=8", "threads=1"]
    assert commands.run(*asked, "predict.to=one.jsonl", cwd=tmp_path).returncode == 0
    many, parts = [*asked, "predict.to=many.jsonl", "strategy=ddp", "devices=4"], tmp_path / "many.jsonl.parts"
    for least, with_, code in ((10, signal.SIGINT, 130), (30, signal.SIGKILL, -9), (60, signal.SIGKILL, -9)):
        begun = commands.Forked(
            [*commands.COMMAND, *many], cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT
        )
        until(lambda: begun.poll() is not None or (parts.exists() and len([*parts.iterdir()]) >= least))  # noqa: B023 - called at once
        assert begun.poll() is None, "it ended before it was killed"
        os.kill(begun.pid, with_)
        assert begun.wait() == code
        assert not (tmp_path / "many.jsonl").exists()
    assert commands.run(*many, cwd=tmp_path).returncode == 0
    assert (tmp_path / "many.jsonl").read_bytes() == (tmp_path / "one.jsonl").read_bytes()
    assert len((tmp_path / "one.jsonl").read_text().splitlines()) == 20_000 and not parts.exists()


def test_scores_are_of_classes(runs: dict[str, Path], tmp_path: Path) -> None:
    asked = made(runs["regression"], "regression", f"predict.to={tmp_path}/a.jsonl", "predict.scores=logits")
    with pytest.raises(AssertionError, match="only classes have scores"):
        resident(1, predict, asked)


def test_a_train_command_does_not_take_its_words(tmp_path: Path) -> None:
    from dtrain.compose import compose
    from dtrain.verb.decide import decide

    with pytest.raises(WordsError, match=r"predict.batch \(command line\): only predict uses it. Type dtrain predict"):
        decide(compose(["model=mlp", "data=synthetic", "predict.batch=3"]), ONE)
