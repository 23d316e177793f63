"""Small parts that many tests build: a plan, a mesh on forked ranks, a small GPT, a batch of tokens."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
import yaml
from pool import ranks, resident
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from dtrain.backend.gloo import Gloo
from dtrain.build import build
from dtrain.cluster import Cluster
from dtrain.compose import compose
from dtrain.config.schema import GROUPS, NAMED, Config
from dtrain.data.order import samples
from dtrain.data.stream import as_source
from dtrain.loop.assemble import assemble, prepare
from dtrain.loop.step import gradients_of, zero
from dtrain.mesh import Mesh
from dtrain.model import balance, balanced, blocks, construct
from dtrain.model.gpt import GPT
from dtrain.model.seeds import derive, fill
from dtrain.optim.clip import clip
from dtrain.parallel.order import materialize
from dtrain.planned import BatchShape, MeshShape, PipelineShape, Plan
from dtrain.resolve import resolve

# matrices of several sizes, and a vocabulary that does not divide by two ranks; much smaller, and rounding errors grow from step to step
PARTS: dict[str, Any] = {
    "strategy": {"_target_": "dtrain.strategy.single.Single"},
    "precision": {"_target_": "dtrain.precision.fp32.build"},
    "model": {"_target_": "dtrain.model.gpt.GPT", "vocab": "auto", "layers": 2, "heads": 4, "kv_heads": 2, "width": 32, "hidden": 48, "tied": True},
    "objective": {"_target_": "dtrain.objective.next_token.NextToken"},
    # not AdamW: where a gradient is nearly zero it divides rounding errors by themselves, and no two orders of adding agree
    "optim": {"_target_": "dtrain.optim.sgd.build", "lr": 0.03, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "data": {
        "_target_": "dtrain.data.synthetic.Synthetic", "task": "next_token", "inputs": [4], "outputs": 3, "vocab": 13, "sequence": 10, "samples": 50,
    },
}  # fmt: skip
STRATEGIES: dict[str, Any] = {
    "ddp": {"_target_": "dtrain.strategy.ddp.DDP", "bucket_mb": 25},
    "fsdp": {"_target_": "dtrain.strategy.fsdp.FSDP", "reshard": "forward", "offload": "none"},
}

CPUS = Cluster(gpus=0, cpus=8)
composed = cache(lambda *words: compose(words))

UNEVEN: dict[str, Any] = {
    "_target_": "dtrain.data.dataset.Dataset",
    "dataset": {"_target_": "small.Uneven"},
    "holdout": 0.0,
    "outputs": 13,
}


class Uneven:
    """Samples of ten tokens of which sample i has i % 10 targets that do not count: a mean of means is wrong."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row = tokens(1, 11, seed=index)[0]
        return row[:-1], torch.where(torch.arange(10) < index % 10, -100, row[1:])


def config(*words: str) -> Config:
    """As compose makes it; plain numbers are set on a copy, because composing costs a fifth of a second."""
    keys = {word: word.split("=")[0] for word in words}
    plain = [word for word in words if keys[word] not in NAMED and keys[word].split(".")[0] not in (*GROUPS, "recipe")]
    made: Config = deepcopy(composed(*(word for word in words if word not in plain)))
    for word in plain:
        (*path, name), text = word.split("=", 1)[0].split("."), word.split("=", 1)[1]
        setattr(getattr(made, path[0]) if path else made, name, yaml.safe_load(text))
        made.sources[word.split("=", 1)[0]] = "command line"
    return made


def plan(*words: str, on: Cluster = CPUS) -> Plan:
    return resolve(config(*words), on)


GIVEN = plan()
"""Of which the steps below take what they are not given: made before ranks are forked."""


class Collectives(TorchDispatchMode):
    """Names of the collectives called inside the context, in order."""

    def __enter__(self) -> "Collectives":
        self.names: list[str] = []
        return super().__enter__()  # type: ignore[no-any-return]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.names.append(func.__name__.split(".")[0])
        return func(*args, **kwargs or {})


class Operators(TorchDispatchMode):
    """How often each operator of torch ran inside the context, by name."""

    def __enter__(self) -> "Operators":
        self.counts: Counter[str] = Counter()
        return super().__enter__()  # type: ignore[no-any-return]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.__name__.split(".")[0]] += 1
        return func(*args, **kwargs or {})


@contextmanager
def mesh_of(**degrees: int) -> Iterator[Mesh]:
    """The mesh of this rank, for as long as the context lasts."""
    with Gloo(timeout=60).open():
        yield Mesh(MeshShape(**degrees), device="cpu")


def on_mesh(work: Callable[[Mesh], Any], **degrees: int) -> list[Any]:
    """`work(mesh)` on every rank of a mesh of these degrees. What it builds is gone before the group is."""

    return ranks(MeshShape(**degrees).ranks, _on_mesh, work, degrees)


def on_resident_mesh(work: Callable[[Mesh], Any], **degrees: int) -> list[Any]:
    """`on_mesh`, on ranks that stay for the tests of this file, under the conditions of `resident`."""
    return resident(MeshShape(**degrees).ranks, _on_mesh, work, degrees)


def _on_mesh(work: Callable[[Mesh], Any], degrees: dict[str, int]) -> Any:
    with mesh_of(**degrees) as mesh:
        return work(mesh)


def small_gpt(**changed: object) -> GPT:
    """Every matrix of another size, so that a mixed-up shape shows; filled so that no output is zero."""
    arguments = {"vocab": 13, "layers": 2, "heads": 2, "width": 8, "hidden": 12} | changed
    model = GPT(**arguments)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3, generator=generator)
    return model


def tokens(batch: int, length: int, *, vocab: int = 13, seed: int = 0) -> Tensor:
    return torch.randint(vocab, (batch, length), generator=torch.Generator().manual_seed(seed))


