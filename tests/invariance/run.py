"""A run of train.py's parts on forked ranks, from words: losses and norms of every step, the first gradients, the last weights."""

import math
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from pool import resident
from small import plan, whole_of
from torch import Tensor

from dtrain.backend.gloo import Gloo
from dtrain.loop.assemble import assemble, prepare
from dtrain.loop.step import gradients_of, zero
from dtrain.mesh import Mesh
from dtrain.model import balance, balanced
from dtrain.optim.clip import clip
from dtrain.planned import Plan

# AdamW divides by the root of the second moment: of gradients that are all but zero a smaller eps makes steps of rounding errors
COMMON = "batch=8 optim.eps=1e-5 optim.lr=1e-3 schedule=constant schedule.warmup=0 logger=[] hook=[]"


def run(model: str, words: str, *, steps: int) -> dict[str, Any]:
    """Of the whole model: what the ranks hold is put together. All ranks must tell the same losses and norms."""
    asked = plan(*model.split(), *COMMON.split(), *words.split())
    _load()
    told = resident(asked.world, _rank, asked, steps, seconds=600)
    for other in told[1:]:
        assert other["losses"] == told[0]["losses"], "ranks disagree about the loss"
        assert other["norms"] == told[0]["norms"], "ranks disagree about the norm"
    whole = dict(told[0])
    for part in ("gradients", "weights"):
        whole[part] = {name: tensor for rank in told for name, tensor in rank[part].items()}
    return whole


@cache
def _load() -> None:
    """Here once, and not in every rank: 2 s."""
    with suppress(ImportError):
        import transformers.models.llama.modeling_llama  # noqa: F401


@cache
def reference(model: str, steps: int, precision: str = "fp32") -> dict[str, Any]:
    return run(model, f"devices=1 precision={precision}", steps=steps)


def worst(here: dict[str, Any], there: dict[str, Any]) -> dict[str, float]:
    """Largest relative differences: of every loss and the first norm to themselves, of a tensor to its largest number."""
    found = {"losses": max(_relative(a, b) for a, b in zip(here["losses"], there["losses"], strict=True))}
    found["norm"] = _relative(here["norms"][0], there["norms"][0])
    for part in ("gradients", "weights"):
        assert here[part].keys() == there[part].keys()
        found[part] = max(
            _apart(torch.tensor(here[part][name]), torch.tensor(value)) for name, value in there[part].items()
        )
    return found


def _relative(a: float, b: float) -> float:
    return abs(a - b) / abs(b) if math.isfinite(a) else math.inf


def _apart(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-12)) if bool(torch.isfinite(a).all()) else math.inf


def _rank(plan: Plan, steps: int) -> dict[str, Any]:
    with Gloo(timeout=60).open():
        return _steps(plan, Mesh(plan.mesh, device="cpu"), steps)


def _steps(plan: Plan, mesh: Mesh, steps: int) -> dict[str, Any]:
    parts = assemble(plan, mesh)
    training, model, precision = prepare(parts), parts.model, parts.precision
    parameters, moving = gradients_of(model), balanced(model)
    told: dict[str, Any] = {"losses": [], "norms": [], "gradients": {}}
    for number in range(steps):
        loss = training.step(training.stream, number)
        scale = precision.scale.value / mesh.batch_ranks if precision.scale else 1.0
        told["gradients"] = told["gradients"] or {
            name: (torch.tensor(whole_of(p.grad)) / scale).tolist()
            for name, p in model.named_parameters()
            if p.grad is not None
        }
        norm = clip(parameters, plan.clip, scale=scale, stages=mesh.shape.pp, news=loss.news)
        assert training.schedule.factor(number) == 1
        if precision.scale is None or precision.scale.accept(norm):
            training.optimizer.step()
        balance(moving, mesh.sum)
        zero(parameters)
        told["losses"].append(mesh.sum_stages(mesh.sum(loss.sums["loss"].clone())).item() / loss.count)
        told["norms"].append(norm.item())
    training.stream.close()
    return told | {"weights": {name: whole_of(p) for name, p in model.named_parameters()}}
