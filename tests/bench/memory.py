"""What a rank holds, counted on real tensors in a real step, beside what theory says.

    python tests/bench/memory.py [--only 'zero3 2']

The gpt (8 layers x 128, hidden 384, vocabulary 256, fp32) or the moe with as many weights seen by a token, AdamW, 4 samples of 128 tokens
a step over the world. Ranks are forked and talk through gloo; after two steps that make optimizer state and buckets, a third is watched. After
every operator of it the storages that are alive are told apart by what they are for: parameters at rest (local pieces), gathered ones (what
FSDP2 gathers into), gradients (of parameters, whole ones that wait for their turn, buckets), optimizer state, flat buffers on their way between
ranks, samples. What is left are activations and whatever is short-lived. A storage counts once, with all its bytes.

Activations are counted in two ways that know nothing of each other: storages alive when a backward begins, the largest over the microbatches; and
storages held by the graph, by torch.autograd.graph.saved_tensors_hooks. The second misses what a checkpointed block keeps for itself.

Beside each figure stands counted / theory, where theory is the formula of its column; figures are KiB, of the rank that holds most.
Where one is off by more than 5% the last column says why.
"""

import argparse
import os
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from pool import ranks
from small import plan as plan_of
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dtrain.build import build
from dtrain.clip import clip
from dtrain.data.stream import Stream, as_source
from dtrain.mesh import Mesh
from dtrain.model import balanced, construct
from dtrain.parallel.context import context_of
from dtrain.parallel.order import parallelize
from dtrain.plan import Plan
from dtrain.step import gradients_of, make_step, zero

L, C, F, H, V, T, B = 8, 128, 384, 4, 256, 128, 4
E, K, FE = 8, 2, 192  # experts, those a token sees, their width
WORDS = (
    "data=synthetic", "objective=next_token", f"data.vocab={V}", f"data.sequence={T}", f"model.layers={L}", f"model.width={C}", f"batch={B}",
)  # fmt: skip

COLUMNS = {
    "rest": "parameters at rest", "peak": "at their peak", "gradients": "gradients at their peak", "end": "at the end", "state": "optimizer state",
    "kept": "activations kept",
}  # fmt: skip
PLAIN = {"hooks": "by hooks", "alive": "most alive in the step", "flight": "in flight"}

LEGEND = """\
Sizes of this model, KiB. Parameters: P all, b a block, R outside of blocks, h the head, D without experts, E the experts, d a block without
experts, e the experts of a block. Activations of the whole batch: X on the residual path and in norms, G what norms give to matrices, S inside
attention and feed-forward, Y the softmax, A all of the blocks, Z all behind them (X + G + S + Y = A + Z), I the inputs of blocks, M results of
matrix products and attention. `most alive`: activations and everything short-lived, at its peak. `in flight`: flat buffers of parameters and
gradients on their way, at their peak. A dash: nothing expected, nothing there."""


def sizes(moe: bool) -> dict[str, float]:
    """The letters of the formulas, in KiB."""
    expert = E * 3 * C * FE if moe else 0
    block = 4 * C * C + 2 * C + (E * C if moe else 3 * C * F)
    inside = 6 * C + 3 * H + (2 * K * C + 4 * K * FE if moe else 4 * F)
    parameters = {
        "P": L * (block + expert) + 2 * V * C + C, "b": block + expert, "d": block, "e": expert, "R": 2 * V * C + C, "h": V * C,
        "D": L * block + 2 * V * C + C, "E": L * expert,
    }  # fmt: skip
    a_token = {
        "X": L * (4 * C + 2) + 2 * C + 1, "G": L * 2 * C + C, "S": L * inside, "Y": V, "A": L * (6 * C + 2 + inside), "Z": 3 * C + 1 + V,
        "I": L * C, "M": L * (6 * C + 2 * F + H),
    }  # fmt: skip
    floats = parameters | {name: number * B * T for name, number in a_token.items()}
    return {name: number * 4 / 1024 for name, number in floats.items()}


@dataclass
class Case:
    """`theory`: the formulas that differ from those of one rank, by column; `why`: the letter of the reason where the figure is another;
    `rank`: the one shown, None: the one that holds most."""

    words: str
    world: int
    theory: dict[str, str] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)
    rank: int | None = None

    def formula(self, column: str) -> str:
        alone = {"rest": "P", "peak": "P", "gradients": "P", "end": "P", "state": "2*P", "kept": "A+Z"}
        return (alone | self.theory)[column]


