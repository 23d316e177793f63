"""torch's process group over a communicator of MPI.

Values travel as bytes, whatever their type. Sums are those of MPI: in the type itself, but in fp32 for bf16 and fp16,
which MPI does not have, rounded once at the end (gloo rounds after every addition).
"""

import hashlib
from array import array
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.integrations.mpi.loop import Loop, Operation

NAME = "mpi4py"
"""For torch, which has a backend named mpi in builds of its own only."""
WIDTHS = {1: "BYTE", 2: "INT16_T", 4: "INT32_T", 8: "INT64_T", 16: "C_DOUBLE_COMPLEX"}
"""Bytes of a value -> MPI's type that only moves them."""
TYPES = {
    torch.float32: "FLOAT", torch.float64: "DOUBLE", torch.int8: "INT8_T", torch.uint8: "UINT8_T",
    torch.int16: "INT16_T", torch.int32: "INT32_T", torch.int64: "INT64_T", torch.bool: "C_BOOL",
    torch.complex64: "C_FLOAT_COMPLEX", torch.complex128: "C_DOUBLE_COMPLEX",
}  # fmt: skip
HALVES = (torch.bfloat16, torch.float16)
AVG = dist.ReduceOp.AVG
OPERATIONS = (
    (dist.ReduceOp.SUM, "SUM", "LOR"), (AVG, "SUM", "LOR"), (dist.ReduceOp.PRODUCT, "PROD", "LAND"),
    (dist.ReduceOp.MIN, "MIN", "LAND"), (dist.ReduceOp.MAX, "MAX", "LOR"), (dist.ReduceOp.BAND, "BAND", "LAND"),
    (dist.ReduceOp.BOR, "BOR", "LOR"), (dist.ReduceOp.BXOR, "BXOR", "LXOR"),
)  # fmt: skip
"""torch's operation, MPI's, and that of bool, which is no number to MPI."""
KINDS = dist.ReduceOp.RedOpType.__members__
_Group: Any = dist.ProcessGroup  # its overloads take tensors outside of lists too, which torch.distributed never gives


