"""Weights that the forward itself changes: clamped ones (WGAN, arXiv 1701.07875), a teacher that follows its student
(BYOL, arXiv 2006.07733), rows that nn.Embedding(max_norm=...) scales.

Sharded weights are gathered for a forward, in memory that is freed after it with what was written there. Copies stay
alike only if every rank writes the same. So copies are watched in steps 1, 2, 4, 8 and so on, by a sum over the bits of
each weight, and shards in such forwards with the next of each, since one of a step's microbatches may find what another
has written (on a GPU in the first and from 1024 on: to compare them the host waits); the others cost nothing.

Uses private attributes of FSDP2: `pre_forward`, `post_forward` and `fsdp_params` of a group, and of a parameter
`_param_fqn`, `_module_info`, `sharded_param` and `_unsharded_param`.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dtrain.errors import WordsError
from dtrain.mesh import Mesh
from dtrain.mesh.sharding import local
from dtrain.strategy.trained import Trained, lost_write

RARE = 1024
"""The forward from which the host may wait for a GPU to compare weights again."""
PLAIN = (nn.Parameter, DTensor)
"""Types of parameters whose bits can be read; others may lack operators."""


def is_watched(number: int, device: torch.device) -> bool:
    """Whether weights are compared in this forward or step, counted from 1."""
    return number == 1 or (is_power(number) and (device.type == "cpu" or number >= RARE))


def is_power(number: int) -> bool:
    """Whether it is 1, 2, 4, 8 and so on."""
    return number > 0 and not number & (number - 1)


def refuse_max_norm(model: nn.Module, reason: str) -> None:
    """Raises WordsError for an embedding that scales the rows it looks up, in place."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise WordsError(
                f"strategy: {name or 'the model'}.weight has max_norm, so a forward scales the rows that it looks up, "
                f"in place; {reason}. Type devices=1 strategy=single, or scale what the embedding returns."
            )


class ShardWrites:
    """In the watched forwards of `root` with gradients, raises WordsError for a sharded parameter that the forward
    writes or replaces, or leaves with another `requires_grad`. `groups`: FSDP2's parameter groups under `root`.
    """

    def __init__(self, root: nn.Module, groups: Sequence[Any]) -> None:
        self._root, self._groups = root, groups
        self._before: dict[Any, list[Tensor]] = {}
        self._labelled = set[Any]()
        """The groups whose gathered parameters have the attributes of the sharded ones: the forward may read them."""
        self._trained = Trained(root)
        self._is_watching, self._forwards = False, 0
        devices = {each.sharded_param.device for group in groups for each in group.fsdp_params}
        self._device = next((each for each in devices if each.type != "cpu"), torch.device("cpu"))
        root.register_forward_pre_hook(self._start, prepend=True)
        self._attach()

    def _attach(self) -> None:
        self._methods = [(group, group.pre_forward, group.post_forward) for group in self._groups]
        for group, begin, end in self._methods:
            group.pre_forward, group.post_forward = partial(self._begin, group, begin), partial(self._end, group, end)
        self._hook = self._root.register_forward_hook(self._finish)

    def _start(self, root: nn.Module, arguments: Any) -> None:
        if not torch.is_grad_enabled():
            return
        self._forwards += 1
        after = self._forwards > 2 and is_watched(self._forwards - 1, self._device)
        if not after and not is_watched(self._forwards, self._device):
            return
        if self._forwards > 1:
            self._attach()
        self._is_watching = True  # whatever gradients are in a part of the forward

    def _begin(self, group: Any, proceed: Callable[..., Any], *arguments: Any) -> Any:
        result = proceed(*arguments)
        if group not in self._labelled:
            self._labelled.add(group)
            for each in group.fsdp_params:
                for name, value in vars(each.sharded_param).items():
                    vars(each._unsharded_param).setdefault(name, value)
        if self._is_watching:
            self._before[group] = _sums(each._unsharded_param for each in group.fsdp_params)
        return result

    def _end(self, group: Any, proceed: Callable[..., Any], *arguments: Any) -> Any:
        if group not in self._before:
            return proceed(*arguments)
        weights = [each._unsharded_param for each in group.fsdp_params]
        written = _differ(self._before.pop(group), _sums(weights))
        for each, weight, is_written in zip(group.fsdp_params, weights, written, strict=True):
            if is_written or getattr(each._module_info.module, each._module_info.param_name) is not weight:
                raise lost_write(each._param_fqn)
        return proceed(*arguments)

    def _finish(self, root: nn.Module, arguments: Any, output: Any) -> None:
        if not self._is_watching:
            return
        self._is_watching = False
        self._hook.remove()
        for group, begin, end in self._methods:
            group.pre_forward, group.post_forward = begin, end
        self._trained.check()


class CopyWrites:
    """Create it before the forwards of a step of copies, and call `check` after their backwards, on all ranks. `roots`:
    the model, or its stages, of which the ranks of the batch have copies.
    """

    def __init__(self, roots: Sequence[nn.Module], mesh: Mesh) -> None:
        self._roots, self._mesh = roots, mesh
        self._before = self._parameters()
        self._plain = {name: each for name, each in self._before.items() if type(each) in PLAIN and not each.is_meta}
        self._sums = _sums(self._plain.values()) if mesh.batch_ranks > 1 else []

    def check(self) -> None:
        """Raises WordsError for a parameter that the forward replaced, or wrote with other values on another rank."""
        for name, parameter in self._parameters().items():
            if self._before.get(name, parameter) is not parameter:
                raise WordsError(
                    f"model: the forward puts another parameter in the place of {name}, which the optimizer does not "
                    "know. Write its values instead: with torch.no_grad(): weight.copy_(...)."
                )
        if not self._sums:
            return
        now = _sums(self._plain.values())
        values = torch.stack(now) * torch.tensor(_differ(self._sums, now), device=now[0].device)
        extremes = torch.stack((values, -values))
        group = None if self._mesh.batch_ranks == self._mesh.world else self._mesh.group("batch")
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
        spread = (extremes[0] + extremes[1]).tolist()
        differing = next((name for name, apart in zip(self._plain, spread, strict=True) if apart), None)
        if differing is not None:
            raise WordsError(
                f"model: the forward writes {differing} with other values on every rank, so the copies drift apart. "
                "Write what follows from the weights alone, or keep it in a buffer, whose values dtrain averages."
            )

    def _parameters(self) -> dict[str, nn.Parameter]:
        return {name: parameter for root in self._roots for name, parameter in root.named_parameters()}


def _sums(weights: Iterable[Tensor]) -> list[Tensor]:
    """Of each weight, a number that changes with its bits."""
    return [_sum(local(weight.detach()).contiguous().view(-1).view(torch.uint8)) for weight in weights]


def _sum(piece: Tensor) -> Tensor:
    """Of the bytes, eight at a time and without a copy."""
    piece = piece.clone() if piece.storage_offset() % 8 else piece
    whole = len(piece) // 8 * 8
    return (piece[:whole].view(torch.int64).sum() + piece[whole:].sum()) % 2**62


def _differ(before: Sequence[Tensor], now: Sequence[Tensor]) -> list[bool]:
    different: list[bool] = (torch.stack(list(before)) != torch.stack(list(now))).tolist() if before else []
    return different
