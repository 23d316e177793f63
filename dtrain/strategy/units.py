"""Keeps FSDP2's units, the modules it gathers and reduces together, the same on ranks whose samples take different
paths through the model.

FSDP2 reduces those parameters of a unit that have a gradient on this rank, in the order of the rank's own forward and
backward. Ranks that reach different parameters would add up unrelated gradients, or deadlock. Therefore
- every trainable parameter of a unit takes part, with zeros if this rank has no gradient;
- the order in which units are called and go backward is compared: in the first pass with other ranks, later with the
  first pass. A rank that deviates stops before the collective that would be wrong.

Uses private attributes of FSDP2: `_get_fsdp_state`, `_fsdp_param_group(s)` and of a group `pre_forward`,
`pre_backward`, `post_backward`, `_register_post_backward_hook`; a canary test fails when they move.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from dtrain.errors import WordsError
from dtrain.model import own_class
from dtrain.strategy.reach import BACKWARD, Reach, groups_of

METHODS = ("pre_forward", "calls"), ("pre_backward", "goes backward through"), ("post_backward", "ends the backward of")
"""Methods of a parameter group around FSDP2's collectives, and the verb for what the rank does."""
KINDS, END = len(METHODS), -1


def units(root: nn.Module) -> list[tuple[str, Any]]:
    """(name, FSDP2's parameter group) of every unit in the tree of `root`."""
    named = []
    for name, module in root.named_modules():
        if isinstance(module, FSDPModule):
            named += [(name or own_class(module).__name__, group) for group in groups_of(module)]
    return named


def take_part(root: nn.Module, reached: dict[nn.Parameter, bool]) -> None:
    """Reduce all parameters of each unit from now on; `reached` records which of them had a gradient on this rank."""
    running = Running()
    parts = [Part(group, reached, running) for _, group in units(root)]

    def begin(root: nn.Module, arguments: Any) -> None:
        running.is_forward = not _backward_runs()
        for part in parts:
            part.begin()

    def end(root: nn.Module, arguments: Any, output: Any) -> None:
        running.is_forward = False

    root.register_forward_pre_hook(begin, prepend=True)
    root.register_forward_hook(end)


def gather_first(root: nn.Module) -> None:
    """Gather all units before each forward of `root`, in order, if they stay gathered anyway: ranks may then call
    different units.
    """

    def gather(module: nn.Module, arguments: Any) -> None:
        for unit in (each for each in root.modules() if isinstance(each, FSDPModule)):
            unit.unshard()

    root.register_forward_pre_hook(gather)


@dataclass
class Running:
    """Whether a forward of the root runs."""

    is_forward: bool = False


class Part:
    """A unit whose parameters are all reduced together, once per backward, however often the forward called the unit.

    Its gradients are complete after the backward of its last open call. If some calls have no backward, torch calls
    `post_backward` of the group at the end of the backward.
    """

    def __init__(self, group: Any, reached: dict[nn.Parameter, bool], running: Running) -> None:
        self._group, self._reached, self._running = group, reached, running
        self._pre_backward, group.pre_backward = group.pre_backward, self._begin_backward
        self._register, self._proceed = type(group)._register_post_backward_hook, group.post_backward
        group._register_post_backward_hook, group.post_backward = self._called, self._post_backward
        self._open, self._early = 0, False

    def begin(self) -> None:
        """Called before a forward of the root. Calls that are still open had no backward."""
        if not _backward_runs():
            self._open = 0

    def _begin_backward(self, *arguments: Any) -> None:
        """Raises WordsError in a backward whose graph, or whose weights, the loss will need once more."""
        if self._running.is_forward or torch.is_grad_enabled():
            raise WordsError(BACKWARD)
        self._pre_backward(*arguments)

    def _called(self, arguments: Any, keywords: Any) -> Any:
        if torch.is_grad_enabled() and not _backward_runs():
            self._open += 1
        return self._register(self, arguments, keywords)  # torch calls `post_backward` of its first argument

    def post_backward(self) -> None:
        """Called at the end of the backward of one call."""
        self._open = max(0, self._open - 1)
        self._early = self._open > 0
        self._group.post_backward()
        self._early = False

    def _post_backward(self, *arguments: Any) -> None:
        group = self._group
        trained = [each for each in group.fsdp_params if each.sharded_param.requires_grad]
        if not all(hasattr(each, "_unsharded_param") for each in trained):  # no rank has called it yet
            if group.reduce_grads:
                self._reached.update((each.sharded_param, False) for each in trained)
            return
        reducing, group.reduce_grads = group.reduce_grads, group.reduce_grads and not self._early
        if group.reduce_grads:
            self._fill(trained)
        self._proceed(*arguments)
        group.reduce_grads = reducing
        if self._early:
            # so that torch calls this again at the end, if no other call does
            group._training_state = type(group._training_state).IDLE

    def _fill(self, trained: list[Any]) -> None:
        """Record which parameters have a gradient on this rank, and fill in zeros for the others."""
        for each in trained:
            each.accumulate_unsharded_grad_if_needed()
            here = each.unsharded_accumulated_grad is not None or each._unsharded_param.grad is not None
            self._reached[each.sharded_param] = here or self._reached.get(each.sharded_param, False)
            if not here:
                each._unsharded_param.grad = torch.zeros_like(each._unsharded_param)
        # torch refuses a mixture of dtypes, so all get the dtype of the accumulated gradients
        if any(each.unsharded_accumulated_grad is not None for each in trained):
            for each in trained:
                each.to_accumulated_grad_if_needed()


