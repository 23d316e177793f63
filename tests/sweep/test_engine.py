"""A sweep as a user runs it: every job once, whatever happens to jobs, workers and the command."""

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import commands
import pytest
import yaml
from commands import COMMAND, Forked
from killing import descendants, family, mentioning
from pool import ranks
from until import until

from dtrain.config.environment import SWEEP_BEGAN
from dtrain.storage import store

SMALL = ["model=mlp", "data=synthetic", "data.samples=64", "objective=regression", "steps=4", "hook=[]", "logger=[]"]
TROUBLE = [
    "model._target_=sweeping.Trouble",
    "trust=[sweeping]",
    "data=synthetic",
    "data.inputs=[16]",
    "data.samples=64",
]
TROUBLE += ["objective=classification", "steps=4", "hook=[]", "logger=[]"]


def jobs(root: Path) -> dict[str, Path]:
    """The name of each job without its digest -> its folder."""
    return {path.parent.name.rpartition("-")[0]: path.parent for path in root.glob("*/config.yaml")}


def starts(job: Path) -> int:
    """How often a job was begun."""
    return (job / "events.jsonl").read_text().count('"event": "started"')


def test_every_job_is_run_once_and_the_same_command_runs_what_is_missing(tmp_path: Path) -> None:
    first = commands.run("-m", *SMALL, "optim.lr=1e-3,3e-3", "seed=0,1", "sweep.out=s", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    root = tmp_path / "s"
    lrs = ("0.001", "0.003")
    assert sorted(jobs(root)) == [f"optim.lr-{lr}_seed-{seed}" for lr in lrs for seed in (0, 1)]
    gone = jobs(root)["optim.lr-0.003_seed-1"]
    (gone / "result.json").unlink()
    wider = commands.run("-m", *SMALL, "optim.lr=0.001,0.003,1e-2", "seed=0,1", "sweep.out=s", cwd=tmp_path)
    assert wider.returncode == 0, wider.stderr
    assert "6 jobs in s, of which 3 are finished" in wider.stdout
    assert len(jobs(root)) == 6
    assert {job: starts(path) for job, path in jobs(root).items() if path != gone} == dict.fromkeys(
        [job for job, path in jobs(root).items() if path != gone], 1
    )
    assert [len(space["optim.lr"]) for space in yaml.safe_load((root / "sweep.yaml").read_text())["spaces"]] == [2, 3]
    other = commands.run("-m", *SMALL, "batch=16", "optim.lr=0.001,0.003", "sweep.out=s", cwd=tmp_path)
    assert other.returncode == 2
    assert "holds another sweep: batch is 16 here and not given there" in other.stderr
    assert len(jobs(root)) == 6


def test_the_weights_of_a_job_are_those_of_a_run_alone(tmp_path: Path) -> None:
    """And no job sees what another did to its process."""
    words = ["model._target_=sweeping.Counting", "trust=[sweeping]", "data=synthetic", "data.inputs=[16]"]
    words += ["data.samples=64", "data.outputs=1", "objective=regression", "steps=4", "hook=[]", "logger=[]"]
    for slots in (1, 3):
        done = commands.run("-m", *words, "seed=0,1,2", f"sweep.parallel={slots}", f"sweep.out=s{slots}", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    for name, job in jobs(tmp_path / "s1").items():
        alone = commands.run(f"recipe={job}/config.yaml", "trust=[sweeping]", f"out={name}", cwd=tmp_path)
        assert alone.returncode == 0, alone.stderr
        beside = jobs(tmp_path / "s3")[name]
        assert result(job) == result(beside) == result(tmp_path / name)


@pytest.mark.campaign("commands")
def test_a_key_that_is_swept_too_runs_no_finished_job_again(tmp_path: Path) -> None:
    words = ["-m", *SMALL, "sweep.out=s"]
    first = commands.run(*words, "optim.lr=1e-3,3e-3", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    more = commands.run(*words, "seed=0,1", "optim.lr=1e-3,3e-3", cwd=tmp_path)
    assert more.returncode == 0 and "4 jobs in s, of which 2 are finished" in more.stdout, more.stderr
    assert len(jobs(tmp_path / "s")) == 4
    failed = next((tmp_path / "s").glob("optim.lr-*"))
    (failed / "result.json").unlink()
    again = commands.run("sweep", "work", "s", cwd=tmp_path)
    assert again.returncode == 0 and "of which 3 are finished" in again.stdout, again.stderr
    assert len(finished(tmp_path / "s")) == 4


@pytest.mark.campaign("commands")
def test_jobs_are_ranked_by_their_best_where_that_is_asked(tmp_path: Path) -> None:
    """Also at a rung, and by whatever names the best job."""
    words = [*SMALL[:-2], "logger=[]", "trust=[sweeping]", "hook.peak._target_=sweeping.Peak", "evaluate.every=1"]
    words += ["hook.peak.top=0.7,0.6,0.9,0.8", "checkpoint.best=eval_score", "sweep.out=s"]
    done = commands.run("-m", *words, "sweep.stop=halving", "sweep.rung=3", "sweep.factor=4", cwd=tmp_path, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "best: s/hook.peak.top-0.9" in done.stdout
    shown = commands.run("runs", "s", "sort=eval_score", cwd=tmp_path).stdout.splitlines()
    assert shown[-1].startswith("hook.peak.top-0.9") and " 0.9 @2 " in shown[-1]
    assert "hook.peak.top-0.9" in commands.run("runs", "best", "s", cwd=tmp_path).stdout


def test_a_mistake_in_a_file_is_told_with_the_name_of_the_file(tmp_path: Path) -> None:
    recipe = "{model: mlp, data: synthetic, objective: regression, steps: 2, sweep: {space: {optim.lr: [1e-3, -4]}}}"
    (tmp_path / "mine.yaml").write_text(recipe)
    wrong = commands.run("-m", "recipe=mine.yaml", "sweep.out=s", cwd=tmp_path)
    assert wrong.returncode == 2 and "optim.lr=-4 (mine.yaml:1): " in wrong.stderr, wrong.stderr
    assert commands.run("-m", *SMALL, "optim.lr=1e-3,3e-3", "sweep.out=s", cwd=tmp_path).returncode == 0
    file = tmp_path / "s/sweep.yaml"
    file.write_text(file.read_text().replace("steps: '4'", "steps: '-4'"))
    wrong = commands.run("sweep", "work", "s", cwd=tmp_path)
    assert wrong.returncode == 2 and "steps=-4 (s/sweep.yaml): " in wrong.stderr, wrong.stderr


def result(run: Path) -> tuple[float, list[bytes]]:
    """The loss of a run, and the bytes of the tensors in its shards, behind the header of each."""
    shards = [path.read_bytes() for path in sorted(run.glob("checkpoints/*/*/*.safetensors"))]
    loss = json.loads((run / "result.json").read_text())["loss"]
    return loss, [shard[8 + int.from_bytes(shard[:8], "little") :] for shard in shards]


@pytest.mark.campaign("commands")
def test_a_worker_that_comes_late_leaves_what_has_failed_since_the_command_began(tmp_path: Path) -> None:
    began, words = time.time(), ["-m", *TROUBLE, "model.how=raises,none", "sweep.out=s"]
    assert commands.run(*words, cwd=tmp_path).returncode == 1
    late = {**os.environ, SWEEP_BEGAN: str(began)}
    assert commands.run("sweep", "work", "s", "trust=[sweeping]", cwd=tmp_path, env=late).returncode == 1
    assert starts(jobs(tmp_path / "s")["model.how-raises"]) == 1
    commands.run("sweep", "work", "s", "trust=[sweeping]", cwd=tmp_path)
    assert starts(jobs(tmp_path / "s")["model.how-raises"]) == 2


@pytest.mark.campaign("kills")
def test_failures_are_counted_by_cause_and_what_may_pass_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    hows = ["none", "raises", "exits", "segfault", "diverges", "forks", "prints", "killed"]
    done = commands.run(
        "-m", *TROUBLE, f"model.how={','.join(hows)}", "sweep.out=s", "sweep.parallel=3", cwd=tmp_path, timeout=240
    )
    assert done.returncode == 1, done.stderr
    root, states = tmp_path / "s", {}
    for name, job in jobs(root).items():
        finished = (job / "result.json").exists() and json.loads((job / "result.json").read_text())["status"]
        states[name.removeprefix("model.how-")] = finished == "finished", starts(job)
    assert states == {
        "none": (True, 1), "forks": (True, 1), "prints": (True, 1), "raises": (False, 1), "diverges": (False, 1),
        "killed": (False, 2), "segfault": (False, 2), "exits": (False, 2),
    }  # fmt: skip
    for sentence in ("ValueError: planned", "killed by SIGKILL", "killed by SIGSEGV", "exit code 0 and without a word"):
        assert any(line.startswith("dtrain: failed: 1 x") and sentence in line for line in done.stderr.splitlines())
    log = (jobs(root)["model.how-prints"] / "log.txt").read_bytes()
    assert (
        len(log) < 4 << 20 and b"bytes are left out" in log and log.rstrip().endswith(b"the end")
    ) or b"the end" in log
    assert not mentioning(str(tmp_path)), "a process stayed behind"
    assert not list((tmp_path / "tmp").glob("dtrain-*")), "a folder stayed behind"


def test_a_job_that_was_killed_once_finishes(tmp_path: Path) -> None:
    once = tmp_path / "once"
    done = commands.run("-m", *TROUBLE, f"model.once={once}", "model.how=killed,none", "sweep.out=s", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "killed by SIGKILL; it starts again" in done.stderr


@pytest.mark.campaign("signals")
def test_a_job_that_is_asked_to_stop_alone_is_tried_again_and_then_has_failed(tmp_path: Path) -> None:
    words = [*TROUBLE, "sweep.stop=halving", "model.how=none,terminated1,terminated2", f"model.once={tmp_path}/once"]
    done = commands.run("-m", *words, "sweep.parallel=1", "sweep.out=s", cwd=tmp_path)
    assert done.returncode == 0 and "stopped by SIGTERM; it starts again" in done.stderr, done.stderr
    words = [*TROUBLE, "model.how=none,terminated", "sweep.retries=0", "sweep.out=t"]
    done = commands.run("-m", *words, cwd=tmp_path)
    assert done.returncode == 1 and "failed: 1 x stopped by SIGTERM" in done.stderr, done.stderr
    retried = commands.run("sweep", "retry", "t", "trust=[sweeping]", cwd=tmp_path)
    assert retried.returncode == 0 and "1 jobs in t" in retried.stdout, retried.stderr


def test_jobs_of_several_ranks(tmp_path: Path) -> None:
    words = ["strategy=single,ddp", "devices=2"]
    wrong = commands.run("-m", *SMALL, *words, "sweep.out=s", cwd=tmp_path)
    assert wrong.returncode == 2 and not (tmp_path / "s").exists(), "one job is refused: none begins"
    done = commands.run("-m", *SMALL, "strategy=ddp,fsdp", "devices=2", "sweep.out=s", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [json.loads((job / "result.json").read_text())["loss"] for job in jobs(tmp_path / "s").values()]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_secrets_and_what_cannot_be_swept_are_refused_before_anything(tmp_path: Path) -> None:
    for words, sentence in (
        (["out=a,b"], "it cannot be swept"),
        (["seed=0,1", "sweep.parallel=0"], "sweep.parallel=0"),
        (["seed=0,1", "sweep.out=memory://x"], "memory belongs to one process"),
        (["optim.lr=interval(1e-4,1e-2)"], "an interval has no end of values"),
        (["seed=range(0,25)", "steps=range(1,26)", "batch=range(1,25)"], "15,000 jobs"),
        (["seed=0", "model.width=4"], "no word has several values"),
    ):
        done = commands.run("-m", *SMALL, *words, cwd=tmp_path)
        assert done.returncode == 2 and sentence in done.stderr, (words, done.stderr)
    alone = commands.run(*SMALL, "sweep.parallel=2", cwd=tmp_path)
    assert alone.returncode == 2 and "sweep.parallel: nothing in this run reads it. Type -m" in alone.stderr
    assert list(tmp_path.iterdir()) == []


def begin(place: Path, *words: str) -> "subprocess.Popen[str]":
    return Forked([*COMMAND, "-m", *words], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=place)


@pytest.mark.often("2-130")
@pytest.mark.campaign("signals")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_sweep_that_is_asked_to_stop_saves_its_jobs_and_goes_on_later(number: int, code: int, tmp_path: Path) -> None:
    words = [*SMALL, "steps=4000", "seed=0,1,2", "sweep.parallel=2", "sweep.out=s"]
    sweep = begin(tmp_path, *words)
    until(lambda: len([*(tmp_path / "s").glob("*/metrics.jsonl")]) == 2)
    os.kill(sweep.pid, number)
    _, error = sweep.communicate(timeout=60)
    assert sweep.returncode == code, error
    begun = {job: json.loads((job / "result.json").read_text()) for job in jobs(tmp_path / "s").values()}
    assert len(begun) == 2 and all(result["step"] > 0 for result in begun.values())
    assert not mentioning(str(tmp_path))
    again = commands.run("-m", *words, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    for job, before in begun.items():
        events = [json.loads(line) for line in (job / "events.jsonl").read_text().splitlines()]
        assert [event["step"] for event in events if event["event"] == "started"] == [0, before["step"]]


def finished(root: Path) -> list[Path]:
    results = {path: json.loads(path.read_text()) for path in root.glob("*/result.json")}
    return [path for path, result in results.items() if result["status"] == "finished"]


@pytest.mark.campaign("kills")
def test_two_commands_share_the_jobs_of_one_folder(tmp_path: Path) -> None:
    words = [*SMALL, "steps=200", "seed=range(0,12)", "sweep.out=s", "sweep.parallel=2"]
    both = [begin(tmp_path, *words) for _ in range(2)]
    for sweep in both:
        output, error = sweep.communicate(timeout=120)
        assert sweep.returncode == 0, error
        assert "[12/12]" in output
    assert sorted(starts(job) for job in jobs(tmp_path / "s").values()) == [1] * 12


@pytest.mark.campaign("commands")
def test_another_command_takes_the_jobs_that_are_left_and_says_what_failed(tmp_path: Path) -> None:
    words = [*TROUBLE, "model.how=none,raises", "seed=0,1", "sweep.out=s"]
    assert commands.run("-m", *words, cwd=tmp_path).returncode == 1
    (jobs(tmp_path / "s")["model.how-none_seed-1"] / "result.json").unlink()
    work = commands.run("sweep", "work", "s", "sweep.retries=0", cwd=tmp_path)
    assert work.returncode == 2 and "trust=[sweeping]" in work.stderr, "no file says whom to trust"
    work = commands.run("sweep", "work", "s", "trust=[sweeping]", cwd=tmp_path)
    assert work.returncode == 1, work.stderr
    assert "4 jobs in s, of which 1 are finished" in work.stdout
    assert "failed: 2 x ValueError: planned" in work.stderr
    why = commands.run("sweep", "why", "s", cwd=tmp_path)
    assert why.stdout.splitlines()[0].startswith("2 x ValueError: planned")
    assert why.stdout.splitlines()[-1] == "2 of 4 jobs have failed"
    for words, sentence in (
        (["work"], "type dtrain sweep"), (["work", "nowhere"], "it has no sweep.yaml"), (["work", "s", "batch=4"], "Leave it out"),
    ):  # fmt: skip
        wrong = commands.run("sweep", *words, cwd=tmp_path)
        assert wrong.returncode in (2, 3) and sentence in wrong.stderr, wrong.stderr


@pytest.mark.campaign("network")
def test_two_commands_share_the_jobs_on_object_storage(s3: str, tmp_path: Path) -> None:
    root = f"{s3}/sweep-{os.getpid()}"
    words = [*SMALL, "seed=range(0,6)", f"sweep.out={root}", "sweep.parallel=2"]
    both = [begin(tmp_path, *words) for _ in range(2)]
    for sweep in both:
        output, error = sweep.communicate(timeout=200)
        assert sweep.returncode == 0, error
        assert "[6/6]" in output

    def left() -> list[int]:
        names = [name for name in store.folders(root) if name.startswith("seed-")]
        return [store.read(f"{root}/{name}/events.jsonl").count(b'"event": "started"') for name in names]

    assert ranks(1, left) == [[1] * 6]
    again = commands.run("-m", *words, cwd=tmp_path)
    assert again.returncode == 0 and "6 jobs in" in again.stdout and "of which 6 are finished" in again.stdout
    work = commands.run("sweep", "work", root, cwd=tmp_path)
    assert work.returncode == 0, work.stderr


@pytest.mark.campaign("kills")
def test_jobs_go_on_when_what_forks_them_is_killed(tmp_path: Path) -> None:
    sweep = begin(
        tmp_path, *SMALL, "steps=400", "seed=range(0,4)", "sweep.parallel=2", "sweep.out=s", "sweep.retries=2"
    )
    until(lambda: len([*(tmp_path / "s").glob("*/metrics.jsonl")]) >= 2)
    os.kill(family(sweep.pid)["zygote"][0], signal.SIGKILL)
    _, error = sweep.communicate(timeout=120)
    assert sweep.returncode == 0, error
    assert error.count("killed by SIGKILL; it starts again") >= 1
    results = [json.loads(path.read_text()) for path in (tmp_path / "s").glob("*/result.json")]
    assert [result["status"] for result in results] == ["finished"] * 4


@pytest.mark.slow
@pytest.mark.campaign("signals")
@pytest.mark.parametrize("storage", ["disk", "s3"])
def test_a_worker_that_is_stopped_for_a_minute_loses_its_jobs_and_commits_nothing_of_them(
    storage: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    root = str(tmp_path / "s") if storage == "disk" else f"{request.getfixturevalue('s3')}/stopped-{os.getpid()}"
    words = [*SMALL, "steps=20000", "seed=0,1", "sweep.parallel=1", f"sweep.out={root}", "checkpoint.every=2000"]
    first = begin(tmp_path, *words)
    until(lambda: ranks(1, contents, root, "COMMIT.json") != [{}])
    processes = [first.pid, *descendants(first.pid) - {first.pid}]
    for pid in processes:
        os.kill(pid, signal.SIGSTOP)
    ranks(1, disguise, root)
    second = begin(tmp_path, *words, "sweep.retries=0")
    _, error = second.communicate(timeout=300)
    assert second.returncode == 0, error
    (results,), (commits,) = ranks(1, contents, root, "result.json"), ranks(1, contents, root, "COMMIT.json")
    assert len(results) == 2
    for pid in reversed(processes):
        os.kill(pid, signal.SIGCONT)
    _, error = first.communicate(timeout=120)
    assert first.returncode == 0, error
    assert ranks(1, contents, root, "result.json") == [results] and ranks(1, contents, root, "COMMIT.json") == [commits]


def contents(root: str, name: str) -> dict[str, bytes]:
    """The files of this name below the jobs of a sweep. In a process of its own: a client of S3 starts threads."""
    paths = [path for path in store.tree(root, depth=5) if path.endswith(f"/{name}")]
    return {path: store.read(store.join(root, path)) for path in paths}


def disguise(root: str) -> None:
    """Give the lease that is held to another host, where nobody sees whether it lives."""
    for path in [path for path in store.tree(root, depth=3) if "/lease/0" in path]:
        record = json.loads(store.read(store.join(root, path)))
        if record["state"] == "held":
            store.write(store.join(root, path), json.dumps({**record, "place": "another host"}).encode())


@pytest.mark.campaign("commands")
def test_out_of_memory_a_job_starts_again_with_half_the_microbatch(tmp_path: Path) -> None:
    """And has the losses of one that had room."""
    words = ["model._target_=sweeping.Large", "trust=[sweeping]", "data=synthetic", "data.inputs=[16]", "batch=16"]
    words += ["data.samples=64", "objective=classification", "steps=4", "hook=[]", "logger=[]", "sweep.out=s"]
    done = commands.run("-m", *words, "model.most=99,4,0", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    large, small, none = (jobs(tmp_path / "s")[f"model.most-{most}"] for most in (99, 4, 0))
    assert "microbatch: 4" in (small / "config.yaml").read_text() and starts(small) == 3 and starts(none) == 5
    assert result(small)[0] == pytest.approx(result(large)[0], rel=1e-6)
    assert done.stderr.count("model.most=4: OutOfMemoryError") == 2 and "starts again with microbatch=4" in done.stderr
    assert "failed: 1 x OutOfMemoryError" in done.stderr


@pytest.fixture
def limited(tmp_path: Path) -> Iterator[Path]:
    """The file that moves a process into a control group with 1,500 MiB of memory."""
    groups = Path("/sys/fs/cgroup")
    old = (groups / "memory").is_dir()
    folder = groups / ("memory" if old else "") / f"dtrain-test-{os.getpid()}"
    limit = folder / ("memory.limit_in_bytes" if old else "memory.max")
    try:
        folder.mkdir()
        limit.write_text(str(1500 << 20))
    except OSError as error:
        pytest.skip(f"no control group of memory can be made here: {error}")
    yield folder / "cgroup.procs"
    folder.rmdir()


@pytest.mark.often("2")
@pytest.mark.campaign("kills")
@pytest.mark.parametrize("devices", [1, 2])
def test_a_job_that_the_kernel_kills_for_memory_starts_again_with_half_the_microbatch(
    limited: Path, devices: int, tmp_path: Path
) -> None:
    words = ["model._target_=sweeping.Greedy", "trust=[sweeping]", "data=synthetic", "data.inputs=[16]", "steps=2"]
    words += ["data.samples=64", "objective=classification", "batch=32", f"devices={devices}"]
    words += ["strategy=ddp"] * (devices > 1) + ["hook=[]", "logger=[]", "sweep.out=s", "optim.lr=0.01,0.02"]
    command = ["sh", "-c", f'echo $$ > {limited}; exec "$@"', "sh", *COMMAND, "-m", *words, "sweep.parallel=1"]
    tests = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (tests, tests.parent)))}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    sentence = f"by the kernel: out of memory; it starts again with microbatch={16 // devices}"
    assert done.stderr.count(sentence) == 2, done.stderr


def test_a_spike_leaves_its_cause(tmp_path: Path) -> None:
    done = commands.run("-m", *TROUBLE, "model.how=diverges,none", "sweep.out=s", cwd=tmp_path)
    assert done.returncode == 1
    facts = json.loads((jobs(tmp_path / "s")["model.how-diverges"] / "failure.json").read_text())
    assert facts["kind"] == "spike" and "nan" in facts["error"]
    assert facts["error"] in commands.run("sweep", "why", "s", cwd=tmp_path).stdout