def sharded(ranks: int, peak: str, gradients: str, kept: str) -> dict[str, str]:
    n = ranks
    return {"rest": f"P/{n}", "peak": f"P/{n}+{peak}", "gradients": gradients, "end": f"P/{n}", "state": f"2*P/{n}", "kept": kept}


def split(kept: str) -> dict[str, str]:
    return {"rest": "P/2", "peak": "P/2", "gradients": "P/2", "end": "P/2", "state": "P", "kept": kept}


WHY = {
    "a": "Torch's schedules keep a buffer to receive into for each of the 4 microbatches, and outputs that were sent.",
    "b": "FSDP2 over a shard axis of one rank copies the experts of a block while it runs.",
}
CASES = {
    "single": Case("", 1),
    "ddp 2": Case("strategy=ddp", 2, {"kept": "(A+Z)/2"}),
    "zero1 2": Case("strategy=zero1", 2, sharded(2, "P", "7*b/2+b+h", "(A+Z)/2")),
    "zero2 2": Case("strategy=zero2", 2, sharded(2, "P", "7*b/2+b+h", "(A+Z)/2")),
    "zero3 2": Case("strategy=zero3", 2, sharded(2, "R+b", "7*b/2+b+h", "(A+Z)/2")),
    "zero3 4": Case("strategy=zero3", 4, sharded(4, "R+b", "7*b/4+b+h", "(A+Z)/4")),
    "zero1 2, accumulate 2": Case("strategy=zero1 accumulate=2", 2, sharded(2, "P", "P", "(A+Z)/4")),
    "zero2 2, accumulate 2": Case("strategy=zero2 accumulate=2", 2, sharded(2, "P", "P/2+b+h", "(A+Z)/4")),
    "zero3 2, accumulate 2": Case("strategy=zero3 accumulate=2", 2, sharded(2, "R+b", "P/2+b+h", "(A+Z)/4")),
    "tp 2": Case("strategy=ddp mesh.tp=2", 2, split("X+G+S/2+Y")),
    "tp 2, sequence split": Case("strategy=ddp mesh.tp=2 tensor.sequence=split", 2, split("X/2+G+S/2+Y")),
    "tp 2, loss split": Case("strategy=ddp mesh.tp=2 tensor.loss=split", 2, split("X+G+S/2+Y/2")),
    "tp 2, both split": Case("strategy=ddp mesh.tp=2 tensor.sequence=split tensor.loss=split", 2, split("X/2+G+S/2+Y/2")),
    "pp 2, 1f1b, rank 0": Case("strategy=ddp mesh.pp=2 accumulate=4", 2, split("A/2*2/4"), {"kept": "a"}, rank=0),
    "pp 2, 1f1b, rank 1": Case("strategy=ddp mesh.pp=2 accumulate=4", 2, split("(A/2+Z)*1/4"), {"kept": "a"}, rank=1),
    "pp 2, gpipe, rank 0": Case("strategy=ddp mesh.pp=2 accumulate=4 pipeline.schedule=gpipe", 2, split("A/2"), rank=0),
    "pp 2, gpipe, rank 1": Case("strategy=ddp mesh.pp=2 accumulate=4 pipeline.schedule=gpipe", 2, split("A/2+Z"), rank=1),
    "cp 2, ring": Case("strategy=ddp mesh.cp=2", 2, {"kept": "(A+Z)/2"}),
    "cp 2, ulysses": Case("strategy=ddp mesh.cp=2 context.attention=ulysses", 2, {"kept": "(A+Z)/2"}),
    "moe, single": Case("model=moe", 1),
    "moe, ddp 2": Case("model=moe strategy=ddp", 2, {"kept": "(A+Z)/2"}),
    "moe, ep 2": Case(
        "model=moe strategy=ddp mesh.ep=2", 2,
        {"rest": "D+E/2", "peak": "D+E/2", "gradients": "D+E/2", "end": "D+E/2", "state": "2*(D+E/2)", "kept": "(A+Z)/2"},
    ),
    "moe, ep 2, zero3": Case(
        "model=moe mesh.ep=2 strategy=zero3", 2, sharded(2, "R+d", "7*(d+e)/2+d+e/2+h", "(A+Z)/2"), {"peak": "b"},
    ),
    "remat selective": Case("remat=selective", 1, {"kept": "I+M+Z"}),
    "remat budget, half": Case("remat=budget", 1, {"kept": "A/2+I/2+Z"}),
    "remat full": Case("remat=full", 1, {"kept": "I+Z"}),
}  # fmt: skip


