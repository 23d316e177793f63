"""Agreement between the ranks of a batch after every backward, so that they go on as one process would.

Parameters. A strategy averages a zero for a parameter that this rank's samples did not reach. Where no rank reached it,
its gradient is None again: nothing decays it and it gets no moments.

Buffers. Persistent buffers that a training forward changed (BatchNorm's statistics, a codebook) are made alike over the
ranks of the batch after every step: floating ones are averaged, others are those of the first rank. So what is saved,
evaluated and resumed is what every rank has. Buffers of modules that balance themselves (`dtrain.model.Balanced`), and
buffers that are not saved, are left alone; of the latter `Unsaved` knows those that training changes.

Each step costs one sum of one number over the hosts; more crosses ranks only when a rank's own facts changed since the
last agreement.
"""

from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtrain.mesh import Mesh
from dtrain.mesh.sharding import local, split_like
from dtrain.model import Balanced, saved_buffers


class Agreement:
    """All ranks call `begin` before the forward of a step and `settle` after its backward."""

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        self._mesh = mesh
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._index = {id(parameter): number for number, parameter in enumerate(self._parameters)}
        self._owners = [(module, name) for module, name, _ in saved_buffers(model)] if mesh.world > 1 else []
        self._before: list[tuple[Tensor, int]] = []
        self._first: list[Tensor] = []
        self._begun = False
        self._mine: frozenset[int] = frozenset()
        self._unreached: frozenset[int] = frozenset()
        self._moving: frozenset[int] = frozenset()

    def begin(self) -> None:
        if not self._begun:
            self._begun, self._first = True, [_read(buffer).clone() for buffer in self._buffers()]
        if self._owners:
            self._before = [(buffer, buffer._version) for buffer in self._buffers()]

    @torch.no_grad()
    def settle(self, missing: Sequence[Collection[nn.Parameter]]) -> None:
        """`missing`: the parameters without a gradient in each of the passes whose gradients crossed ranks."""
        if self._mesh.world == 1:
            return
        mine = frozenset[int]()
        if missing:
            mine = frozenset.intersection(*(frozenset(self._index[id(p)] for p in some) for some in missing))
        changed = self._changed()
        news = torch.tensor(float(mine != self._mine or not changed <= self._moving))
        dist.all_reduce(news)
        if news.item():
            self._exchange(mine, changed)
        for number in self._unreached:
            self._parameters[number].grad = None
        if self._moving and self._mesh.batch_ranks > 1:
            self._make_alike([_read(buffer) for number, buffer in enumerate(self._buffers()) if number in self._moving])

    def _buffers(self) -> list[Tensor]:
        return [module._buffers[name] for module, name in self._owners]  # type: ignore[misc]

    def _changed(self) -> frozenset[int]:
        """Indices of the buffers that this step's forward changed.

        Some kernels write without counting a version, BatchNorm's on the CPU among them: so the first step compares
        values, and later a buffer counts as changed when any of its module did.
        """
        now = self._buffers()
        modules = [id(module) for module, _ in self._owners]
        pairs = zip(modules, now, self._before, strict=True)
        touched = {module for module, each, (was, version) in pairs if each is not was or each._version != version}
        if self._first:
            values = zip(modules, now, self._first, strict=True)
            touched |= {module for module, each, was in values if not torch.equal(_read(each), was)}
            self._first = []
        return frozenset(number for number, module in enumerate(modules) if module in touched)

    def _exchange(self, mine: frozenset[int], changed: frozenset[int]) -> None:
        flags = torch.zeros(len(self._parameters) + len(self._owners), dtype=torch.int32)
        flags[[*mine, *(len(self._parameters) + number for number in changed)]] = 1
        counts = self._mesh.sum(flags).tolist()
        ranks = self._mesh.batch_ranks
        self._mine = mine
        self._unreached = frozenset(number for number in range(len(self._parameters)) if counts[number] == ranks)
        self._moving |= {number for number in range(len(self._owners)) if counts[len(self._parameters) + number]}

    def _make_alike(self, buffers: list[Tensor]) -> None:
        group = self._mesh.group("batch")
        for dtype in sorted({buffer.dtype for buffer in buffers}, key=str):
            same = [buffer for buffer in buffers if buffer.dtype == dtype]
            if dtype.is_floating_point or dtype.is_complex:
                flat = torch.cat([buffer.flatten() for buffer in same]).to(torch.promote_types(dtype, torch.float32))
                dist.all_reduce(flat, group=group)
                flat = flat.div_(self._mesh.batch_ranks).to(dtype)
            else:
                flat = torch.cat([buffer.flatten() for buffer in same])
                dist.broadcast(flat, group=group, group_src=0)
            torch._foreach_copy_(same, split_like(flat, same))


class Unsaved:
    """Finds state that is neither shared nor saved: buffers with persistent=False that training keeps changing, and
    plain numbers that count. A cache is filled once.
    """

    def __init__(self, model: nn.Module) -> None:
        self._counts: list[dict[str, float]] = []
        self._modules = [(path, module) for path, module in model.named_modules() if not isinstance(module, Balanced)]
        self._owners = {
            f"{path}.{name}".removeprefix("."): (module, name)
            for path, module in self._modules
            for name in module._non_persistent_buffers_set
        }
        self._last = self._versions()
        self._values: dict[str, Tensor] | None = None

    def changed(self) -> list[str]:
        """Call after every step: after the second one, returns the names of buffers that both have changed."""
        if not self._owners:
            return []
        now = self._versions()
        last = {name: (id(buffer), version) for name, (buffer, version) in self._last.items()}
        moved = [name for name, (buffer, version) in now.items() if last.get(name) != (id(buffer), version)]
        if self._values is None:
            self._last, self._values = now, {name: _read(now[name][0]).clone() for name in moved}
            return []
        self._owners, values, self._values = {}, self._values, {}
        return sorted(name for name in moved if name in values and _differ(values[name], _read(now[name][0])))

    def counted(self) -> list[str]:
        """Call after every step: after the third one, returns the names of numeric attributes that both steps since the
        first have changed.
        """
        if len(self._counts) == 3:
            return []
        counts: dict[str, float] = {}
        for path, module in self._modules:
            numbers = {name: value for name, value in vars(module).items() if type(value) in (int, float)}
            counts |= {f"{path}.{name}".removeprefix("."): value for name, value in numbers.items()}
        self._counts.append(counts)
        if len(self._counts) < 3:
            return []
        first, second, _ = self._counts
        return sorted(
            name for name, value in counts.items() if first.get(name, value) != second.get(name, value) != value
        )

    def _versions(self) -> dict[str, tuple[Tensor, int]]:
        buffers = ((name, module._buffers[key]) for name, (module, key) in self._owners.items())
        return {name: (buffer, buffer._version) for name, buffer in buffers if buffer is not None}


def _differ(here: Tensor, there: Tensor) -> bool:
    """Whether the shape is the same: a cache has grown with longer rows."""
    return here.shape == there.shape and not torch.equal(here, there)


def _read(buffer: Tensor) -> Tensor:
    return local(buffer.detach())
