"""Checkpoints in which every rank writes what it holds: safetensors shards and JSON, no pickle, committed by one file.

    <out>/checkpoints/step-00000100/<attempt>/rank-00000-0.safetensors ... COMMIT.json

A directory is never written twice; what has no valid COMMIT.json is not a checkpoint. Any mesh reads what any other wrote.
"""

import datetime
import hashlib
import itertools
import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from dtrain import store
from dtrain.checkpoint import commit as commits
from dtrain.checkpoint import shards
from dtrain.errors import PreflightError, StoreError
from dtrain.mesh import Mesh
from dtrain.state import TrainState


class Sharded:
    """`every` steps between checkpoints (0: only when asked), `keep` newest ones stay (None: all). `resume` is auto, never or must."""

    def __init__(self, *, out: str, mesh: Mesh, resume: str, every: int, keep: int | None) -> None:
        self._out, self._mesh, self._resume, self._every, self._keep = out, mesh, resume, every, keep
        self._last: tuple[int, str] | None = None
        self.damaged: list[str] = []
        """One sentence for every checkpoint that `restore` passed over."""

    def due(self, step: int) -> bool:
        return bool(self._every) and step % self._every == 0

    def save(self, state: TrainState) -> str:
        if self._last and self._last[0] == state.step:
            return self._last[1]
        now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%S")
        attempt = self._on_rank_0(f"save under {self._out}", lambda: f"{now}-{uuid.uuid4().hex[:8]}")
        url = store.join(commits.folder(self._out, state.step), attempt)
        tensors, facts = state.tensors(), state.facts()
        ranks = self._on_all(f"save to {url}", lambda: self._write_shard(url, tensors) | {"optim": facts["optim"]})

        def commit() -> None:
            commits.write(
                url,
                {
                    "step": state.step,
                    "facts": {**facts, "optim": {name: value for rank in ranks for name, value in rank["optim"].items()}},
                    "world": self._mesh.world,
                    "mesh": vars(self._mesh.shape),
                    "files": [file for rank in ranks for file in rank["files"]],
                    "pieces": [piece for rank in ranks for piece in rank["pieces"]],
                    "tensors": _shapes(tensors) | {name: shape for rank in ranks for name, shape in rank["tensors"].items()},
                },
            )
            commits.read(url)
            self._drop_old()

        self._on_rank_0(f"commit {url}", commit)
        self._last = (state.step, url)
        return url

    def restore(self, state: TrainState) -> dict[str, Any] | None:
        chosen, self.damaged = self._on_rank_0(f"restore from {self._out}", lambda: commits.newest(self._out))
        if chosen is None:
            if self._resume == "must":
                raise PreflightError(f"resume=must: there is no checkpoint under {self._out}. Type resume=auto to start from the beginning.")
            return None
        if self._resume == "never":
            raise PreflightError(f"resume=never: {self._out} holds a run already. Type out=<another place>, or resume=auto to go on with it.")
        url, commit = chosen
        state.make_room([*commit["tensors"], *commit["facts"]["optim"]])
        averaged = any(name.startswith("ema.") for name in commit["tensors"])
        self._load(url, commit, {name: tensor for name, tensor in state.tensors().items() if averaged or not name.startswith("ema.")})
        if state.ema and not averaged:
            state.ema.begin()
        state.load_facts(commit["facts"])
        self._last = (state.step, url)
        return {**commit, "url": url}

    def load_weights(self, source: str, state: TrainState) -> dict[str, Any]:
        """Weights only, from a run's `out`, a step's folder or one attempt; all ranks call it. Raises StoreError."""
        url, commit = self._on_rank_0(f"load weights from {source}", lambda: find(source))
        self._load(url, commit, {name: tensor for name, tensor in state.tensors().items() if name.startswith("model.")})
        return {**commit, "url": url}

    def wait(self) -> None:
        """Saves are complete when `save` returns."""

    def _write_shard(self, url: str, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        name = f"rank-{self._mesh.rank:05d}-0.safetensors"
        held = list(shards.mine(tensors, self._mesh.place))
        if not held:
            return {"files": [], "pieces": [], "tensors": {}}
        pieces = [{"name": tensor, "key": tensor, "file": name, "shape": list(piece.shape), "offset": list(offset)} for tensor, piece, offset in held]
        folder = store.local_path(url) if store.is_local(url) else store.scratch("save")
        folder.mkdir(parents=True, exist_ok=True)
        try:
            path = folder / name
            save_file({tensor: piece.contiguous() for tensor, piece, _ in held}, path)
            store.fsync(path)
            store.fsync(folder)
            file = {"name": name, "size": path.stat().st_size, "sha256": _sha256(path)}
            store.upload(path, store.join(url, name))
        finally:
            if not store.is_local(url):
                shutil.rmtree(folder)
        return {"files": [file], "pieces": pieces, "tensors": _shapes({name: tensors[name] for name, *_ in held})}

    def _load(self, url: str, commit: Mapping[str, Any], wanted: Mapping[str, Tensor]) -> None:
        pieces: dict[str, list[Mapping[str, Any]]] = {}
        for piece in commit["pieces"]:
            pieces.setdefault(piece["name"], []).append(piece)
        folder = store.local_path(url) if store.is_local(url) else store.scratch("load")
        everywhere = set().union(*self._mesh.gather(list(wanted))) if self._mesh.shape.pp > 1 else set(wanted)

        def read() -> None:
            _check(url, commit, wanted, everywhere)
            names = {name for key, tensor in wanted.items() for name in shards.needed(tensor, pieces[key])}
            files = {file["name"]: self._fetch(url, file, folder) for file in commit["files"] if file["name"] in names}
            for key, tensor in wanted.items():
                shards.load(tensor, pieces[key], files)

        try:
            self._on_all(f"load {url}", read)
        finally:
            if not store.is_local(url):
                shutil.rmtree(folder)

    def _fetch(self, url: str, file: Mapping[str, Any], folder: Path) -> Path:
        """The local path of a shard whose bytes were verified."""
        path = folder / str(file["name"])
        if not store.is_local(url):
            store.download(store.join(url, str(file["name"])), path)
        if _sha256(path) != file["sha256"]:
            raise StoreError(
                "load", store.join(url, str(file["name"])), "its bytes are not those that were saved. Remove its folder to use an older one"
            )
        return path

    def _drop_old(self) -> None:
        """Keep the newest `keep` steps that verify; of what is older, a commit goes before its files. Damaged newer ones stay too."""
        if self._keep is None:
            return
        valid = 0
        older: list[int] = []
        for step, attempts in itertools.groupby(commits.attempts(self._out), key=lambda entry: entry[0]):
            if valid < max(1, self._keep):
                valid += any(commits.is_valid(url) for _, url in attempts)
            else:
                older.append(step)
        for step in older:
            for attempt in store.children(commits.folder(self._out, step)):
                store.remove(store.join(commits.folder(self._out, step), attempt, commits.NAME))
            store.remove(commits.folder(self._out, step))

    def _on_all(self, what: str, act: Callable[[], Any]) -> list[Any]:
        """What `act` returned on each rank. An error of any rank is raised on all, so that they stop together; only text crosses."""
        error, answer = None, None
        try:
            answer = act()
        except (StoreError, OSError) as failure:
            error = str(failure)
        answers = self._mesh.gather((error, answer))
        for rank, (failed, _) in enumerate(answers):
            if failed:
                raise StoreError(f"cannot {what}: rank {rank}: {failed}" if self._mesh.world > 1 else failed)
        return [answer for _, answer in answers]

    def _on_rank_0(self, what: str, act: Callable[[], Any]) -> Any:
        """What `act` returned on rank 0, on every rank."""
        return self._on_all(what, act if self._mesh.rank == 0 else lambda: None)[0]


def find(source: str) -> tuple[str, dict[str, Any]]:
    """(attempt URL, commit) for a run's `out`, a step's folder or an attempt. Raises StoreError when nothing valid is there."""
    if store.exists(store.join(source, commits.NAME)):
        return source, commits.read(source)
    chosen, damaged = commits.newest(source)
    if chosen is None:
        for attempt in reversed(store.children(source)):
            if store.exists(store.join(source, attempt, commits.NAME)):
                return store.join(source, attempt), commits.read(store.join(source, attempt))
        raise StoreError.during("find a checkpoint at", source, "; ".join(damaged) or "there is no committed one")
    return chosen


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    return {name: {"shape": list(tensor.shape), "dtype": str(tensor.dtype)} for name, tensor in tensors.items()}


def _check(url: str, commit: Mapping[str, Any], wanted: Mapping[str, Tensor], everywhere: Iterable[str]) -> None:
    """Every wanted tensor is there with its shape, and (of the model) nothing is left over that no rank wants, the names of `everywhere`."""
    saved = commit["tensors"]
    missing = [name for name in wanted if name not in saved]
    model = {name for name in saved if name.startswith("model.")}
    extra = sorted(model - set(everywhere))
    wrong = [
        f"{name} is {saved[name]['shape']} there, {list(tensor.shape)} here"
        for name, tensor in wanted.items()
        if name in saved and saved[name]["shape"] != list(tensor.shape)
    ]
    faults = [f"missing: {', '.join(missing[:3])}"] * bool(missing) + [f"left over: {', '.join(extra[:3])}"] * bool(extra) + wrong[:3]
    if faults:
        raise StoreError.during("load", url, f"it is of another model or optimizer. {'; '.join(faults)}")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
