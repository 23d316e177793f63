"""The base of an adapter that others trained, such as a folder of Hugging Face: remembered by its URL, and by a digest
of the numbers, which each rank takes from the bytes that it reads anyway.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dtrain.checkpoint import adopt
from dtrain.checkpoint.conversions import described
from dtrain.checkpoint.state import TrainState
from dtrain.checkpoint.sums import Sums, digest
from dtrain.errors import StoreError
from dtrain.mesh import Mesh
from dtrain.storage import store
from dtrain.weights import Stored, names, place

Reference = Mapping[str, Any]
"""`url`, `digest`, `names`: the table of `init_names`, and `tensors`: the names of those of the model."""


def is_reference(base: Reference) -> bool:
    """Whether the base with this reference is of others."""
    return "tensors" in base


def load(source: str, state: TrainState, mesh: Mesh, table: Any = None) -> Reference:
    """Load the weights at `source` into those that the adapter leaves as they are; all ranks call it. `table`: of
    `init_names`. Returns their reference. Raises ForeignError, StoreError.
    """
    sums = Sums()
    tensors = adopt.take(source, tensors=state.weights(of_base=True), state=state, mesh=mesh, table=table, sums=sums)
    if mesh.shape.pp > 1:
        tensors = {name: one for each in mesh.gather(_facts(tensors)) for name, one in _stored(each).items()}
    rows = [row for each in mesh.gather(sums.rows) for row in each]
    url = str(Path(store.local_path(source)).absolute()) if store.is_local(source) else source
    held = names.held(table)
    return {"url": url, "digest": digest(rows, tensors), "names": held, "tensors": sorted(tensors)}


def restore(base: Reference, state: TrainState, mesh: Mesh) -> Reference:
    """Load the weights of a base again, from where it was or from `state.moved`. Raises StoreError if it is gone or was
    changed.
    """
    cause = ""
    for url in dict.fromkeys((base["url"], state.moved or base["url"])):
        try:
            again = load(url, state, mesh, base["names"])
        except StoreError as error:
            cause = cause or _without_end(str(error))
            continue
        if again["digest"] == base["digest"]:
            return again
        cause = cause or "it was changed since: other numbers are there"
    raise changed(base, cause)


def changed(base: Reference, cause: str) -> StoreError:
    hint = f"Bring it back (its digest begins with {base['digest'][:8]}), or train on with init=<where it is now>"
    return StoreError.during("load the base of the adapter from", base["url"], cause, hint)


class Whole:
    """The whole base with a reference, for an export. `commit`: `tensors` as in a checkpoint."""

    def __init__(self, base: Reference, facts: Mapping[str, Any]) -> None:
        """`facts`: those of the adapter's checkpoint. Raises StoreError if the base is gone, or has other tensors."""
        self._base = base
        try:
            weights, rules = place.open_at(base["url"]), names.table(base["names"])
        except StoreError as error:
            raise changed(base, _without_end(str(error))) from error
        wanted, tied = base["tensors"], facts.get("tied") or {}
        whole = partial(described, facts.get("huggingface"))
        self._weights, self._matched = adopt.find(weights, wanted, tied, rules, whole)
        if self._matched.faults:
            raise changed(base, "; ".join(self._matched.faults))
        tensors = self._tensors().items()
        shapes = {f"model.{name}": {"shape": [*one.shape], "dtype": f"torch.{one.dtype}"} for name, one in tensors}
        self.commit: Mapping[str, Any] = {"tensors": shapes}

    def fill(self, targets: Mapping[str, Tensor]) -> None:
        """Fill some tensors, by their names in a checkpoint. Raises StoreError if any of the base was changed."""
        sums = Sums()
        for name, stored in self._tensors().items():
            target = targets.get(f"model.{name}")
            if target is None:
                target = torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))
            adopt.fill(self._weights, self._matched.sources, {name: target}, sums)
        if digest(sums.rows, self._tensors()) != self._base["digest"]:
            raise changed(self._base, "it was changed since: other numbers are there")

    def _tensors(self) -> dict[str, Stored]:
        return {name: self._weights.tensors[theirs] for name, theirs in self._matched.sources.items()}


def _facts(tensors: Mapping[str, Stored]) -> dict[str, Any]:
    """Type and shape of each tensor, as JSON."""
    return {name: [one.dtype, [*one.shape]] for name, one in tensors.items()}


def _stored(facts: Mapping[str, Any]) -> dict[str, Stored]:
    return {name: Stored(dtype, tuple(shape), ()) for name, (dtype, shape) in facts.items()}


def _without_end(sentence: str) -> str:
    """A sentence as the cause in another one."""
    return sentence.split(". ")[0].rstrip(".")
