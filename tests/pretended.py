"""An accelerator that is not there: its tensors are those of the CPU in a wrapper, and it refuses, waits and copies as a GPU does.

    with rehearsed() as device:     # in a forked process: it stays registered for as long as the process lives
        ...                         # torch.zeros(3, device="pretended"), .to("pretended"), streams, events, collectives
    device.notes                    # where the host waited for it, and what was made without a device

Built on torch's hooks for accelerators written in Python (`_setup_privateuseone_for_python_backend`, experimental in 2.13). Kernels run at once, so two streams
never race; copies that wait for nobody arrive when somebody waits for them, and what is read before holds nan. It carries FSDP2, DDP, tensors split over
ranks, pipelines and all-to-all, over gloo. It cannot show kernels of a GPU (attention is products and a softmax here), CUDA graphs, the allocator, and NCCL.
"""

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future
from torch.distributed.fsdp._fully_shard import _fsdp_init, _fsdp_param
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils import backend_registration
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import dtrain

NAME = "pretended"
PACKAGE = str(Path(dtrain.__file__).parent)
aten = torch.ops.aten
COPIES = (aten._to_copy, aten.copy_, aten._foreach_copy_)
JOINS = (aten.stack, aten.cat)
"""Which refuse numbers of another device also where these have no dims."""
INDEXED = (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_)
"""Which take indices of the CPU, and wait while these are copied."""
WAITS = (
    aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten._unique2, aten.unique_dim, aten.unique_consecutive, aten.equal, aten.is_nonzero,
    aten.bincount,
)  # fmt: skip
"""Whose answer, or its size, the host must know. In a GPU's sources they synchronise the stream."""


BETWEEN_TWO = (torch.ops.c10d.send, torch.ops.c10d.recv_)


@dataclass(frozen=True)
class Note:
    """`kind`: waits, homeless or mixed; `where`: the innermost function of dtrain, or of what called torch where there is none; `step`: None before the first."""

    kind: str
    operator: str
    where: str
    step: int | None


def registered() -> torch.device:
    """For this process, and as long as it lives: call it in a forked one."""
    if torch._C._get_privateuse1_backend_name() != NAME:
        backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
        _autocast()
    return torch.device(NAME, 0)


class _Stream:
    """All work is done at once, in order."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def wait_stream(self, _: Any) -> None: ...
    def wait_event(self, _: Any) -> None: ...
    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def synchronize(self) -> None:
        _arrive()

    def query(self) -> bool:
        return True

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *_: object) -> None: ...


class _Event(_Stream):
    def record(self, _: Any = None) -> None: ...
    def wait(self, _: Any = None) -> None: ...


def _arrive() -> None:
    """Noted is a thread that gives the device its work, the loop's or one of autograd."""
    for device in DEVICES:
        if not threading.current_thread().name.startswith("dtrain-"):
            device.note("waits", "synchronize")
        device.wait()


class _Module(backend_registration._DummyBackendModule):  # type: ignore[misc]
    """What torch asks of the module of an accelerator, and FSDP2 of its streams."""

    Stream, Event = _Stream, _Event
    amp_dtypes = (torch.float16, torch.bfloat16)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return list(self.amp_dtypes)

    def set_device(self, _: Any) -> None: ...

    def synchronize(self, _: Any = None) -> None:
        _arrive()

    def current_stream(self, _: Any = None) -> _Stream:
        return _Stream()

    def stream(self, stream: _Stream) -> _Stream:
        return stream

    def get_rng_state(self, _: Any = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, _: Any = None) -> None:
        torch.set_rng_state(state)


PRODUCTS = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "matmul",
    "linear",
    "conv1d",
    "conv2d",
    "conv3d",
    "einsum",
    "scaled_dot_product_attention",
)
WIDE = (
    "cross_entropy_loss",
    "nll_loss",
    "log_softmax.int",
    "softmax.int",
    "layer_norm",
    "group_norm",
    "mse_loss",
    "sum",
    "sum.dim_IntList",
    "pow.Tensor_Scalar",
)
"""Of the operators that autocast on a GPU runs in 16 bits, and in 32, those that our models call."""


def _autocast() -> None:
    _fallthrough.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for names, wide in ((PRODUCTS, False), (WIDE, True)):
        for name in names:
            packet, _, overload = name.partition(".")
            operator = getattr(getattr(aten, packet), overload or "default")
            _library.impl(name, _with_types(operator, wide=wide), "AutocastPrivateUse1")


