"""Handles weights that are used outside of the forward of their unit: `F.linear(x, self.blocks[0].weight)` in a parent,
a penalty on all parameters, an embedding in the first block that its parent calls. FSDP2 has not gathered them there,
so torch fails on a mixture of types, or computes with shards.

The first pass of each kind is watched, function by function. A unit whose weights are used this way is from then on
gathered with the root, and reduced with it at the end of the backward. That costs the memory of the unit during the
whole step; passes that are not watched cost nothing.

Uses private attributes of FSDP2: `_get_fsdp_state`, `_fsdp_param_groups`, and of a parameter `unsharded_param` and
`sharded_state`.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from dtrain.errors import WordsError

FACTS = {
    "size", "dim", "ndimension", "numel", "nelement", "stride", "is_floating_point", "is_complex", "is_contiguous",
    "element_size", "__len__", "__hash__",
}  # fmt: skip
"""Functions that do not read the values of a tensor."""


BACKWARD = (
    "strategy: a gradient is computed before the backward of the loss (torch.autograd.grad, create_graph=True), but "
    "the backward frees sharded weights. Type strategy=ddp."
)


def groups_of(module: FSDPModule) -> list[Any]:
    """FSDP2's parameter groups of a module."""
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group is not None]


class Reach(TorchFunctionMode):
    """Between `begin` and `end`, sharded weights are gathered before torch functions use them. Compiled code is not
    watched.
    """

    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        self.units: list[str] = []
        """Names of the units that are therefore gathered with the root."""
        self._root = root
        self._owners: dict[int, tuple[str, Any, Any, Any]] = {}
        self._compiled: dict[nn.Module, Any] = {}

    def begin(self) -> None:
        self.end()
        for name, module in self._root.named_modules():
            if name and isinstance(module, FSDPModule):
                for group in groups_of(module):
                    owner = name, module._get_fsdp_state(), group
                    self._owners |= {id(each.sharded_param): (*owner, each) for each in group.fsdp_params}
        if self._owners:
            for module in self._root.modules():
                if module._compiled_call_impl is not None:
                    self._compiled[module] = module._compiled_call_impl
                    module._compiled_call_impl = self._aside(module._compiled_call_impl)
            self.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """Stop watching; does nothing before `begin`."""
        if self._owners:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        for module, call in self._compiled.items():
            module._compiled_call_impl = call
        self._owners, self._compiled = {}, {}

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in FACTS or (name == "__get__" and not isinstance(func(*args), Tensor)):
            return func(*args, **kwargs or {})
        args, kwargs = tree_map_only(DTensor, self._gathered, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _gathered(self, weight: DTensor) -> Tensor:
        name, state, group, each = self._owners.get(id(weight), ("", None, None, None))
        if each is None:
            return weight
        if name not in self.units:
            self.units.append(name)
            root: Any = self._root._get_fsdp_state()  # type: ignore[operator]
            if not hasattr(state, "_fsdp_param_groups"):
                raise WordsError(
                    f"strategy: weights of {name} are used outside of its forward, but are sharded there. Type "
                    "strategy=ddp."
                )
            state._fsdp_param_groups.remove(group)
            root._fsdp_param_groups.append(group)
            group.post_forward_mesh_info = None
            group.pre_forward(self._root, (), {})
        if each.sharded_state.name != "UNSHARDED":
            raise WordsError(BACKWARD)
        gathered: Tensor = each.unsharded_param
        return gathered

    def _aside(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A compiled call without this mode, with which it would be compiled again."""

        def proceed(*arguments: Any, **keywords: Any) -> Any:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            try:
                return call(*arguments, **keywords)
            finally:
                self.__enter__()  # type: ignore[no-untyped-call]

        return proceed
