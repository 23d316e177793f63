"""The ranks of tp, each of which has all of a tensor or a part of it. All of them call every method."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.mesh import Mesh
from dtrain.parallel.checks import distance


class Ranks:
    """The ranks of tp. `sequence`: what lies between split modules is a part of the sequence."""

    def __init__(self, mesh: Mesh, *, sequence: bool) -> None:
        self._group, self._rank, self._device = mesh.axis("tp").get_group(), mesh.coordinate["tp"], mesh.device
        self._sequence = sequence

    def mine(self, whole: Tensor, part: Tensor) -> Tensor | None:
        """The counterpart of `part` in the whole tensor: all of it, or this rank's part of the sequence [B, T, ...].
        None: it is another part. Without communication.
        """
        if whole.shape == part.shape:
            return whole
        size = self._group.size()
        if not self._sequence or whole.ndim < 2 or whole.ndim != part.ndim or whole.shape[1] % size:
            return None
        mine = whole.chunk(size, 1)[self._rank]
        return mine if mine.shape == part.shape else None

    def whole(self, tensors: Sequence[Tensor], rounding: float) -> list[Tensor] | None:
        """The whole of each tensor; None if one is a part of the heads or of the width."""
        shapes = [float(size) for x in tensors for size in (x.ndim, *x.shape)]
        counted, sizes = (torch.tensor(each, device=self._device) for each in ([float(len(shapes))], shapes))
        if self._spread(counted) or self._spread(sizes):
            return None
        whole = list[Tensor]()
        for x in tensors:
            if not x.numel() or self._spread(x) <= rounding:
                whole.append(x)
            elif self._sequence and x.is_floating_point() and x.ndim >= 2:
                pieces = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self._group.size())]
                dist.all_gather(pieces, x.contiguous(), group=self._group)
                whole.append(torch.cat(pieces, 1))
            else:
                return None
        return whole

    def worst(self, values: Sequence[float]) -> list[float]:
        """The largest over the ranks, which thus go on alike."""
        worst = torch.tensor(values, dtype=torch.float64, device=self._device).nan_to_num(float("inf"))
        if len(values):
            dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=self._group)
        numbers: list[float] = worst.tolist()
        return numbers

    def adds_up(self, whole: Tensor, part: Tensor, tolerance: float) -> bool:
        """Whether the sum or the mean over the ranks is the whole, so that an outer module may add."""
        total = part.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self._group)
        off = min(distance(whole, way, whole) for way in (total, total / self._group.size()))
        return self.worst([off])[0] <= tolerance

    def _spread(self, x: Tensor) -> float:
        """How much a tensor differs between the ranks, relative to its largest number."""
        if not x.numel():
            return 0.0
        x = x.detach().to(self._device, torch.float64).nan_to_num(0.0, 1e30, -1e30).flatten()
        both = torch.cat([x, -x])
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=self._group)
        high, low = both.chunk(2)
        return float((high + low).max() / both.abs().max().clamp(min=1e-30))
