"""Collates samples: numbers of any kind become tensors, and rows of different lengths are padded.

    data.pad=0                              # shorter rows are padded: token 0, target -100 or NaN, attention_mask 0
    data.collate._target_=mypkg.collate     # a list of samples -> a batch with data.inputs and data.targets

Padded positions do not count in the loss, so it does not depend on which rows share a batch. Masks follow from the
lengths that rows had, never from a value: -100 may be a target of its own.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from numbers import Number
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dtrain.data import IGNORE, Batch
from dtrain.data.shift import next_targets
from dtrain.errors import WordsError
from dtrain.files.linekinds import EXACT

MASK = "attention_mask"
ZERO = (MASK, "decoder_attention_mask", "token_type_ids", "position_ids")
"""Inputs that are padded with 0, not with the padding token."""
TOKENS = "input_ids"
EACH = {MASK: TOKENS, "decoder_attention_mask": "decoder_input_ids", "token_type_ids": TOKENS}
"""Inputs that have an entry for each token, and the input that has the tokens."""
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.uint16, torch.uint32, torch.uint64)
FLOATS = (torch.float64, torch.float16, torch.bfloat16)
TARGETS = "targets"
Sizes = Mapping[str, Tensor]
"""The lengths of rows before they were padded, int64 [B]: `inputs` of the first input that has dims, `targets` of the
targets, if they are padded; empty if nothing is.
"""


def tensors(part: Any, name: str) -> Any:
    """The tensor of a number, an array or a list of numbers, or a mapping of them: floats become fp32, integers int64;
    uint8 images stay.

    Raises WordsError for anything else; `name` says which part of the data it is.
    """
    if isinstance(part, Mapping):
        return {key: tensors(value, f"{name} {key!r}") for key, value in part.items()}
    try:
        value = _tensor(part)
    except (ValueError, TypeError, RuntimeError) as error:
        raise WordsError(f"{name} is not an array of numbers: {error}.") from None
    if value is None:
        raise WordsError(f"{name} is {_described(part)}")
    if value.dtype == torch.uint64 and bool((value.long() < 0).any()):
        raise WordsError(f"{name} has a number above 2**63 - 1, the largest of int64.")
    if value.dtype in INTEGERS or (value.dtype == torch.uint8 and value.ndim < 2):
        return value.long()
    return value.float() if value.dtype in FLOATS else value


def check_range(made: Sequence[Any], given: Callable[[], Iterable[tuple[str, Any]]]) -> None:
    """Raises WordsError, with its name, if one of the `given` parts has a finite number that is infinite in fp32, as
    the tensors `made` of them have it. The parts are looked at only if a tensor has an infinity.
    """
    leaves = [leaf for part in made for _, leaf in _leaves(part)]
    if not any(leaf.is_floating_point() and bool(leaf.isinf().any()) for leaf in leaves):
        return
    for name, part in given():
        for _, leaf in _leaves(part):
            numbers = np.asarray(leaf, np.float64).ravel()
            odd = numbers[np.isfinite(numbers) & (np.abs(numbers) > torch.finfo().max)]
            if odd.size:
                raise WordsError(
                    f"{name} has {odd[0]}, which is too large for fp32 (up to {torch.finfo().max:.2g}). Scale it."
                )


def check_entries(inputs: Any, name: str, *, place: int = 0) -> None:
    """Raises WordsError, with the `name` of a sample, if a mask has not one entry for each token: padded, it would hide
    a token or show padding. `place`: the dimension of the tokens, 1 in a batch.
    """
    for mask, tokens in EACH.items():
        if isinstance(inputs, Mapping) and mask in inputs and tokens in inputs:
            have, want = (math.prod(inputs[each].shape[place : place + 1]) for each in (mask, tokens))
            if have != want:
                raise WordsError(
                    f"{name} {mask} has {have} entries and {tokens} has {want}. Write one for each token, or leave "
                    f"{mask} out of data.inputs."
                )


def check_some(inputs: Any, name: str) -> None:
    """Raises WordsError, with the `name` of a sample, if its first row has no entry: padded, it would be trained as a
    row of padding.
    """
    leaves = inputs.values() if isinstance(inputs, Mapping) else [inputs]
    if next((leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim), 1) == 0:
        raise WordsError(f"{name} has an empty row of inputs, which would be padding alone. Leave the sample out.")


def tree(change: Callable[..., Any], first: Any, *others: Any) -> Any:
    """Apply `change` to the leaves of nested mappings with the same keys."""
    if isinstance(first, Mapping):
        return {key: tree(change, item, *(other[key] for other in others)) for key, item in first.items()}
    return change(first, *others)


def stack(
    samples: Sequence[tuple[Any, Any]],
    *,
    pad: float | None,
    length: int | None,
    masks: Sequence[str] = (),
    fixed: Collection[str] | None = None,
) -> tuple[Any, Any, Sizes]:
    """Stack samples of tensors into (inputs, targets, sizes) of a batch; with `pad`, rows are padded to `length` or to
    the longest row.

    `masks`: those of MASKS that are created for samples without them. `fixed`: the parts that are never padded, as
    `fixed_of` names them; None: by these samples. Raises WordsError if shapes differ and cannot be padded.
    """
    inputs, targets = map(list, zip(*samples, strict=True))
    if pad is None:
        return tree(_stacked, *inputs), tree(_stacked, *targets), {}
    rows = [_row(each) for each in inputs]
    inputs = [_with_masks(each, masks, row) for each, row in zip(inputs, rows, strict=True)]
    fixed = fixed_of(inputs, targets) if fixed is None else fixed
    sizes = {"inputs": torch.tensor(rows)}
    if TARGETS not in fixed and isinstance(targets[0], Tensor) and targets[0].ndim:
        sizes[TARGETS] = torch.tensor([len(each) for each in targets])
    return _padded(inputs, length, pad, fixed), _padded(targets, length, IGNORE, fixed, TARGETS), sizes


def fixed_of(inputs: Sequence[Any], targets: Sequence[Any]) -> set[str]:
    """The names of parts that have one size in all of these samples while their rows do not have it."""
    sizes, rows = dict[str, list[int]](), [_row(each) for each in inputs]
    for part, name in ((inputs, ""), (targets, TARGETS)):
        for sample in part:
            for key, leaf in _leaves(sample, name):
                if leaf.ndim:
                    sizes.setdefault(key, []).append(len(leaf))
    return {
        name
        for name, each in sizes.items()
        if len({*each}) == 1 and each != rows and name.rpartition(".")[2] not in EACH
    }


def mask_of(sizes: Tensor, length: int) -> Tensor:
    """[B, length] bool: where rows of these sizes [B] have an entry."""
    return torch.arange(length) < sizes[:, None]


def batch_of(inputs: Any, targets: Any, sizes: Sizes, *, shift: bool, beside: str | None) -> Batch:
    """The batch of inputs and targets whose rows had these `sizes`, with the `target_mask` [B, T] of padded targets.
    `shift`: the targets become the next tokens. `beside`: there is an attention_mask, and an input that has no name
    gets this one.
    """
    batch = {"inputs": inputs if beside is None else _with_mask(inputs, sizes, beside), "targets": targets}
    if shift:
        return batch | {"targets": next_targets(batch)}
    if TARGETS in sizes:
        batch["target_mask"] = mask_of(sizes[TARGETS], targets.shape[1])
    return batch


def _with_mask(inputs: Any, sizes: Sizes, name: str) -> Any:
    named = inputs if isinstance(inputs, Mapping) else {name: inputs}
    rows = _first(named, 2)
    if MASK in named or "inputs" not in sizes or rows is None:
        return named
    return {**named, MASK: mask_of(sizes["inputs"], rows.shape[1]).long()}


def rounded(part: Any) -> float | None:
    """A whole number in a part of a sample that its tensor of fp32 would round; None if there is none."""
    if isinstance(part, Mapping):
        return next((odd for each in part.values() if (odd := rounded(each)) is not None), None)
    if not isinstance(part, float | list | tuple | np.ndarray | np.generic | Tensor):
        return None
    try:
        numbers = np.asarray(part)
    except (ValueError, TypeError, RuntimeError):  # no array of numbers, which is told elsewhere
        return None
    if numbers.dtype != np.float64 or not numbers.size or not np.abs(numbers).max() > EXACT:
        return None
    with np.errstate(over="ignore"):
        odd = numbers[(numbers == np.trunc(numbers)) & (numbers.astype(np.float32) != numbers)]
    return float(odd.flat[0]) if odd.size else None


def fractions_of(inputs: Any) -> frozenset[str]:
    """The names of the inputs that are fractions."""
    return frozenset(name for name, leaf in _leaves(inputs) if leaf.is_floating_point())


def as_fractions(part: Any, names: Collection[str], name: str = "") -> Any:
    """Inputs in which those of these names are fractions, where they are whole numbers."""
    if isinstance(part, Mapping):
        return {key: as_fractions(each, names, f"{name}.{key}") for key, each in part.items()}
    return part.float() if name in names and part.dtype == torch.int64 else part


def joined(parts: Sequence[Any], fill: float | None, name: str = "") -> Any:
    """One batch of numpy arrays from the `parts` of several processes; short rows are padded to the longest of all."""
    first = parts[0]
    if isinstance(first, Mapping):
        return {key: joined([part[key] for part in parts], fill, key) for key in first}
    longest = max(part.shape[1:2] for part in parts)
    if any(part.shape[1:2] != longest for part in parts):
        if fill is None:
            raise WordsError(
                "data.collate: the processes of data.workers return rows of different lengths. Also type "
                "data.pad=<the padding token>."
            )
        value = 0 if name in ZERO else fill
        value = math.nan if fill == IGNORE and first.dtype.kind == "f" else value
        parts = [
            np.pad(part, [(0, 0), (0, longest[0] - part.shape[1]), *[(0, 0)] * (part.ndim - 2)], constant_values=value)
            for part in parts
        ]
    return np.concatenate(parts)


def _tensor(value: Any) -> Tensor | None:
    """A tensor of the value; None if it has no numbers."""
    if np.ma.is_masked(value):
        return None
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        return torch.from_numpy(np.array(value, dtype=value.dtype.newbyteorder("=")))  # torch knows no other byte order
    if isinstance(value, Number) or _is_numbers(value):
        return torch.tensor(value)
    return value.detach() if isinstance(value, Tensor) else None


def _is_numbers(value: Any) -> bool:
    """Whether the value is a nested list or tuple of numbers."""
    if not isinstance(value, list | tuple) or not value:
        return False
    return isinstance(value[0], Number | np.generic) or _is_numbers(value[0])


def _described(value: Any) -> str:
    kind = type(value).__name__
    if isinstance(value, str | bytes):
        return f"text ({value[:20]!r}). Return numbers: encode it first."
    if hasattr(value, "getbands"):  # PIL
        return (
            f"an image ({kind}). Return an array of it, such as numpy.asarray(image, dtype='float32') / 255, or "
            "use ToTensor of torchvision."
        )
    if value is None:
        return (
            "None. Return a number; for a class or a token that does not count -100. objective=regression knows no "
            "such number: leave the sample out, or what is missing at the end of a row with data.pad."
        )
    if np.ma.is_masked(value):
        return "a masked array, whose hidden numbers would count as they are beneath. Return its filled(<a number>)."
    if isinstance(value, np.ndarray | np.generic):
        return f"an array of the type {value.dtype}. Return an array of numbers, such as float32 or int64."
    if isinstance(value, list | tuple) and not value:
        return f"an empty {kind}. Return at least one number."
    return f"a {kind}. Return several parts as a mapping, so that they have names, or one array of numbers."


def _stacked(*rows: Tensor) -> Tensor:
    shapes = {row.shape for row in rows}
    if len(shapes) > 1:
        one, other, *_ = sorted(map(list, shapes))
        raise WordsError(
            f"data.dataset: samples have the shapes {one} and {other}, but a batch needs one shape. "
            "Type data.pad=<the padding token> for rows of different lengths, or data.collate._target_=<your function>."
        )
    return torch.stack(rows)


def _row(inputs: Any) -> int:
    """The length of a sample's row: of its tokens, or of its first input that is not a scalar."""
    leaf = _first(inputs, 1)
    return 0 if leaf is None else len(leaf)


