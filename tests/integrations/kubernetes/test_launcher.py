"""Runs that the real kubectl submits to a stand-in for a cluster (tests/apiserver.py), where pods are processes."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import commands
import pytest
from apiserver import apiserver
from commands import Forked
from launching import plan_of

from dtrain.build import build
from dtrain.config import word as config_word
from dtrain.errors import PreflightError, WordsError
from dtrain.integrations.kubernetes import launcher as kubernetes
from dtrain.integrations.kubernetes.pending import Pending
from dtrain.launcher import answer, detached
from dtrain.testing.engine import RUN, EngineTests

SCHEMAS = pytest.importorskip("kubernetes_validate", reason="Type: pip install kubernetes-validate")


def words(folder: Path) -> tuple[str, ...]:
    """Of pods with the files of this host."""
    where = config_word.quote(str(folder))
    volume = config_word.quote(f"here:{folder.parent}")
    return (
        "launcher=kubernetes", "launcher.image=train:1", f"launcher.python={sys.executable}",
        f"launcher.folder={where}", f"launcher.volumes=[{volume}]", f"out={config_word.quote(f'{folder}/run')}",
    )  # fmt: skip


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with apiserver(tmp_path_factory.mktemp("cluster")) as variables:
        yield {**os.environ, **variables}


def kubectl(cluster: dict[str, str], *arguments: str) -> str:
    command = ["kubectl", *arguments]
    return subprocess.run(command, env=cluster, capture_output=True, text=True, timeout=60, check=True).stdout


def kept(cluster: dict[str, str]) -> list[str]:
    return kubectl(cluster, "get", "jobs,pods,services,secrets", "--output=name").split()


@pytest.mark.campaign("kills")
class TestKubernetes(EngineTests):
    start, detached, shown = Forked, True, (0, 1)  # the first pod's
    slow = (
        "test_a_killed_agent_starts_again", "test_a_second_ctrl_c_ends_all", "test_the_first_error_of_a_rank_is_shown",
        "test_a_killed_command_takes_its_run_with_it_or_finds_it_again",
    )  # fmt: skip

    test_nodes_with_another_version_of_a_package_are_refused_by_name = None  # all pods have one image

    @pytest.fixture(autouse=True)
    def _cluster(self, cluster: dict[str, str], tmp_path: Path) -> None:
        self.environment = cluster
        self.words = tuple(each for each in words(tmp_path / "it's here") if not each.startswith("out="))

    def _begin(self, folder: Path, *typed: str) -> Any:
        """Pods have no working folder of the command: `out` is a path on their volume."""
        places = [
            f"out={config_word.quote(f'{folder}/{each[4:]}')}" if each.startswith("out=") else each for each in typed
        ]
        return super()._begin(folder, *places)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    folder = tmp_path / "it's here"
    folder.mkdir()
    return folder


@pytest.mark.campaign("network")
def test_a_job_is_described_submitted_followed_and_stopped(cluster: dict[str, str], place: Path) -> None:
    run = (*RUN, *words(place))
    done = commands.run(*run, "steps=1000000", "launcher.detach=true", cwd=place, env=cluster)
    assert done.returncode == 0 and "dtrain stop" in done.stdout, done.stderr
    name = json.loads((place / "run" / "engine.json").read_text())["job"]
    secret = json.loads(kubectl(cluster, "get", "secret", name, "--output=json"))
    job = json.loads(kubectl(cluster, "get", "job", name, "--output=json"))
    service = json.loads(kubectl(cluster, "get", "service", name, "--output=json"))
    assert {each["metadata"]["ownerReferences"][0]["uid"] for each in (secret, service)} == {job["metadata"]["uid"]}
    assert secret["data"]["DTRAIN_SECRET"] not in json.dumps(job) and name in done.stdout
    other = commands.run(*run, "steps=1000000", "optim.lr=1", cwd=place, env=cluster)
    assert other.returncode == 3 and f"belongs to job {name}" in other.stderr
    while not (place / "run" / "metrics.jsonl").exists():
        assert name in str(kept(cluster))
    done = commands.run("stop", str(place / "run"), cwd=place, env=cluster)
    assert done.returncode == 0 and "has saved and ended" in done.stdout, done.stderr
    assert not [each for each in kept(cluster) if name in each]
    assert list((place / "run" / "checkpoints").rglob("COMMIT.json"))


@pytest.mark.campaign("network")
def test_the_pods_of_a_job_are_the_workers_of_a_sweep(cluster: dict[str, str], place: Path) -> None:
    there = [each for each in words(place) if not each.startswith("out=")]
    run = [each for each in RUN if not each.startswith(("nodes=", "devices=", "strategy="))]
    root = config_word.quote(f"{place}/s")
    sweep = ("-m", "seed=0,1,2,3", f"sweep.out={root}", "sweep.workers=2", "steps=5")
    done = commands.run(*run, *sweep, *there, cwd=place, env=cluster)
    assert done.returncode == 0, done.stdout + done.stderr
    results = [json.loads(path.read_text()) for path in (place / "s").glob("seed-*/result.json")]
    assert [result["status"] for result in results] == ["finished"] * 4


@pytest.mark.slow
@pytest.mark.campaign("network")
def test_a_pod_that_is_deleted_comes_back_and_no_step_is_lost(cluster: dict[str, str], place: Path) -> None:
    command = Forked(
        [*commands.COMMAND, *RUN, *words(place), "steps=1000"], cwd=place, env=cluster, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    metrics = place / "run" / "metrics.jsonl"
    while not metrics.exists() or metrics.stat().st_size < 2000:
        assert command.poll() is None, command.communicate()[0]
    name = json.loads((place / "run" / "engine.json").read_text())["job"]
    pods = [each for each in kept(cluster) if each.startswith(f"pod/{name}-0-")]
    kubectl(cluster, "delete", *pods, "--wait=false")
    output = command.communicate(timeout=150)[0]
    assert command.returncode == 0, output
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == [*range(1, 1001)]
    pods = [each for each in kept(cluster) if f"/{name}-" in each]
    assert len(pods) == 4, "both pods saved, ended with 75, and were replaced"


@pytest.mark.campaign("kills")
def test_the_first_pod_is_killed_and_the_others_join_the_one_that_replaces_it(
    cluster: dict[str, str], place: Path
) -> None:
    command = Forked(
        [*commands.COMMAND, *RUN, *words(place), "steps=400", "launcher.wait=30"], cwd=place, env=cluster, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    metrics = place / "run" / "metrics.jsonl"
    while not metrics.exists() or metrics.stat().st_size < 1000:
        assert command.poll() is None, command.communicate()[0]
    killed = _first_pod(place / "run")
    os.killpg(killed, signal.SIGKILL)
    output = command.communicate(timeout=150)[0]
    assert command.returncode == 0, output
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == [*range(1, 401)]
    name = json.loads((place / "run" / "engine.json").read_text())["job"]
    assert sum(each.startswith(f"pod/{name}-1-") for each in kept(cluster)) == 1, "the second pod waited for the first"


@pytest.mark.campaign("kills")
def test_an_error_of_the_program_ends_the_job_at_once_with_its_cause(cluster: dict[str, str], place: Path) -> None:
    fault = ("hook.fault._target_=dtrain.testing.faults.AtStep", "hook.fault.action=raise", "hook.fault.step=3")
    done = commands.run(*RUN, *words(place), *fault, "steps=20", "launcher.restarts=0", cwd=place, env=cluster)
    assert done.returncode == 1 and "FaultError: an injected fault" in done.stderr, done.stderr
    facts = json.loads((place / "run" / "failure.json").read_text())
    assert facts["kind"] == "error" and "FaultError" in facts["message"]
    name = json.loads((place / "run" / "engine.json").read_text())["job"]
    assert sum(each.startswith(f"pod/{name}-0-") for each in kept(cluster)) == 1


def _first_pod(out: Path) -> int:
    """The process of the first pod of a run."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            is_run = (entry / "cmdline").read_bytes().endswith(f"dtrain\0run\0{out}\0".encode())
            if is_run and b"\0JOB_COMPLETION_INDEX=0\0" in (entry / "environ").read_bytes():
                return os.getsid(int(entry.name))
    raise AssertionError("no pod of the first index runs")


