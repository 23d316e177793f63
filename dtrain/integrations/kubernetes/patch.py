"""launcher.patch: what a user merges into the pod template of a run, held against the fields that Kubernetes has
(pod.yaml) and against what the plan and other words state.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from dtrain.config import files
from dtrain.config.word import cut
from dtrain.errors import nearest
from dtrain.secrets import HERE, masked

SHM = "/dev/shm"
TYPES: Mapping[str, tuple[type, ...]] = {"text": (str,), "int": (int,), "bool": (bool,), "number": (int, float)}
OF_A_JOB = {
    "completions": "nodes=<number>", "parallelism": "nodes=<number>", "replicas": "nodes=<number>",
    "numNodes": "nodes=<number>", "nprocPerNode": "devices=<number>", "backoffLimit": "launcher.backoff=<number>",
    "ttlSecondsAfterFinished": "nothing: a day is kept",
}  # fmt: skip
"""Fields of jobs, of which no pod template has one -> the words for them."""
CAPABILITIES = (
    "ALL", "AUDIT_CONTROL", "AUDIT_READ", "AUDIT_WRITE", "BLOCK_SUSPEND", "BPF", "CHECKPOINT_RESTORE", "CHOWN",
    "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID", "IPC_LOCK", "IPC_OWNER", "KILL", "LEASE",
    "LINUX_IMMUTABLE", "MAC_ADMIN", "MAC_OVERRIDE", "MKNOD", "NET_ADMIN", "NET_BIND_SERVICE", "NET_BROADCAST",
    "NET_RAW", "PERFMON", "SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYSLOG", "SYS_ADMIN", "SYS_BOOT", "SYS_CHROOT",
    "SYS_MODULE", "SYS_NICE", "SYS_PACCT", "SYS_PTRACE", "SYS_RAWIO", "SYS_RESOURCE", "SYS_TIME", "SYS_TTY_CONFIG",
    "WAKE_ALARM",
)  # fmt: skip
"""https://man7.org/linux/man-pages/man7/capabilities.7.html"""
OF_A_POD = {
    "restartPolicy": "It belongs to the failure policy of the job. Leave it out.",
    "terminationGracePeriodSeconds": "Type launcher.grace=<seconds>.",
    "hostname": "The pods find the first one by it. Leave it out.",
    "subdomain": "The pods find the first one by it. Leave it out.",
}  # fmt: skip
OF_THE_CONTAINER = {
    "image": "Type launcher.image=<image>.", "command": "It is dtrain run <out>. Leave it out.",
    "args": "The command is dtrain run <out>. Leave it out.", "workingDir": "Type launcher.folder=<path>.",
}  # fmt: skip
"""Fields that the plan or another word states -> what to type instead."""


def problems(
    patch: Mapping[str, Any],
    *,
    container: str,
    gpu: str,
    labels: Sequence[str],
    ours: Any,
    volumes: Sequence[str] | None,
) -> Iterator[str]:
    """A sentence for each mistake. `container`: the name of ours. `gpu`: the resource of GPUs. `labels`: those of ours.
    `ours`: a pattern of the variables that dtrain sets. `volumes`: the names of those there are; None: not known.
    """
    unknown = [*_unlike(patch, "PodTemplateSpec", "")]
    yield from (f"launcher.patch: {sentence}" for sentence in unknown)
    text = json.dumps(patch, default=str)
    if HERE.search(text) or masked(text) != text:
        yield "launcher.patch holds a secret, and stands in a manifest that others can read. Refer to a Secret instead."
    if unknown:
        return
    spec = patch.get("spec") or {}
    stated = [*_stated(spec, OF_A_POD, "spec"), *_of_containers(spec, container, volumes)]
    for each in spec.get("containers") or ():
        if each.get("name") == container:
            stated += _stated(each, OF_THE_CONTAINER, f"spec.containers.{container}")
            stated += _of_ours(each, gpu, ours)
    for each in filter(None, (*(spec.get("containers") or ()), *(spec.get("initContainers") or ()))):
        stated += _of_devices(each)
    if any(volume.get("name") == "shm" for volume in spec.get("volumes") or ()):
        stated.append(f"the volume shm is that of {SHM}. Type launcher.shm=<size>.")
    for label in {*((patch.get("metadata") or {}).get("labels") or ())}.intersection(labels):
        stated.append(f"by the label {label} the pods are found. Leave it out.")
    yield from (f"launcher.patch: {sentence}" for sentence in stated)


