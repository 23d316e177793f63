"""Launchers and sweepers of Hydra: they start workers and propose jobs, and the engine runs them."""

import json
import os
import signal
import subprocess
import time
from contextlib import nullcontext
from pathlib import Path

import commands
import pytest
import yaml
from commands import COMMAND
from killing import mentioning
from slurm import slurm

from dtrain.errors import WordsError
from dtrain.sweep import foreign

SMALL = ["model=mlp", "data=synthetic", "data.samples=64", "objective=regression", "steps=4", "hook=[]", "logger=[]"]
TROUBLE = ["model._target_=sweeping.Trouble", "trust=[sweeping]", "data=synthetic", "data.inputs=[16]"]
TROUBLE += ["data.samples=64", "objective=classification", "steps=4", "hook=[]", "logger=[]"]
WAYS = ("raises", "diverges", "killed", "segfault", "exits")
WALKING = '''"""A sweeper of somebody else: halves optim.lr as long as that makes the figure smaller."""

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper


class Walking(Sweeper):
    def __init__(self, first, batches):
        self.value, self.batches = first, batches

    def setup(self, *, hydra_context, task_function, config):
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments):
        fixed = [word for word in arguments if "optim.lr" not in word]
        for number in range(self.batches):
            values = [self.value, self.value / 2]
            jobs = self.launcher.launch([[*fixed, f"++optim.lr={value}"] for value in values], 2 * number)
            figures = [job.return_value for job in jobs]
            print("figures", *figures)
            self.value = values[figures.index(min(figures))] / 4


ConfigStore.instance().store(
    group="hydra/sweeper",
    name="walking",
    node={"_target_": "hydra_plugins.walking.Walking", "first": 0.1, "batches": 2},
    provider="walking",
)
'''


@pytest.fixture
def walking(tmp_path: Path) -> dict[str, str]:
    """The environment of a command that has the sweeper."""
    (tmp_path / "plugins" / "hydra_plugins").mkdir(parents=True)
    (tmp_path / "plugins" / "hydra_plugins" / "walking.py").write_text(WALKING)
    return environment(tmp_path / "plugins")


def environment(*more: Path) -> dict[str, str]:
    """Of a command whose processes see the tests' modules, and those in more folders."""
    tests = Path(__file__).parents[1]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*more, tests, tests.parent)))}


def run(place: Path, environment: dict[str, str], *words: str) -> "subprocess.CompletedProcess[str]":
    return commands.run(*words, cwd=place, env=environment, timeout=240)


def test_a_sweeper_proposes_and_gets_the_figures_of_its_jobs(walking: dict[str, str], tmp_path: Path) -> None:
    words = ["-m", *SMALL, "hydra/sweeper=walking", "hydra.sweeper.first=0.2", "optim.lr=interval(0.001,1.0)", "out=s"]
    done = run(tmp_path, walking, *words)
    assert done.returncode == 0, done.stderr
    spaces = yaml.safe_load((tmp_path / "s" / "sweep.yaml").read_text())["spaces"]
    told = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("figures")]
    figures = {
        job.name.split("-")[1]: json.loads((job / "result.json").read_text())["metrics"]["eval_loss"]
        for job in (tmp_path / "s").glob("optim.lr-*")
    }
    assert [float(figure) for batch in told for figure in batch] == [
        figures[str(space["optim.lr"][0])] for space in spaces
    ]
    again = run(tmp_path, walking, *words)
    assert again.stdout.count("of which 2 are finished") == 2 and "[" not in again.stdout.split("figures")[0]


def test_a_plugin_that_cannot_be_imported_is_named(walking: dict[str, str], tmp_path: Path) -> None:
    broken = tmp_path / "plugins" / "hydra_plugins" / "broken.py"
    broken.write_text("raise ValueError('mutable default')\n")
    ended = run(tmp_path, walking, "-m", *SMALL, "hydra/sweeper=walking", "optim.lr=0.1", "sweep.out=s")
    assert ended.returncode == 2 and len(ended.stderr.splitlines()) == 1, ended.stderr
    assert f"{broken} cannot be: ValueError: mutable default. Update it" in ended.stderr


