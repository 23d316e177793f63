"""State of a model that training changes, and that no checkpoint has, or that ranks average. It may begin to change
later: `again` begins to watch once more.
"""

import torch
from torch import Tensor, nn

from dtrain.mesh.sharding import local
from dtrain.model import Balanced


class Unsaved:
    """Finds state that is neither shared nor saved: buffers with persistent=False that training keeps changing, and
    plain numbers that count. A cache is filled once.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = [(path, module) for path, module in model.named_modules() if not isinstance(module, Balanced)]
        self._owners = {
            f"{path}.{name}".removeprefix("."): (module, name)
            for path, module in self._modules
            for name in module._non_persistent_buffers_set
        }
        self.again()

    def again(self) -> None:
        self._counts: list[dict[str, float]] = []
        self._last, self._is_done = self._versions(), not self._owners
        self._values: dict[str, Tensor] | None = None

    def changed(self) -> list[str]:
        """Call after every step: after the second one, returns the names of buffers that both have changed."""
        if self._is_done:
            return []
        now = self._versions()
        last = {name: (id(buffer), version) for name, (buffer, version) in self._last.items()}
        moved = [name for name, (buffer, version) in now.items() if last.get(name) != (id(buffer), version)]
        if self._values is None:
            self._last, self._values = now, {name: _read(now[name][0]).clone() for name in moved}
            return []
        self._is_done, values, self._values = True, self._values, None
        return sorted(name for name in moved if name in values and _is_other(values[name], _read(now[name][0])))

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


class Moved:
    """Finds saved floating buffers that a step changes, but for the statistics of BatchNorm: ranks average
    them, so what they hold of a batch depends on the mesh, as a queue of samples, a codebook or a range of activations
    does.
    """

    def __init__(self, model: nn.Module) -> None:
        self._owners = {
            f"{path}.{name}".removeprefix("."): (module, name)
            for path, module in model.named_modules()
            if not isinstance(module, Balanced | nn.modules.batchnorm._BatchNorm)
            for name, buffer in module._buffers.items()
            if buffer is not None and buffer.is_floating_point() and name not in module._non_persistent_buffers_set
        }
        self.again()

    def again(self) -> None:
        self._before = self._state()

    def names(self) -> list[str]:
        """Call after every step: after the first one, returns the names of buffers that it has changed, each once."""
        if not self._before:
            return []
        before, now, self._before = self._before, self._state(), {}
        names = [name for name, state in before.items() if name in now and now[name] != state]
        for name in names:
            del self._owners[name]
        return names

    def _state(self) -> dict[str, tuple[int, int, str]]:
        """(identity, writes, sum) of each buffer; some kernels write without counting."""
        found = ((name, module._buffers.get(key)) for name, (module, key) in self._owners.items())
        buffers = {name: buffer for name, buffer in found if buffer is not None}
        sums = [_read(buffer).float().sum().item() for buffer in buffers.values()]
        return {
            name: (id(buffer), buffer._version, str(total))
            for (name, buffer), total in zip(buffers.items(), sums, strict=True)
        }


def _is_other(before: Tensor, after: Tensor) -> bool:
    """Whether the values changed. A cache that grew has another shape and does not count."""
    return before.shape == after.shape and not torch.equal(before, after)


def _read(buffer: Tensor) -> Tensor:
    return local(buffer.detach())
