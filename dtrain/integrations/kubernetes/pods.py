"""The words of launcher=kubernetes that describe pods: taken apart, and checked before anything is created."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from posixpath import normpath
from typing import Any

from dtrain.cluster.allocation import OF_RANKS
from dtrain.config import files
from dtrain.config.environment import HANDED, SECRET
from dtrain.config.word import cut
from dtrain.integrations.kubernetes import patch
from dtrain.integrations.kubernetes.manifest import INSTANCE, KINDS, QUEUE
from dtrain.integrations.kubernetes.patch import SHM
from dtrain.planned import Plan
from dtrain.secrets import HERE, masked
from dtrain.storage import store

LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
NAME = re.compile(rf"(?=.{{1,253}}\Z){LABEL}(\.{LABEL})*")
"""A DNS subdomain: names of most objects."""
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
QUANTITY = re.compile(r"(?P<number>[0-9]+(\.[0-9]+)?)(?P<unit>[kMGTPE]|[KMGTPE]i)?")
FINDS = (INSTANCE, "app.kubernetes.io/name")
"""Labels of ours, by which pods are found."""
PART = r"[a-z0-9]+(?:[._-]+[a-z0-9]+)*"
REGISTRY = r"(?:localhost|[\w-]+\.[\w.-]*|[\w.-]+(?=:))(?::\d+)?"
IMAGE = re.compile(
    rf"(?=.{{1,500}}\Z)(?:{REGISTRY}/)?{PART}(?:/{PART})*(?::\w[\w.-]{{0,127}})?(?:@\w+:[0-9a-f]{{32,}})?", re.ASCII
)
"""A registry, small letters in its paths, a tag, a digest
(https://pkg.go.dev/github.com/distribution/reference#pkg-overview)."""
KEY = re.compile(rf"({NAME.pattern}/)?[A-Za-z0-9]([\w.-]{{0,61}}[A-Za-z0-9])?", re.ASCII)
"""Of a label, or a resource."""
VALUE = re.compile(r"([A-Za-z0-9]([\w.-]{0,61}[A-Za-z0-9])?)?", re.ASCII)
"""Of a label."""
OURS = re.compile(rf"{'|'.join((*OF_RANKS, SECRET, HANDED, 'JOB_COMPLETION_INDEX'))}|PET_.*")
"""Variables that tell a pod its place."""
REFERENCE = re.compile(rf"(?P<secret>{NAME.pattern})/(?P<key>[\w.-]{{1,253}}):(?P<name>{VARIABLE.pattern})", re.ASCII)


def volume(text: str) -> tuple[str, str, bool]:
    """The claim, the path and whether it is only read. Raises ValueError."""
    claim, _, path = text.partition(":")
    path, is_read_only = path.removesuffix(":ro"), path.endswith(":ro")
    if not NAME.fullmatch(claim) or not path.startswith("/") or ":" in path or ".." in path.split("/"):
        raise ValueError(f"launcher.volumes: {cut(text)!r} is no <claim>:/path or <claim>:/path:ro.")
    return claim, f"/{normpath(path).strip('/')}", is_read_only


def variable(text: str) -> tuple[str, str, str]:
    """The name and the key of a Secret, and the variable. Raises ValueError."""
    match = REFERENCE.fullmatch(text)
    if not match:
        raise ValueError(f"launcher.env_from: {cut(text)!r} is no <secret>/<key>:<variable>.")
    return match["secret"], match["key"], match["name"]


def problems(
    plan: Plan, *, kind: str, where: Mapping[str, str | None], pods: Mapping[str, Any], job: Mapping[str, Any]
) -> Iterator[str]:
    """A sentence for each word that no object of Kubernetes can hold, or that would not work there. `where`, `pods`,
    `job`: the launcher's arguments.
    """
    yield from _texts(where, pods, job)
    lists = dict[str, list[Any]](volumes=[], env_from=[])
    for name, parse in (("volumes", volume), ("env_from", variable)):
        for text in pods[name]:
            try:
                lists[name].append(parse(text))
            except ValueError as error:
                yield str(error)
    yield from _variables(pods["env"], [name for _, _, name in lists["env_from"]])
    for key, value in job["labels"].items():
        if not KEY.fullmatch(str(key)) or not _is_text(value) or not VALUE.fullmatch(str(value)):
            yield f"launcher.labels: {cut(f'{key}: {value}')!r} is no label of Kubernetes."
    yield from _places(plan, lists["volumes"])
    volumes = None if kind == "trainjob" else ["shm", *(f"volume-{number}" for number in range(len(pods["volumes"])))]
    yield from patch.problems(
        pods["patch"], container=KINDS[kind].container, gpu=pods["gpu"], labels=FINDS, ours=OURS, volumes=volumes
    )
    if wrong := {*job["labels"]}.intersection(FINDS):
        yield f"launcher.labels: by {min(wrong)} the pods are found. Leave it out."
    yield from _queue(job["queue"], job["labels"])
    if kind == "trainjob" and job["backoff"] != files.node("launcher", "kubernetes")["backoff"]:
        yield "launcher.backoff: a TrainJob has the failure policy of its runtime. Leave it out."
    if kind == "trainjob" and pods["folder"] is not None:
        yield "launcher.folder: a TrainJob has no field for it. Set WORKDIR in the image."
    if isinstance(plan.allowed, Sequence) and len(plan.allowed) > 1 and kind in ("trainjob", "pytorchjob"):
        yield (
            f"nodes={min(plan.allowed)}:{max(plan.allowed)}: launcher.kind={kind} starts a fixed number of pods. Type "
            f"launcher.kind=job, or nodes={max(plan.allowed)}."
        )


def _queue(queue: str | None, labels: Mapping[str, Any]) -> Iterator[str]:
    if queue is not None and not NAME.fullmatch(queue):
        yield f"launcher.queue={cut(queue)!r} is no name of a queue: small letters, digits, - and dots."
    if queue is not None and QUEUE in labels:
        yield f"launcher.queue={cut(queue)} and launcher.labels both name a queue. Leave one out."


def _texts(where: Mapping[str, str | None], pods: Mapping[str, Any], job: Mapping[str, Any]) -> Iterator[str]:
    if not IMAGE.fullmatch(pods["image"]):
        small = cut(pods["image"].lower())
        instead = f" Type launcher.image={small}." if IMAGE.fullmatch(small) else ""
        yield (
            f"launcher.image={cut(pods['image'])!r} is no name of an image, such as registry.example.org/train:1, with "
            f"small letters in its path.{instead}"
        )
    if where["namespace"] is not None and not re.fullmatch(LABEL, where["namespace"]):
        yield f"launcher.namespace={cut(where['namespace'])!r} is no name in Kubernetes: small letters, digits and -."
    if not NAME.fullmatch(job["runtime"]):
        yield f"launcher.runtime={cut(job['runtime'])!r} is no name in Kubernetes: small letters, digits, - and dots."
    if where["context"] is not None and (not where["context"].isprintable() or not where["context"]):
        yield f"launcher.context={cut(where['context'])!r} is no context of a kubeconfig."
    for name in ("memory", "shm"):
        if pods[name] is not None and not size_of(pods[name]):
            yield f"launcher.{name}={cut(pods[name])!r} is no quantity, such as 64Gi."
    if pods["shm"] and pods["memory"] and size_of(pods["shm"]) > size_of(pods["memory"]) > 0:
        yield (
            f"launcher.shm={pods['shm']} is more than launcher.memory={pods['memory']}, in which /dev/shm is counted."
        )
    if not KEY.fullmatch(pods["gpu"]) or "/" not in pods["gpu"]:
        yield f"launcher.gpu={cut(pods['gpu'])!r} is no resource of a device plugin, such as nvidia.com/gpu."
    if pods["folder"] is not None and not pods["folder"].startswith("/"):
        yield f"launcher.folder={cut(pods['folder'])!r} is no absolute path in the image."


def size_of(quantity: str) -> float:
    """A quantity as a number of bytes; 0 if it is none."""
    match = QUANTITY.fullmatch(quantity)
    number, unit = (match["number"], match["unit"] or "") if match else ("0", "")
    power = " kmgtpe".index(unit[0].lower()) if unit else 0
    return float(number) * float(1024 if unit.endswith("i") else 1000) ** power


def _variables(env: Mapping[str, Any], secrets: Sequence[str]) -> Iterator[str]:
    for name in (*env, *secrets):
        group = "env" if name in env else "env_from"
        if not VARIABLE.fullmatch(name):
            yield f"launcher.{group}: {cut(name)!r} is no name of a variable."
        elif OURS.fullmatch(name):
            yield f"launcher.{group}: {name} tells a pod its place in the run, and is set for it. Leave it out."
    names = [*env, *secrets]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"launcher.env_from: {name} is there twice, or in launcher.env too. Leave one out."
    for name, value in env.items():
        text = f"{name}={value}"
        if not _is_text(value):
            yield f"launcher.env: {cut(name)} is {cut(json.dumps(value))}, and variables are text. Type '\"...\"'."
        elif HERE.search(text) or masked(text) != text:
            yield (
                f"launcher.env: {cut(name)} is a secret, and would stand in a manifest that others can read. Put it "
                f"into a Secret, and type launcher.env_from=[<secret>/<key>:{cut(name)}]."
            )


def _is_text(value: Any) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)


