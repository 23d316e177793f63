"""One gradient clip for every mesh: the norm of the whole model, and gradients scaled so that it stays below a
bound.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtrain.errors import WordsError
from dtrain.mesh.sharding import local, shards


def clip(
    parameters: Sequence[nn.Parameter],
    bound: float | None,
    *,
    scale: float = 1.0,
    stages: int = 1,
    beside: Tensor | None = None,
) -> Tensor:
    """Divide gradients by `scale`, bound their global L2 norm by `bound` (None: do not), return the norm before: 0-dim,
    fp32.

    Works on local pieces. The square of a piece that n ranks hold alike counts 1/n on each, so one all-reduce of one
    number over all ranks is the sum over any mesh, experts and the `stages` of a pipeline included; where every rank
    holds everything there is none. `beside`, 0-dim and fp32, is summed over all ranks in place; it travels in the same
    collective, or in one of its own where there is none.
    """
    pieces: dict[tuple[int, torch.dtype], list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            piece = local(parameter.grad)
            piece = torch.view_as_real(piece) if piece.is_complex() else piece
            wide = torch.promote_types(piece.dtype, torch.float32)
            pieces.setdefault((shards(parameter.grad), wide), []).append(piece)
    norms: dict[int, Tensor] = {}
    for (cut, wide), group in pieces.items():
        norm = torch.linalg.vector_norm(torch.stack(_norms(group, wide))).float()
        norms[cut] = torch.hypot(norms[cut], norm) if cut in norms else norm
    if stages == 1 and all(cut == 1 for cut in norms):
        norm = norms[1] if norms else torch.zeros((), device=_device(parameters))
        if beside is not None and dist.get_world_size() > 1:
            dist.all_reduce(beside)
    else:
        ranks = dist.get_world_size() // stages
        squares = (norm**2 * (cut / ranks) for cut, norm in norms.items())
        square = sum(squares, torch.zeros((), device=_device(parameters)))
        # offloaded gradients are on the CPU, `beside` is not
        both = square[None] if beside is None else torch.stack([square, beside.to(square.device)])
        dist.all_reduce(both)
        norm = both[0].sqrt()
        if beside is not None:
            beside.copy_(both[1])
    if scale != 1.0:
        norm = norm / scale
    if bound is not None or scale != 1.0:
        factor = torch.clamp(bound / (norm + 1e-6), max=1.0) if bound is not None else torch.ones_like(norm)
        for group in pieces.values():
            torch._foreach_mul_(group, factor / scale if scale != 1.0 else factor)
    return norm


def _norms(pieces: list[Tensor], wide: torch.dtype) -> tuple[Tensor, ...]:
    try:
        return torch._foreach_norm(pieces, 2, wide)
    except (NotImplementedError, RuntimeError):
        if all(piece.layout == torch.strided for piece in pieces):
            raise
        shape = next(list(piece.shape) for piece in pieces if piece.layout != torch.strided)
        raise WordsError(
            f"model: the gradient of a parameter {shape} is sparse, and gradients are added up and clipped dense. "
            "Look it up without sparse=True."
        ) from None


def _device(parameters: Sequence[nn.Parameter]) -> torch.device:
    return parameters[0].device if parameters else torch.device("cpu")
