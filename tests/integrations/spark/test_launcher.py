"""Nodes that are tasks of a barrier job on a real cluster of Spark: the losses of local nodes, and nothing left."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import commands
import pytest
from commands import COMMAND, Forked
from standalone import CONF, skip_without, spark

from dtrain.integrations.spark import launcher, task
from dtrain.integrations.spark.driver import reason
from dtrain.testing.engine import EngineTests

SMALL = (
    "model=mlp", "data=synthetic", "objective=regression", "strategy=ddp", "nodes=2", "devices=2", "hook=[]",
    "logger=[]", "checkpoint.every=50", "launcher=spark",
)  # fmt: skip


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dict[str, str]]]:
    with spark(tmp_path_factory.mktemp("spark")) as (master, variables):
        yield master, {**os.environ, **variables}


@pytest.mark.campaign("kills")
class TestSpark(EngineTests):
    start, seconds = Forked, 300.0
    slow = (
        "test_a_killed_agent_starts_again", "test_a_second_ctrl_c_ends_all", "test_the_first_error_of_a_rank_is_shown",
        "test_nodes_with_another_version_of_a_package_are_refused_by_name",
        "test_a_killed_command_takes_its_run_with_it_or_finds_it_again",
        "test_a_node_that_is_told_to_go_has_the_run_save",
    )  # fmt: skip

    @pytest.fixture(autouse=True)
    def _cluster(self, cluster: tuple[str, dict[str, str]]) -> None:
        master, self.environment = cluster
        self.words = (
            "launcher=spark", f"launcher.master={master}", f"launcher.conf={CONF}", "launcher.address=127.0.0.1",
        )  # fmt: skip


@pytest.fixture
def words(cluster: tuple[str, dict[str, str]]) -> list[str]:
    return [
        *SMALL, "steps=6", f"launcher.master={cluster[0]}", f"launcher.conf={CONF}", "launcher.address=127.0.0.1",
    ]  # fmt: skip


@pytest.mark.campaign("network")
def test_what_is_wrong_with_the_workers_is_told_before_anything_starts(
    words: list[str], cluster: tuple[str, dict[str, str]], tmp_path: Path
) -> None:
    for more, sentence in (
        (["launcher.python=/no/python"], "an executor has no /no/python. Type launcher.python=<its path"),
        (["launcher.folder=/no/folder"], "the working folder /no/folder cannot be read there"),
        (["nodes=9", "batch=18", "launcher.wait=3"], "Spark has no room for 9 node(s)"),
    ):
        done = commands.run(*words, *more, "out=a", cwd=tmp_path, env=cluster[1])
        assert done.returncode == 3 and sentence in done.stderr, done.stderr
        assert "Traceback" not in done.stderr and not (tmp_path / "a" / "metrics.jsonl").exists()


@pytest.mark.slow
@pytest.mark.campaign("network")
def test_the_secret_is_in_no_argument_and_in_no_file(
    words: list[str], cluster: tuple[str, dict[str, str]], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    secret, events = "4f0c9a7be1d2480ab35c6e7f", tmp_path / "events"
    events.mkdir()
    logged = CONF.replace("{", "{" + f"spark.eventLog.enabled: true, spark.eventLog.dir: '{events}', ")
    environment = {**cluster[1], "DTRAIN_SECRET": secret}
    command = Forked(
        [*COMMAND, *words, "steps=300", f"launcher.conf={logged}", "out=a"], cwd=tmp_path, env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    seen, deadline = set[bytes](), time.monotonic() + 300
    while command.poll() is None:
        assert time.monotonic() < deadline
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                seen.add(entry.read_bytes())
        time.sleep(0.1)
    output, _ = command.communicate()
    assert command.returncode == 0, output
    assert any(b"dtrain.launcher.local.agent" in line for line in seen)
    assert not [line for line in seen if secret.encode() in line]
    places = [tmp_path, Path(cluster[1]["SPARK_CONF_DIR"]).parent]
    files = [path for place in places for path in place.rglob("*") if path.is_file()]
    assert any(path.parent == events or path.parent.parent == events for path in files)
    assert not [path for path in files if secret.encode() in path.read_bytes()]


@pytest.mark.slow
@pytest.mark.campaign("kills")
def test_a_lost_executor_is_replaced_and_no_step_is_lost(
    words: list[str], cluster: tuple[str, dict[str, str]], tmp_path: Path
) -> None:
    daemons = Path(cluster[1]["SPARK_CONF_DIR"]).parent
    command = Forked([*COMMAND, *words, "steps=1000", "out=a"], cwd=tmp_path, env=cluster[1], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 200
    while not any((tmp_path / "a" / "checkpoints").rglob("COMMIT.json")):
        assert time.monotonic() < deadline and command.poll() is None
        time.sleep(0.1)
    os.kill(executors(daemons)[0], signal.SIGKILL)
    assert command.wait(300) == 0
    steps = [json.loads(line)["step"] for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    events = [json.loads(line) for line in (tmp_path / "a" / "events.jsonl").read_text().splitlines()]
    assert steps == [*range(1, 1001)] and sum(event["event"] == "started" for event in events) > 1


def executors(daemons: Path) -> list[int]:
    """The processes of executors whose workers have their folders there."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if b"CoarseGrainedExecutorBackend" in (entry / "cmdline").read_bytes():
                found += [int(entry.name)] if (entry / "cwd").readlink().is_relative_to(daemons) else []
    return found