def _first(inputs: Any, dims: int) -> Tensor | None:
    """The tokens, or the first input with so many dims."""
    if not isinstance(inputs, Mapping):
        return inputs if isinstance(inputs, Tensor) and inputs.ndim >= dims else None
    leaves = (inputs.get(TOKENS), *inputs.values())
    return next((leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim >= dims), None)


def _leaves(part: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a part of a sample, by name."""
    if isinstance(part, Mapping):
        for key, each in part.items():
            yield from _leaves(each, f"{name}.{key}")
    else:
        yield name, part


def _with_masks(inputs: Any, masks: Sequence[str], row: int) -> Any:
    """The inputs of a sample with the masks that it lacks: ones for each token."""
    lacking = [name for name in masks if name not in inputs]
    sizes = {name: len(inputs[EACH[name]]) if EACH[name] in inputs else row for name in lacking}
    ones = {name: torch.ones(size, dtype=torch.int64) for name, size in sizes.items()}
    return {**inputs, **ones} if ones else inputs


def _padded(column: Sequence[Any], length: int | None, fill: float, fixed: Collection[str], name: str = "") -> Any:
    """Stack one part of the samples; rows that are not `fixed` are padded, to `length` if given."""
    if isinstance(column[0], Mapping):
        return {
            key: _padded([each[key] for each in column], length, 0 if key in ZERO else fill, fixed, f"{name}.{key}")
            for key in column[0]
        }
    if not column[0].ndim or name in fixed:
        return _stacked(*column)
    sizes = [len(each) for each in column]
    longest = max(sizes) if length is None else length
    if longest < max(sizes):
        raise WordsError(
            f"data.length={length}: a row has {max(sizes)} entries. Type data.length={max(sizes)}, or cut the rows."
        )
    if fill == IGNORE and any(each.is_floating_point() for each in column):
        if name != TARGETS and min(sizes) < longest:
            raise WordsError(
                f"data.pad: {name} are floats, and of several targets floats cannot be marked as not counting. Return "
                "rows of one length."
            )
        column, fill = [each.float() for each in column], math.nan
    return _stacked(*(F.pad(each, [*[0, 0] * (each.ndim - 1), 0, longest - len(each)], value=fill) for each in column))