def test_a_job_that_fails_ends_a_sweeper_that_wants_its_figure(walking: dict[str, str], tmp_path: Path) -> None:
    done = run(tmp_path, walking, "-m", *TROUBLE, "model.how=raises", "hydra/sweeper=walking", "sweep.out=s")
    assert done.returncode == 1
    assert "hydra/sweeper=walking ends: optim.lr=0.1: failed" in done.stderr
    assert "failed: 2 x ValueError: planned" in done.stderr


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["hydra/launcher=nope"], "Could not find 'hydra/launcher/nope'"),
        (["hydra/sweeper=nope"], "Could not find 'hydra/sweeper/nope'"),
        (["hydra/launcher=rq"], "the package hydra-rq-launcher is not installed. Type pip install hydra-rq-launcher."),
        (["hydra.launcher.n_jobs=2"], "Type hydra/launcher=<name> too"),
        (["hydra/launcher=basic", "hydra.launcher.nope=2"], "hydra.launcher.nope"),
    ],
)
def test_what_hydra_does_not_know_is_refused_before_anything(words: list[str], sentence: str, tmp_path: Path) -> None:
    done = commands.run("-m", *SMALL, "seed=0,1", *words, "sweep.out=s", cwd=tmp_path)
    assert done.returncode == 2 and sentence in done.stderr, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_words_are_hydras_or_ours() -> None:
    ours, hydras = foreign.split(["seed=0,1", "+hydra/launcher=joblib", "hydra.launcher.n_jobs=2"])
    assert (ours, hydras.launcher, hydras.sweeper) == (["seed=0,1"], "joblib", "")
    assert hydras.words == ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
    with pytest.raises(WordsError, match="writes the words of its workers to files"):
        foreign.split(["hydra/launcher=joblib", "logger.mine.api_key=abcdef123456"])


@pytest.mark.often("joblib", "submitit_slurm")
@pytest.mark.campaign("kills")
@pytest.mark.parametrize("launcher", ["", "joblib", "submitit_local", "submitit_slurm"])
def test_ten_of_thirty_jobs_fail_in_five_ways(
    launcher: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with slurm(tmp_path_factory.mktemp("slurm")) if launcher == "submitit_slurm" else nullcontext({}) as queue:
        _fail_in_five_ways(launcher, tmp_path, {**environment(), **queue})


def _fail_in_five_ways(launcher: str, tmp_path: Path, environment: dict[str, str]) -> None:
    hows = [f"none{number}" for number in range(20)] + [f"{way}{number}" for way in WAYS for number in (1, 2)]
    words = [f"model.how={','.join(hows)}", "sweep.out=s"]
    words += [f"hydra/launcher={launcher}", "sweep.workers=2"] if launcher else []
    # an interpreter of its own, whose end is joblib's sign to end its processes
    done = subprocess.run(
        [*COMMAND, "-m", *TROUBLE, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 1, done.stderr
    results = {path.parent.name: json.loads(path.read_text()) for path in (tmp_path / "s").glob("*/result.json")}
    done_well = [name.split("-")[1] for name, result in results.items() if result["status"] == "finished"]
    assert sorted(done_well) == sorted(hows[:20])
    causes = [line for line in done.stderr.splitlines() if "] model.how=" in line and " failed: " in line]
    assert sorted(line.split("model.how=")[1].split()[0] for line in causes) == sorted(hows[20:])
    totals = [line for line in done.stderr.splitlines() if line.startswith("dtrain: failed: ")]
    assert [line.split()[2] for line in totals] == ["2"] * 5, totals
    assert len(list((tmp_path / "s").glob("*/log.txt"))) == 10, "of those that printed something"
    slurms = 60 if "SLURM_CONF" in environment else 0  # it ends its srun after the command of the sweep has ended
    deadline = time.monotonic() + slurms
    while (left := mentioning(str(tmp_path))) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left, "a process stayed behind"


@pytest.mark.campaign("signals")
def test_workers_save_their_jobs_when_the_command_is_asked_to_stop(tmp_path: Path) -> None:
    words = [*SMALL, "steps=20000", "seed=0,1", "sweep.out=s", "hydra/launcher=joblib", "sweep.workers=2"]
    sweep = subprocess.Popen(
        [*COMMAND, "-m", *words], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path,
        env=environment(),
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while len([*(tmp_path / "s").glob("*/metrics.jsonl")]) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    os.kill(sweep.pid, signal.SIGTERM)
    _, error = sweep.communicate(timeout=120)
    assert sweep.returncode == 75, error
    results = [json.loads(path.read_text()) for path in (tmp_path / "s").glob("*/result.json")]
    assert len(results) == 2 and all(result["step"] > 0 for result in results)
    assert not mentioning(str(tmp_path))
