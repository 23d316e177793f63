"""What a rank holds, counted on real tensors in a real step: by walking live storages, not by formulas.

    found = ranks(2, count, plan("data=synthetic", "devices=2", "strategy=zero3"))   # of every rank, in bytes

Two steps make optimizer state and buckets, a third is watched. After every operator of it the storages that are alive are told apart by what they
are for; a storage counts once, with all its bytes.
"""

import gc
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from dtrain.build import build
from dtrain.checkpoint.snapshot import Snapshot
from dtrain.checkpoint.state import TrainState
from dtrain.data.stream import Stream
from dtrain.loop.assemble import assemble, prepare
from dtrain.loop.step import gradients_of, zero
from dtrain.mesh import Mesh
from dtrain.model import balance, balanced
from dtrain.objective.head import Deferred
from dtrain.optim.clip import clip
from dtrain.parallel.pipeline import Pipeline
from dtrain.planned import Plan


def _forward(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(query.shape, key.shape, value.shape)


def _backward(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return sdpa_backward_flop_count(gradient.shape, query.shape, key.shape, value.shape)


def _grouped(a: Any, b: Any, *_: Any, **__: Any) -> int:
    return int(2 * a.shape[0] * a.shape[1] * b.shape[-1])


def _added(out: Any, a: Any, b: Any, *_: Any, **__: Any) -> int:
    return int(2 * a.shape[0] * a.shape[1] * b.shape[1])


COUNTED = {
    torch.ops.aten.addmm_: _added,
    torch.ops.aten._grouped_mm: _grouped,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _forward,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _backward,
}
"""What torch's counter leaves out: products that are added in place, matrices by expert, and the attention of the CPU, by the formulas that it has for those of a GPU."""


class Flops(TorchDispatchMode):
    """Operations inside the context, by the formulas of torch's FlopCounterMode, whose hooks on modules a zero-bubble schedule does not bear; of
    DTensors those of the local pieces."""

    def __enter__(self) -> "Flops":
        self.count = 0
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        formula = COUNTED.get(func.overloadpacket) or flop_registry.get(func.overloadpacket)
        self.count += formula(*args, **(kwargs or {}), out_val=out) if formula else 0
        return out


class Held:
    """A tensor that the graph keeps; when this is gone it keeps it no longer."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Meter(TorchDispatchMode):
    """Looks after every operator at what is alive. `peak` holds the largest sizes seen, in bytes."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        buckets: list[Any],
        standing: list[Any],
    ) -> None:
        super().__init__()
        self.optimizer, self.parameters, self.gathering = optimizer, list(model.parameters()), _fsdp_parameters(model)
        self.resting = [storage(p) for p in self.parameters] + [
            p._sharded_param_data.untyped_storage() for p in self.gathering
        ]
        self.state = self._state()
        self.samples: set[int] = set()
        self.updates = False
        """Whether the optimizer is at work: gradients stay, and views and what is written in place take no memory."""
        self.peak = dict.fromkeys(("peak", "gradients", "kept", "hooks", "alive", "flight", "total"), 0)
        steady = sizes([*self.resting, *self.state]).keys()
        self.standing = [weakref.ref(each) for each in standing if each._cdata not in steady]
        self._alive: dict[int, Any] = {}
        self._held: dict[int, list[int]] = {}
        self._buckets, self._gathers, self._reduces = buckets, [], []
        self.groups = _fsdp_groups(model)

    def gathered(self) -> list[Any]:
        return [t.untyped_storage() for p in self.gathering for t in p.all_gather_outputs]

    def gradients(self) -> list[Any]:
        whole = [
            gradient
            for p in self.gathering
            for gradient in (p.sharded_param.grad, p.unsharded_accumulated_grad, _whole(p))
        ]
        return [storage(gradient) for gradient in (*(p.grad for p in self.parameters), *whole) if gradient is not None]

    def _state(self) -> list[Any]:
        return [
            storage(value)
            for entries in self.optimizer.state.values()
            for value in entries.values()
            if isinstance(value, Tensor)
        ]

    def rest(self, named: Iterable[int] | None = None) -> dict[int, int]:
        """Sizes of what is alive and none of the others: activations, and what is short-lived."""
        if named is None:
            named = sizes([*self.resting, *self.gathered(), *self.gradients(), *self.state, *self._buffers()])
        others = {
            *named,
            *self.samples,
            *sizes(_living(self.standing)),
        }  # such as tables of which a forward takes views
        self._alive = {key: reference for key, reference in self._alive.items() if reference() is not None}
        return sizes(_living(reference for key, reference in self._alive.items() if key not in others))

    def _buffers(self) -> list[Any]:
        return [*_living(self._buckets), *self._flying()]

    def _flying(self) -> list[Any]:
        """What is gathered or reduced, among ranks or, of one shard, copied."""
        states = [state for group in self.groups for state in group.comm_ctx.reduce_scatter_states]
        copied = [storage(state.reduce_scatter_input) for state in states]
        return [*_living(self._gathers + self._reduces), *copied]

    def look(self) -> None:
        resting, gathered, gradients = sizes(self.resting), sizes(self.gathered()), sizes(self.gradients())
        state, flight = sizes(self.state), sizes(self._flying())
        whole = resting | gathered
        rest = self.rest({*whole, *gradients, *state, *flight, *sizes(_living(self._buckets))})
        self._note("peak", whole)
        self._note("gradients", gradients)
        self._note("flight", {key: flight[key] for key in flight.keys() - gathered.keys() - gradients.keys()})
        self._note("alive", rest)
        self._note("total", sizes(_living(self.standing)) | whole | gradients | state | rest | flight)
        others = whole.keys() | self.samples
        self._note("hooks", {key: nbytes for key, (nbytes, _) in self._held.items() if key not in others})

    def backward_begins(self) -> None:
        self._note("kept", self.rest())

    def pack(self, tensor: Tensor) -> Held:
        with _disable_current_modes():
            held, kept = Held(tensor.detach()), storage(tensor)  # whole, an output would hold the graph that holds it
        entry = self._held.setdefault(kept._cdata, [kept.nbytes(), 0])
        entry[1] += 1
        weakref.finalize(held, self._let_go, kept._cdata)
        return held

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = {
            each._cdata: each
            for each in (storage(tensor) for tensor in tree_leaves(out) if isinstance(tensor, Tensor))
            if each.device.type != "meta"
        }
        new = [key for key in made if key not in self._alive or self._alive[key]() is None]
        self._alive |= {key: weakref.ref(each) for key, each in made.items()}
        if func.namespace == "c10d" and "allgather_base" in func.__name__:
            self._gathers.append(weakref.ref(storage(args[0])))
        if func.namespace == "c10d" and "reduce_scatter" in func.__name__:
            self._reduces += [weakref.ref(storage(args[0])), weakref.ref(storage(args[1]))]
        if new or not (self.updates or func.is_view):
            self.look()
        return out

    def _let_go(self, key: int) -> None:
        self._held[key][1] -= 1
        if not self._held[key][1]:
            del self._held[key]

    def _note(self, name: str, sizes: Mapping[int, int]) -> None:
        self.peak[name] = max(self.peak[name], sum(sizes.values()))


def storage(tensor: Any) -> Any:
    """That of the local piece."""
    tensor = getattr(tensor, "_local_tensor", tensor)
    return getattr(tensor, "elem", tensor).untyped_storage()


def sizes(storages: Iterable[Any]) -> dict[int, int]:
    """Bytes of each storage, once."""
    return {each._cdata: each.nbytes() for each in storages}


def size(storages: Iterable[Any]) -> int:
    return sum(sizes(storages).values())


def _living(references: Any) -> list[Any]:
    return [each for reference in references if (each := reference()) is not None]


def _whole(parameter: Any) -> Tensor | None:
    return parameter._unsharded_param.grad if hasattr(parameter, "_unsharded_param") else None


def _fsdp_groups(model: nn.Module) -> list[Any]:
    """What FSDP2 keeps for each module: private, there is no public way to see what is gathered."""
    groups = [
        module._get_fsdp_state()._fsdp_param_group for module in model.modules() if isinstance(module, FSDPModule)
    ]
    return [group for group in groups if group]


def _fsdp_parameters(model: nn.Module) -> list[Any]:
    return [parameter for group in _fsdp_groups(model) for parameter in group.fsdp_params]


class Recorded:
    """A source that remembers the storages of what it gave."""

    def __init__(self, source: Any) -> None:
        self._source, self.taken = source, set[int]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def __len__(self) -> int:
        return len(self._source)

    def take(self, *which: Any) -> Any:
        batch = self._source.take(*which)
        self.taken |= {storage(tensor)._cdata for tensor in batch.values()}
        return batch


def count(plan: Plan) -> dict[str, int]:
    """One rank: the loop of train.py without logs, of which one step is watched. In bytes; `flops` are this rank's operations of a step,
    `saved` what it writes of a checkpoint, without headers."""
    # a loss has some rows of logits in fp32 for each thread
    with build(plan.backend).open(), patch.object(torch, "get_num_threads", lambda: plan.threads):
        before = {each._cdata for each in storages()}
        mesh = Mesh(plan.mesh, device=plan.device)
        parts = assemble(plan, mesh)
        source = Recorded(parts.source)
        training = prepare(replace(parts, source=source))
        model, wrapped, optimizer, stream, step = (
            parts.model,
            parts.forward,
            training.optimizer,
            training.stream,
            training.step,
        )
        parameters = gradients_of(model)
        buckets: list[Any] = []

        def update() -> None:
            clip(parameters, plan.clip, scale=parts.precision.scaled_by(mesh.batch_ranks), stages=mesh.shape.pp)
            optimizer.step()

        for number in range(2):
            with Flops() as flops:
                step(stream, number)
            update()
            balance(balanced(model), mesh.sum)
            buckets = [weakref.ref(storage(p.grad)) for p in parameters if p.grad is not None]
            zero(parameters)
        gc.collect()
        standing = [each for each in storages() if each._cdata not in before | source.taken]
        meter = Meter(
            wrapped if isinstance(wrapped, Pipeline) else model,
            optimizer,
            buckets,
            standing,
        )
        del standing
        found = _watched(step, update, stream, meter)
        zero(parameters)
        files = Snapshot(mesh.rank, mesh.replica_coords).take(
            TrainState(model, optimizer, ema=training.state.ema).tensors()
        )
        stream.close()
        return found | {"saved": sum(len(file.parts[1]) for file in files), "flops": flops.count}


def _watched(step: Any, update: Any, stream: Stream, meter: Meter) -> dict[str, int]:
    share = next(stream)
    samples = [tensor for batch in share.microbatches for tensor in batch.values()]
    meter.samples = {storage(each)._cdata for each in samples}
    alone = torch.empty(
        sum(each.nbytes for each in samples), dtype=torch.uint8
    ).untyped_storage()  # they are views of more, read ahead
    meter.standing.append(weakref.ref(alone))
    run = torch.autograd._engine_run_backward

    def begin(*arguments: Any, **keywords: Any) -> Any:
        meter.backward_begins()
        return run(*arguments, **keywords)

    with (
        patch("torch.autograd._engine_run_backward", begin),
        meter,
        saved_tensors_hooks(meter.pack, lambda held: held.tensor),
    ):
        step(iter([share]), 2)
    meter.look()
    found = {
        "rest": size(meter.resting),
        "end": size(meter.gradients()),
        "state": size(meter.state),
        "computing": meter.peak["total"],
    }
    meter.updates = True
    with meter:
        update()
    return meter.peak | found


def storages() -> list[Any]:
    """Of every tensor that lives."""
    return [
        storage(each)
        for each in gc.get_objects()
        if issubclass(type(each), Tensor)
        and type(each) is not Deferred
        and not each.is_meta
        and each.layout == torch.strided
    ]


def peak_on_gpu(plan: Plan) -> int:
    """Of one rank on a CUDA device: the most bytes its allocator gave out in the third step."""
    with build(plan.backend).open():
        mesh = Mesh(plan.mesh, device=plan.device)
        parts = assemble(plan, mesh)
        training, parameters = prepare(parts), gradients_of(parts.model)
        for number in range(3):
            torch.cuda.reset_peak_memory_stats()
            training.step(training.stream, number)
            clip(parameters, plan.clip)
            training.optimizer.step()
            zero(parameters)
        training.stream.close()
        return torch.cuda.max_memory_allocated()
