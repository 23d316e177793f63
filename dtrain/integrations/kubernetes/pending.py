"""Pods that do not begin: why, as Kubernetes says it in the status of a pod and in the events of its job."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dtrain.config.word import cut
from dtrain.errors import PreflightError
from dtrain.integrations.kubernetes.manifest import INSTANCE
from dtrain.secrets import screen

LOOK_SECONDS = 10.0
BEGINNING = ("ContainerCreating", "PodInitializing")
"""Reasons to wait that end by themselves."""
Ask = Callable[..., str]
"""Asks kubectl: its arguments -> what it prints."""


class Pending:
    """Says why pods of a job wait, each time that it changes."""

    def __init__(self, ask: Ask, resource: str, job: str, ended: threading.Event) -> None:
        self._ask, self._resource, self._job, self._ended, self._said = ask, resource, job, ended, list[str]()

    def run(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            self.look()

    def look(self) -> None:
        """Say what is not said yet."""
        try:
            pods = json.loads(self._ask("get", "pods", f"--selector={INSTANCE}={self._job}", "--output=json"))["items"]
            sentences = list(dict.fromkeys(sentence for pod in pods for sentence in _of(pod)))
            sentences = sentences or self._failed() or ([] if pods else self._suspended())
        except (PreflightError, ValueError, LookupError):  # nobody answers now
            return
        for sentence in sentences:
            if sentence not in self._said:
                screen.complain(f"job {self._job}: {sentence}", begin="note: ")
        self._said = sentences

    def _failed(self) -> list[str]:
        """Why the job creates no pod, such as a quota: its newest event."""
        selector = f"--field-selector=involvedObject.name={self._job},reason=FailedCreate"
        events = json.loads(self._ask("get", "events", selector, "--sort-by=.lastTimestamp", "--output=json"))["items"]
        return [f"no pod can be created: {cut(str(event.get('message', '')), 400)}" for event in events[-1:]]

    def _suspended(self) -> list[str]:
        """A queue such as Kueue's takes the suspension away once it admits the job."""
        spec = json.loads(self._ask("get", self._resource, self._job, "--output=json"))["spec"]
        waits = spec.get("suspend") or spec.get("runPolicy", {}).get("suspend")
        return ["it is suspended until its queue admits it"] if waits else []


def _of(pod: Mapping[str, Any]) -> Iterator[str]:
    """Why a pod waits. Its number is left out: most pods wait for the same."""
    status = pod.get("status", {})
    if status.get("phase") not in (None, "Pending"):
        return
    for condition in status.get("conditions", ()):
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            yield f"a pod is not scheduled: {_said(condition)}"
    for container in (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())):
        waiting = container.get("state", {}).get("waiting")
        if waiting and waiting.get("reason") not in BEGINNING:
            yield f"a pod does not begin: {_said(waiting)}"


def _said(facts: Mapping[str, Any]) -> str:
    reason, message = str(facts.get("reason", "")), str(facts.get("message", ""))
    return cut(": ".join(filter(None, (reason, message))), 400)
