"""Records that `dtrain verify` takes inside the ranks of a run: the first samples, gradients and updates, and whether
the forward drew random numbers.

<out>/first/rank-00000.safetensors   pieces of `gradient.<parameter>`, `update.<parameter>` and `weight.<parameter>`
      first/rank-00000.json          place of each piece in its tensor, generators drawn from, digests of samples
      calls.json                     the first call of the model that gave another output for the same, with calls=true
"""

import hashlib
import json
import os
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from dtrain.build import build
from dtrain.checkpoint import Checkpoint, shards
from dtrain.checkpoint.state import TrainState
from dtrain.data import Batch
from dtrain.data.stream import leaves
from dtrain.evaluation.calls import watch
from dtrain.mesh import Mesh
from dtrain.mesh.sharding import reduced
from dtrain.model.seeds import drawn
from dtrain.storage import store


def recorded(*, kind: str, seed: int, out: str, mesh: Mesh, calls: bool = False, **options: Any) -> Checkpoint:
    """The plan's checkpoint (`kind`), which also records the first step of a run. `calls`: the run ends in its first
    forward, when the model has been called often enough (calls.py).
    """
    checkpoint: Checkpoint = build({"_target_": kind, **options}, out=out, mesh=mesh)
    restore = checkpoint.restore

    def begin(state: TrainState) -> dict[str, Any] | None:
        restored = restore(state)
        if calls:
            watch(state.model, lambda other: _end(store.join(out, "calls.json"), other))
        elif restored is None:
            _watch(state, mesh, seed, store.join(out, "first"))
        return restored

    vars(checkpoint)["restore"] = begin
    return checkpoint


def _end(url: str, number: int | None) -> None:
    """Write the number of a call, and end the process: an exception would be reported as the failure of a rank."""
    store.write(url, json.dumps(number).encode())
    os._exit(0)


def _watch(state: TrainState, mesh: Mesh, seed: int, folder: str) -> None:
    """Record around the first optimizer step, when the gradients are those of the whole batch and clipped."""
    optimizer, stream = state.optimizer, state.stream
    assert optimizer is not None and stream is not None
    read = [(place, sample, _digest(batch)) for place, sample, batch in stream.alone(stream.seen)]
    step = optimizer.step

    def first() -> None:
        vars(optimizer).pop("step")
        generators = drawn(seed, state.step, mesh.batch_rank)
        reached = {name: weight for name, weight in state.model.named_parameters() if weight.grad is not None}
        tensors = {f"weight.{name}": _real(weight).clone() for name, weight in reached.items()}
        tensors |= {f"gradient.{name}": _real(reduced(weight)) for name, weight in reached.items()}
        step()
        for name, weight in reached.items():
            tensors[f"update.{name}"] = _real(weight) - tensors[f"weight.{name}"]
        listed, file = list(shards.mine(tensors, mesh.replica_coords)), store.join(folder, f"rank-{mesh.rank:05d}")
        store.write(f"{file}.safetensors", save({name: piece.cpu().contiguous() for name, piece, _ in listed}))
        pieces = [{"name": name, "offset": [*offset], "shape": [*piece.shape]} for name, piece, offset in listed]
        shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
        notes = {"step": state.step + 1, "drawn": generators, "samples": read, "pieces": pieces, "shapes": shapes}
        store.write(f"{file}.json", json.dumps(notes).encode())

    vars(optimizer)["step"] = first


def _digest(batch: Batch) -> str:
    return hashlib.sha256(b"".join(save({"": tensor.contiguous()}) for tensor in leaves(batch))).hexdigest()


def _real(tensor: Tensor) -> Tensor:
    """The tensor in fp32, a complex number as two real ones."""
    tensor = tensor.detach()
    tensor = tensor.to_dense() if tensor.is_sparse else tensor
    return torch.view_as_real(tensor).float() if tensor.is_complex() else tensor.float()