def test_kubectl_reads_the_objects_as_they_were_meant(cluster: dict[str, str]) -> None:
    import yaml

    plan = plan_of("s3://bucket/run", "launcher=kubernetes", "launcher.image=train:1", "strategy=ddp", "nodes=2")
    for document in yaml.safe_load_all(build(plan.launcher).describe(plan)):
        command = ["kubectl", "label", "--local", "--filename=-", "--output=json", "more=yes"]
        done = subprocess.run(
            command, input=json.dumps(document), capture_output=True, text=True, timeout=60, check=True
        )
        document["metadata"]["labels"]["more"] = "yes"
        assert json.loads(done.stdout) == document


def test_a_cluster_that_nobody_serves_is_one_sentence(tmp_path: Path) -> None:
    if not shutil.which("kubectl"):
        pytest.skip("kubectl is not here. Type: apt-get install kubernetes-client")
    env = {**os.environ, "KUBECONFIG": str(tmp_path / "none")}
    folder = tmp_path / "here"
    folder.mkdir()
    done = commands.run(*RUN, *words(folder), "steps=6", cwd=folder, env=env)
    assert done.returncode == 3 and "launcher=kubernetes: kubectl: " in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def test_without_kubectl_it_is_named(tmp_path: Path) -> None:
    env = {**os.environ, "PATH": str(tmp_path)}
    folder = tmp_path / "here"
    folder.mkdir()
    done = commands.run(*RUN, *words(folder), "steps=6", cwd=folder, env=env)
    assert done.returncode == 3 and "kubectl is not here. Install kubernetes-client." in done.stderr, done.stderr