def _places(plan: Plan, volumes: Sequence[tuple[str, str, bool]]) -> Iterator[str]:
    """Whether the pods and this host can share `out`."""
    paths = [path for _, path, _ in volumes]
    for path in sorted({path for path in paths if paths.count(path) > 1} | {path for path in paths if path == "/"}):
        yield f"launcher.volumes: nothing can be mounted at {path}, or twice."
    if any(path == SHM or path.startswith(f"{SHM}/") for path in paths):
        yield f"launcher.volumes: {SHM} is the pod's memory. Type launcher.shm=<size>."
    if plan.out.startswith("memory://"):
        yield f"out={plan.out} is the memory of one process. Type out=<a URL>, or a path on one of launcher.volumes."
    elif store.is_local(plan.out):
        is_whole = plan.out.startswith(("/", "file:"))
        out = PurePosixPath(normpath(store.local_path(plan.out)) if is_whole else plan.out)
        mounts = [is_read_only for _, path, is_read_only in volumes if out.is_absolute() and out.is_relative_to(path)]
        if not mounts or all(mounts):
            what = "is not on any of launcher.volumes" if not mounts else "is on a volume that is only read"
            yield (
                f"out={plan.out} {what}, and pods do not see the folders of this host. Type out=<a URL>, or "
                "launcher.volumes=[<claim>:/shared] out=/shared/<name> where this host has the same folder."
            )
