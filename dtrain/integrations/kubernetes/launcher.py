"""A run as a job of Kubernetes: kubectl creates it, and each of its pods executes `dtrain run <out>`. The first pod
serves the run; the others join it by its host name.

    dtrain plan launcher=kubernetes launcher.image=registry.example.org/train:1 nodes=2 out=s3://bucket/run

prints the manifest. A Secret that belongs to the job holds what the pods need and nobody else may read.
"""

import contextlib
import json
import os
import re
import subprocess
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import yaml

from dtrain.cluster.allocation import read
from dtrain.config.environment import HANDED, SECRET
from dtrain.errors import PreflightError, WordsError
from dtrain.integrations.kubernetes import manifest
from dtrain.integrations.kubernetes.manifest import INSTANCE, KINDS, Pods
from dtrain.integrations.kubernetes.pending import Pending
from dtrain.integrations.kubernetes.pods import problems, size_of, variable, volume
from dtrain.launcher import detached, process
from dtrain.launcher.answer import answer
from dtrain.launcher.external import External
from dtrain.launcher.local import attached
from dtrain.planned import Plan
from dtrain.result import Result

UNREACHED = (
    re.compile("connection to the server|unable to connect|no such host|timeout|context .* does not exist", re.I),
    "No cluster is reached from here. kubectl config get-contexts lists them: type launcher.context=<a name>.",
)
"""Errors of kubectl where no cluster answers, and the sentence for them."""
LOOK_SECONDS = 2.0
LAST_SECONDS = 10.0
"""Time for the last lines of a pod, once its job has ended."""
ENDED = ("Complete", "Completed", "Succeeded", "Failed")
"""Conditions of a job that has ended, of all kinds."""


