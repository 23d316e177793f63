"""A stand-in for a cluster of Kubernetes, for the real kubectl: it checks what it is given by the schemas, keeps
Secrets, Services and Jobs, and runs each pod of an Indexed Job as a process of this host.

with apiserver(folder) as variables:
    subprocess.run(["kubectl", "get", "jobs"], env={**os.environ, **variables})

It proves what the launcher asks and how it reads the answers; nothing about schedulers, networks or controllers.
"""

import base64
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from until import until

VERSION = "1.33"
GROUPS = {"v1": ("Secret", "Service", "Pod"), "batch/v1": ("Job",)}
PLACE = re.compile(r"/(?:api|apis)/(v1|batch/v1)/namespaces/default/(\w+)(?:/([\w.-]+))?(/log)?")
INDEX = "batch.kubernetes.io/job-completion-index"


@contextlib.contextmanager
def apiserver(folder: Path) -> Iterator[dict[str, str]]:
    """The variables by which kubectl finds it, a process of its own. At the end no pod is left."""
    if not shutil.which("kubectl"):
        pytest.skip("kubectl is not here. Type: apt-get install kubernetes-client")
    server = subprocess.Popen([sys.executable, __file__, str(folder)], stdin=subprocess.PIPE, start_new_session=True)
    try:
        until(lambda: (folder / "config").exists() or server.poll() is not None)
        assert server.poll() is None
        yield {"KUBECONFIG": str(folder / "config"), "KUBECACHEDIR": str(folder / "cache")}
    finally:
        server.communicate(timeout=60)


