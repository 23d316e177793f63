"""Agreement between the ranks of a batch after every backward, so that they go on as one process would.

Parameters. A strategy averages a zero for a parameter that this rank's samples did not reach. Where no rank reached it,
its gradient is None again: nothing decays it and it gets no moments.

Buffers. Persistent buffers that a training forward changed (BatchNorm's statistics, a codebook) are made alike over the
ranks of the batch after every step: floating ones are averaged, others are those of the first rank. So what is saved,
evaluated and resumed is what every rank has. A buffer begins to change when it counts a version, or when its checksum
is another one: kernels such as BatchNorm's, and writes through `.data`, count none. Checksums are taken after every
step while they are cheap, else every `EVERY` steps. Buffers of modules that balance themselves
(`dtrain.model.Balanced`), and buffers that are not saved, are left alone; of the latter `Unsaved` knows those that
training changes.

A rank's message has a number for each parameter, 1 if this rank reached it, and for each buffer, 1 if it began to
change; of their sums it counts only whether they are 0. They need no collective of their own: a strategy sums them with
the gradients, or else `clip` with the norm. On a GPU a rank that reached everything reads none of them, but for those
of buffers that never changed, every `EVERY` steps.
"""

from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtrain.errors import WordsError
from dtrain.mesh import Mesh
from dtrain.mesh.sharding import local, split_like
from dtrain.model import saved_buffers
from dtrain.strategy import Carried

EVERY = 8
"""Steps after which a GPU is asked whether a buffer of another rank began to change, if some buffers never have, and
after which the checksums of buffers that are large, or on a GPU, are taken.
"""
FEW = 1 << 18
"""Numbers in all buffers that never changed, of which a CPU takes the checksums after every step."""
SUMMED = {dtype: dtype for dtype in (torch.float32, torch.float64, torch.complex64, torch.complex128)}
SUMMED |= dict.fromkeys((torch.float16, torch.bfloat16), torch.float32)
"""Types of buffers whose checksum is their norm -> the type it is computed in. Of others it is the sum of bytes."""


class Agreement:
    """All ranks call `begin` before the forward of a step; after its backward `message`, and then `settle` with the sum
    of the messages over the ranks of the batch.
    """

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        self._mesh, self._every, self._steps = mesh, 1 if mesh.device.type == "cpu" else EVERY, 0
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._index = {id(parameter): number for number, parameter in enumerate(self._parameters)}
        self._owners = [(module, name) for module, name, _ in saved_buffers(model)] if mesh.world > 1 else []
        self._moving: list[int] = []
        """The buffers that some rank has changed so far."""
        self._still = list(range(len(self._owners)))
        self._before: list[tuple[Tensor, int]] = []
        self._checksums = torch.zeros(len(self._owners), dtype=torch.float64, device=mesh.device)
        numbers = sum(self._buffer(number).numel() for number in self._still)
        self._checked_every = 1 if mesh.device.type == "cpu" and numbers <= FEW else EVERY
        self._missed: list[int] = []
        self._usual = torch.zeros(len(self._parameters) + len(self._owners), device=mesh.device)
        self._usual[: len(self._parameters)] = 1
        """The message of a rank that reached everything and changed no still buffer."""
        self._changes: Tensor | None = None
        """The part about buffers of the sums that have not been read."""

    @property
    def size(self) -> int:
        """Numbers in a message."""
        return len(self._usual)

    def begin(self) -> None:
        buffers = [self._buffer(number) for number in self._still]
        self._before = [(buffer, buffer._version) for buffer in buffers]
        if buffers and not self._steps:
            self._checksums[self._still] = _checksums(buffers)

    def message(self, missing: Sequence[Collection[nn.Parameter]]) -> Tensor:
        """This rank's message, which the caller does not change. `missing`: the parameters without a gradient in each
        of the passes whose gradients crossed ranks.
        """
        self._missed = []
        if missing and all(missing):
            every_time = set.intersection(*({self._index[id(parameter)] for parameter in some} for some in missing))
            self._missed = sorted(every_time)
        others = self._others() if self._still and self._steps % self._checked_every == 0 else None
        read = others is not None and (not self._steps or others.device.type == "cpu")
        changed = self._changed(others.nonzero().flatten().tolist() if others is not None and read else ())
        if not self._missed and not changed and (others is None or read):
            return self._usual
        message = self._usual.clone()
        message[self._missed] = 0
        message[[len(self._parameters) + number for number in changed]] = 1
        if others is not None and not read:
            message[len(self._parameters) :].add_(others)
        return message

    @torch.no_grad()
    def settle(self, sums: Tensor) -> None:
        if self._missed:
            for number, count in zip(self._missed, sums[self._missed].tolist(), strict=True):
                if not count:
                    self._parameters[number].grad = None
        if self._still:
            changes = sums[len(self._parameters) :]
            self._changes = changes.clone() if self._changes is None else self._changes + changes
            if self._steps % self._every == 0:
                self._move(self._changes.tolist())
                self._changes = None
        self._steps += 1
        if self._moving and self._mesh.batch_ranks > 1:
            self._make_alike([_read(self._buffer(number)) for number in self._moving])

    def _buffer(self, number: int) -> Tensor:
        module, name = self._owners[number]
        buffer = module._buffers[name]
        assert buffer is not None
        return buffer

    def _move(self, counts: Sequence[float]) -> None:
        """`counts`: of each buffer, not 0 if some rank changed it."""
        if any(counts):
            self._moving = sorted({*self._moving, *(number for number in self._still if counts[number])})
            self._still = [number for number in self._still if not counts[number]]

    def _changed(self, others: Collection[int]) -> list[int]:
        """The still buffers that this step's forward changed: when any of a module did, all of them. `others`: those
        with another checksum.
        """
        touched = {id(self._owners[number][0]) for number in others}
        for number, (was, version) in zip(self._still, self._before, strict=True):
            now = self._buffer(number)
            if now is not was or now._version != version:
                touched.add(id(self._owners[number][0]))
        return [number for number in self._still if id(self._owners[number][0]) in touched]

    def _others(self) -> Tensor:
        """1 for each still buffer whose checksum is not that of the last time, on the device; nothing waits for it."""
        now = self._checksums.clone()
        now[self._still] = _checksums([self._buffer(number) for number in self._still])
        others, self._checksums = (now != self._checksums).float(), now
        return others

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


