"""The command as a user meets it: exit codes, one message, nothing left behind."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import commands
import pytest


def dtrain(*words: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    return commands.run(*words, cwd=cwd)


WRONG = {
    "a misspelt choice": (["strategy=fdsp"], 2, "Did you mean fsdp?"),
    "a word for a number": (["nodes=two"], 2, "an integer"),
    "a plus before a misspelt group": (["+stratgy=ddp"], 2, "Did you mean strategy?"),
    "an unknown argument": (["optim.lrr=1"], 2, "Did you mean optim.lr?"),
    "a batch that does not split": (["batch=7", "devices=2", "strategy=ddp"], 2, "batch=6 or batch=8"),
    "a flag": (["--strategy=fsdp"], 2, "strategy=fsdp"),
    "an untrusted target": (["model._target_=os.system"], 2, "trust=[os]"),
    "a target that Hydra lets through": (["model._target_=torch.hub.load"], 2, "not trusted"),
    "data that is not there": (["data.path=/nowhere/at/all"], 3, "/nowhere/at/all"),
    "a place that cannot be written": (["out=/proc/here"], 3, "/proc/here"),
    "an empty place": (["out="], 2, "no place for a run"),
    "an axis that does not divide": (["mesh.tp=3", "devices=6"], 2, "does not divide model.heads=4"),
    "weights that are not there": (["init=/nowhere/at/all"], 3, "init=/nowhere/at/all"),
    "nothing to resume": (["resume=must", "out=empty"], 3, "no checkpoint"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_words_get_one_message(case: str, tmp_path: Path) -> None:
    words, code, hint = WRONG[case]
    done = dtrain("steps=1", *words, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert hint in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.rglob("metrics.jsonl"))


def test_a_fork_that_cannot_go_on_is_refused_before_the_launch(tmp_path: Path) -> None:
    words = ["model=mlp", "data=synthetic", "objective=regression", "logger=[]"]
    assert dtrain(*words, "steps=10", "stop_after=2", "out=first", cwd=tmp_path).returncode == 0
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes").touch()
    for more, sentences in (
        (["fork=nowhere"], ["fork=nowhere: nothing is there."]),
        (["fork=empty"], ["fork=empty: there is no committed checkpoint."]),
        (["fork=first", "steps=2"], ["has done 2 steps, but steps=2. Type steps=<more than 2>."]),
        (
            ["fork=first", "stop_after=2", "seed=1", "batch=4"],
            [
                "stop_after=2. Type stop_after=<more than 2>",
                "Type seed=0, or init=first",
                "Type batch=8, or init=first",
            ],
        ),
    ):
        done = dtrain(*words, "out=second", *more, cwd=tmp_path)
        assert done.returncode == 3 and "Traceback" not in done.stderr
        assert len(done.stderr.splitlines()) == len(sentences)
        for sentence in sentences:
            assert sentence in done.stderr
    assert not (tmp_path / "second").exists()
    assert dtrain(*words, "out=second", "fork=first", "steps=10", "stop_after=3", cwd=tmp_path).returncode == 0
    shutil.rmtree(tmp_path / "first")
    assert dtrain(*words, "out=second", "fork=first", "steps=10", "stop_after=4", cwd=tmp_path).returncode == 0, (
        "it has its own"
    )


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    done = dtrain("strategy=fdsp", "nodes=two", "optim.lrr=1", cwd=tmp_path)
    assert [hint in done.stderr for hint in ("fdsp", "nodes=two", "optim.lrr")] == [True] * 3


def test_of_a_word_said_again_the_last_counts_and_that_is_told(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("seed: 5\n")
    done = dtrain("plan", "recipe=mine.yaml", "seed=3", "+seed=4", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "note: seed=3 (command line): given more than once, seed=4 counts.\n")
    assert "seed 4" in done.stdout
    done = dtrain("plan", "seed=3", "seed=4", "seed=3", cwd=tmp_path)
    assert "seed=4 (command line): given more than once, seed=3 counts." in done.stderr and "seed 3" in done.stdout
    assert not dtrain("plan", "recipe=mine.yaml", "seed=3", "seed=3", cwd=tmp_path).stderr


def test_a_broken_recipe_names_its_line(tmp_path: Path) -> None:
    (tmp_path / "broken.yaml").write_text("steps: 3\nmodel:\n  layers: [1,\n")
    done = dtrain("recipe=broken.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert "broken.yaml:4:1" in done.stderr
    assert "Traceback" not in done.stderr


def test_plan_does_not_import_torch(tmp_path: Path) -> None:
    code = "import sys; from dtrain.__main__ import main; code = main(['plan', 'strategy=fsdp', 'nodes=2', 'devices=2']); sys.exit(code or 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    for said in (
        "2 node(s) x 2 device(s) = 4 rank(s)",
        "dp_shard=4",
        "8 samples = 2 per forward x 4 data-parallel rank(s) x 1 accumulated",
        "outputs/",
    ):
        assert said in done.stdout
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("checkpoint ls out=nowhere", "cannot find a checkpoint at nowhere: nothing is there"),
        ("tokenize nowhere to=tokens", "cannot find nowhere: no file is there"),
    ],
)
def test_a_place_where_nothing_is_costs_no_import_of_torch(words: str, sentence: str, tmp_path: Path) -> None:
    code = "import sys; from dtrain.__main__ import main; code = main(sys.argv[1:]); sys.exit(code + 10 * ('torch' in sys.modules))"
    command = [sys.executable, "-c", code, *words.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False)
    assert done.returncode == 3 and sentence in done.stderr


def test_help_lists_verbs_words_and_recipes(tmp_path: Path) -> None:
    done = dtrain("--help", cwd=tmp_path)
    assert done.returncode == 0
    for said in (
        "evaluate",
        "generate",
        "auto, ddp, fsdp, hsdp, pipeline, single, zero1, zero2, zero3",
        "verify",
        "shakespeare",
    ):
        assert said in done.stdout


def test_a_finished_run_says_so_and_another_one_is_refused(corpus: Path, tmp_path: Path) -> None:
    words = [
        "steps=2",
        "model.layers=1",
        "model.width=32",
        "hook=[]",
        "data.sequence=16",
        f"data.path={corpus}",
        "out=run",
    ]
    first = dtrain(*words, cwd=tmp_path)
    assert first.returncode == 0
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert (
        f"last step's loss {result['loss']:.4f}, held-out loss {result['metrics']['eval_loss']:.4f}, held-out perplexity"
        in first.stdout
    )
    again = dtrain(*words, cwd=tmp_path)
    assert again.returncode == 0
    assert "already finished" in again.stdout
    other = dtrain(*words, "optim.lr=1e-5", cwd=tmp_path)
    assert other.returncode == 2
    assert "another optim" in other.stderr
    wider = dtrain("steps=3", *words[1:], "precision=bf16", cwd=tmp_path)
    assert wider.returncode == 0, "any precision goes on from what any other saved"
    assert "going on after step 2" in wider.stdout


INTERRUPTED = """import os
import signal
import sys


class Finder:
    @staticmethod
    def find_spec(name, path, target=None):
        if name == "dtrain.cluster":
            os.kill(os.getpid(), signal.SIGINT)


sys.meta_path.insert(0, Finder)
"""


def test_ctrl_c_counts_while_the_command_is_still_imported(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTED)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [*commands.COMMAND, "model=mlp", "data=synthetic", "objective=regression", "steps=2", "out=a"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
        timeout=100,
    )  # fmt: skip
    assert done.returncode == 130 and not (tmp_path / "a").exists()
    assert done.stderr.startswith("dtrain: stopped by SIGINT before there was anything new to save")


def test_a_run_in_memory_leaves_no_folder(corpus: Path, tmp_path: Path) -> None:
    words = [
        "steps=2",
        "model.layers=1",
        "model.width=32",
        "hook=[]",
        "data.sequence=16",
        f"data.path={corpus}",
        "out=memory://run",
    ]
    done = dtrain(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"corpus"}
