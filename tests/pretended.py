"""A device that is not there: tensors that say they lie on it, and an error wherever they meet tensors of the CPU as no GPU would let them."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves, tree_map

MOVES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
JOINS = (torch.ops.aten.stack.default, torch.ops.aten.cat.default)
"""Which refuse numbers of another device also where these have no dims."""


def device() -> torch.device:
    """For this process, and as long as it lives: call it in a forked one. The hooks are torch's own for backends in Python (2.13)."""
    if torch._C._get_privateuse1_backend_name() != "pretended":
        backend_registration._setup_privateuseone_for_python_backend("pretended")
    return torch.device("pretended", 0)


class Pretended(Tensor):
    """`held`, a tensor of the CPU, as if it lay on the device."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> "Pretended":
        made: Pretended = torch.Tensor._make_wrapper_subclass(cls, held.shape, strides=held.stride(), dtype=held.dtype, device=device())  # type: ignore[attr-defined]
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        others = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and not isinstance(x, cls)]
        if func not in MOVES and any(func in JOINS or x.ndim for x in others):
            raise RuntimeError(f"{func}: expected all tensors to be on the same device")
        to = kwargs.pop("device", None)
        inside = tree_map(lambda x: x.held if isinstance(x, cls) else x, (list(args), kwargs))
        out = func(*inside[0], **inside[1])
        if func._schema.is_mutable:
            return args[0]
        return out if to is not None and to.type == "cpu" else tree_map(lambda x: cls(x) if isinstance(x, Tensor) else x, out)
