"""L2 norms of many tensors, exact to the last digits of fp32 whatever their size."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dtrain.errors import WordsError

PIECE = 1 << 16
"""Numbers of which torch adds up the squares at once. Its sum over a tensor on the CPU runs in fp32: of 1e6 numbers of
one size the norm is 1e-5 low, of 8e7 1e-2, so a clip would depend on how the mesh splits them.
"""


def norms(tensors: Sequence[Tensor], wide: torch.dtype) -> tuple[Tensor, ...]:
    """The norm of each tensor, 0-dim and in `wide`; on the CPU one for each piece of a large tensor. Raises WordsError
    for a sparse tensor.
    """
    try:
        return torch._foreach_norm([*_pieces(tensors)], 2, wide)
    except (NotImplementedError, RuntimeError):
        if all(tensor.layout == torch.strided for tensor in tensors):
            raise
        shape = next(list(tensor.shape) for tensor in tensors if tensor.layout != torch.strided)
        raise WordsError(
            f"model: the gradient of a parameter {shape} is sparse, and gradients are added up and clipped dense. "
            "Look it up without sparse=True."
        ) from None


def norm(tensor: Tensor, wide: torch.dtype) -> Tensor:
    """The norm of one tensor, 0-dim and in `wide`."""
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms([tensor], wide)))
    return total


def _pieces(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    for tensor in tensors:
        if tensor.numel() > PIECE and tensor.device.type == "cpu":
            yield from tensor.reshape(-1).split(PIECE)
        else:
            yield tensor
