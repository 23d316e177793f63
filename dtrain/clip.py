"""One gradient clip for every mesh: the norm of the whole model, and gradients scaled so that it stays below a bound."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


def clip(parameters: Sequence[nn.Parameter], bound: float | None, *, scale: float = 1.0) -> Tensor:
    """Divide gradients by `scale`, bound their global L2 norm by `bound` (None: do not), return the norm before: 0-dim, fp32.

    Works on local shards: one foreach norm, one all-reduce of a scalar per mesh of sharded gradients, one foreach product.
    """
    plain: list[Tensor] = []
    sharded: dict[DeviceMesh, list[Tensor]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            sharded.setdefault(gradient.device_mesh, []).append(gradient.to_local())
        elif gradient is not None:
            plain.append(gradient)
    norms = [torch.linalg.vector_norm(torch.stack(torch._foreach_norm(plain)))] if plain else []
    for mesh, group in sharded.items():
        square = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(group))).float() ** 2
        dist.all_reduce(square, group=mesh.get_group("dp_shard"))
        norms.append(square.sqrt())
    norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
    if scale != 1.0:
        norm = norm / scale
    if bound is not None or scale != 1.0:
        factor = torch.clamp(bound / (norm + 1e-6), max=1.0) if bound is not None else torch.ones_like(norm)
        for group in filter(None, (plain, *sharded.values())):
            torch._foreach_mul_(group, factor / scale if scale != 1.0 else factor)
    return norm