def test_outside_of_a_pod_nothing_is_served() -> None:
    plan = plan_of("s3://bucket/run", "launcher=kubernetes", "launcher.image=train:1", "strategy=ddp", "nodes=2")
    with pytest.raises(PreflightError, match="this command creates no job"):
        build(plan.launcher).launch(plan)


@pytest.mark.parametrize("kind", ["jobset", "trainjob", "pytorchjob"])
def test_workers_of_a_sweep_are_pods_of_an_indexed_job(kind: str) -> None:
    made = ("launcher=kubernetes", "launcher.image=train:1", "strategy=ddp", "nodes=2", f"launcher.kind={kind}")
    plan = plan_of("s3://bucket/sweep", *made)
    with pytest.raises(WordsError, match=r"Type launcher\.kind=job for workers"):
        build(plan.launcher).submit_workers(plan, ["python", "-m", "dtrain", "sweep", "work"], {})


def test_names_are_those_of_hosts() -> None:
    from dtrain.integrations.kubernetes.launcher import _name

    for out in ("s3://bucket/It is_HERE", "/shared/run", "runs/" + "a" * 200, "s3://bucket/-.-", "gs://b/ü"):
        name = _name(out)
        assert len(name) <= 50 and name.strip("-") == name and name.replace("-", "").isalnum() and name == name.lower()
        assert name.isascii() and name == _name(out)
    assert _name("s3://a/run") != _name("s3://b/run")


def test_the_name_of_a_secret_is_shown() -> None:
    said = 'Error from server (AlreadyExists): secrets "dtrain-run-0b85d8d5" already exists'
    with pytest.raises(PreflightError, match=r"AlreadyExists\): the Secret dtrain-run-0b85d8d5 already exists"):
        answer.answer(
            ["sh", "-c", f"echo '{said}' >&2; exit 1"],
            launcher="kubernetes",
            install="",
            unreached=kubernetes.UNREACHED,
        )


class Asked:
    """A kubectl that says `broken` where it is asked for it, and else what `answers` has for the verb."""

    def __init__(self, broken: str = "", **answers: str) -> None:
        self.broken, self.answers, self.commands = broken, answers, list[str]()

    def __call__(self, command: list[str], stdin: str = "") -> str:
        kind = json.loads(stdin)["kind"] if stdin else ""
        self.commands.append(" ".join([*command[1:3], kind]))
        if self.broken and self.broken in self.commands[-1]:
            raise PreflightError("launcher=kubernetes: kubectl: the server is gone.")
        return self.answers.get(command[1], "")