class News:
    """Brings the messages of a step to all ranks. Those that the strategy does not sum with the gradients are summed by
    `clip`, which adds up `numbers` over all ranks beside the norm and calls `settle`. In the first step, and in a loop
    of your own that does not give them to `clip`, they have a collective of their own.
    """

    def __init__(self, agreement: Agreement, mesh: Mesh) -> None:
        self._agreement, self._mesh = agreement, mesh
        self._stage = int(mesh.max(torch.tensor([float(agreement.size)])).item())
        """Numbers of each stage of a pipeline: it has parameters of its own, and the norm is summed over all."""
        self._passes: list[list[nn.Parameter]] = []
        self._has_clip, self._is_open = False, False
        self.numbers = torch.empty(0, device=mesh.device)

    def begin(self) -> None:
        """A step begins. Raises WordsError if the last one was not settled."""
        self._passes = []
        if self._is_open:
            raise WordsError(
                "loop: it gave the news of some steps to clip(..., news=loss.news), but not those of the last one. "
                "Call clip in every step, before the optimizer."
            )
        self._agreement.begin()

    def add(self, missing: list[nn.Parameter] | None) -> None:
        """A pass begins, for which the strategy gives this list."""
        if missing is not None:
            self._passes.append(missing)
        if isinstance(missing, Carried):
            missing.message = lambda: self._agreement.message([missing])

    def tell(self) -> "News | None":
        """The backward is over on this rank. Returns what is left for `clip` to sum."""
        mesh, agreement, last = self._mesh, self._agreement, self._passes[-1] if self._passes else None
        if mesh.world == 1:
            return None
        if isinstance(last, Carried) and last.sums is not None:
            agreement.settle(last.sums)
            return None
        message = agreement.message(self._passes)
        if mesh.batch_ranks == 1:
            agreement.settle(message)
            return None
        if not self._has_clip:
            agreement.settle(mesh.sum(message.clone()))
            return self
        self._is_open, self.numbers = True, message
        if mesh.shape.pp > 1:
            self.numbers = message.new_zeros(mesh.shape.pp * self._stage)
            self.numbers[self._part] = message
        return self

    def settle(self, sums: Tensor) -> None:
        self._has_clip = True
        if self._is_open:
            self._is_open = False
            self._agreement.settle(sums[self._part])

    @property
    def _part(self) -> slice:
        first = self._mesh.coordinate["pp"] * self._stage
        return slice(first, first + self._agreement.size)


@torch.no_grad()
def _checksums(buffers: Sequence[Tensor]) -> Tensor:
    """[N], fp64, on their device: equal as long as the buffers are."""
    sums: list[Tensor | None] = [None] * len(buffers)
    for dtype in {buffer.dtype for buffer in buffers}:
        places = [place for place, buffer in enumerate(buffers) if buffer.dtype == dtype]
        same = [_read(buffers[place]) for place in places]
        some: Sequence[Tensor] = (
            torch._foreach_norm(same, 2, SUMMED[dtype])
            if dtype in SUMMED
            else [each.flatten().view(torch.uint8).sum() for each in same]
        )
        for place, each in zip(places, some, strict=True):
            sums[place] = each
    return torch.stack([each.double() for each in sums if each is not None])


def _read(buffer: Tensor) -> Tensor:
    return local(buffer.detach())
