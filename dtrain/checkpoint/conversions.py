"""Tensors of a Hugging Face folder that have other names, or lie in other pieces, than in the model of transformers: as
its own from_pretrained would rename, stack and join them, but as places of bytes, of which each rank reads its own.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from dtrain.model import configuration, own_class
from dtrain.weights import Piece, Stored, Weights, contiguous


def whole_of(model: nn.Module) -> nn.Module | None:
    """All of a model of transformers, of which `model` may be one stage, without memory; None if it is of others."""
    if configuration(model) is None:
        return None
    kind: Any = own_class(model)
    with torch.device("meta"):
        return cast(nn.Module, kind(model.config))


def described(config: Mapping[str, Any] | None) -> nn.Module | None:
    """The model of transformers with the config.json `config`, without memory; None if it has none."""
    if config is None:
        return None
    import transformers

    rest = {name: value for name, value in config.items() if name not in ("architectures", "model_type")}
    kind = getattr(transformers, str(config["architectures"][0]))
    with torch.device("meta"):
        return cast(nn.Module, kind(transformers.AutoConfig.for_model(config["model_type"], **rest)))


def can_untie(config: Mapping[str, Any]) -> bool:
    """Whether transformers heeds tie_word_embeddings=false in a config.json."""
    import transformers

    rest = {name: value for name, value in config.items() if name not in ("architectures", "model_type")}
    return not transformers.AutoConfig.for_model(config["model_type"], **rest).tie_word_embeddings


def converted(weights: Weights, whole: Any) -> Weights:
    """`weights` with the names and shapes that `whole`, a model of transformers, has for them. A conversion that is
    more than renaming, stacking and joining leaves its tensors as they are.
    """
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    except ImportError:  # before transformers 5, names are those of the model
        return weights
    transforms = get_model_conversion_mapping(whole)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    known, groups = dict.fromkeys(whole.state_dict(), True), defaultdict[str, dict[str, list[str]]](dict)
    tensors = dict[str, Stored]()
    for name in sorted(weights.tensors, key=_natural):
        target, pattern = rename_source_key(name, renamings, converters, whole.base_model_prefix, known)
        if pattern is None:
            tensors[target] = weights.tensors[name]
        else:
            groups[target].setdefault(pattern, []).append(name)
    for target, sources in groups.items():
        try:
            tensors |= _joined(target, sources, converters, weights.tensors)
        except ValueError:  # of another shape than the model's: they are listed as they are
            tensors |= {name: weights.tensors[name] for names in sources.values() for name in names}
    return replace(weights, tensors=tensors)


def _joined(
    target: str, sources: Mapping[str, list[str]], converters: Sequence[Any], tensors: Mapping[str, Stored]
) -> dict[str, Stored]:
    """The tensor that a converter makes of others. Raises ValueError if it does more than stack and join."""
    converter = next((each for each in converters if set(sources) <= set(each.source_patterns)), None)
    if converter is None:
        raise ValueError("several converters make it")
    steps = {type(each).__name__: each.dim for each in converter.operations if hasattr(each, "dim")}
    parts = [[tensors[name] for name in sources[each]] for each in converter.source_patterns if each in sources]
    if len(steps) == len(converter.operations) and set(steps) <= {"MergeModulelist", "Concatenate"}:
        if "MergeModulelist" in steps:
            parts = [[stack(each, steps["MergeModulelist"])] for each in parts]
        whole = [one for each in parts for one in each]
        if "Concatenate" in steps or len(whole) == 1:
            return {target: join(whole, steps.get("Concatenate", 0))}
    raise ValueError("it is more than stacked and joined")


def stack(parts: Sequence[Stored], dim: int) -> Stored:
    """As torch.stack. Raises ValueError unless all have the same shape and type, and so many dims."""
    _alike(parts, {part.shape for part in parts})
    pieces = tuple(_raised(piece, dim, index) for index, part in enumerate(parts) for piece in part.pieces)
    return Stored(parts[0].dtype, _with(parts[0].shape, dim, len(parts)), pieces)


def join(parts: Sequence[Stored], dim: int) -> Stored:
    """As torch.cat. Raises ValueError unless all have the same type, and shape but for `dim`."""
    _alike(parts, {(*part.shape[:dim], *part.shape[dim + 1 :]) for part in parts})
    if not 0 <= dim < len(parts[0].shape):
        raise ValueError(f"there is no dim {dim}")
    pieces, begin = list[Piece](), 0
    for part in parts:
        for piece in part.pieces:
            offset = (*piece.offset[:dim], piece.offset[dim] + begin, *piece.offset[dim + 1 :])
            pieces.append(replace(piece, offset=offset))
        begin += part.shape[dim]
    shape = parts[0].shape
    return Stored(parts[0].dtype, (*shape[:dim], begin, *shape[dim + 1 :]), tuple(pieces))


def _alike(parts: Sequence[Stored], shapes: set[tuple[int, ...]]) -> None:
    if len(shapes) != 1 or not parts or len({part.dtype for part in parts}) != 1:
        raise ValueError("tensors of several shapes or types cannot be one")


def _with(sizes: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    return (*sizes[:dim], size, *sizes[dim:])


def _raised(piece: Piece, dim: int, index: int) -> Piece:
    """The piece at `index` of a new dim."""
    offset, shape = _with(piece.offset, dim, index), _with(piece.shape, dim, 1)
    rows = piece.stride == contiguous(piece.shape)
    return replace(piece, offset=offset, shape=shape, stride=contiguous(shape) if rows else _with(piece.stride, dim, 1))


def _natural(name: str) -> list[tuple[int, str]]:
    """Layer 10 after layer 9."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"\.", name)]