def submitted(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(kubernetes, "_ask", asked)
    plan = plan_of("s3://bucket/run", "launcher=kubernetes", "launcher.image=train:1", "strategy=ddp", "nodes=2")
    return str(build(plan.launcher).submit(plan, {"DTRAIN_SECRET": "0123456789abcdef"}))


@pytest.mark.parametrize("broken", ["create --filename=- Service", "create --filename=- Job", "patch services"])
def test_what_was_created_before_an_error_is_deleted(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(broken)
    with pytest.raises(PreflightError, match="the server is gone"):
        submitted(asked, monkeypatch)
    assert asked.commands[-1] == "delete jobs.batch,services,secrets "


def test_nothing_of_a_job_that_is_alive_is_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    for asked in (Asked(get='{"status": {}}'), Asked("create --filename=- Secret")):
        with pytest.raises(PreflightError):
            submitted(asked, monkeypatch)
        made = asked.commands.index("create --filename=- Secret") if asked.broken else 0
        assert not [each for each in asked.commands[made:] if each.startswith("delete")], asked.commands


WAITS = "ImagePullBackOff: Back-off pulling image train:1"
OF_PODS = {
    "scheduled": (
        {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}]},
        "a pod is not scheduled: Unschedulable: 0/3 nodes",
    ),
    "pulled": (
        {"containerStatuses": [{"state": {"waiting": dict(zip(("reason", "message"), WAITS.split(": "), strict=True))}}]},
        f"a pod does not begin: {WAITS}",
    ),
    "soon": ({"containerStatuses": [{"state": {"waiting": {"reason": "ContainerCreating"}}}]}, ""),
}  # fmt: skip


def test_why_pods_do_not_begin_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    events = [{"message": "older"}, {"message": "pods is forbidden: exceeded quota: gpus"}]
    answers = {"pods": [*OF_PODS], "events": events}
    job = {"spec": {"suspend": True}}

    def ask(verb: str, kind: str, *_: str) -> str:
        if kind == "jobs.batch":
            return json.dumps(job)
        if answers[kind] is None:
            raise PreflightError("nobody answers")
        pods = [{"status": {"phase": "Pending", **OF_PODS[name][0]}} for name in answers[kind] if kind == "pods"]
        return json.dumps({"items": pods if kind == "pods" else answers[kind]})

    pending = Pending(ask, "jobs.batch", "mine", threading.Event())
    for names in (["pulled", "pulled", "soon"], None, ["pulled"], ["scheduled"], ["pulled"], [], []):
        answers["pods"] = names
        pending.look()
    answers["events"] = []
    pending.look()
    job["spec"] = {}
    pending.look()
    said = [OF_PODS["pulled"][1], OF_PODS["scheduled"][1], OF_PODS["pulled"][1]]
    said.append("no pod can be created: pods is forbidden: exceeded quota: gpus")
    said.append("it is suspended until its queue admits it")
    assert capsys.readouterr().err.splitlines() == [f"note: job mine: {sentence}" for sentence in said]


def test_a_command_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer, "ANSWER_SECONDS", 0.2)
    with pytest.raises(PreflightError, match=r"launcher=mine: sleep did not answer within 0.2 s"):
        answer.answer(["sleep", "5"], launcher="mine", install="", unreached=kubernetes.UNREACHED)
    refused = "echo The connection to the server localhost:8080 was refused >&2; exit 1"
    with pytest.raises(
        PreflightError, match=r"was refused. No cluster is reached from here. .* type launcher.context="
    ):
        answer.answer(["sh", "-c", refused], launcher="kubernetes", install="", unreached=kubernetes.UNREACHED)
    with pytest.raises(PreflightError, match=r"launcher=mine: false: it ended with exit code 1"):
        answer.answer(["false"], launcher="mine", install="", unreached=kubernetes.UNREACHED)
    assert detached.log_file("s3://a", "x").name == "x.log"