def _with_types(operator: Any, *, wide: bool) -> Callable[..., Any]:
    def cast(x: Any) -> Any:
        return (
            x.to(torch.float32 if wide else torch.get_autocast_dtype(NAME))
            if isinstance(x, Tensor) and x.is_floating_point() and x.device.type == NAME
            else x
        )

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(NAME, enabled=False):
            return operator(*tree_map(cast, args), **tree_map(cast, kwargs))

    return call


_library, _fallthrough = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")


@contextmanager
def rehearsed() -> Iterator["Device"]:
    """Everything inside runs on the device, as far as it asks for it."""
    registered()
    with ExitStack() as stack:
        for owner, name, value in (
            (torch, "Event", _Event), (torch, "tensor", _tensor), (Tensor, "pin_memory", _pin), (torch.accelerator, "current_device_index", lambda: 0),
            (_fsdp_param, "free_storage", lambda _: None), (_fsdp_param, "alloc_storage", lambda *_: None),
            (_fsdp_init, "_move_states_to_device", _move),
            (torch.accelerator, "current_stream", lambda *_: _Stream()), (torch.accelerator, "synchronize", lambda *_: _arrive()),
        ):  # fmt: skip
            stack.enter_context(patch.object(owner, name, value))
        device = stack.enter_context(Device())
        DEVICES.append(device)
        stack.callback(DEVICES.remove, device)
        stack.enter_context(
            patch.object(
                torch.accelerator,
                "set_device_index",
                lambda _: device.chosen_in.add(threading.current_thread().name.partition("_")[0]),
            )
        )
        stack.enter_context(_Homes(device))
        yield device


class _Homes(TorchFunctionMode):
    """Notes the constructors that dtrain itself calls without saying where; afterwards torch has said the CPU for them."""

    def __init__(self, device: "Device") -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        caller = sys._getframe(1).f_code
        ours = (
            caller.co_filename.startswith(PACKAGE) and caller.co_name != "__torch_function__"
        )  # which hands on what others call
        if ours and func in _device_constructors() and (kwargs or {}).get("device") is None:
            self._device.note("homeless", func.__name__)
        return func(*args, **kwargs or {})


def _tensor(data: Any, *, device: Any = None, _made: Any = torch.tensor, **options: Any) -> Tensor:
    """torch makes it on the host and copies, where no mode sees it."""
    made: Tensor = _made(data, **options)
    return made if device is None else made.to(device)