class Held:
    """A tensor that the graph keeps; when this is gone it keeps it no longer."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Meter(TorchDispatchMode):
    """Looks after every operator at what is alive. `peak` holds the largest sizes seen, in bytes."""

    def __init__(self, model: nn.Module, optimizer: Any, buckets: list[Any]) -> None:
        super().__init__()
        self.optimizer, self.parameters, self.gathering = optimizer, list(model.parameters()), _fsdp_parameters(model)
        self.resting = [storage(p) for p in self.parameters] + [p._sharded_param_data.untyped_storage() for p in self.gathering]
        self.state = self._state()
        self.samples: set[int] = set()
        self.peak = dict.fromkeys(("peak", "gradients", "kept", "hooks", "alive", "flight"), 0)
        self._alive: dict[int, Any] = {}
        self._held: dict[int, list[int]] = {}
        self._buckets, self._gathers, self._reduces = buckets, [], []

    def gathered(self) -> list[Any]:
        return [t.untyped_storage() for p in self.gathering for t in p.all_gather_outputs]

    def gradients(self) -> list[Any]:
        whole = [gradient for p in self.gathering for gradient in (p.sharded_param.grad, p.unsharded_accumulated_grad, _whole(p))]
        return [storage(gradient) for gradient in (*(p.grad for p in self.parameters), *whole) if gradient is not None]

    def _state(self) -> list[Any]:
        return [storage(value) for entries in self.optimizer.state.values() for value in entries.values() if isinstance(value, Tensor)]

    def rest(self) -> list[Any]:
        """What is alive and none of the others: activations, and what is short-lived."""
        named = (*self.resting, *self.gathered(), *self.gradients(), *self.state, *_living(self._buckets + self._gathers + self._reduces))
        others = {each._cdata for each in named} | self.samples
        self._alive = {key: reference for key, reference in self._alive.items() if reference() is not None}
        return [each for each in _living(self._alive.values()) if each._cdata not in others]

    def look(self) -> None:
        gathered, gradients = self.gathered(), self.gradients()
        self._note("peak", size([*self.resting, *gathered]))
        self._note("gradients", size(gradients))
        arrived = {each._cdata for each in (*gathered, *gradients)}
        self._note("flight", size([each for each in _living(self._gathers + self._reduces) if each._cdata not in arrived]))
        self._note("alive", size(self.rest()))
        others = {each._cdata for each in (*self.resting, *gathered)} | self.samples
        self._note("hooks", sum(nbytes for key, (nbytes, _) in self._held.items() if key not in others))

    def backward_begins(self) -> None:
        self._note("kept", size(self.rest()))

    def pack(self, tensor: Tensor) -> Held:
        held, kept = Held(tensor), storage(tensor)
        entry = self._held.setdefault(kept._cdata, [kept.nbytes(), 0])
        entry[1] += 1
        weakref.finalize(held, self._let_go, kept._cdata)
        return held

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = {each._cdata: each for each in (storage(tensor) for tensor in tree_leaves(out) if isinstance(tensor, Tensor))}
        self._alive |= {key: weakref.ref(each) for key, each in made.items()}
        if func.namespace == "c10d" and "allgather_base" in func.__name__:
            self._gathers.append(weakref.ref(storage(args[0])))
        if func.namespace == "c10d" and "reduce_scatter" in func.__name__:
            self._reduces += [weakref.ref(storage(args[0])), weakref.ref(storage(args[1]))]
        self.look()
        return out

    def _let_go(self, key: int) -> None:
        self._held[key][1] -= 1
        if not self._held[key][1]:
            del self._held[key]

    def _note(self, name: str, value: int) -> None:
        self.peak[name] = max(self.peak[name], value)


def storage(tensor: Any) -> Any:
    """That of the local piece."""
    tensor = getattr(tensor, "_local_tensor", tensor)
    return getattr(tensor, "elem", tensor).untyped_storage()


def size(storages: list[Any]) -> int:
    return sum({each._cdata: each.nbytes() for each in storages}.values())


def _living(references: Any) -> list[Any]:
    return [each for reference in references if (each := reference()) is not None]


def _whole(parameter: Any) -> Tensor | None:
    return parameter._unsharded_param.grad if hasattr(parameter, "_unsharded_param") else None


def _fsdp_parameters(model: nn.Module) -> list[Any]:
    """What FSDP2 keeps for each parameter: private, there is no public way to see what is gathered."""
    groups = [module._get_fsdp_state()._fsdp_param_group for module in model.modules() if isinstance(module, FSDPModule)]
    return [parameter for group in groups if group for parameter in group.fsdp_params]


def count(plan: Plan) -> dict[str, int]:
    """One rank: the loop of train.py without logs, of which one step is watched."""
    with build(plan.backend).open():
        mesh = Mesh(plan.mesh, device=plan.device)
        strategy, objective, precision = build(plan.strategy), build(plan.objective), build(plan.precision)
        source = as_source(build(plan.data))
        model = construct(plan.model, facts=source.facts, seed=0)
        extra = {"remat": build(plan.remat), "compile": build(plan.compile), "pipeline": plan.pipeline, "tensors": plan.tensor}
        wrapped = parallelize(model, mesh, strategy, precision=precision, seed=0, **extra)
        optimizer, parameters = build(plan.optim, model=model), gradients_of(model)
        stream = Stream(source, batch=plan.batch, mesh=mesh, seed=0, count=objective.count)
        context = context_of(mesh, plan.context["attention"])
        step = make_step(wrapped, objective, strategy, mesh, precision=precision, seed=0, context=context)
        buckets: list[Any] = []
        for number in range(2):
            step(stream, number)
            clip(parameters, plan.clip, stages=mesh.shape.pp)
            optimizer.step()
            for module in balanced(model):
                module.balance(mesh.sum)
            buckets = [weakref.ref(storage(p.grad)) for p in parameters if p.grad is not None]
            zero(parameters)
        found = _watched(step, stream, Meter(model, optimizer, buckets))
        stream.close()
        return found


def _watched(step: Any, stream: Stream, meter: Meter) -> dict[str, int]:
    share = next(stream)
    meter.samples = {storage(tensor)._cdata for batch in share.microbatches for tensor in batch.values()}
    run = torch.autograd._engine_run_backward

    def begin(*arguments: Any, **keywords: Any) -> Any:
        meter.backward_begins()
        return run(*arguments, **keywords)

    with patch("torch.autograd._engine_run_backward", begin), meter, saved_tensors_hooks(meter.pack, lambda held: held.tensor):
        step(iter([share]), 2)
    meter.look()
    return meter.peak | {"rest": size(meter.resting), "end": size(meter.gradients()), "state": size(meter.state)}


def row(name: str, case: Case, counted: list[dict[str, int]], noted: set[str]) -> Iterator[str]:
    """The cells of a case; letters of the reasons it needs are added to `noted`."""
    letters, why = sizes("model=moe" in case.words), []
    yield name
    shown = counted if case.rank is None else [counted[case.rank]]
    for column in COLUMNS:
        found, formula = max(each[column] for each in shown) / 1024, case.formula(column)
        ratio = found / eval(formula, {}, letters)
        off = abs(ratio - 1) > 0.05
        why += [case.why.get(column, "not explained")] if off else []
        yield f"{found:,.0f} = {f'**{ratio:.2f}**' if off else f'{ratio:.2f}'} x {formula.replace('*', '·')}"
    for column in PLAIN:
        found = max(each[column] for each in shown) / 1024
        yield f"{found:,.0f}" if found else "-"
    noted.update(why)
    yield ", ".join(dict.fromkeys(why))


def main(only: str) -> None:
    names = [name for name in CASES if only in name]
    print(LEGEND, end="\n\n")
    for moe in (False, True):
        print(f"{'moe' if moe else 'gpt'}: " + ", ".join(f"{name} {value:,.0f}" for name, value in sizes(moe).items() if value), end="\n\n")
    print("| " + " | ".join(["", *COLUMNS.values(), *PLAIN.values(), "why"]) + " |")
    print("|---" * (len(COLUMNS) + len(PLAIN) + 2) + "|")
    counted: dict[tuple[str, int], list[dict[str, int]]] = {}
    noted: set[str] = set()
    for name in names:
        case = CASES[name]
        key = (case.words, case.world)
        if key not in counted:
            counted[key] = ranks(case.world, count, plan_of(*WORDS, f"devices={case.world}", *case.words.split()), seconds=600)
        print("| " + " | ".join(row(name, case, counted[key], noted)) + " |", flush=True)
    print("", *(f"{letter}: {WHY[letter]}" for letter in sorted(noted & set(WHY))), sep="\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="cases whose name holds this")
    main(parser.parse_args().only)