def _backward_runs() -> bool:
    return torch._C._current_graph_task_id() != -1


UNITS = (
    "but all ranks must call the same elements of ModuleLists and Sequentials in the same order, because this strategy "
    "gathers them when they are called. Type strategy=ddp for a model that chooses among them, or freezes some for a "
    "time."
)
EXPERTS = (
    "but all ranks must call the experts that mesh.ep splits in the same order, because they exchange rows. Leave out "
    "mesh.ep for a model that skips some."
)


class Order:
    """Checks that every rank of `group` calls the units under `root`, and goes backward through them, in the same order
    in every pass. `rule` is the message for the user.
    """

    def __init__(self, root: nn.Module, group: dist.ProcessGroup, rule: str = UNITS) -> None:
        self._group, self._reach, self._rule = group, Reach(root), rule
        self._key = True, True, 0
        self._orders: dict[tuple[bool, bool, int], list[int]] = {}
        self._expected: list[int] | None = None
        self._seen: list[int] = []
        self._open = False
        self._names = list[str]()
        for number, (name, unit) in enumerate(units(root)):
            for kind, (method, verb) in enumerate(METHODS):
                self._names.append(f"{verb} {name}")
                setattr(unit, method, partial(self._watched, unit, KINDS * number + kind, getattr(unit, method)))
        root.register_forward_pre_hook(self._begin, prepend=True)
        root.register_forward_pre_hook(self._watch)
        root.register_forward_hook(lambda *_: self._reach.end(), prepend=True, always_call=True)
        root.register_forward_hook(lambda *_: None if torch.is_grad_enabled() else self.end())
        self._names.append("ends its step")

    def followed(self, name: str, exchange: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Wrap `exchange`, so that its forward and backward are part of the order as `name`. Compiled code is not
        watched.
        """
        forth, back = len(self._names) - 1, len(self._names)
        self._names[-1:-1] = [f"calls {name}", f"goes backward through {name}"]

        def watched(*arguments: Any) -> torch.Tensor:
            if torch.compiler.is_compiling() or not self._open:
                return exchange(*arguments)
            self._pass(forth)
            output = exchange(*arguments)
            if output.requires_grad:
                output.register_hook(lambda gradient: self._pass(back))
            return output

        return watched

    def end(self) -> None:
        """Call after a backward, or after a forward without one."""
        if self._open:
            self._pass(END)
            self._open = False
            if self._key[2] == len(self._reach.units):  # else units were moved to the root, which changes the order
                self._orders[self._key] = self._seen

    def _begin(self, root: nn.Module, arguments: Any) -> None:
        if _backward_runs():  # a recomputation
            return
        self.end()
        self._key = root.training, torch.is_grad_enabled(), len(self._reach.units)
        self._expected, self._seen, self._open = self._orders.get(self._key), [], True

    def _watch(self, root: nn.Module, arguments: Any) -> None:
        if self._open and self._expected is None:
            self._reach.begin()

    def _watched(self, unit: Any, event: int, proceed: Callable[..., Any], *arguments: Any) -> Any:
        # the unit may have several outputs, each of which announces its backward
        if self._open and (event % KINDS != 1 or unit._training_state.name != "PRE_BACKWARD"):
            self._pass(event)
        return proceed(*arguments)

    def _pass(self, event: int) -> None:
        """Record an event. Raises WordsError if out of order: in the first pass on all ranks, then on this one."""
        number = len(self._seen)
        self._seen.append(event)
        if self._expected is None:
            ranks = torch.zeros(self._group.size(), dtype=torch.int64)
            ranks[self._group.rank()] = event
            dist.all_reduce(ranks, group=self._group)
            other = next((rank for rank, theirs in enumerate(ranks.tolist()) if theirs != ranks[0]), None)
            if other is not None:
                here, there = dist.get_global_rank(self._group, 0), dist.get_global_rank(self._group, other)
                one, two = self._names[int(ranks[0])], self._names[int(ranks[other])]
                raise WordsError(f"strategy: rank {here} {one} where rank {there} {two}, {self._rule}")
        elif self._expected[number] != event:
            first, before = "step" if self._key[1] else "evaluation", self._names[self._expected[number]]
            difference = f"rank {dist.get_rank()} {self._names[event]} where the first {first} {before}"
            raise WordsError(f"strategy: {difference}, {self._rule}")
