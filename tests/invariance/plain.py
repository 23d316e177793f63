"""A training loop as anybody would write it, on the samples that dtrain takes and in its microbatches: batch norms see one at a time."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from small import plan
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import dtrain.build
from dtrain.data.order import samples
from dtrain.model.seeds import derive


def loop(
    build: Callable[[], nn.Module],
    words: list[str],
    *,
    steps: int,
    sample: Callable[[int], Mapping[str, Tensor]],
    loss_of: Callable[[nn.Module, Mapping[str, Tensor]], Tensor],
    count: Callable[[Mapping[str, Tensor]], int],
    optimizer_of: Callable[[nn.Module], torch.optim.Optimizer],
    unused: bool = False,
) -> dict[str, Any]:
    """Losses, the first gradients and the last weights. `loss_of` of a batch is a mean over what `count` counts in it.

    In a process group every rank takes its part of each batch, and DistributedDataParallel averages: `unused` if some
    parameters have no gradient.
    """
    asked = plan(*words)
    torch.manual_seed(derive(asked.seed, "model"))
    model = build()
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.sparse = False  # AdamW takes no sparse gradients
    optimizer = optimizer_of(model)
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    called = model
    if world > 1:
        called = DistributedDataParallel(model, find_unused_parameters=unused)
        called.broadcast_buffers = False
    source = dtrain.build.build(asked.data)
    size, part = asked.batch.size, asked.batch.microbatch
    losses, gradients = [], {}
    for step in range(steps):
        index, _ = samples(np.arange(size * step, size * (step + 1)), n=len(source), seed=derive(asked.seed, "data"))
        read = [sample(int(i)) for i in source.original(index)]
        batches = [collated(read[first : first + part]) for first in range(0, size, part)]
        whole, total = sum(map(count, batches)), torch.zeros(())
        mine = np.array_split(np.arange(len(batches)), world)[rank]
        for number in mine:
            waits = isinstance(called, DistributedDataParallel) and number != mine[-1]
            with called.no_sync() if waits else nullcontext():  # type: ignore[operator]
                loss = loss_of(called, batches[number]) * (count(batches[number]) / whole)
                (loss * world).backward()
            total += loss.detach()
        if world > 1:
            dist.all_reduce(total)
        gradients = gradients or {key: p.grad.tolist() for key, p in model.named_parameters() if p.grad is not None}
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    weights = {key: p.tolist() for key, p in model.named_parameters()}
    return {"losses": losses, "gradients": gradients, "weights": weights}


def collated(rows: list[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
