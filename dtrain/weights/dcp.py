"""Checkpoints of torch.distributed.checkpoint: `.metadata` is a pickle of a few classes, and each shard of a tensor
lies in a file of a rank, as a file of torch.save of its own.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from dtrain.storage import store
from dtrain.weights import SIZES, ForeignError, Piece, Stored, contiguous, pickles, plain
from dtrain.weights.pickles import RefusedError

METADATA = ".metadata"
MODULE = "torch.distributed.checkpoint"
CLASSES = (
    *(f"metadata.{name}" for name in ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties",
    "ChunkStorageMetadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    "filesystem._StorageInfo", "filesystem._StoragePrefix",
)  # fmt: skip
OLDER = "torch.distributed._shard.sharded_tensor.metadata"


def tensors(url: str) -> dict[tuple[str, ...], Stored]:
    """The tensors of a checkpoint, by their path in the state that was saved. Raises ForeignError, StoreError."""
    where = store.join(url, METADATA)
    try:
        return dict(_tensors(url, pickles.load(store.read(where), _known()), store.sizes(url)))
    except RefusedError as error:
        raise ForeignError.during("read", where, str(error)) from error
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        cause = f"it is not as torch writes it ({type(error).__name__}: {plain(error)})"
        raise ForeignError.during("read", where, cause) from error


def _known() -> dict[str, Any]:
    """Stand-ins for the classes of the metadata: each records what it is given."""
    names = (*(f"{MODULE}.{name}" for name in CLASSES), f"{OLDER}.TensorProperties", f"{OLDER}.MEM_FORMAT_ENCODING")
    known: dict[str, Any] = {name: type(name, (pickles.recorded(),), {}) for name in names}
    dtypes = {f"torch.{dtype}": dtype for dtype in SIZES}
    return known | dtypes | {"torch.Size": list, "collections.OrderedDict": pickles.ordered}


def _tensors(url: str, metadata: Any, sizes: Mapping[str, int]) -> Iterator[tuple[tuple[str, ...], Stored]]:
    """Raises RefusedError for shards that are encoded, or lie elsewhere."""
    state = metadata.state
    places = {(key.state["fqn"], _sizes(key.state.get("offset"))): info for key, info in state["storage_data"].items()}
    paths = state.get("planner_data") or {}
    for name, facts in state["state_dict_metadata"].items():
        if "size" not in facts.state:
            continue  # not a tensor
        shape, dtype = _sizes(facts.state["size"]), _dtype(facts.state["properties"])
        pieces = []
        for chunk in facts.state["chunks"]:
            offset, part = _sizes(chunk.state["offsets"]), _sizes(chunk.state["sizes"])
            pieces.append(_piece(url, name, offset, shape=part, info=places[name, offset].state, sizes=sizes))
        path = paths.get(name) if isinstance(paths, dict) else None
        yield tuple(map(str, path or (name,))), Stored(dtype, shape, tuple(pieces))


def _piece(
    url: str,
    name: str,
    offset: tuple[int, ...],
    shape: tuple[int, ...],
    info: Mapping[str, Any],
    sizes: Mapping[str, int],
) -> Piece:
    file, begin, length = info["relative_path"], info["offset"], info["length"]
    if info.get("transform_descriptors"):
        raise RefusedError(f"{plain(name)} is encoded with {plain(info['transform_descriptors'])}")
    if not isinstance(file, str) or "/" in file or "\\" in file or file in ("", ".", ".."):
        raise RefusedError(f"{plain(name)} lies in {plain(file)}, which is not a file beside it")
    if type(begin) is not int or type(length) is not int or begin < 0 or length < 1:
        raise RefusedError(f"{plain(name)} has an impossible place")
    if begin + length > sizes.get(file, -1):
        raise RefusedError(f"{plain(name)} lies in {plain(file)}, which is missing or cut off")
    return Piece(offset, shape, store.join(url, file), begin, contiguous(shape), packed=length)


def _dtype(properties: Any) -> str:
    """The name of the type; properties are pickled as a tuple, or as a dict by older versions."""
    state = properties.state
    dtype = state["dtype"] if isinstance(state, dict) else state[0]
    if dtype not in SIZES:
        raise RefusedError(f"it has tensors of {plain(dtype)}")
    return str(dtype)


def _sizes(value: Any) -> tuple[int, ...]:
    """Raises RefusedError unless the value is a list of sizes."""
    sizes = tuple(value or ())
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise RefusedError(f"{plain(value)} is not a list of sizes")
    return sizes
