"""A save in the background: every rank writes its files, then rank 0 commits them, or all ranks learn why not.

Ranks exchange messages over the rendezvous store, never by collectives, which belong to the loop.
"""

import contextlib
import hashlib
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Thread
from typing import Any, Literal

from dtrain.checkpoint import commit as commits
from dtrain.checkpoint.load import read_file
from dtrain.checkpoint.snapshot import File
from dtrain.errors import ChangedError, LeaseError, PreflightError, StoreError, first_line
from dtrain.mesh import Mesh
from dtrain.storage import attempts, lease, store

REMOTE_STREAMS, LOCAL_STREAMS = 4, 2
"""Number of files a rank writes at a time; with a remote URL each is in memory once more."""
BEAT_SECONDS = 1.0
"""Seconds between heartbeats of a rank."""
FATAL = (LeaseError, ChangedError)
"""Errors of a save after which no further one can succeed, so they end the run."""
NICENESS = 10
"""The nice value of the writing threads, on Linux: on a busy host the loop goes first."""


@dataclass(frozen=True)
class SaveResult:
    """The outcome of a save. `stall_seconds`: how long the loop waited for it; `seconds`: its duration.

    `error` of a committed save: a removal of old checkpoints that failed.
    """

    kind: Literal["committed", "failed"]
    step: int
    url: str
    error: str | None
    stall_seconds: float = 0.0
    seconds: float = 0.0