class Kubernetes:
    """The arguments are explained in conf/launcher/kubernetes.yaml."""

    about: ClassVar = {"where": "elsewhere", "detached": True}
    inside = False

    def __init__(
        self, *, image: str, kind: str, namespace: str | None, context: str | None, folder: str | None, python: str,
        volumes: Sequence[str], env: Mapping[str, Any], env_from: Sequence[str], labels: Mapping[str, Any],
        queue: str | None, gpu: str, memory: str | None, shm: str | None, patch: Mapping[str, Any], runtime: str,
        grace: int, backoff: int, detach: bool, restarts: int, silence: float, wait: float,
    ) -> None:  # fmt: skip
        self.detach = detach
        self._kind, self._where = kind, {"namespace": _text(namespace), "context": _text(context)}
        self._pods: dict[str, Any] = {
            "image": image, "python": python, "folder": _text(folder), "volumes": [*map(str, volumes)],
            "env": {str(name): value for name, value in env.items()}, "env_from": [*map(str, env_from)], "gpu": gpu,
            "memory": _text(memory), "shm": _text(shm), "grace": grace, "patch": dict(patch),
        }  # fmt: skip
        self._job: dict[str, Any] = {
            "labels": {str(name): value for name, value in labels.items()},
            "backoff": backoff,
            "queue": _text(queue),
            "runtime": runtime,
        }
        self._serving: dict[str, Any] = {"restarts": restarts, "silence": silence, "wait": wait}

    def describe(self, plan: Plan) -> str:
        """The manifest. Raises WordsError for words that cannot stand in it."""
        documents = [yaml.safe_dump(each, sort_keys=False, width=120) for each in self._objects(plan)]
        name = _name(plan.out)
        return f"# and a Secret {name}, made for each start and deleted with the job\n" + "---\n".join(documents)

    def submit(self, plan: Plan, environment: Mapping[str, str]) -> str:
        return self._create(self._objects(plan), environment)

    def submit_workers(self, plan: Plan, command: Sequence[str], environment: Mapping[str, str]) -> str:
        """A worker in each pod of an Indexed Job. Raises WordsError for another kind of job."""
        if self._kind != "job":
            raise WordsError(
                f"launcher.kind={self._kind}: its pods are the nodes of one run. Type launcher.kind=job for workers."
            )
        return self._create(self._objects(plan, command[1:], own=[*environment]), environment)

    def _create(self, objects: Sequence[manifest.Object], environment: Mapping[str, str]) -> str:
        """Create the objects, of which the last is the job, and their Secret. Returns the job's name."""
        *others, job = objects
        name, kinds = str(job["metadata"]["name"]), f"{KINDS[self._kind].resource},services,secrets"
        if self._is_alive(name):
            raise PreflightError(f"launcher=kubernetes: job {name} was created meanwhile. Type the same words again.")
        self._ask("delete", kinds, name, "--ignore-not-found", "--cascade=foreground")
        self._ask("create", "--filename=-", stdin=json.dumps(manifest.secret(name, environment)))
        try:
            for each in others:
                self._ask("create", "--filename=-", stdin=json.dumps(each))
            uid = self._ask("create", "--filename=-", "--output=jsonpath={.metadata.uid}", stdin=json.dumps(job))
            owner = json.dumps(manifest.owned_by(self._kind, name, uid.strip()))
            for resource in ("secrets", *(f"{each['kind']}s".lower() for each in others)):
                self._ask("patch", resource, name, "--type=merge", f"--patch={owner}")
        except BaseException:  # its Secret is ours, and so is what has its name
            with contextlib.suppress(PreflightError):
                self._ask("delete", kinds, name, "--ignore-not-found", "--cascade=foreground", "--wait=false")
            raise
        return name

    def jobs(self, out: str) -> Collection[str]:
        name = _name(out)
        return [name] if self._is_alive(name) else []

    def _is_alive(self, name: str) -> bool:
        """Whether there is a job of this name that has not ended."""
        text = self._ask("get", KINDS[self._kind].resource, name, "--ignore-not-found", "--output=json")
        conditions = json.loads(text).get("status", {}).get("conditions", ()) if text.strip() else ()
        has_ended = any(each["type"] in ENDED and each["status"] == "True" for each in conditions)
        return bool(text.strip()) and not has_ended

    def waiting(self, job: str) -> str:
        """`reading` tells it, pod by pod."""
        return ""

    def cancel(self, job: str, *, save: bool) -> None:
        """Delete the job; its pods have `grace` seconds to save, or one."""
        resource = KINDS[self._kind].resource
        self._ask("delete", f"{resource}/{job}", "--ignore-not-found", "--cascade=foreground", "--wait=false")
        if not save:
            self._ask("delete", "pods", f"--selector={INSTANCE}={job}", "--grace-period=1", "--wait=false")

    def log(self, out: str, job: str) -> Path:
        return detached.log_file(out, f"kubernetes-{job}")

    def notes(self, plan: Plan) -> Iterator[str]:
        given, asked = self._pods["memory"], manifest.predicted_bytes(plan)
        if given and size_of(given) < asked:
            yield (
                f"launcher.memory={given}: {asked / (1 << 30):.1f} GiB would be requested by themselves, of which a "
                "quarter is spare; a pod that takes more than its memory is killed."
            )

    @contextmanager
    def reading(self, out: str, job: str) -> Iterator[None]:
        path, ended = self.log(out, job), threading.Event()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
        reader = _LogReader(self._command(), job, KINDS[self._kind].container, path, ended)
        thread = threading.Thread(target=reader.run, name="dtrain-logs", daemon=True)
        waits = Pending(self._ask, KINDS[self._kind].resource, job, ended)
        pending = threading.Thread(target=waits.run, name="dtrain-pending", daemon=True)
        for each in (thread, pending):
            each.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(LAST_SECONDS)
            reader.stop()
            thread.join()
            pending.join()

    def launch(self, plan: Plan) -> Result:
        """Serve the run in the first pod, and join it in the others. Raises PreflightError outside of a pod."""
        if read(os.environ) is None:
            raise PreflightError(
                "launcher=kubernetes: this command creates no job, and this process is in none. Leave "
                "launcher=kubernetes out to run it here."
            )
        if plan.nodes == 1:
            return attached.launch(plan, here=1, address=None, **self._serving)
        return External(**self._serving).launch(plan)

    def _objects(
        self, plan: Plan, arguments: Sequence[str] = (), own: Sequence[str] = (SECRET, HANDED)
    ) -> list[manifest.Object]:
        """`arguments`: of Python in the pods, by default those of the plan's run."""
        wrong = [*problems(plan, kind=self._kind, where=self._where, pods=self._pods, job=self._job)]
        if wrong:
            raise WordsError(*wrong)
        taken = {name: value for name, value in self._pods.items() if name != "python"}
        taken["volumes"] = [volume(text) for text in taken["volumes"]]
        taken["env"] = {name: str(value) for name, value in taken["env"].items()}
        taken["env_from"] = [variable(text) for text in taken["env_from"]]
        command = [self._pods["python"], *(arguments or ("-m", "dtrain", "run", plan.out))]
        pods = Pods(command=command, own=own, **taken)
        job = {**self._job, "labels": {name: str(value) for name, value in self._job["labels"].items()}}
        return manifest.objects(self._kind, _name(plan.out), plan, pods, **job)

    def _command(self) -> list[str]:
        return ["kubectl", *(f"--{name}={value}" for name, value in self._where.items() if value)]

    def _ask(self, *arguments: str, stdin: str = "") -> str:
        return _ask([*self._command(), *arguments], stdin)


