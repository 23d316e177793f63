"""verify passes what is right, and names the first quantity that differs where a fault was planted."""

import json
import subprocess
from pathlib import Path

import commands
import pytest
from small import composed
from verifying import verified

from dtrain.cluster import Cluster
from dtrain.resolve import resolve
from dtrain.verb.verify_runs import Runs

GPT = ("model.layers=2", "model.width=32", "data=synthetic", "data.sequence=16", "verify.steps=3", "batch=8")
TESTS = str(Path(__file__).parent.parent)


def verify(out: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    environ = {"PYTHONPATH": TESTS, "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    return commands.run("verify", *GPT, f"out={out}", *words, env=environ)


def test_what_is_right_passes(tmp_path: Path) -> None:
    done = verify(tmp_path / "run", "strategy=fsdp", "devices=2", "microbatch=2")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "run" / "verify.json").read_text())
    assert report["same"] and [row["quantity"] for row in report["rows"]] == [
        "loss",
        "norm",
        "gradients",
        "updates",
        "weights",
    ]
    assert all(row["compared"] and not row["rounded"] for row in report["rows"][2:])
    assert report["whole"] == 8, "one process sees all samples of a step at once"
    resumed = [
        json.loads(line) for line in (tmp_path / "run" / "verify" / "asked" / "events.jsonl").read_text().splitlines()
    ]
    assert [event["step"] for event in resumed if event["event"] == "started"] == [0, 1], "stopped and resumed"
    assert all(row["difference"] <= row["allowed"] for row in report["rows"])
    half = report["built"][1]
    assert half["split"]["dp_shard"] == half["parameters"] and half["held"] < 0.6 * half["parameters"], "really sharded"
    assert "loss" in done.stdout and done.stdout.rstrip().endswith("same")


@pytest.mark.often("a wrong loss scale")
@pytest.mark.parametrize(
    ("words", "first"),
    [
        (("loop=planted.alone", "strategy=ddp", "devices=2"), "norm at step 1"),
        (("loop=planted.louder", "strategy=ddp", "devices=2"), "loss at step 1"),
        (("loop=planted.skipping", "strategy=pipeline", "devices=2"), "norm at step 1"),
    ],
    ids=["a missing all-reduce", "a wrong loss scale", "a stage skipped"],
)
def test_a_planted_fault_is_named_by_what_differs_first(
    words: tuple[str, ...],
    first: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = verified(tmp_path / "run", " ".join((*GPT, *words)), monkeypatch)
    assert not report["same"] and report["first"] == first
    assert f"dtrain: verify: {first} differs" in capsys.readouterr().err


def test_what_was_not_built_as_asked_never_takes_a_step(tmp_path: Path) -> None:
    done = verify(tmp_path / "run", "trust=[planted]", "loop=planted.whole", "strategy=fsdp", "devices=2")
    assert done.returncode == 1
    assert "0 are sharded over dp_shard x cp = 2" in done.stdout
    assert not (tmp_path / "run" / "verify" / "asked" / "checkpoints").exists()


@pytest.mark.slow
def test_three_axes_on_eight_ranks_pass(tmp_path: Path) -> None:
    done = verify(tmp_path / "run", "strategy=fsdp", "mesh.pp=2", "mesh.tp=2", "devices=8")
    assert done.returncode == 0, done.stdout + done.stderr


MINE = "# mine\nmodel: gpt\ndata: synthetic\nsteps: 6\nexpect:\n  step: 3\n  loss: [{low}, 9]\n  small: [data.samples=64]\n"


def test_a_recipe_is_held_against_what_it_expects(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(MINE.format(low=2))
    done = verify(tmp_path / "run", f"recipe={tmp_path}/mine.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "run" / "verify.json").read_text())
    (finding,) = report["figures"]
    assert report["expected"] and (finding["figure"], finding["verdict"]) == ("loss", "ok")
    assert len((tmp_path / "run" / "verify" / "small" / "metrics.jsonl").read_text().splitlines()) == 3, (
        "no more steps than are looked at"
    )
    assert "samples: 64" in (tmp_path / "run" / "verify" / "small" / "plan.yaml").read_text()
    assert "as expected" in done.stdout and "verify  " not in done.stdout, "one rank needs no other beside it"


@pytest.mark.campaign("commands")
def test_what_was_not_expected_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(MINE.format(low=8))
    done = verify(tmp_path / "run", f"recipe={tmp_path}/mine.yaml", "strategy=ddp", "devices=2")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "the expected figures were not reached" in done.stderr
    report = json.loads((tmp_path / "run" / "verify.json").read_text())
    assert not report["expected"] and report["same"], "and two ranks are held against one all the same"


@pytest.mark.parametrize(
    ("words", "advised"), [((), True), (("backend.kernels=deterministic",), False), (("backend=gloo",), False)]
)
def test_where_kernels_of_a_gpu_may_be_the_reason_it_says_what_to_type(words: tuple[str, ...], advised: bool) -> None:
    asked = composed(*([] if words == ("backend=gloo",) else ["backend=nccl"]), *words)
    runs = Runs(resolve(asked, Cluster(gpus=1, cpus=4)), asked)
    assert ("type backend=nccl backend.kernels=deterministic" in runs.order()) == advised


def test_a_loop_that_writes_no_rows_is_refused_before_it_trains(tmp_path: Path) -> None:
    (tmp_path / "bare.py").write_text("def train(plan): raise SystemExit('it ran')\n")
    words = ("verify", *GPT, f"out={tmp_path}/run", "loop=bare.train", "trust=[bare]")
    done = commands.run(*words, cwd=tmp_path, env={"OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"})
    assert done.returncode == 2 and "loop=bare.train: verify compares" in done.stderr, done.stdout + done.stderr
    assert not (tmp_path / "run").exists()
