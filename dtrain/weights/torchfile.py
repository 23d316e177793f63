"""The tensors of a file of `torch.save`: a zip with a pickle of names and shapes, and the bytes of each storage, which
are read where they lie. A state dict, or a dict with one inside, such as a .ckpt of Lightning.
"""

import io
import math
import struct
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from dtrain.storage import store
from dtrain.weights import SIZES, ForeignError, Piece, Stored, pickles, plain
from dtrain.weights.pickles import RefusedError

BLOCK = 1 << 16
"""Bytes that are read at once from the directory of a file."""
BROKEN = (ValueError, KeyError, TypeError, OSError, EOFError, OverflowError, RuntimeError, struct.error)
"""Errors of zipfile for a damaged file; RefusedError is a ValueError."""
DEEPEST, LONGEST = 32, 400
"""The most dicts inside each other, and letters of a name."""
EXPANDED = 1 << 30
"""Bytes that a tensor may have however small its storage is, which it reads again and again."""
ENDS = 1 << 10
"""Bytes of a file with one tensor before and behind its numbers."""
STORAGES = {
    "Double": "float64", "Float": "float32", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64",
    "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool", "ComplexFloat": "complex64",
}  # fmt: skip
AGAIN = (
    "Load it with torch.load(..., weights_only=True) where it was made, and type torch.save(<its state dict>, <file>)"
)


class Storage(NamedTuple):
    dtype: str
    key: str