class _LogReader:
    """Appends what the first pod of a job says to a file, and what the pods say that replace it."""

    def __init__(self, command: Sequence[str], job: str, container: str, path: Path, ended: threading.Event) -> None:
        self._command, self._job, self._container, self._path, self._ended = command, job, container, path, ended
        self._read, self._since = set[str](), ""
        """Ids of pods that say no more, and when the connection to the present one broke."""
        self._reader: subprocess.Popen[bytes] | None = None

    def run(self) -> None:
        while True:
            was_over = self._ended.is_set()
            pod = self._first_pod()
            if pod:
                self._follow(pod["metadata"]["name"])
                if self._is_over(pod):
                    self._read.add(pod["metadata"]["uid"])
                    self._since = ""
                else:
                    self._since = f"--since-time={datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
            elif was_over:
                return
            self._ended.wait(LOOK_SECONDS)

    def stop(self) -> None:
        """End the thread, whatever the pod still says."""
        self._read.add("*")
        if self._reader:
            self._reader.kill()

    def _first_pod(self) -> dict[str, Any] | None:
        """The oldest pod of the first node that has begun and is not read."""
        pods = [
            pod
            for pod in self._pods()
            if _is_first(pod) and pod["status"].get("phase") not in (None, "Pending")
            and not {pod["metadata"]["uid"], "*"} & self._read
        ]  # fmt: skip
        return min(pods, key=lambda pod: str(pod["metadata"]["creationTimestamp"]), default=None)

    def _is_over(self, pod: Mapping[str, Any]) -> bool:
        same = [now for now in self._pods() if now["metadata"]["uid"] == pod["metadata"]["uid"]]
        return not same or same[0]["status"].get("phase") in ("Succeeded", "Failed")

    def _pods(self) -> list[dict[str, Any]]:
        try:
            text = _ask([*self._command, "get", "pods", f"--selector={INSTANCE}={self._job}", "--output=json"])
            return list(json.loads(text)["items"])
        except PreflightError:  # nobody answers now
            return []

    def _follow(self, pod: str) -> None:
        arguments = ["logs", pod, f"--container={self._container}", "--follow", *filter(None, [self._since])]
        with self._path.open("ab") as file:
            self._reader = subprocess.Popen(
                [*self._command, *arguments], stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.DEVNULL,
                start_new_session=True, preexec_fn=partial(process.die_with, os.getpid()),
            )  # fmt: skip
        self._reader.wait()


def _is_first(pod: Mapping[str, Any]) -> bool:
    metadata = pod["metadata"]
    about = {**metadata.get("annotations", {}), **metadata.get("labels", {})}
    index = about.get("batch.kubernetes.io/job-completion-index")
    return index == "0" or about.get("training.kubeflow.org/replica-type", "").lower() == "master"


def _text(value: Any) -> str | None:
    """A word of digits alone is a number."""
    return None if value is None else str(value)


def _name(out: str) -> str:
    """The name of the job of a run, as a host name has to be, with room for an index."""
    start, _, digest = detached.name_of(out).lower().rpartition("-")
    return f"{re.sub('[^a-z0-9-]+', '-', start)[:40].rstrip('-')}-{digest}"


def _ask(command: Sequence[str], stdin: str = "") -> str:
    return answer(
        command, launcher="kubernetes", install="Install kubernetes-client.", stdin=stdin, unreached=UNREACHED
    )