def register() -> None:
    """Make the group known to torch, once."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def _create(options: Any, _: Any) -> "MpiGroup":
    """The group of the ranks in `options`, which are alone in this call; of all, if it names none."""
    loop, ranks, seconds = Loop.of_process(), options.global_ranks_in_group, options.timeout.total_seconds()
    tag = int(hashlib.sha256(str(options.group_id).encode()).hexdigest()[:4], 16) >> 1  # MPI_TAG_UB is 32767 or more

    def make() -> Any:
        world = loop.mpi.COMM_WORLD
        return world.Create_group(world.Get_group().Incl(ranks), tag) if ranks else world.Dup()

    try:
        communicator = loop.call(make, seconds)
    except TimeoutError as error:
        loop.abort(f"MPI: the group of ranks {ranks or 'of the world'} timed out waiting {round(seconds * 1000)}ms")
        raise RuntimeError(loop.broken) from error
    return MpiGroup(loop, communicator, options, seconds)


class MpiGroup(_Group):  # type: ignore[misc]
    """`seconds`: timeout of operations that have none of their own."""

    def __init__(self, loop: Loop, communicator: Any, options: Any, seconds: float) -> None:
        super().__init__(options.group_rank, options.group_size)
        self._loop, self._comm, self._seconds = loop, communicator, seconds
        self._mine, self._count, self._number = options.group_rank, options.group_size, 0
        self._store, self._name = options.store, str(options.group_id)

    def get_group_store(self) -> Any:
        return self._store

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return NAME

    @property
    def group_name(self) -> str:
        return self._name

    def _get_sequence_number_for_group(self) -> int:
        """The collectives that this rank has entered."""
        return self._number

    def _set_sequence_number_for_group(self) -> None:
        pass

    def abort(self) -> None:
        self._loop.abort("the process group was aborted")

    # sums

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Operation:
        return self._each(tensors, lambda tensor: self._allreduce(tensor, opts or dist.AllreduceOptions()))

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> Operation:
        (tensor,) = tensors
        sent, kind, operation = self._summed(tensor, opts.reduceOp)
        received = torch.empty_like(sent) if self._mine == opts.rootRank else None

        def start() -> Any:
            into = None if received is None else [self._view(received), sent.numel(), kind]
            return [self._comm.Ireduce([self._view(sent), sent.numel(), kind], into, operation, opts.rootRank)]

        def finish() -> None:
            if received is not None:
                tensor.copy_(self._mean(received, opts))

        return self._collective("reduce", tensor, start, finish, opts)

    def _allreduce(self, tensor: Tensor, opts: Any) -> Operation:
        sent, kind, operation = self._summed(tensor, opts.reduceOp)
        # a contiguous tensor of a type that MPI has is summed in place
        in_place = sent.data_ptr() == tensor.data_ptr()

        def start() -> Any:
            return [self._comm.Iallreduce(self._loop.mpi.IN_PLACE, [self._view(sent), sent.numel(), kind], operation)]

        def finish() -> None:
            if not in_place or opts.reduceOp == AVG:
                tensor.copy_(self._mean(sent, opts))

        return self._collective("all_reduce", tensor, start, finish, opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Operation:
        opts = opts or dist.ReduceScatterOptions()
        _sent(input, output)
        _check("reduce_scatter", [input], [self._count * output.numel()])
        sent, kind, operation = self._summed(input, opts.reduceOp)
        received = torch.empty(output.numel(), dtype=sent.dtype)

        def start() -> Any:
            into = [self._view(received), received.numel(), kind]
            return [self._comm.Ireduce_scatter_block([self._view(sent), received.numel(), kind], into, operation)]

        def finish() -> None:
            _fill(output, self._mean(received, opts))

        return self._collective("reduce_scatter", output, start, finish, opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any) -> Operation:
        pairs = [*zip(outputs, inputs, strict=True)]
        for output, parts in pairs:
            _check("reduce_scatter", parts, [output.numel()] * self._count)
        return self._each(
            pairs, lambda pair: self.reduce_scatter_single(pair[0], _flat(pair[1], pair[0]), opts), outputs
        )

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Operation:
        pairs = [*zip(outputs, inputs, strict=True)]
        return self._each(pairs, lambda pair: self.reduce_scatter_single(pair[0], pair[1], opts), outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _mean(self, total: Tensor, opts: Any) -> Tensor:
        return total / self._count if opts.reduceOp == AVG else total

    # values that travel as they are

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> Operation:
        (tensor,) = tensors
        moved = tensor.detach().contiguous()

        def start() -> Any:
            return [self._comm.Ibcast(self._bytes(moved), opts.rootRank)]

        def finish() -> None:
            if moved.data_ptr() != tensor.data_ptr():
                tensor.copy_(moved)

        return self._collective("broadcast", tensor, start, finish, opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Operation:
        _check("all_gather", [output], [self._count * input.numel()])
        sent, received = _sent(input, output), torch.empty(output.numel(), dtype=output.dtype)

        def start() -> Any:
            return [self._comm.Iallgather(self._bytes(sent), self._bytes(received, sent.numel()))]

        return self._collective("all_gather", output, start, lambda: _fill(output, received), opts)

    _allgather_base = all_gather_single

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> Operation:
        (lists,), (tensor,) = outputs, inputs
        sent = self._listed("all_gather", tensor, lists)
        received = torch.empty(self._count * sent.numel(), dtype=sent.dtype)

        def start() -> Any:
            return [self._comm.Iallgather(self._bytes(sent), self._bytes(received, sent.numel()))]

        return self._collective("all_gather", tensor, start, lambda: _spread(received, lists), opts)

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Operation:
        pairs = [*zip(outputs, inputs, strict=True)]
        return self._each(pairs, lambda pair: self.all_gather_single(pair[0], pair[1], opts), outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any) -> Operation:
        (tensor,) = inputs
        is_root = self._mine == opts.rootRank
        sent = self._listed("gather", tensor, outputs[0]) if is_root else tensor.detach().contiguous()
        received = torch.empty(self._count * sent.numel() if is_root else 0, dtype=sent.dtype)

        def start() -> Any:
            into = self._bytes(received, sent.numel()) if is_root else None
            return [self._comm.Igather(self._bytes(sent), into, opts.rootRank)]

        return self._collective(
            "gather", tensor, start, lambda: _spread(received, outputs[0]) if is_root else None, opts
        )

    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any) -> Operation:
        (tensor,) = outputs
        if self._mine == opts.rootRank:
            self._listed("scatter", tensor, inputs[0])
        sent = _flat(inputs[0], tensor) if self._mine == opts.rootRank else None
        received = torch.empty(tensor.numel(), dtype=tensor.dtype)

        def start() -> Any:
            into = self._bytes(received)
            return [
                self._comm.Iscatter(None if sent is None else self._bytes(sent, tensor.numel()), into, opts.rootRank)
            ]

        return self._collective("scatter", tensor, start, lambda: _fill(tensor, received), opts)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, received: Sequence[int], sent: Sequence[int], opts: Any = None
    ) -> Operation:
        """`received` and `sent`: rows for each rank; empty: the same number for each."""
        from_here, into = _sent(input, output), torch.empty(output.numel(), dtype=output.dtype)
        counts = [self._counts(tensor, rows) for tensor, rows in ((input, sent), (output, received))]
        return self._exchange(from_here, into, counts, output, finish=lambda: _fill(output, into), opts=opts)

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> Operation:
        if (len(inputs), len(outputs)) != (self._count, self._count):
            raise RuntimeError(f"backend=mpi: all_to_all needs {self._count} tensors to send, and as many to receive")
        sent, into = _flat(inputs, outputs[0]), _flat(outputs, outputs[0])
        counts = [[tensor.numel() for tensor in tensors] for tensors in (inputs, outputs)]
        return self._exchange(sent, into, counts, sent, finish=lambda: _spread(into, outputs), opts=opts)

    def _exchange(
        self, sent: Tensor, received: Tensor, counts: Sequence[Sequence[int]], result: Tensor,
        finish: Callable[[], None], opts: Any,
    ) -> Operation:  # fmt: skip
        """`counts`: values for and from each rank. The ranks tell each other how many they send, because MPI passes
        over a message that is shorter than expected.
        """
        if counts[0][self._mine] != counts[1][self._mine]:
            raise RuntimeError(f"backend=mpi: all_to_all: this rank sends {counts[0]}, awaits {counts[1]}")
        told, heard, kind = array("q", counts[0]), array("q", [0] * self._count), self._loop.mpi.INT64_T

        def start() -> Any:
            return [
                self._comm.Ialltoall([told, 1, kind], [heard, 1, kind]),
                self._comm.Ialltoallv(self._parts(sent, counts[0]), self._parts(received, counts[1])),
            ]

        def check() -> None:
            if [*heard] != [*counts[1]]:
                raise RuntimeError(f"backend=mpi: all_to_all: ranks send {[*heard]} values, not {[*counts[1]]}")
            finish()

        return self._collective("all_to_all", result, start, check, opts)

    def barrier(self, opts: Any = None) -> Operation:
        return self._collective("barrier", torch.empty(0), lambda: [self._comm.Ibarrier()], lambda: None, opts)

    # messages

    def send(self, tensors: Sequence[Tensor], rank: int, tag: int) -> Operation:
        (tensor,) = tensors
        sent = tensor.detach().contiguous()
        return self._message("send", tensor, lambda: [self._comm.Isend(self._bytes(sent), rank, tag)], lambda: None)

    def recv(self, tensors: Sequence[Tensor], rank: int, tag: int) -> Operation:
        (tensor,) = tensors
        received = tensor.detach().contiguous()

        def finish() -> None:
            if received.data_ptr() != tensor.data_ptr():
                tensor.copy_(received)

        return self._message("recv", tensor, lambda: [self._comm.Irecv(self._bytes(received), rank, tag)], finish)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int) -> Operation:
        raise RuntimeError("backend=mpi receives from a rank that is named")

    # operations

    def _counts(self, tensor: Tensor, rows: Sequence[int]) -> list[int]:
        """Values for or from each rank. Raises RuntimeError if they are not those of the tensor."""
        whole = tensor.shape[0] if tensor.dim() else 1
        if rows and (len(rows) != self._count or sum(rows) != whole or min(rows) < 0):
            raise RuntimeError(f"backend=mpi: all_to_all: {[*rows]} are not {whole} rows for {self._count} ranks")
        if not rows and whole % self._count:
            raise RuntimeError(f"backend=mpi: all_to_all: {whole} rows cannot be split among {self._count} ranks")
        row = tensor.numel() // tensor.shape[0] if tensor.dim() and tensor.shape[0] else 1
        return [count * row for count in rows] if rows else [tensor.numel() // self._count] * self._count

    def _listed(self, name: str, tensor: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        """A tensor that goes to or comes from one of a list with one for each rank, as contiguous values."""
        _check(name, tensors, [tensor.numel()] * self._count)
        for each in tensors:
            _sent(each, tensor)
        return tensor.detach().contiguous()

    def _each(
        self, items: Sequence[Any], act: Callable[[Any], Operation], result: Sequence[Tensor] | None = None
    ) -> Operation:
        """One operation that completes with the last of several, which run in their order."""
        operations = [act(item) for item in items]
        if not operations:
            return self.barrier()
        operations[-1].tensors = [*(items if result is None else result)]
        return operations[-1]

    def _collective(
        self, name: str, tensor: Tensor, start: Callable[[], Any], finish: Callable[[], None], opts: Any
    ) -> Operation:
        timeout = getattr(opts, "timeout", None)
        seconds = timeout.total_seconds() if timeout and timeout > timedelta(0) else self._seconds
        self._number += 1
        what = f"{name} number {self._number} of {self.group_desc or 'the world'} ({tensor.nbytes} bytes)"
        operation = Operation(what, start, finish, seconds=seconds, queue=self, result=[tensor])
        return self._loop.submit(operation)

    def _message(self, name: str, tensor: Tensor, start: Callable[[], Any], finish: Callable[[], None]) -> Operation:
        what = f"{name} of {self.group_desc or 'the world'} ({tensor.nbytes} bytes)"
        return self._loop.submit(Operation(what, start, finish, seconds=self._seconds, queue=None, result=[tensor]))

    def _summed(self, tensor: Tensor, operation: Any) -> tuple[Tensor, Any, Any]:
        """A tensor that MPI can sum, its type, and MPI's operation. Raises RuntimeError for what MPI does not have."""
        names = next((names for ours, *names in OPERATIONS if operation == ours), None)
        dtype = torch.float32 if tensor.dtype in HALVES else tensor.dtype
        is_exact = operation == AVG and not (dtype.is_floating_point or dtype.is_complex)
        if names is None or is_exact or dtype not in TYPES or tensor.device.type != "cpu":
            named = next((name for name, kind in KINDS.items() if operation == kind), str(operation))
            raise RuntimeError(f"backend=mpi has no {named} of {tensor.dtype} on {tensor.device.type}")
        chosen = getattr(self._loop.mpi, names[dtype == torch.bool])
        return tensor.detach().to(dtype).contiguous(), getattr(self._loop.mpi, TYPES[dtype]), chosen

    def _view(self, tensor: Tensor) -> Any:
        """The memory of a contiguous tensor."""
        return self._loop.mpi.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)

    def _bytes(self, tensor: Tensor, count: int | None = None) -> list[Any]:
        """A contiguous tensor as values that are only moved; `count`: of each rank's part."""
        if tensor.device.type != "cpu":
            raise RuntimeError(f"backend=mpi moves values of the CPU, not of {tensor.device.type}")
        kind = getattr(self._loop.mpi, WIDTHS[tensor.itemsize])
        return [self._view(tensor), tensor.numel() if count is None else count, kind]

    def _parts(self, tensor: Tensor, counts: Sequence[int]) -> list[Any]:
        begins = [0, *accumulate(counts)][:-1]
        return [self._view(tensor), (list(counts), begins), getattr(self._loop.mpi, WIDTHS[tensor.itemsize])]


def _sent(tensor: Tensor, like: Tensor) -> Tensor:
    if tensor.dtype != like.dtype:
        raise RuntimeError(f"backend=mpi: {tensor.dtype} cannot be received as {like.dtype}")
    return tensor.detach().contiguous()


def _check(name: str, tensors: Sequence[Tensor], sizes: Sequence[int]) -> None:
    """Raises RuntimeError for another number of tensors, or of their values, than MPI would read or write."""
    found = [tensor.numel() for tensor in tensors]
    if found != [*sizes]:
        raise RuntimeError(f"backend=mpi: {name}: {found} values, where the other tensors need {[*sizes]}")


def _flat(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.cat([_sent(tensor, like).reshape(-1) for tensor in tensors])


def _fill(tensor: Tensor, flat: Tensor) -> None:
    tensor.detach().copy_(flat.view(tensor.shape))


def _spread(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    parts = flat.split([tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.detach().copy_(part.view(tensor.shape))
