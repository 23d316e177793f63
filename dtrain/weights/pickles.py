"""Reads pickles of torch without running them. A pickle names classes and functions that it wants called; here each
name of a short table stands for an object of ours that only records what it was given, and any other is refused.
"""

import io
import pickle
import pickletools
from collections.abc import Callable, Mapping
from typing import Any

from dtrain.weights import plain

LARGEST = 256 << 20
"""Largest pickle that is read, in bytes: one of names and shapes, without the numbers."""
HARMLESS = (
    "lightning.", "lightning_fabric.", "pytorch_lightning.", "omegaconf.", "numpy.", "argparse.Namespace", "pathlib.",
    "datetime.", "collections.defaultdict", "collections.Counter", "builtins.set", "builtins.dict", "builtins.list",
    "builtins.slice", "builtins.complex", "builtins.bytearray", "typing.Any", "torch.device", "torch.Generator",
    "torch.serialization._get_layout", "torch.torch_version.TorchVersion", "_codecs.encode", "__builtin__.set",
)  # fmt: skip
"""Names, and beginnings of names, of what checkpoints hold beside tensors. A Recorded stands for each."""


SPARE = 1 << 16
"""Places of the memo that a pickle may leave free."""
HASHED = {
    "SETITEM": slice(1, 2), "SETITEMS": slice(1, None, 2), "DICT": slice(1, None, 2), "ADDITEMS": slice(None),
    "FROZENSET": slice(None),
}  # fmt: skip
"""Operations that hash objects -> which of those that they take from the stack, the last one first."""


class RefusedError(ValueError):
    """A pickle that asks for more than a checkpoint of weights needs."""


class Call:
    """A function of ours in a pickle: it can be called, and nothing else."""

    __slots__ = ("function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)

    def __setstate__(self, _: Any) -> None:
        raise RefusedError("its pickle wants to change a function")


def load(data: bytes, known: Mapping[str, Any], persistent: Callable[[Any], Any] | None = None) -> Any:
    """The object of a pickle. `known`: full name -> what stands for it: a text, a class or a function; `persistent`
    answers its references to objects outside. Raises RefusedError, which names what the pickle asks for.
    """
    if len(data) > LARGEST:
        raise RefusedError(f"its pickle has {len(data)} bytes")
    try:
        _scan(data)
        return _Unpickler(io.BytesIO(data), known, persistent).load()
    except RefusedError:
        raise
    except MemoryError:
        raise RefusedError("its pickle asks for more memory than there is") from None
    except Exception as error:  # a malformed pickle can fail in any operation
        raise RefusedError(f"its pickle is damaged ({type(error).__name__}: {plain(error)})") from error


def recorded() -> type:
    """A new class whose objects take anything, keep it in `args` and `state`, and do nothing. One for each pickle: a
    hostile one can set its attributes.
    """

    class Recorded:
        args: tuple[Any, ...]
        state: Any

        def __new__(cls, *args: Any, **_: Any) -> "Recorded":
            self = object.__new__(cls)
            self.args, self.state = args, {}
            return self

        def __setstate__(self, state: Any) -> None:
            self.state = state

        def __setitem__(self, key: Any, value: Any) -> None: ...

        def append(self, item: Any) -> None: ...

        def extend(self, items: Any) -> None: ...

        def add(self, item: Any) -> None: ...

    return Recorded


def _scan(data: bytes) -> None:
    """Raises RefusedError for what would take time or memory without bound: a tuple of tuples that is hashed, and a
    memo with places that nothing needs.
    """
    stack, memo = list[int | None](), dict[int, int | None]()  # how deep tuples are nested; None for a mark
    for number, (code, argument, _) in enumerate(pickletools.genops(data)):
        if "PUT" in code.name or code.name == "MEMOIZE":
            place = len(memo) if code.name == "MEMOIZE" else int(argument or 0)
            if place > number + SPARE:
                raise RefusedError(f"its pickle asks for {place} places of its memo")
            memo[place] = stack[-1]
        elif "GET" in code.name:
            stack.append(memo[int(argument or 0)])
        elif code.name == "DUP":
            stack.append(stack[-1])
        elif code.name == "MARK":
            stack.append(None)
        else:
            taken = _taken(code, stack)
            if any(depth > 1 for depth in taken[HASHED.get(code.name, slice(0))]):
                raise RefusedError("its pickle has a key that is a tuple of tuples")
            nested = 1 + max(taken, default=0) if code.name.startswith("TUPLE") else 0
            stack += [nested] * len(code.stack_after)


def _taken(code: pickletools.OpcodeInfo, stack: list[int | None]) -> list[int]:
    """Those that an operation takes from the stack, the last one first."""
    before, taken = code.stack_before, list[int]()
    if pickletools.markobject in before:
        while (depth := stack.pop()) is not None:
            taken.append(depth)
        before = before[: before.index(pickletools.markobject)]
    return taken + [stack.pop() or 0 for _ in before]


class _Dict(dict[Any, Any]):
    """An OrderedDict, whose state is not kept."""

    def __setstate__(self, state: Any) -> None: ...


def ordered(pairs: Any = ()) -> _Dict:
    """An OrderedDict of names. Raises RefusedError for other keys, which could take long to hash."""
    if not all(isinstance(key, str | int) for key, _ in pairs):
        raise RefusedError("a dict of its pickle has keys that are no names")
    return _Dict(pairs)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, known: Mapping[str, Any], persistent: Callable[[Any], Any] | None) -> None:
        super().__init__(file)
        self._known, self._persistent, self._recorded = known, persistent, recorded()

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full in self._known:
            known = self._known[full]
            return known if isinstance(known, str | type) else Call(known)
        if any(full.startswith(each) if each.endswith(".") else full == each for each in HARMLESS):
            return self._recorded
        raise RefusedError(f"its pickle names {plain(full)}, which no weights need and which could run code")

    def persistent_load(self, pid: Any) -> Any:
        if self._persistent is None:
            raise RefusedError("its pickle refers to objects outside of itself")
        return self._persistent(pid)
