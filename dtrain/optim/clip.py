"""One gradient clip for every mesh: the norm of the whole model, and gradients scaled so that it stays below a
bound.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtrain.mesh.sharding import local, shards
from dtrain.optim.norms import norms


class News(Protocol):
    """Numbers, [N], that tell the other ranks about a step, and what to do with their sums over all ranks."""

    @property
    def numbers(self) -> Tensor: ...

    def settle(self, sums: Tensor) -> None: ...


@torch.no_grad()  # with gradients enabled, to_local of each DTensor is a node of a graph
def clip(
    parameters: Sequence[nn.Parameter],
    bound: float | None,
    *,
    scale: float = 1.0,
    stages: int = 1,
    beside: Tensor | None = None,
    news: News | None = None,
) -> Tensor:
    """Divide gradients by `scale`, bound their global L2 norm by `bound` (None: do not), return the norm before: 0-dim,
    fp32.

    Works on local pieces. The square of a piece that n ranks hold alike counts 1/n on each, so one all-reduce of one
    number over all ranks is the sum over any mesh, experts and the `stages` of a pipeline included; where every rank
    holds everything there is none. `beside`, 0-dim and fp32, is summed over all ranks in place, and `news` are settled;
    both travel in the same collective, or in one of their own where there is none.
    """
    pieces: dict[tuple[int, torch.dtype], list[Tensor]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if type(gradient) is Tensor:  # the usual case, once for each parameter in each step
            pieces.setdefault((1, gradient.dtype), []).append(gradient)
        elif gradient is not None:
            pieces.setdefault((shards(gradient), gradient.dtype), []).append(local(gradient))
    by_cut: dict[int, Tensor] = {}
    for (cut, dtype), group in pieces.items():
        if dtype.is_complex:
            group[:] = map(torch.view_as_real, group)
        wide = torch.promote_types(group[0].dtype, torch.float32)
        norm: Tensor = torch.linalg.vector_norm(torch.stack(norms(group, wide))).float()
        by_cut[cut] = torch.hypot(by_cut[cut], norm) if cut in by_cut else norm
    is_whole = stages == 1 and all(cut == 1 for cut in by_cut)
    if is_whole:
        norm = by_cut[1] if by_cut else torch.zeros((), device=_device(parameters))
        square = norm[None][:0]
    else:
        ranks = dist.get_world_size() // stages
        squares = (norm**2 * (cut / ranks) for cut, norm in by_cut.items())
        square = sum(squares, torch.zeros((), device=_device(parameters))).view(1)
    sums = _summed(square, beside, news)
    if not is_whole:
        norm = sums[0].sqrt()
    if scale != 1.0:
        norm = norm / scale
    if bound is not None or scale != 1.0:
        factor = torch.clamp(bound / (norm + 1e-6), max=1.0) if bound is not None else torch.ones_like(norm)
        for group in pieces.values():
            torch._foreach_mul_(group, factor / scale if scale != 1.0 else factor)
    return norm


def _summed(square: Tensor, beside: Tensor | None, news: News | None) -> Tensor:
    """`square`, [1] or [0], over all ranks, which `beside` and `news` are given theirs of too."""
    numbers = [square, *([] if beside is None else [beside[None]]), *([] if news is None else [news.numbers])]
    # offloaded gradients are on the CPU, the others are not
    sums = torch.cat([each.to(square.device) for each in numbers]) if len(numbers) > 1 else square
    if len(sums) and dist.get_world_size() > 1:
        dist.all_reduce(sums)
    if beside is not None:
        beside.copy_(sums[len(square)])
    if news is not None:
        news.settle(sums[len(sums) - len(news.numbers) :])
    return sums


def _device(parameters: Sequence[nn.Parameter]) -> torch.device:
    return parameters[0].device if parameters else torch.device("cpu")
