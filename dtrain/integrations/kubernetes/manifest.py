"""The objects of Kubernetes that run a plan: an Indexed Job with a headless Service, a JobSet, a TrainJob or a
PyTorchJob. Each pod is a node and executes the same command; its index tells it which one.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dtrain.cluster import network
from dtrain.errors import EXIT_CODES, FOR_GOOD, PreflightError, WordsError
from dtrain.launcher import apart
from dtrain.planned import Plan
from dtrain.predict import formulas
from dtrain.predict.memory import memory as predicted

Object = dict[str, Any]

INSTANCE = "app.kubernetes.io/instance"
"""Label of all objects of a run: the name of its job."""
QUEUE = "kueue.x-k8s.io/queue-name"
"""Label by which Kueue knows the queue of a job."""
KEPT_SECONDS = 86_400
"""How long a job that has ended is kept, with the logs of its pods."""
OF_A_CORE = 900
"""Thousandths of each core that a pod requests: a node keeps some of its cores for kubelet and daemons."""
OF_A_RANK, SPARE = 4 << 30, 1.25
"""Bytes of a host that Python, torch and the libraries of a GPU take beside what is predicted, and a share for files
and the rest. Both are assumptions.
"""
NODE_PORTS = 30000 - network.PORTS.start
"""Ports from 30000 on are those of services (--service-node-port-range)."""
MANAGER = "dtrain.launcher/kubernetes"
"""Owner of our patches to the runtime of a TrainJob."""


@dataclass(frozen=True)
class Kind:
    """A kind of job. `resource`: for kubectl. `container`: its name in the pods. `first`: host name of the first pod,
    if no controller sets the variables of its environment.
    """

    version: str
    name: str
    resource: str
    container: str
    first: str = ""


KINDS: Mapping[str, Kind] = {
    "job": Kind("batch/v1", "Job", "jobs.batch", "dtrain", "{name}-0.{name}"),
    "jobset": Kind(
        "jobset.x-k8s.io/v1alpha2", "JobSet", "jobsets.jobset.x-k8s.io", "dtrain", "{name}-node-0-0.{name}"
    ),
    "trainjob": Kind("trainer.kubeflow.org/v1alpha1", "TrainJob", "trainjobs.trainer.kubeflow.org", "node"),
    "pytorchjob": Kind("kubeflow.org/v1", "PyTorchJob", "pytorchjobs.kubeflow.org", "pytorch"),
}  # fmt: skip


@dataclass(frozen=True)
class Pods:
    """Pods as the words describe them; the arguments are those of conf/launcher/kubernetes.yaml, taken apart."""

    image: str
    command: Sequence[str]
    folder: str | None
    volumes: Sequence[tuple[str, str, bool]]
    """Claim, path, and whether it is only read."""
    env: Mapping[str, str]
    env_from: Sequence[tuple[str, str, str]]
    """Name and key of a Secret, and the variable."""
    gpu: str
    memory: str | None
    shm: str | None
    grace: int
    own: Sequence[str]
    """Variables that are in the Secret of the job."""
    patch: Mapping[str, Any]


def objects(kind: str, name: str, plan: Plan, pods: Pods, *, labels: Mapping[str, str], backoff: int,
            runtime: str, queue: str | None) -> list[Object]:  # fmt: skip
    """The objects to create; the last is the job."""
    labels = {**labels, **({QUEUE: queue} if queue else {})}
    template = _template(KINDS[kind], name, plan, pods)
    if kind == "job":
        return [_service(name), _job(kind, name, labels, _indexed(plan, template, backoff, KEPT_SECONDS))]
    if kind == "jobset":
        replicated = {"name": "node", "replicas": 1, "template": {"spec": _indexed(plan, template, backoff)}}
        network = {"enableDNSHostnames": True, "subdomain": name, "publishNotReadyAddresses": True}
        spec = {"network": network, "ttlSecondsAfterFinished": KEPT_SECONDS, "replicatedJobs": [replicated]}
        return [_job(kind, name, labels, spec)]
    if kind == "trainjob":
        return [_job(kind, name, labels, _trained(plan, template, runtime))]
    policy = {"backoffLimit": backoff, "ttlSecondsAfterFinished": KEPT_SECONDS, "cleanPodPolicy": "Running"}
    # of this operator, "ExitCode" fails the job at 75, and "Never" at a preempted pod
    replica = {"restartPolicy": "OnFailure", "template": template}
    replicas = {"Master": {"replicas": 1, **replica}}
    if plan.nodes > 1:
        replicas["Worker"] = {"replicas": plan.nodes - 1, **replica}
    spec = {"nprocPerNode": str(plan.devices), "runPolicy": policy, "pytorchReplicaSpecs": replicas}
    return [_job(kind, name, labels, spec)]


def secret(name: str, variables: Mapping[str, str]) -> Object:
    """The Secret from which the pods take these variables. It is never shown."""
    metadata = {"name": name, "labels": _labels(name)}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": dict(variables)}


def owned_by(kind: str, name: str, uid: str) -> Object:
    """The patch by which an object is deleted with its job."""
    owner = {"apiVersion": KINDS[kind].version, "kind": KINDS[kind].name, "name": name, "uid": uid}
    return {"metadata": {"ownerReferences": [owner]}}


def merged(base: Any, patch: Any) -> Any:
    """`patch` over `base`: names are merged, and items of lists that have a name or a mountPath; null removes."""
    if isinstance(base, Mapping) and isinstance(patch, Mapping):
        both = {**base, **{name: merged(base.get(name), value) for name, value in patch.items()}}
        return {name: value for name, value in both.items() if value is not None}
    if isinstance(base, list) and isinstance(patch, list) and base and patch:
        for key in ("mountPath", "name"):
            if all(isinstance(item, Mapping) and key in item for item in (*base, *patch)):
                items = {item[key]: item for item in base}
                for item in patch:
                    items[item[key]] = merged(items.get(item[key], {}), item)
                return [*items.values()]
    return patch


def _job(kind: str, name: str, labels: Mapping[str, str], spec: Object) -> Object:
    metadata = {"name": name, "labels": {**_labels(name), **labels}}
    return {"apiVersion": KINDS[kind].version, "kind": KINDS[kind].name, "metadata": metadata, "spec": spec}


def _labels(name: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": "dtrain", INSTANCE: name}


def _service(name: str) -> Object:
    """Gives the pods their host names."""
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {INSTANCE: name}}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name, "labels": _labels(name)}, "spec": spec}


def _indexed(plan: Plan, template: Object, backoff: int, kept: int | None = None) -> Object:
    """An Indexed Job. A pod that was disrupted, or has saved and asks to be run again, is replaced and not counted; one
    that refuses the plan, or would fail again, ends the job.
    """
    codes = {"containerName": "dtrain", "operator": "In"}
    refused = sorted({WordsError.exit_code, PreflightError.exit_code, FOR_GOOD})
    rules = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "Ignore", "onExitCodes": {**codes, "values": [EXIT_CODES["preempted"]]}},
        {"action": "FailJob", "onExitCodes": {**codes, "values": refused}},
    ]
    spec: Object = {"completionMode": "Indexed", "completions": plan.nodes, "parallelism": plan.nodes}
    spec |= {"backoffLimit": backoff, "podFailurePolicy": {"rules": rules}}
    return {**spec, **({"ttlSecondsAfterFinished": kept} if kept else {}), "template": template}


def _trained(plan: Plan, template: Object, runtime: str) -> Object:
    """A TrainJob: what its trainer has no field for is a patch of the runtime's pods."""
    spec = template["spec"]
    container = next(each for each in spec["containers"] if each["name"] == "node")
    trainer: Object = {"numNodes": plan.nodes, "numProcPerNode": plan.devices}
    trainer |= {name: container[name] for name in ("image", "command", "env") if name in container}
    trainer |= {"resourcesPerNode": container["resources"]} if "resources" in container else {}
    rest = {name: value for name, value in container.items() if name not in (*trainer, "resources")}
    others = [each for each in spec["containers"] if each is not container]
    pods = {**template, "spec": {**spec, "containers": [rest, *others]}}
    job = {"name": "node", "template": {"spec": {"template": pods}}}
    patch = {"manager": MANAGER, "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [job]}}}}
    reference = {"apiGroup": "trainer.kubeflow.org", "kind": "ClusterTrainingRuntime", "name": runtime}
    return {"runtimeRef": reference, "trainer": trainer, "runtimePatches": [patch]}


def _template(kind: Kind, name: str, plan: Plan, pods: Pods) -> Object:
    """The pod template, with the user's patch."""
    resources = _resources(plan, pods)
    container = {
        "name": kind.container,
        "image": pods.image,
        "command": [_verbatim(argument) for argument in pods.command],
        **({"workingDir": pods.folder} if pods.folder else {}),
        "env": _environment(kind, name, pods),
        **({"resources": resources} if resources else {}),
        "volumeMounts": [
            {"name": "shm", "mountPath": "/dev/shm"},
            *(
                {"name": f"volume-{number}", "mountPath": path, **({"readOnly": True} if is_read_only else {})}
                for number, (_, path, is_read_only) in enumerate(pods.volumes)
            ),
        ],
    }
    shm = {"medium": "Memory", **({"sizeLimit": pods.shm} if pods.shm else {})}
    claims = [{"persistentVolumeClaim": {"claimName": claim}} for claim, _, _ in pods.volumes]
    spec: Object = {
        **({"subdomain": name} if kind.name == "Job" else {}),
        # a TrainJob's is that of its runtime, a PyTorchJob's is set for the replicas
        **({"restartPolicy": "Never"} if kind.first else {}),
        # nothing in a pod asks Kubernetes
        **({} if kind.name == "TrainJob" else {"automountServiceAccountToken": False}),
        "terminationGracePeriodSeconds": pods.grace,
        "containers": [container],
        "volumes": [
            {"name": "shm", "emptyDir": shm},
            *({"name": f"volume-{number}", **claim} for number, claim in enumerate(claims)),
        ],
    }
    template: Object = merged({"metadata": {"labels": _labels(name)}, "spec": spec}, pods.patch)
    return template


def _environment(kind: Kind, name: str, pods: Pods) -> list[Object]:
    plain = dict(pods.env)
    if kind.first:
        plain |= {"MASTER_ADDR": kind.first.format(name=name), "MASTER_PORT": str(_port(name))}
    secrets = [*((name, variable, variable) for variable in pods.own), *pods.env_from]
    return [
        *({"name": variable, "value": _verbatim(value)} for variable, value in plain.items()),
        *(
            {"name": variable, "valueFrom": {"secretKeyRef": {"name": where, "key": key}}}
            for where, key, variable in secrets
        ),
    ]


def _port(name: str) -> int:
    """Where the first pod serves the run: another port for each job, for pods that share the network of a node."""
    return network.PORTS.start + int(hashlib.sha256(name.encode()).hexdigest(), 16) % NODE_PORTS


def _resources(plan: Plan, pods: Pods) -> Object:
    """The cores of its threads, or its share of the node's where other pods have the other GPUs, and the memory that is
    predicted, without a limit.
    """
    cores, gpus = plan.devices * plan.threads * OF_A_CORE, plan.cluster.get("gpus") or 0
    if plan.device == "cuda" and plan.devices < gpus:
        cores = min(cores, plan.cluster["cpus"] * OF_A_CORE * plan.devices // gpus)
    limits = {"memory": pods.memory} if pods.memory else {}
    asked = predicted_bytes(plan)
    memory = limits or ({"memory": f"{math.ceil(asked / (1 << 20))}Mi"} if asked else {})
    requests = {"cpu": f"{cores}m" if cores % 1000 else str(cores // 1000), **memory}
    if plan.device == "cuda":
        limits = {**limits, pods.gpu: str(plan.devices)}
    return {"requests": requests, **({"limits": limits} if limits else {})}


def predicted_bytes(plan: Plan) -> int:
    """Memory of the host that the ranks of a pod take; 0 if it is not known without building the model."""
    shapes = formulas.shapes(plan) or apart.known(plan)
    if shapes is None:
        return 0
    memory = predicted(plan, shapes)
    rank = memory.host + memory.copies + OF_A_RANK + (0 if plan.device == "cuda" else memory.peak)
    return int(plan.devices * rank * SPARE)


def _verbatim(text: str) -> str:
    """Kubernetes replaces $(NAME) in commands and variables."""
    return text.replace("$", "$$")