def few_steps(parts: dict[str, Any], degrees: dict[str, int], **changed: Any) -> dict[str, Any]:
    """A few steps of train.py on this rank, without logs, hooks and checkpoints: losses, norms, and the whole weights at the end.

    `parts` maps groups (strategy, optim, model, data, objective, precision) to Parts.
    """
    with mesh_of(**degrees) as mesh:
        return steps_on(mesh, parts, **changed)


def steps_on(
    mesh: Mesh,
    parts: dict[str, Any],
    *,
    size: int = 8,
    microbatch: int = 4,
    steps: int = 4,
    clip_at: float | None = 1.0,
    seed: int = 5,
    pipeline: PipelineShape | None = None,
    tensors: dict[str, str] | None = None,
    context: str = "ring",
) -> dict[str, Any]:
    data = size // mesh.data_ranks
    asked = replace(
        GIVEN, **parts, batch=BatchShape(size, microbatch, mesh.data_ranks, data // microbatch), seed=seed,
        pipeline=pipeline or PipelineShape(), tensor=tensors or GIVEN.tensor, context={"attention": context},
    )  # fmt: skip
    assembled = assemble(asked, mesh)
    model, precision, training = assembled.model, assembled.precision, prepare(assembled)
    assembled.begin(build(GIVEN.checkpoint, out="memory://none", mesh=mesh, resume="never"), training.state)
    parameters, losses, norms, first = gradients_of(model), [], [], {}
    for number in range(steps):
        loss = training.step(training.stream, number)
        first = first or {name: whole_of(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        scale = precision.scale.value / mesh.batch_ranks if precision.scale else 1.0
        norm = clip(parameters, clip_at, scale=scale, stages=mesh.shape.pp, news=loss.news)
        if precision.scale is None or precision.scale.accept(norm):
            training.optimizer.step()
        balance(balanced(model), mesh.sum)
        zero(parameters)
        losses.append(mesh.sum_stages(mesh.sum(loss.sums["loss"].clone())).item() / loss.count)
        norms.append(norm.item())
    training.stream.close()
    whole = {name: whole_of(p) for name, p in model.named_parameters() if not p.is_meta}
    buffers = {name: buffer.tolist() for name, buffer in model.named_buffers()}
    return {
        "buffers": buffers,
        "losses": losses,
        "norms": norms,
        "gradients": first,
        "weights": whole,
        "scale": precision.scale and precision.scale.value,
    }


def whole_of(tensor: Tensor) -> list[Any]:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().tolist()


def joined(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """One run out of those of the ranks of a pipeline: what they say alike, and the weights and gradients of all stages."""
    assert all(run["losses"] == runs[0]["losses"] and run["norms"] == runs[0]["norms"] for run in runs)
    parts = {
        name: {key: value for run in runs for key, value in run[name].items()} for name in ("weights", "gradients")
    }
    assert len(parts["weights"]) == sum(len(run["weights"]) for run in runs), "every parameter is on one stage"
    return runs[0] | parts


def one_backward(remat: Callable[[list[torch.nn.Module]], None] | None, *, layers: int = 4) -> dict[str, Any]:
    """Forward and backward of a small GPT whose blocks `remat` has changed: results, and what they cost."""
    model = small_gpt(layers=layers)
    visits = [0] * layers
    for index, block in enumerate(model.blocks):
        block.attention.register_forward_pre_hook(lambda *_, index=index: visits.__setitem__(index, visits[index] + 1))
    if remat:
        remat(list(blocks(model)))
    saved = 0

    def keep(tensor: Tensor) -> Tensor:
        nonlocal saved
        saved += 1
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(tokens(2, 6)).square().mean()
    with Operators() as backward:
        loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {
        "loss": loss.detach(),
        "gradients": gradients,
        "saved": saved,
        "visits": visits,
        "backward": backward.counts,
    }


def same_bits(run: dict[str, Any], reference: dict[str, Any]) -> None:
    """Loss and gradients of two `one_backward`s are equal, bit for bit."""
    assert torch.equal(run["loss"], reference["loss"])
    assert run["gradients"].keys() == reference["gradients"].keys()
    for name, gradient in reference["gradients"].items():
        assert torch.equal(run["gradients"][name], gradient), name


def first_batch(parts: dict[str, Any], *, size: int = 8, seed: int = 5) -> tuple[torch.nn.Module, dict[str, Tensor]]:
    """The model and the batch that `few_steps` begins with, by the shortest way."""
    source = as_source(build(parts["data"]))
    model = construct(parts["model"], facts=source.facts, seed=derive(seed, "model"))
    materialize(model, torch.device("cpu"))
    fill(model, seed)
    return model, source.take(*samples(np.arange(size), n=len(source), seed=derive(seed, "data")))


def alike(tensors: dict[str, Any], reference: dict[str, Any], tolerance: float) -> None:
    """Every tensor is that of the reference, relative to its largest number."""
    assert tensors.keys() == reference.keys()
    for name, values in reference.items():
        here, there = torch.tensor(tensors[name]), torch.tensor(values)
        torch.testing.assert_close(
            here,
            there,
            rtol=0,
            atol=tolerance * there.abs().max().item(),
            msg=lambda text, name=name: f"{name}: {text}",
        )


def agree(run: dict[str, Any], reference: dict[str, Any], *, tolerance: float = 1e-5) -> None:
    """Losses, norms and weights are those of the reference: relative to their size, and weights to the largest of their tensor."""
    for name in ("losses", "norms"):
        torch.testing.assert_close(torch.tensor(run[name]), torch.tensor(reference[name]), rtol=tolerance, atol=0)
    alike(run["weights"], reference["weights"], tolerance)
