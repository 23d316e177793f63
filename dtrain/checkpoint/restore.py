"""Loads a commit, or a copy in memory, into the state: the same one on all ranks, and only if it is intact on all."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from dtrain.checkpoint import base, others
from dtrain.checkpoint.commit import Candidate, DamagedError, MisfitError, first, report_damaged
from dtrain.checkpoint.load import Reading, mismatches
from dtrain.checkpoint.memory import Copy, Memory
from dtrain.checkpoint.state import TrainState
from dtrain.errors import DtrainError, StoreError, WordsError
from dtrain.mesh import Mesh
from dtrain.model.adapted import Packed, begin, packed
from dtrain.storage.attempts import place

Commit = Mapping[str, Any]


class Restore:
    """Loads checkpoints; all ranks call the methods in the same order. A skipped checkpoint adds a sentence to
    `damaged`, which rank 0 prints once another one is loaded, and its place to `passed_over`. `hint`: what to type if
    one is of another model or optimizer.
    """

    def __init__(self, mesh: Mesh, hint: str = "") -> None:
        self._mesh, self._hint = mesh, hint
        self.damaged: list[str] = []
        self.passed_over: set[str] = set()

    def candidates(self, look: Callable[[], Iterator[Candidate]]) -> Iterator[tuple[str, dict[str, Any]]]:
        """(URL, commit) on every rank of the candidates that `look` yields on rank 0, newest first."""
        candidates = look() if self._mesh.rank == 0 else iter(())
        while True:
            chosen, damaged = self._mesh.on_rank_0("look for checkpoints", lambda: first(candidates))
            for url, fault in damaged:
                self._skip(url, fault)
            if chosen is None:
                return
            yield chosen

    def load(self, url: str, commit: Commit, state: TrainState) -> bool:
        """Load a checkpoint into `state`; returns whether its bytes and facts are intact on all ranks. Raises
        MisfitError if it is of another model or optimizer, WordsError if it is of other data.
        """
        self._load_base(commit, state)
        wanted = self._wanted(commit, state)
        unfit = self._mesh.on_all(f"load {url}", lambda: state.unfit(commit["facts"]))
        if cause := next(filter(None, unfit), None):
            self._skip(url, str(DamagedError.during("load", url, cause)))
            return False
        if not self._fill(url, commit, wanted, ("model.", "optim."), state):
            return False
        self._finish(url, commit, state)
        self._report(commit)
        return True

    def load_weights(self, url: str, commit: Commit, state: TrainState) -> bool:
        """Like `load`, but only the weights, which also initialise their average. The weights of a model become the
        base of an adapter.
        """
        of_adapter = commit["facts"].get("adapter")
        if of_adapter and not state.adapter:
            kind = of_adapter["kind"]
            hint = f"Type adapter={kind} and its words too, or export it with adapter=merged first"
            raise StoreError.during("load", url, f"it holds an adapter ({kind}), not a model", hint)
        is_base = bool(state.adapter) and not of_adapter
        if not is_base:
            self._load_base(commit, state)
        loaded = self._fill(url, commit, state.weights(of_base=is_base), ("model.",), state)
        if loaded and is_base:
            state.base = base.reference(url, commit)
            begin(state.model)
        if loaded and state.ema:
            state.ema.begin()
        if loaded:
            self._report(commit)
        return loaded

    def _load_base(self, commit: Commit, state: TrainState) -> None:
        """Load the weights that an adapter's checkpoint does not hold. Raises StoreError if they are not what they were
        when it was saved.
        """
        named = commit["facts"].get("base")
        if named is None or not state.adapter or (state.base and state.base["digest"] == named["digest"]):
            return
        if others.is_reference(named):
            state.base = others.restore(named, state, self._mesh)
            return
        find = partial(base.find, named, state.moved)
        url, found = self._mesh.on_rank_0("look for the base of the adapter", find)
        if not self._fill(url, found, state.weights(of_base=True), ("model.",), state):
            raise StoreError(self.damaged[-1])
        state.base = base.reference(url, found)

    def load_copy(self, memory: Memory, copy: Copy, url: str, state: TrainState) -> None:
        """Like `load`, from the memory of the nodes."""
        commit = copy.commit
        self._load_base(commit, state)
        wanted = self._wanted(commit, state)
        self._check(url, commit, wanted, ("model.", "optim."))
        memory.fill(copy, wanted)
        self._finish(url, commit, state)
        self._report(commit)

    def _wanted(self, commit: Commit, state: TrainState) -> dict[str, Tensor]:
        """The tensors of `state` to load: with the optimizer states that the commit has, and without averaged weights
        if it has none.
        """
        state.make_room([*commit["tensors"], *commit["facts"]["optim"]])
        averaged = any(name.startswith("ema.") for name in commit["tensors"])
        return {name: tensor for name, tensor in state.tensors().items() if averaged or not name.startswith("ema.")}

    def _fill(
        self, url: str, commit: Commit, wanted: Mapping[str, Tensor], strict: tuple[str, ...], state: TrainState
    ) -> bool:
        """Verify on all ranks, then fill. Returns whether the bytes are intact."""
        self._check(url, commit, wanted, strict)
        narrow = {f"model.{name}": partial(self._pack, layer) for name, layer in packed(state.model).items()}
        reading = Reading(url, commit, wanted, narrow)

        def verify() -> str:
            try:
                reading.verify()
            except DamagedError as error:
                return str(error)
            return ""

        fault = next(filter(None, self._mesh.on_all(f"load {url}", verify)), None)
        if fault:
            self._skip(url, fault)
            return False
        self._mesh.on_all(f"load {url}", reading.fill)
        return True

    def _pack(self, layer: Packed, weight: Tensor) -> None:
        layer.pack(weight.to(self._mesh.device))

    def skip_misfit(self, url: str, why: DtrainError) -> None:
        """Skip a checkpoint that does not fit, unlike an older one that the same process wrote: it was changed."""
        first = str(why).split(". ")[0]
        self._skip(url, f"{first}, unlike others that its process wrote ({url})")

    def _skip(self, url: str, fault: str) -> None:
        self.damaged.append(fault)
        self.passed_over.add(place(url))

    def _report(self, commit: Commit) -> None:
        if self._mesh.rank == 0:
            report_damaged(self.damaged, commit["step"])

    def _check(self, url: str, commit: Commit, wanted: Mapping[str, Tensor], strict: tuple[str, ...]) -> None:
        """Raises MisfitError on all ranks if the commit does not fit the state of one of them."""
        everywhere = set().union(*self._mesh.gather(list(wanted))) if self._mesh.shape.pp > 1 else set(wanted)
        faults = self._mesh.on_all(f"load {url}", lambda: "; ".join(mismatches(commit, wanted, everywhere, strict)))
        if different := next(filter(None, faults), None):
            cause = f"it is of another model or optimizer. {different}"
            raise MisfitError.during("load", url, cause, self._hint)

    def _finish(self, url: str, commit: Commit, state: TrainState) -> None:
        had_average = any(name.startswith("ema.") for name in commit["tensors"])
        if state.ema and not had_average:
            state.ema.begin()
            state.notes.append(
                f"ema: the checkpoint of step {commit['step']} has no average of the weights, so it begins there"
            )
        elif had_average and not state.ema:
            state.notes.append(
                f"ema: the checkpoint of step {commit['step']} has an average of the weights, which is dropped. Type "
                "ema=<its decay> to go on with it"
            )
        faults = self._mesh.on_all(f"load {url}", partial(_load_facts, commit, state))
        for kind, *problems in filter(None, faults):  # on all ranks, also of what one of them alone sees
            raise WordsError(*problems) if kind == "words" else MisfitError.during("load", url, problems[0])


def _load_facts(commit: Commit, state: TrainState) -> list[str]:
    """Load the facts of a commit. Returns the kind of error and its problems if they are of another run."""
    try:
        state.load_facts(commit["facts"])
    except WordsError as error:
        return ["words", *error.problems]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        return ["misfit", f"its facts cannot be loaded ({type(error).__name__}: {error})"]
    return []
