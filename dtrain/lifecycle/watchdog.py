"""The watchdog of a rank: reports its position on SIGUSR2, and ends it when a step takes too long.

kill -USR2 <pid>        report-<rank>.json in DTRAIN_REPORTS; while native code holds the GIL, only stack-<rank>.txt
"""

import datetime
import faulthandler
import json
import mmap
import os
import select
import signal
import socket
import sys
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as groups

from dtrain.errors import StoreError, text_of
from dtrain.lifecycle import bus_error, failure, loaders, recorder, stacks, unwatched
from dtrain.lifecycle.root_cause import is_victim, kind_of
from dtrain.lifecycle.signals import REPORT
from dtrain.mesh import Mesh
from dtrain.storage import store

FIRST_STEP = 3
"""Multiple of the timeout for the first step and its collectives, which compile, connect and fill caches, and for parts
of an evaluation, which may do so too.
"""
CHECKS = 10
"""Number of checks within one timeout."""
HANDLERS = 3
"""Frames of the handler of SIGBUS on top of what it interrupted."""
DATA = f"dtrain{os.sep}data{os.sep}"
"""A main thread in this folder is waiting for samples."""


class Watchdog:
    """A context that ends this rank when it makes no progress. `timeout`: seconds of a step and of every collective;
    `batch`: samples of a step; `folder`: for reports, None if nobody reads them.

    Between `rest` and the next `beat` or `part` only collectives have a timeout.
    """

    def __init__(self, mesh: Mesh, folder: str | None, *, timeout: float, batch: int) -> None:
        self._mesh, self._timeout, self._batch = mesh, timeout, batch
        self._folder = Path(folder) if folder else None
        self._step = self._seen = 0
        self._begun = self._beats = 0
        self._resting, self._in_step = True, False
        self._page: mmap.mmap | bytearray = bytearray(failure.STEP.size)
        self._timed: set[tuple[dist.ProcessGroup, float]] = set()
        self._main = threading.get_ident()
        self._file: IO[str] = sys.__stderr__ or sys.stderr
        self._over = False

    def begin_step(self, step: int, seen: int) -> None:
        """A step begins, after `step` steps and `seen` samples. Takes less than a microsecond after the first call."""
        if not self._begun:
            self._arm(2 * FIRST_STEP * self._timeout)
        self._step, self._seen, self._resting, self._in_step = step + 1, seen, False, True
        self._begun += 1
        self._beats += 1
        failure.STEP.pack_into(self._page, 0, step + 1, seen, self._batch)

    def pause_hang_detection(self) -> None:
        """The step, or the last part, is done."""
        self._resting, self._in_step = True, False
        failure.STEP.pack_into(self._page, 0, self._step, self._seen, 0)

    def resume_hang_detection(self) -> None:
        """A part of longer work between two steps begins, such as a batch of an evaluation."""
        self._resting = False
        self._beats += 1

    def __enter__(self) -> "Watchdog":
        failure.clear_context()
        self._set_timeouts(FIRST_STEP * self._timeout)
        with ExitStack() as stack:
            self._ear, self._mouth = socket.socketpair()
            for end in (self._ear, self._mouth):
                stack.enter_context(end).setblocking(False)
            if self._folder:
                path = self._folder / f"step-{self._mesh.rank}"
                store.write(str(path), bytes(failure.STEP.size))
                with path.open("r+b") as file:
                    self._page = mmap.mmap(file.fileno(), failure.STEP.size)
            if threading.current_thread() is threading.main_thread():
                self._take_signals(stack)
            thread = threading.Thread(target=self._watch, name="dtrain-watchdog", daemon=True)
            thread.start()
            stack.callback(self._end, thread)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is not None:
            failure.set_context(**self._position())
            # after an error of its own, the device may not respond
            if is_victim({"kind": kind_of(error, text_of(error))}):
                failure.set_context(calls=recorder.calls(_labels()))
            if self._folder:  # before the others can see that this rank has ended
                with suppress(StoreError):  # reported by the caller that ends this process
                    failure.report_exception(self._folder, self._mesh.rank, error)
        self._stack.close()

    # signals

    def _take_signals(self, stack: ExitStack) -> None:
        """SIGUSR2 wakes the watchdog's thread and writes all stacks, even while native code holds the GIL. A crash
        writes them too.
        """
        stack.callback(signal.signal, REPORT, signal.signal(REPORT, lambda *_: None))
        stack.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(self._mouth.fileno(), warn_on_full_buffer=False))
        file = self._file
        if self._folder:
            file = stack.enter_context((self._folder / f"stack-{self._mesh.rank}.txt").open("w", encoding="utf-8"))
        is_watched, enabled = self._folder and unwatched.is_watched(), faulthandler.is_enabled()
        if is_watched:
            self._file = file
        if is_watched or not enabled:
            faulthandler.enable(self._file)
            stack.callback(faulthandler.enable if enabled else faulthandler.disable)
        stack.enter_context(bus_error.reported(self._bus_error))
        faulthandler.register(REPORT, file, all_threads=True, chain=True)
        stack.callback(faulthandler.unregister, REPORT)

    def _bus_error(self, sentence: str, is_cut: bool) -> None:
        """End this rank. A restart would read other samples from a file that was cut."""
        frames = stacks.of_thread(threading.get_ident())[:-HANDLERS]
        place: dict[str, Any] = {"where": stacks.own(frames), "stack": stacks.lines(frames)}
        kind = "words" if is_cut else "error"
        unwatched.give_up(self._folder, self._mesh.rank, sentence, kind=kind, **self._position(), **place)

    def _end(self, thread: threading.Thread) -> None:
        self._over = True
        self._mouth.send(b"\0")
        thread.join()
        faulthandler.cancel_dump_traceback_later()

    # the thread

    def _watch(self) -> None:
        beats, since, checked, waits = -1, time.monotonic(), 0, None
        entered = since
        while not self._over:
            if select.select([self._ear], [], [], self._timeout / CHECKS)[0] and REPORT in self._ear.recv(4096):
                self._report()
            now, first = time.monotonic(), self._begun <= 1
            if self._resting or self._beats != beats:
                beats, since = self._beats, now
            waited, waits = waits, None if self._in_step else self._waits()
            if waits is None or waits != waited:
                entered = now
            if not first:
                self._set_timeouts(self._timeout)
            patience = self._timeout * (FIRST_STEP if first or not self._in_step else 1)
            late = self._timeout * ((FIRST_STEP if first else 1) + 2 / CHECKS)  # gloo raises earlier, NCCL never
            if now - since > patience or now - entered > late:
                sentence = f"no progress for {now - min(since, entered):.0f} s"
                unwatched.give_up(self._folder, self._mesh.rank, sentence, **self._now())
            if self._beats > checked or not self._resting:
                self._arm(2 * patience)
            elif self._beats:
                faulthandler.cancel_dump_traceback_later()
            checked = self._beats

    def _waits(self) -> object:
        """The collective that the main thread is in, and the number of collectives in each group."""
        inside = stacks.collective(stacks.of_thread(self._main))
        return inside and (inside, sequence_numbers())

    def _arm(self, seconds: float) -> None:
        """End the process with its stacks after `seconds`, even if native code holds the GIL."""
        faulthandler.dump_traceback_later(seconds, exit=True, file=self._file)

    def _report(self) -> None:
        if self._folder:
            facts = {"rank": self._mesh.rank, "host": socket.gethostname(), "pid": os.getpid(), **self._now()}
            store.write(str(self._folder / f"report-{self._mesh.rank}.json"), json.dumps(facts).encode())

    def _now(self) -> dict[str, Any]:
        """The position of the main thread, and of other threads outside of libraries."""
        main = stacks.of_thread(self._main)
        where, stack = stacks.own(main), stacks.lines(main)
        if self._folder and where and where.startswith(DATA) and (loading := loaders.reader(self._folder)):
            where, stack = loading[0], [*stack, *loading[1]]
        return {
            **self._position(),
            "where": where,
            "microbatch": stacks.microbatch(main),
            "collective": stacks.collective(main),
            "threads": stacks.others(self._main, leave_out=[threading.get_ident()]),
            "stack": stack,
            "calls": recorder.calls(_labels()),
        }

    def _position(self) -> dict[str, Any]:
        samples = [self._seen, self._seen + self._batch - 1] if self._in_step else None
        return {"step": self._step, "samples": samples, "groups": sequence_numbers()}

    def _set_timeouts(self, seconds: float) -> None:
        """Set the timeout of every process group. That of NCCL is the longest, because it ends the process by SIGABRT,
        mostly a rank that only waits.
        """
        last = 2 * FIRST_STEP * self._timeout
        for group in list(groups._world.pg_names):
            if (group, seconds) not in self._timed:
                self._timed.add((group, seconds))
                for backend in {group._get_backend(device) for device in group._device_types}:
                    if set_timeout := getattr(backend, "_set_default_timeout", None):  # torch 2.13: gloo and NCCL only
                        set_timeout(datetime.timedelta(seconds=last if backend.name().startswith("nccl") else seconds))


def sequence_numbers() -> dict[str, int]:
    """Group of several ranks -> the collectives that this rank has entered, if the backend counts them."""
    numbers: dict[str, int] = {}
    for name, group in _named().items():
        with suppress(RuntimeError):
            numbers[name] = group._get_sequence_number_for_group()  # type: ignore[attr-defined]
    return numbers


def _labels() -> dict[str, str]:
    """torch's name of a process group -> the name that all its ranks agree on"""
    return {str(groups._world.pg_names[group]): name for name, group in _named().items()}


def _named() -> dict[str, dist.ProcessGroup]:
    named: dict[str, dist.ProcessGroup] = {}
    for group, ranks in list(groups._world.pg_group_ranks.items()):
        if len(ranks) > 1 and group in groups._world.pg_names:
            axis = f"{group.group_desc.removeprefix('mesh_')} of ranks {_some(sorted(ranks))}"
            name = "the world" if group is dist.group.WORLD else axis
            named[name if name not in named else f"{name}, number {len(named)}"] = group
    return named


def _some(ranks: list[int]) -> str:
    return ",".join(map(str, ranks)) if len(ranks) <= 8 else f"{ranks[0]} to {ranks[-1]} ({len(ranks)})"