class CheckpointWriter:
    """Begins at once. `arrived` waits for the bytes of `files`, and raises if they must not be saved. `commit`: written
    by rank 0; `manifest`: this rank's tensors and facts in it; `before_commit`: makes durable whatever the commit
    depends on; `after_commit`: removes old checkpoints, and nobody waits for it; both run on rank 0. `before`: the
    previous save.
    """

    def __init__(
        self,
        mesh: Mesh,
        *,
        out: str,
        url: str,
        files: Sequence[File],
        arrived: Callable[[], None],
        commit: Mapping[str, Any],
        manifest: Mapping[str, Any],
        before_commit: Callable[[], None] | None,
        after_commit: Callable[[str, Mapping[str, Any]], None],
        before: "CheckpointWriter | None" = None,
    ) -> None:
        self.url, self.error, self.fatal = url, "", ""
        self.seconds = 0.0
        self._mesh, self._out, self._commit, self._manifest = mesh, out, commit, manifest
        mark = {"step": str(commit["step"]), "attempt": url.rsplit("/", 1)[-1]}
        self._files = [replace(file, mark=mark) for file in files]
        self._arrived, self._before, self._after = arrived, before_commit, after_commit
        self._key, self._stop, self._begin = url.rsplit("/", 1)[-1], threading.Event(), time.monotonic()
        self._over, self._committed = threading.Event(), dict[str, Any]()
        self._read_by_all = [before._letter("verdict")] if before else []
        self._thread = Thread(target=self._run, name="dtrain-writer", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether the save is committed or has failed."""
        return self._over.is_set()

    def join(self, seconds: float | None = None) -> None:
        self._over.wait(seconds)

    def ended(self, seconds: float) -> bool:
        """Whether all work after the commit ends within `seconds`."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def stop(self) -> None:
        """Write no more files: the save fails, unless it is committed already."""
        self._stop.set()

    def _run(self) -> None:
        _give_way()
        if self._mesh.world > 1:
            Thread(target=self._beat, name="dtrain-beat", daemon=True).start()
        try:
            self._land()
        except Exception as error:  # nobody sees the exception of a thread
            self._fail(error)
        finally:
            self.seconds = time.monotonic() - self._begin
            self._over.set()
        if self._committed:
            self._after(self.url, self._committed)

    def _land(self) -> None:
        mine: dict[str, Any] = {"error": "", "fatal": ""}
        try:
            self._arrived()
            pieces = [piece for file in self._files for piece in file.manifest()]
            mine |= {**self._manifest, "files": self._write(), "pieces": pieces}
        except Exception as error:  # the other ranks must learn of any error
            mine |= {"error": describe(error), "fatal": _fatal(error)}
        if self._mesh.world == 1:
            self._decide([mine])
            return
        self._mesh.kv_set(self._letter(self._mesh.rank), json.dumps(mine))
        if self._mesh.rank == 0:
            self._decide_for_all()
        else:
            verdict = json.loads(self._await([0], "verdict")[0])
            self.error, self.fatal = verdict["error"], verdict["fatal"]

    def _decide_for_all(self) -> None:
        everyone = range(self._mesh.world)
        try:
            manifests = [json.loads(letter) for letter in self._await(everyone, "manifest")]
            self._mesh.kv_delete(*map(self._letter, everyone), *self._read_by_all)
            self._decide(manifests)
        except Exception as error:  # as above
            self._fail(error)
        self._mesh.kv_set(self._letter("verdict"), json.dumps({"error": self.error, "fatal": self.fatal}))

    def _decide(self, manifests: Sequence[Mapping[str, Any]]) -> None:
        """On rank 0: commit when every rank has written its files."""
        failed = [(rank, manifest) for rank, manifest in enumerate(manifests) if manifest["error"]]
        if failed:
            rank, error = failed[0][0], failed[0][1]["error"]
            self.fatal = next((manifest["fatal"] for _, manifest in failed if manifest["fatal"]), "")
            self.error = f"rank {rank}: {error}" if self._mesh.world > 1 else error
            self._remove(self.url)
            return
        resting = sorted({name for manifest in manifests for name in manifest["resting"]})
        facts: dict[str, Any] = {**self._commit["facts"], "optim": {}, "resting": resting}
        commit = {**self._commit, "facts": facts, "files": [], "pieces": [], "tensors": {}}
        for manifest in manifests:
            facts["optim"] |= manifest["optim"]
            commit["tensors"] |= manifest["tensors"]
            commit["files"] += manifest["files"]
            commit["pieces"] += manifest["pieces"]
        if fault := commits.fault(commit):
            self.error = f"cannot save to {self.url}: {fault}"
            self._remove(self.url)
            return
        commits.check_files(self.url, commit["files"], store.sizes(self.url))
        lease.verify(self._out)
        if self._before:
            self._before()
            lease.verify(self._out)
        commits.write(self.url, commit)
        try:
            commits.read(self.url)
        except commits.DamagedError:
            self._remove(self.url)
            raise
        self._committed = commit

    def _fail(self, error: Exception) -> None:
        self.error, self.fatal = describe(error), _fatal(error)

    def _remove(self, url: str) -> None:
        try:
            attempts.remove(url)
        except StoreError as error:
            self.error += f"; {error}"

    def _write(self) -> list[dict[str, Any]]:
        """Write all files of this rank; stop at the first error."""
        remaining, lock = iter(self._files), threading.Lock()
        done: dict[str, dict[str, Any]] = {}
        errors: list[Exception] = []

        def stream() -> None:
            _give_way()
            while not errors and not self._stop.is_set():
                with lock:
                    file = next(remaining, None)
                if file is None:
                    return
                try:
                    done[file.name] = self._put(file)
                except Exception as error:  # raised below, by the thread that waits
                    errors.append(error)

        count = min(len(self._files), LOCAL_STREAMS if store.is_local(self.url) else REMOTE_STREAMS)
        threads = [Thread(target=stream, name=f"dtrain-stream-{number}", daemon=True) for number in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        if self._stop.is_set():
            raise StoreError(f"the save to {self.url} was given up")
        if self._files:
            store.sync_folder(self.url)
        return [done[file.name] for file in self._files]

    def _put(self, file: File) -> dict[str, Any]:
        """Write a file and read it back: a checkpoint with corrupt bytes must not replace an older one."""
        digest = hashlib.sha256()
        for part in file.parts:
            digest.update(part)
        facts = {"name": file.name, "size": file.size, "sha256": digest.hexdigest()}
        store.put(store.join(self.url, file.name), file.parts)
        read_file(store.join(self.url, file.name), facts)
        return facts

    # letters

    def _letter(self, what: object) -> str:
        return f"checkpoint/{self._key}/{what}"

    def _beat(self) -> None:
        """Send heartbeats while the save is running, however slow the storage is."""
        with contextlib.suppress(RuntimeError):  # without the store nobody receives it
            for beat in itertools.count():
                self._mesh.kv_set(f"checkpoint/alive/{self._mesh.rank}", f"{self._key} {beat}")
                if self._over.wait(BEAT_SECONDS):
                    return

    def _await(self, ranks: Sequence[int], what: str) -> list[str]:
        """The messages of these ranks, once all have arrived. Raises StoreError if one gives no sign of life for the
        mesh's timeout.
        """
        keys = [self._letter(rank if what == "manifest" else what) for rank in ranks]
        signs: dict[int, tuple[object, float]] = {}
        pause, looked = 0.002, time.monotonic()
        while (letters := self._mesh.kv_get(keys)) is None:
            time.sleep(pause)
            pause = min(pause * 1.5, 0.1)
            if time.monotonic() - looked > BEAT_SECONDS:
                looked = time.monotonic()
                self._look_for(ranks, keys, signs)
        return letters

    def _look_for(self, ranks: Sequence[int], keys: Sequence[str], signs: dict[int, tuple[object, float]]) -> None:
        now = time.monotonic()
        for rank, key in zip(ranks, keys, strict=True):
            if rank == self._mesh.rank or self._mesh.kv_get([key]):
                continue
            sign = self._mesh.kv_get([f"checkpoint/alive/{rank}"])
            if rank not in signs or signs[rank][0] != sign:
                signs[rank] = (sign, now)
            elif now - signs[rank][1] > self._mesh.timeout:
                seconds = f"{self._mesh.timeout:.0f} s"
                raise StoreError(f"cannot save to {self.url}: rank {rank} has given no sign for {seconds}")


def describe(error: Exception) -> str:
    return str(error) if isinstance(error, PreflightError) else f"{type(error).__name__}: {first_line(error)}"


def _fatal(error: Exception) -> str:
    return next((kind.__name__ for kind in FATAL if isinstance(error, kind)), "")


def _give_way() -> None:
    if sys.platform == "linux":  # where a thread has a priority of its own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