JOB = {"python": ".".join(map(str, sys.version_info[:2])), "host": "127.0.0.1", "port": 9, "command": []}


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"python": "2.7"}, "and the command's is 2.7"),
        ({"folder": "/no/folder"}, "the working folder /no/folder cannot be read there (No such file or directory)"),
        ({}, "the command cannot be reached at 127.0.0.1:9 (Connection refused). Type launcher.address="),
    ],
)
def test_an_executor_that_cannot_be_a_node_says_why(changed: dict[str, str], sentence: str, tmp_path: Path) -> None:
    assert sentence in task.unfit({**JOB, "folder": str(tmp_path), **changed})


def test_an_executor_without_dtrain_is_told_by_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "NEEDED", ("dtrain", "nothing_of_that_name"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        job = {**JOB, "folder": str(tmp_path), "port": server.getsockname()[1]}
        assert "has no nothing_of_that_name. Install dtrain there" in task.unfit(job)


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (
            "PySparkRuntimeError: [PYTHON_VERSION_MISMATCH] Python in worker has different version: 3.9 than that in driver: "
            "3.11, PySpark cannot run with different minor versions.\nPlease check",
            "Python in worker has different version: 3.9 than that in driver: 3.11, PySpark cannot run with different minor "
            "versions. Type launcher.python=",
        ),
        ("java.lang.UnsupportedClassVersionError: org/apache/spark/launcher/Main", "this Java is too old for Spark"),
        (
            "o1.\n: org.apache.spark.SparkException: Job aborted due to stage failure: Could not recover from a failed barrier "
            "ResultStage. Most recent failure reason: Stage failed because barrier task ResultTask(1, 0) finished "
            "unsuccessfully.\nExecutorLostFailure (executor 0 exited caused by one of the running tasks) Reason: Command "
            "exited with code 137\n\tat org.x",
            "executor 0 of Spark was lost",
        ),
        ("o0.\n: org.apache.spark.SparkException: worker lost\n\tat org.x", "org.apache.spark.SparkException: worker lost."),
    ],
)  # fmt: skip
def test_errors_of_spark_become_sentences(said: str, sentence: str) -> None:
    assert reason(said, 2).startswith(sentence)


@pytest.mark.parametrize(
    ("words", "java", "code", "sentence"),
    [
        (["launcher.conf={executor.memory: 4g}"], "", 2, "launcher.conf: 'executor.memory' is no setting of Spark"),
        (
            ["launcher.conf={spark.hadoop.fs.s3a.secret.key: wJalrXUtnFEMIKMDENGbPxRfiCY}"],
            "",
            2,
            "secret.key holds a secret",
        ),
        (["launcher.master=spark://127.0.0.1:9"], "", 3, "no master of Spark answers (127.0.0.1:9: "),
        ([], "/no/java", 3, "there is no java in JAVA_HOME=/no/java. Install Java 17"),
    ],
)
def test_what_cannot_be_a_cluster_is_refused_at_once(
    words: list[str], java: str, code: int, sentence: str, tmp_path: Path
) -> None:
    if not java:
        skip_without()
    environment = {**os.environ, **({"JAVA_HOME": java} if java else {})}
    done = commands.run(*SMALL, "steps=6", *words, "out=a", cwd=tmp_path, env=environment)
    assert done.returncode == code and sentence in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def test_the_job_of_a_plan_has_an_executor_for_each_node(tmp_path: Path) -> None:
    done = commands.run("plan", *SMALL, "threads=3", "launcher.conf={spark.executor.memory: 2g}", "out=a", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for line in ("spark.task.cpus=6", "spark.executor.cores=6", "spark.cores.max=12", "spark.executor.memory=2g"):
        assert line in done.stdout


class Booting:
    """A driver whose executors come one by one."""

    def __init__(self, *events: dict[str, object]) -> None:
        self._events = [*events]

    def alive(self) -> bool:
        return True

    def events(self, seconds: float = 0.0) -> list[dict[str, object]]:
        return [self._events.pop(0)] if self._events else []


def test_executors_that_boot_are_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(launcher, "TELL_SECONDS", -1)
    spark = launcher.Spark(
        master=None, conf={}, folder=None, python=None, restarts=0, silence=1.0, wait=9.0, address=None
    )
    spark._asked = {"nodes": [2, 2]}
    spark._await_ready(Booting({}, {"executors": 0}, {"executors": 1}, {"ready": True}))  # type: ignore[arg-type]
    session, none, one = capsys.readouterr().err.splitlines()
    assert session.startswith("note: launcher=spark waits for a session of Spark; ")
    assert "for executors of 2 node(s), 0 of Spark are there; " in none and ", 1 of Spark are there; " in one