def _move(parameters: Sequence[Tensor], buffers: Sequence[Tensor], device: torch.device) -> None:
    """As FSDP2 does it, which sets `.data`; torch lets no wrapper take the place of a plain tensor so."""
    for tensor in (*parameters, *buffers):
        if tensor.device not in (device, torch.device("meta")):
            moved = tensor.detach().to(device)
            torch.utils.swap_tensors(
                tensor,
                torch.nn.Parameter(moved, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else moved,
            )


def _pin(tensor: Tensor) -> Tensor:
    PINNED.add(tensor.untyped_storage().data_ptr())
    return tensor


DEVICES: list["Device"] = []
"""Those of the contexts that are open."""
PINNED = set[int]()
"""Addresses of the memory of the host from which the device copies by itself."""


class Pretended(Tensor):
    """`held`, a tensor of the CPU, as if it lay on the device."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> "Pretended":
        made: Pretended = torch.Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=registered(),
        )  # type: ignore[attr-defined]
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return run(func, args, kwargs or {}, Device())

    def tolist(self) -> Any:
        """Which torch refuses to subclasses."""
        return self.to("cpu").tolist()


class Device(TorchDispatchMode):
    """`notes` of what happened inside the context; `step` is set by whoever counts steps."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[Note] = []
        self.step: int | None = None
        self.chosen_in = set[str]()
        """Names of the threads that have said on which device they work."""
        self._queued: list[Callable[[], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its pieces come here
        return run(func, args, kwargs or {}, self)

    def note(self, kind: str, func: Any) -> None:
        self.notes.append(Note(kind, str(func).removeprefix("aten."), _where(), self.step))

    def queue(self, copy: Callable[[], Any]) -> None:
        self._queued.append(copy)

    def wait(self) -> None:
        queued, self._queued = self._queued, []
        for copy in queued:
            copy()


def run(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], on: Device) -> Any:
    """An operator, as the device does it."""
    kwargs, packet = dict(kwargs), func.overloadpacket
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    here, others = (
        [x for x in tensors if isinstance(x, Pretended)],
        [x for x in tensors if not isinstance(x, Pretended)],
    )
    to = kwargs.get("device")
    if kwargs.pop("pin_memory", None) and not here:
        made = func(*args, **kwargs)
        PINNED.add(made.untyped_storage().data_ptr())
        return made
    if not here and (to is None or to.type != NAME):
        return func(*args, **kwargs)
    if packet in COPIES:
        return _copy(func, args, {name: value for name, value in kwargs.items() if name != "device"}, to, on)
    if to is not None:
        made = func(*_inside(args), **kwargs | {"device": torch.device("cpu") if to.type == NAME else to})
        return Pretended(made) if to.type == NAME else made
    if others and (packet in JOINS or any(x.ndim for x in others)):
        if packet not in INDEXED or any(x is args[0] for x in others):
            on.note("mixed", func)
            raise RuntimeError(f"{func}: expected all tensors to be on the same device ({_where()})")
        on.note("waits", func)
    if _waits(func, args, kwargs):
        on.note("waits", func)
        on.wait()
    if packet is aten._fused_sdp_choice:
        return 0  # products and a softmax: no kernel of a GPU is here
    if packet in (aten.is_pinned, aten._pin_memory):
        return False
    out = _back(func, tensors, func(*_inside(args), **_inside(kwargs)))
    if func.namespace == "c10d" and packet not in BETWEEN_TWO and here:
        work = torch._C._distributed_c10d.Work.unbox(out[-1] if isinstance(out, tuple) else out)
        work.wait()
        done = torch.futures.Future[Any]()
        done.set_result([x for x in tree_leaves(out) if isinstance(x, Tensor)])
        work = _create_work_from_future(done).boxed()
        out = (*out[:-1], work) if isinstance(out, tuple) else work
    return out


def _waits(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    packet = func.overloadpacket
    if packet in INDEXED:  # a single number behind a mask is filled in, without knowing how often
        masked = any(x.dtype == torch.bool for x in args[1] if x is not None)
        return masked and (packet is aten.index or args[2].numel() > 1)
    if packet is aten.repeat_interleave:
        return kwargs.get("output_size") is None
    return packet in WAITS


def _inside(tree: Any) -> Any:
    return tree_map(
        lambda x: x.held if isinstance(x, Pretended) else x, list(tree) if isinstance(tree, tuple) else tree
    )


def _back(func: Any, tensors: Sequence[Tensor], out: Any) -> Any:
    """What was given and changed in place comes back as itself."""
    if func._schema.is_mutable:
        given = {id(x.held): x for x in tensors if isinstance(x, Pretended)}
        return tree_map(lambda x: given[id(x)] if id(x) in given else Pretended(x) if isinstance(x, Tensor) else x, out)
    return tree_map(lambda x: Pretended(x) if isinstance(x, Tensor) else x, out)


def _copy(func: Any, args: Sequence[Any], kwargs: dict[str, Any], to: torch.device | None, on: Device) -> Any:
    """Between host and device, where it waits unless it is told not to and the host's side is pinned; or on the device."""
    new = func.overloadpacket is aten._to_copy
    early = kwargs.get("non_blocking") or (not new and len(args) > 2 and args[2])
    if new:
        made = func(*_inside(args), **kwargs)
        given, wrapped = args[0], to.type == NAME if to else True
        targets, sources = [Pretended(made) if wrapped else made], [given]
    else:
        targets, sources = (args[0], args[1]) if isinstance(args[0], list) else ([args[0]], [args[1]])
    crossing = [
        (target, source)
        for target, source in zip(targets, sources, strict=True)
        if isinstance(target, Pretended) != isinstance(source, Pretended)
    ]
    host = [target if isinstance(source, Pretended) else source for target, source in crossing]
    if crossing and not (
        early and ((new and not wrapped) or all(x.untyped_storage().data_ptr() in PINNED for x in host))
    ):
        on.note("waits", func)
        on.wait()
    elif crossing and isinstance(crossing[0][1], Pretended):
        _later(on, [(target, source.held.detach().clone().to(target.dtype)) for target, source in crossing])
        return targets[0] if func._schema.returns else None
    if not new:
        func(*_inside(args), **kwargs)
    return targets[0] if func._schema.returns else None


def _later(on: Device, pairs: list[tuple[Tensor, Tensor]]) -> None:
    """What the device writes into the host's memory is there when somebody has waited; until then it is not a number."""
    for target, _ in pairs:
        if target.is_floating_point():
            target.detach().fill_(torch.nan)
    on.queue(lambda: [target.detach().copy_(source) for target, source in pairs])


def _where() -> str:
    """In a thread of autograd nobody of dtrain is on the stack."""
    frame, innermost = sys._getframe(2), ""
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(PACKAGE):
            return f"{name.removeprefix(PACKAGE).lstrip('/')} {frame.f_code.co_name}"
        if not innermost and name != __file__ and not name.endswith(("_compile.py", "eval_frame.py")):
            innermost = f"{Path(name).name} {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return innermost
