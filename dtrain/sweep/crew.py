"""Who starts the workers of a sweep for a command: a launcher of Hydra's, an engine such as ssh, which starts one on
each node, or a scheduler such as Slurm, which queues a job of several.
"""

import functools
import os
import secrets
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Protocol

from dtrain.build import build
from dtrain.cluster import Cluster, detect
from dtrain.compose import compose
from dtrain.config.environment import HANDED, SOURCE, SWEEP_BEGAN, WORKERS
from dtrain.config.facts import fact
from dtrain.errors import PreflightError, WordsError, first_line
from dtrain.launcher import Detached, Engine, detached, process
from dtrain.launcher.queued import Watch
from dtrain.lifecycle import signals
from dtrain.planned import Plan
from dtrain.resolve import machine, own
from dtrain.result import source_digest
from dtrain.secrets import masked, screen
from dtrain.storage import options, store
from dtrain.sweep import stop_request
from dtrain.sweep.foreign import Foreign, launch
from dtrain.sweep.jobs import Judged, Request
from dtrain.sweep.worker import Command, ends, work


class Crew(Protocol):
    """In its context workers are started; at its end, those that end with this command are no more. `log`: the folder
    of what they say; empty if this command tells it.
    """

    log: str

    def prepare(self) -> None:
        """Look whether they can be started. Raises DtrainError."""
        ...

    def __enter__(self) -> Any: ...

    def is_working(self) -> bool:
        """Whether a worker has not ended."""
        ...

    def ask(self) -> None:
        """Have the workers save their jobs, and end."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None: ...


class OfHydra:
    """Those of this host share its slots and end with this command; those of a queue outlive it. `number`: of workers;
    None: as many as the launcher says.
    """

    def __init__(self, hydras: Foreign, words: Sequence[str], number: int | None) -> None:
        self._hydras, self._words, self._number, self.log = hydras, words, number, ""
        self._ended, self._error = list[tuple[int, str]](), list[Exception]()
        self._stack = ExitStack()

    def prepare(self) -> None:
        pass

    def __enter__(self) -> "OfHydra":
        self._wanted = self._stack.enter_context(process.scratch("workers")) / "wanted"
        self._wanted.touch()
        self._thread = threading.Thread(target=self._run, name="dtrain-workers", daemon=True)
        self._thread.start()
        return self

    def is_working(self) -> bool:
        if self._error:
            raise self._error[0]
        return self._thread.is_alive()

    def ask(self) -> None:
        self._wanted.unlink(missing_ok=True)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        _complain(self._ended)
        self._stack.close()

    def _run(self) -> None:
        watch = None if self._hydras.is_queue else Command(os.getpid(), str(self._wanted))
        one = functools.partial(work, words=self._words, watch=watch, began=time.time())
        try:
            self._ended += launch(self._hydras, one, self._number)
        except Exception as error:  # a launcher raises what it likes
            self._error.append(
                error if isinstance(error, WordsError) else WordsError(f"hydra/launcher: {first_line(error)}")
            )


class OfEngine:
    """A worker on each node of a plan. One that does not end by itself is started again, at most `restarts` times."""

    def __init__(self, engine: Engine, plan: Plan, words: Sequence[str], restarts: int) -> None:
        self._engine, self._plan, self._restarts = engine, plan, restarts
        self._command = [sys.executable, "-m", "dtrain.sweep.worker", *words]
        self._name = f"{plan.launcher['_target_'].rpartition('.')[2].lower()}-{secrets.token_hex(4)}"
        self._starts, self._asked, self.log = Counter[int](), False, ""
        self._began = str(time.time())

    def prepare(self) -> None:
        self._engine.prepare(self._plan)

    def __enter__(self) -> "OfEngine":
        self._start([*range(self._plan.nodes)])
        return self

    def is_working(self) -> bool:
        alive = self._engine.alive()
        missing = self._plan.nodes - len(alive) - len(ends(self._plan.out, self._name))
        ended = [node for node in range(self._plan.nodes) if node not in alive and self._starts[node] <= self._restarts]
        if missing > 0 and ended and not self._asked:
            self._start(ended[:missing])
            return True
        return bool(alive)

    def ask(self) -> None:
        self._asked = True
        stop_request.ask(self._plan.out, self._name)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._engine.stop()
        _complain(ends(self._plan.out, self._name))

    def _start(self, nodes: Sequence[int]) -> None:
        self._starts.update(nodes)
        handed = {WORKERS: self._name, HANDED: options.hand_over(), SOURCE: source_digest("dtrain")}
        handed[SWEEP_BEGAN] = self._began
        self._engine.start(nodes, self._command, handed)


class OfScheduler:
    """A job of several workers, which does not need this command. There is one for a sweep: it is followed where it is
    queued already.
    """

    def __init__(self, launcher: Detached, plan: Plan, words: Sequence[str]) -> None:
        self._launcher, self._plan, self._words = launcher, plan, words
        self._job, self.log = "", ""
        self._watch = Watch(launcher, plan.out, "")

    def prepare(self) -> None:
        self._launcher.describe(self._plan)

    def __enter__(self) -> "OfScheduler":
        out = self._plan.out
        with detached.submitting(out):
            self._job = next(iter(self._launcher.jobs(out)), "")
            if not self._job:
                command = [sys.executable, "-m", "dtrain", "sweep", "work", *self._words]
                handed = {HANDED: options.hand_over(), SWEEP_BEGAN: str(time.time())}
                with signals.blocked():
                    self._job = self._launcher.submit_workers(self._plan, command, handed)
                    detached.note_job(out, self._plan.launcher, self._job)
        self.log, self._watch = str(self._launcher.log(out, self._job).parent), Watch(self._launcher, out, self._job)
        screen.say(f"job {self._job} has {self._plan.nodes} workers · {self.log}")
        return self

    def is_working(self) -> bool:
        return not self._launcher.detach and self._watch.is_there()

    def ask(self) -> None:
        self._launcher.cancel(self._job, save=True)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is KeyboardInterrupt:
            with suppress(PreflightError):  # it has ended by now
                self._launcher.cancel(self._job, save=False)


@dataclass(frozen=True)
class Nodes:
    """Where workers are to be started. `word`: the word that says so; `launcher`: its arguments; `cluster`: a node."""

    word: str
    launcher: Mapping[str, Any]
    cluster: Cluster


def split(request: Request) -> tuple[Request, Nodes | None]:
    """The sweep without the words of a launcher that starts nodes elsewhere, and those that describe the nodes."""
    named = [word for word in request.words if word.key.split(".")[0] in ("launcher", "cluster")]
    config = own.stated(compose([*map(str, named)]))
    if fact(config.launcher, "where") != "elsewhere":
        return request, None
    cluster = machine.named(config, replace(detect(), external=None))
    word = next(str(word) for word in named if word.key.startswith("launcher"))
    jobs = replace(request, words=tuple(word for word in request.words if word not in named))
    return jobs, Nodes(word, config.launcher, cluster)


def crew(judged: Judged, request: Request, hydras: Foreign, nodes: Nodes | None) -> Crew | None:
    """Who starts the workers; None if this command is the only one. Raises WordsError."""
    root, settings = request.root, judged.config.sweep
    is_shared = hydras.launcher and not hydras.is_queue
    parallel = max(1, judged.slots // (settings.workers or 1)) if is_shared else settings.parallel
    words = [
        str(store.local_path(root).resolve()) if store.is_local(root) else root,
        *(str(word) for word in request.words if word.key == "trust"),
        f"sweep.parallel={parallel}",
        f"sweep.retries={settings.retries}",
        f"sweep.fail={settings.fail}",
        *([f"sweep.time_limit={settings.time_limit}"] * (settings.time_limit is not None)),
    ]
    if hydras.launcher:
        return OfHydra(hydras, words, settings.workers)
    return _on(nodes, judged, words) if nodes else None


def _on(nodes: Nodes, judged: Judged, words: Sequence[str]) -> Crew:
    """Workers on nodes, for each of which as much is asked as its jobs at a time need."""
    plan, number, there = judged.plan, judged.config.sweep.workers, nodes.cluster
    if number is None:
        raise WordsError(f"{nodes.word}: with -m it starts workers on nodes. Type sweep.workers=<how many>.")
    if plan.nodes > 1:
        ranks = plan.nodes * plan.devices
        raise WordsError(
            f"nodes={plan.nodes}: a job of a sweep runs on the node of its worker. Type nodes=1 devices={ranks}."
        )
    left = there.cpus - fact(plan.data, "cpus", 0)
    most = there.gpus if plan.device == "cuda" else left // plan.threads
    ranks = max(plan.devices, min(judged.slots * plan.devices, most))
    workers = replace(plan, out=words[0], nodes=number, devices=ranks, launcher=nodes.launcher)
    built = build(nodes.launcher)
    if fact(nodes.launcher, "detached"):
        return OfScheduler(built, workers, words)
    return OfEngine(built, workers, words, nodes.launcher.get("restarts", 0))


def _complain(ended: Iterable[tuple[int, str]]) -> None:
    """Tell of workers that have failed, those that say the same once."""
    for code, complaints in {} if signals.stop_request() else dict.fromkeys(ended):
        if code not in (0, 1):
            screen.complain(f"a worker ended with exit code {code}: {masked(complaints.strip())}")