class View(NamedTuple):
    """A tensor in the pickle: a view of a storage, in elements."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def __hash__(self) -> int:
        return id(self)


class Ranged(io.RawIOBase):
    """`length` bytes of the file at a URL from `begin` on, as a file that reads only what is asked for. `ends`: bytes
    at both ends that are read at once, in one request.
    """

    def __init__(self, url: str, begin: int, length: int, *, ends: int = 0) -> None:
        self._url, self._begin, self._length, self._at = url, begin, length, 0
        starts, count = ([0, length - ends], ends) if 2 * ends < length else ([0], length)
        parts = store.parts(url, [begin + start for start in starts], count) if ends else []
        self._known = list(zip(starts, parts, strict=False))

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = (0, self._at, self._length)[whence]
        if base + offset < 0:
            raise OSError("it begins after that")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._length - self._at))
        data = self._bytes(count) if count else b""
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def _bytes(self, count: int) -> bytes:
        for start, part in self._known:
            if start <= self._at and self._at + count <= start + len(part):
                return part[self._at - start :][:count]
        return store.parts(self._url, [self._begin + self._at], count)[0]


def tensors(url: str, begin: int = 0, length: int | None = None) -> dict[tuple[str, ...], Stored]:
    """The tensors in the file of torch.save at `url`, by their path in its dicts and lists; or the one tensor in
    `length` bytes of a file from `begin` on. Raises ForeignError, StoreError.
    """
    size = store.size(url) if length is None else length
    try:
        whole = length is None
        file = io.BufferedReader(Ranged(url, begin, size), BLOCK) if whole else Ranged(url, begin, size, ends=ENDS)
        with zipfile.ZipFile(file) as archive:
            loaded, root = _pickled(archive)
            places = _places(url, begin, size, archive)
            return {path: _stored(view, root, places, url) for path, view in _flat(loaded, (), set())}
    except zipfile.BadZipFile as error:
        cause = f"it is not a whole file of torch.save in its zip format ({error})"
        raise ForeignError.during("read", url, cause, AGAIN) from error
    except BROKEN as error:
        cause = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {plain(error)}"
        raise ForeignError.during("read", url, cause, AGAIN) from error


def _flat(node: Any, path: tuple[str, ...], seen: set[int]) -> Iterator[tuple[tuple[str, ...], View]]:
    """(path, view) of every tensor in nested dicts and lists, each of which is visited once."""
    if isinstance(node, View):
        yield path, node
    elif isinstance(node, dict | list | tuple) and id(node) not in seen and len(path) < DEEPEST:
        seen.add(id(node))
        for name, below in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _flat(below, (*path, str(name)[:LONGEST]), seen)


def _pickled(archive: zipfile.ZipFile) -> tuple[Any, str]:
    """The object in the pickle with a View for each tensor, and the folder of the archive. Raises RefusedError."""
    names = archive.namelist()
    main = next((name for name in names if name.endswith("/data.pkl") and name.count("/") == 1), None)
    if main is None:
        raise RefusedError("it is a zip, but not one of torch.save")
    root = main.removesuffix("data.pkl")
    if f"{root}constants.pkl" in names:
        raise RefusedError("it holds a program of TorchScript")
    if f"{root}byteorder" in names and archive.read(f"{root}byteorder") != b"little":
        raise RefusedError("its numbers are of another byte order")
    if archive.getinfo(main).file_size > pickles.LARGEST:
        raise RefusedError("its pickle is too large")
    return pickles.load(archive.read(main), KNOWN, _storage), root


def _places(url: str, begin: int, size: int, archive: zipfile.ZipFile) -> dict[str, tuple[int, int]]:
    """Name -> (first byte in the file, bytes) of every storage."""
    entries = [one for one in archive.infolist() if "/data/" in one.filename]
    if packed := next((one.filename for one in entries if one.compress_type != zipfile.ZIP_STORED), None):
        raise RefusedError(f"its {plain(packed)} is compressed")
    heads = store.parts(url, [begin + one.header_offset for one in entries], 30) if entries else []
    places = dict[str, tuple[int, int]]()
    for one, head in zip(entries, heads, strict=True):
        # the header before the bytes may be longer than the one in the directory, to align them
        skip = 30 + int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
        if head[:4] != b"PK\3\4" or one.header_offset + skip + one.file_size > size:
            raise RefusedError(f"its {plain(one.filename)} is cut off")
        places[one.filename] = begin + one.header_offset + skip, one.file_size
    return places


def _stored(view: View, root: str, places: Mapping[str, tuple[int, int]], url: str) -> Stored:
    """Raises RefusedError if the view reaches beyond its storage."""
    (dtype, key), offset, shape, stride = view
    size = SIZES[dtype]
    begin, length = places[f"{root}data/{key}"]
    numbers = (offset, *shape, *stride)
    if len(shape) != len(stride) or not all(type(number) is int and number >= 0 for number in numbers):
        raise RefusedError(f"a tensor of the storage {plain(key)} has an impossible shape")
    if math.prod(filter(None, shape)) * size > max(length << 10, EXPANDED):
        raise RefusedError(f"a tensor of the storage {plain(key)} has an impossible size")
    last = offset + sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) if math.prod(shape) else -1
    if (last + 1) * size > length:
        raise RefusedError(f"a tensor reaches beyond its storage {plain(key)}")
    piece = Piece((0,) * len(shape), shape, url, begin + offset * size, stride)
    return Stored(dtype, shape, (piece,))


def _storage(pid: Any) -> Storage:
    kind, storage, key, *_ = pid
    if kind != "storage" or not isinstance(storage, str) or not isinstance(key, str):
        raise RefusedError("its pickle refers to an object that is not a storage")
    return Storage(storage, key)


def _tensor(
    storage: Any, offset: Any, shape: Any, stride: Any, grad: Any = False, hooks: Any = None, flags: Any = None
) -> View:
    if not isinstance(storage, Storage):
        raise RefusedError("a tensor of its pickle has no storage")
    if flags:
        raise RefusedError(f"a tensor is a view that is {plain(' and '.join(flags))}: its storage holds other numbers")
    return View(storage, offset, tuple(shape), tuple(stride))


def _typed(
    storage: Any, offset: Any, shape: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, flags: Any = None
) -> View:
    return _tensor(Storage(dtype, storage.key), offset, shape, stride=stride, grad=grad, hooks=hooks, flags=flags)


def _parameter(data: Any, *_: Any) -> Any:
    return data


def _subclass(rebuild: Any, kind: Any, args: Any, *_: Any) -> Any:
    if not isinstance(rebuild, pickles.Call) or rebuild.function not in (_tensor, _typed, _parameter):
        raise RefusedError("its pickle makes a tensor in an unknown way")
    return rebuild(*args)


KNOWN: dict[str, Any] = {
    "collections.OrderedDict": pickles.ordered,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _typed,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._tensor._rebuild_from_type_v2": _subclass,
    "torch.Tensor": "tensor",
    "torch.nn.parameter.Parameter": "parameter",
    "torch.Size": list,
    "torch.storage.UntypedStorage": "uint8",
    **{f"torch.{name}Storage": dtype for name, dtype in STORAGES.items()},
    **{f"torch.{dtype}": dtype for dtype in SIZES},
}
"""Stand-ins for the names in a pickle of tensors: types are texts, and a call makes a View."""