def serve(folder: Path) -> None:
    """Serve until standard input ends."""
    cluster = Cluster(folder)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Handler,), {"cluster": cluster}))
    server.daemon_threads = True
    threads = [threading.Thread(target=work, daemon=True) for work in (server.serve_forever, cluster.control)]
    for thread in threads:
        thread.start()
    config = {
        "apiVersion": "v1", "kind": "Config", "current-context": "here",
        "clusters": [{"name": "here", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
        "users": [{"name": "me", "user": {}}],
    }  # fmt: skip
    (folder / "written").write_text(json.dumps(config))
    (folder / "written").rename(folder / "config")
    sys.stdin.read()
    cluster.over = True
    threads[1].join()
    server.shutdown()


class Cluster:
    def __init__(self, folder: Path) -> None:
        self.folder, self.over, self.lock = folder, False, threading.RLock()
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.kills: dict[str, float] = {}
        """Pod -> when its grace ends."""

    def kind(self, kind: str) -> dict[str, dict[str, Any]]:
        with self.lock:
            return {name: each for (its, name), each in self.objects.items() if its == kind}

    def create(self, kind: str, value: dict[str, Any]) -> dict[str, Any]:
        metadata = value["metadata"]
        metadata |= {"uid": str(uuid.uuid4()), "creationTimestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        metadata |= {"namespace": "default", "resourceVersion": "1"}
        value.setdefault("status", {})
        self.objects[kind, metadata["name"]] = value
        return value

    def delete(self, kind: str, name: str, grace: int | None) -> None:
        value = self.objects[kind, name]
        if kind == "pods":
            self.end(value, value["spec"].get("terminationGracePeriodSeconds", 30) if grace is None else grace)
        elif kind == "jobs" and any(owned_by(pod, value) for pod in self.kind("pods").values()):
            value["metadata"]["deletionTimestamp"] = "now"
        else:
            self.remove(kind, name)

    def remove(self, kind: str, name: str) -> None:
        value = self.objects.pop((kind, name))
        for (its, other), each in [*self.objects.items()]:
            if owned_by(each, value) and its != "pods":
                self.remove(its, other)

    def end(self, pod: dict[str, Any], grace: float) -> None:
        name = pod["metadata"]["name"]
        process = self.processes.get(name)
        if process and process.poll() is None:
            first = "deletionTimestamp" not in pod["metadata"]
            pod["metadata"]["deletionTimestamp"] = "now"
            self.kills[name] = min(time.monotonic() + grace, self.kills.get(name, float("inf")))
            if first:
                process.send_signal(signal.SIGTERM)

    def control(self) -> None:
        """What the controller of Jobs, the scheduler and kubelet do."""
        while not self.over or any(process.poll() is None for process in self.processes.values()):
            with self.lock:
                for name in self.processes if self.over else [*self.kills]:
                    if self.over or time.monotonic() > self.kills[name]:
                        with contextlib.suppress(ProcessLookupError):
                            os.killpg(self.processes[name].pid, signal.SIGKILL)
                for job in [] if self.over else [*self.kind("jobs").values()]:
                    self.tend(job)
            time.sleep(0.05)

    def tend(self, job: dict[str, Any]) -> None:
        spec, status, name = job["spec"], job["status"], job["metadata"]["name"]
        pods = [pod for pod in self.kind("pods").values() if owned_by(pod, job)]
        for pod in pods:
            self.look(pod)
        running = [pod for pod in pods if pod["status"]["phase"] == "Running"]
        if "deletionTimestamp" in job["metadata"] or "conditions" in status:
            for pod in running:
                if "deletionTimestamp" not in pod["metadata"]:
                    self.end(pod, spec["template"]["spec"]["terminationGracePeriodSeconds"])
            if not running and "deletionTimestamp" in job["metadata"]:
                for pod in pods:
                    self.remove("pods", pod["metadata"]["name"])
                self.remove("jobs", name)
            return
        actions = {pod["metadata"]["name"]: action(spec, pod) for pod in pods}
        counted = [each for each in actions.values() if each == "Count"]
        if "FailJob" in actions.values() or len(counted) > spec["backoffLimit"]:
            status["conditions"] = [{"type": "Failed", "status": "True"}]
            return
        busy = {pod["metadata"]["annotations"][INDEX] for pod in pods if actions[pod["metadata"]["name"]] == ""}
        if len(busy) == spec["completions"] and not running:
            status["conditions"] = [{"type": "Complete", "status": "True"}]
        for index in range(spec["completions"]):
            if str(index) not in busy:
                self.start(job, index)

    def start(self, job: dict[str, Any], index: int) -> None:
        template, name = job["spec"]["template"], job["metadata"]["name"]
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": job["metadata"]["uid"]}
        pod = {
            "apiVersion": "v1", "kind": "Pod", "spec": template["spec"],
            "metadata": {
                **template["metadata"], "name": f"{name}-{index}-{uuid.uuid4().hex[:5]}", "ownerReferences": [owner],
                "annotations": {INDEX: str(index)},
            },
        }  # fmt: skip
        secrets = {name: each["data"] for name, each in self.kind("secrets").items()}
        (container,) = template["spec"]["containers"]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("DTRAIN")}
        for variable in container["env"]:
            if "valueFrom" in variable:
                where = variable["valueFrom"]["secretKeyRef"]
                environment[variable["name"]] = base64.b64decode(secrets[where["name"]][where["key"]]).decode()
            else:
                environment[variable["name"]] = variable["value"].replace("$$", "$")
        host, port = name_and_port(job)
        assert environment["MASTER_ADDR"] == host
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "JOB_COMPLETION_INDEX": str(index)}
        pod = self.create("pods", pod)
        with self.log(pod["metadata"]["name"]).open("wb") as log:
            self.processes[pod["metadata"]["name"]] = subprocess.Popen(
                [argument.replace("$$", "$") for argument in container["command"]], cwd=container["workingDir"],
                env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        pod["status"] = {"phase": "Running"}

    def look(self, pod: dict[str, Any]) -> None:
        code = self.processes[pod["metadata"]["name"]].poll()
        if code is not None:
            ended = {"exitCode": 128 - code if code < 0 else code}
            state = {"name": pod["spec"]["containers"][0]["name"], "state": {"terminated": ended}}
            pod["status"] = {"phase": "Failed" if code else "Succeeded", "containerStatuses": [state]}

    def log(self, pod: str) -> Path:
        return self.folder / f"{pod}.log"


def owned_by(value: dict[str, Any], owner: dict[str, Any]) -> bool:
    owners = value["metadata"].get("ownerReferences", [])
    return any(each["uid"] == owner["metadata"]["uid"] for each in owners)


def name_and_port(job: dict[str, Any]) -> tuple[str, str]:
    """The host name of the first pod, which nobody resolves here, and a port for each job."""
    name = job["metadata"]["name"]
    return f"{name}-0.{job['spec']['template']['spec']['subdomain']}", str(
        20000 + int(job["metadata"]["uid"][:4], 16) % 10000
    )


def action(spec: dict[str, Any], pod: dict[str, Any]) -> str:
    """What its podFailurePolicy says about a pod: Ignore, Count or FailJob; empty for one that runs or has done its
    work.
    """
    if pod["status"]["phase"] != "Failed":
        return ""
    code = pod["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"]
    for rule in spec["podFailurePolicy"]["rules"]:
        if code in rule.get("onExitCodes", {}).get("values", ()):
            return str(rule["action"])
    return "Count"


class Handler(BaseHTTPRequestHandler):
    cluster: Cluster
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, value: Any, code: int = 200) -> None:
        data = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def refuse(self, code: int, reason: str, message: str) -> None:
        self.answer(
            {
                "apiVersion": "v1",
                "kind": "Status",
                "status": "Failure",
                "reason": reason,
                "message": message,
                "code": code,
            },
            code,
        )

    def place(self) -> "tuple[str, str, str, bool, dict[str, str]]":
        url = urlsplit(self.path)
        match = PLACE.fullmatch(url.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        return (match[1], match[2], match[3] or "", bool(match[4]), query) if match else ("", "", "", False, query)

    def body(self) -> Any:
        text = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        return json.loads(text) if text else {}

    def do_GET(self) -> None:
        version, kind, name, is_log, query = self.place()
        with self.cluster.lock:
            value = self.cluster.objects.get((kind, name))
            values = [*self.cluster.kind(kind).values()]
        if not version:
            self.discover(urlsplit(self.path).path)
        elif is_log:
            self.stream(name)
        elif name and value:
            self.answer(value)
        elif name:
            self.refuse(404, "NotFound", f'{kind} "{name}" not found')
        else:
            for item in query.get("labelSelector", "").split(","):
                key, _, wanted = item.partition("=")
                values = [each for each in values if not key or each["metadata"].get("labels", {}).get(key) == wanted]
            wanted = query.get("fieldSelector", "").removeprefix("metadata.name=")
            values = [each for each in values if wanted in ("", each["metadata"]["name"])]
            self.answer({"apiVersion": version, "kind": "List", "metadata": {"resourceVersion": "1"}, "items": values})

    def do_POST(self) -> None:
        import kubernetes_validate

        version, kind, _, _, query = self.place()
        value = self.body()
        try:
            assert version and query["fieldValidation"] == "Strict", self.path
            kubernetes_validate.validate(value, VERSION, strict=True)
        except kubernetes_validate.ValidationError as error:
            return self.refuse(400, "BadRequest", str(error).splitlines()[0])
        value["data"] = {
            name: base64.b64encode(text.encode()).decode() for name, text in value.pop("stringData", {}).items()
        }
        with self.cluster.lock:
            if (kind, value["metadata"]["name"]) in self.cluster.objects:
                return self.refuse(409, "AlreadyExists", f'{kind} "{value["metadata"]["name"]}" already exists')
            return self.answer(self.cluster.create(kind, value), 201)

    def do_PATCH(self) -> None:
        _, kind, name, _, _ = self.place()
        patch = self.body()
        with self.cluster.lock:
            self.cluster.objects[kind, name]["metadata"] |= patch["metadata"]
            self.answer(self.cluster.objects[kind, name])

    def do_DELETE(self) -> None:
        _, kind, name, _, _ = self.place()
        options = self.body()
        with self.cluster.lock:
            if (kind, name) not in self.cluster.objects:
                return self.refuse(404, "NotFound", f'{kind} "{name}" not found')
            value = self.cluster.objects[kind, name]
            if kind == "jobs":
                assert options["propagationPolicy"] == "Foreground"
            self.cluster.delete(kind, name, options.get("gracePeriodSeconds"))
            return self.answer(value)

    def stream(self, pod: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Connection", "close")
        self.end_headers()
        with self.cluster.log(pod).open("rb") as log:
            deadline, ended = time.monotonic() + 3600, False
            while not ended and time.monotonic() < deadline:
                time.sleep(0.05)
                ended = self.cluster.processes[pod].poll() is not None
                self.wfile.write(log.read())
                self.wfile.flush()
        self.close_connection = True

    def discover(self, path: str) -> None:
        def resources(version: str) -> list[dict[str, Any]]:
            verbs = ["create", "delete", "get", "list", "patch", "watch"]
            return [
                {
                    "name": f"{kind.lower()}s",
                    "singularName": kind.lower(),
                    "namespaced": True,
                    "kind": kind,
                    "verbs": verbs,
                }
                for kind in GROUPS[version]
            ]

        batch = {"groupVersion": "batch/v1", "version": "v1"}
        answers = {
            "/api": {"kind": "APIVersions", "versions": ["v1"]},
            "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": [{"name": "batch", "versions": [batch], "preferredVersion": batch}]},
            "/version": {"major": "1", "minor": "33", "gitVersion": "v1.33.0"},
            "/openapi/v3": {"paths": {where: {"serverRelativeURL": f"/openapi/v3/{where}"} for where in ("api/v1", "apis/batch/v1")}},
        }  # fmt: skip
        for version, kinds in GROUPS.items():
            where = f"api/{version}" if version == "v1" else f"apis/{version}"
            answers[f"/{where}"] = {"kind": "APIResourceList", "groupVersion": version, "resources": resources(version)}
            paths = {}
            for kind in kinds:
                group, _, short = version.rpartition("/")
                post = {
                    "x-kubernetes-group-version-kind": {"group": group, "kind": kind, "version": short},
                    "parameters": [{"name": "fieldValidation", "in": "query"}],
                    "responses": {},
                }  # fmt: skip
                paths[f"/{where}/namespaces/{{namespace}}/{kind.lower()}s"] = {"post": post, "patch": post}
            answers[f"/openapi/v3/{where}"] = {"openapi": "3.0.0", "info": {"title": "", "version": ""}, "paths": paths}
        if path in answers:
            self.answer(answers[path])
        else:
            self.refuse(404, "NotFound", f"no {path}")


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