def _unlike(value: Any, kind: Any, where: str) -> Iterator[str]:
    """A sentence for each field below `where` that Kubernetes does not have, or of another type; null removes one."""
    name = where or "it"
    if value is None or kind == "any":
        return
    if isinstance(kind, list):
        if not isinstance(value, Sequence) or isinstance(value, str):
            yield f"{name} is {_shown(value)}, and a list is meant."
            return
        for number, each in enumerate(value):
            named = each.get("name", number) if isinstance(each, Mapping) else number
            yield from _unlike(each, kind[0], f"{where}.{cut(str(named))}")
    elif isinstance(kind, Mapping) or kind in fields():
        if not isinstance(value, Mapping):
            yield f"{name} is {_shown(value)}, and a mapping is meant."
            return
        known = {} if isinstance(kind, Mapping) else fields()[kind]
        for key, each in value.items():
            path = f"{where}.{cut(str(key))}".removeprefix(".")
            if isinstance(kind, Mapping):
                yield from _unlike(each, kind["*"], path)
            elif key in known:
                yield from _unlike(each, known[key], path)
            elif word := OF_A_JOB.get(key):
                yield f"{path} is a field of the job, not of its pods. Type {word}."
            else:
                yield f"Kubernetes has no field {path} in a pod template.{nearest(str(key), known)}"
    else:
        types = tuple(one for each in kind.split(" or ") for one in TYPES[each])
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            typed = f"""Type '"{value}"'.""" if types == (str,) and isinstance(value, int | float) else ""
            yield f"{name} is {_shown(value)}, and {kind} is meant. {typed}".rstrip()


def _shown(value: Any) -> str:
    return cut(json.dumps(value, default=str))


@cache
def fields() -> Mapping[str, Mapping[str, Any]]:
    """Type -> field -> its type: a name, a list of one, or a mapping of any key to one."""
    read: Mapping[str, Mapping[str, Any]] = yaml.load(Path(__file__).with_name("pod.yaml").read_bytes(), files.Loader)
    return read


def _stated(of: Mapping[str, Any], table: Mapping[str, str], where: str) -> list[str]:
    return [f"{where}.{name} is stated by other words. {instead}" for name, instead in table.items() if name in of]


def _of_containers(spec: Mapping[str, Any], ours: str, volumes: Sequence[str] | None) -> Iterator[str]:
    """Items that cannot be merged, or that name a container or volume which is not there."""
    lists = {name: spec.get(name) or [] for name in ("containers", "initContainers", "volumes")}
    for name in [name for name, items in lists.items() if not all(item and item.get("name") for item in items)]:
        yield f"{name} is no list of items with a name, by which they are merged."
    there = {*(volumes or ()), *(str(volume["name"]) for volume in lists["volumes"] if volume and volume.get("name"))}
    for each in filter(None, [*lists["containers"], *lists["initContainers"]]):
        if each.get("name") != ours and not each.get("image"):
            yield f"the container {cut(str(each.get('name')))!r} has no image. The name of that of the run is {ours}."
        for mount in filter(None, each.get("volumeMounts") or ()):
            if volumes is not None and mount.get("name") not in there:
                yield f"there is no volume {cut(str(mount.get('name')))!r}, which {cut(str(each.get('name')))} mounts."


def _of_devices(container: Mapping[str, Any]) -> Iterator[str]:
    """Devices such as rdma/hca are whole numbers, limited like huge pages; capabilities are those of Linux."""
    resources = container.get("resources") or {}
    limits, requests = ({**(resources.get(kind) or {})} for kind in ("limits", "requests"))
    for name, value in {**limits, **requests}.items():
        plain, is_device = cut(name), "/" in name
        if is_device and not re.fullmatch(r"[0-9]+", str(value)):
            yield f"resources: {plain} is {_shown(value)}, and a number of devices is meant. Type {plain}: 1."
        elif (is_device or name.startswith("hugepages-")) and str(limits.get(name)) != str(value):
            yield f"resources.requests.{plain} needs the same limit. Type limits: {{{plain}: {value}}}."
    capabilities = (container.get("securityContext") or {}).get("capabilities") or {}
    for name in (str(each) for kind in ("add", "drop") for each in capabilities.get(kind) or ()):
        if name not in CAPABILITIES:
            yield f"there is no capability {cut(name)}.{nearest(name.removeprefix('CAP_'), CAPABILITIES)}"


def _of_ours(container: Mapping[str, Any], gpu: str, ours: re.Pattern[str]) -> Iterator[str]:
    """Resources, variables and mounts of the run's container that other words state."""
    words = {gpu: "devices=<number>", "memory": "launcher.memory=<size>"}
    for kind in ("limits", "requests"):
        for name in words.keys() & {*((container.get("resources") or {}).get(kind) or ())}:
            yield f"resources.{kind}.{name} is stated by the plan. Type {words[name]}."
    for variable in filter(None, container.get("env") or ()):
        if ours.fullmatch(str(variable.get("name"))):
            yield f"env: {variable['name']} tells a pod its place in the run, and is set for it. Leave it out."
    for mount in filter(None, container.get("volumeMounts") or ()):
        if mount.get("mountPath") == SHM:
            yield f"{SHM} is the pod's memory. Type launcher.shm=<size>."
