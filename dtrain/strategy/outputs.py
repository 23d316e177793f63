"""Outputs of any class, shown to wrappers that look for tensors in tuples and mappings alone.

FSDP2 and DDP hang their backward on the tensors of an output. What they do not find they leave out without a word:
gradients then stay on their rank. `show`, a forward hook that runs before theirs, puts an object's fields in a tuple;
`restore`, which runs after, makes the object again.
"""

from collections.abc import MutableMapping
from copy import copy
from typing import Any, NamedTuple

from torch import Tensor, nn


class Shown(NamedTuple):
    fields: dict[Any, Any]
    made: Any


def show(module: nn.Module, arguments: Any, output: Any) -> Any:
    if isinstance(output, Tensor | list | tuple) or type(output) is dict or not _fields(output):
        return output
    return Shown(dict(_fields(output)), output)


def restore(module: nn.Module, arguments: Any, output: Any) -> Any:
    if not isinstance(output, Shown):
        return output
    made = copy(output.made)
    fields = _fields(made)
    for key, value in output.fields.items():  # Hugging Face's outputs refuse `update`
        fields[key] = value
    return made


def _fields(output: Any) -> MutableMapping[Any, Any]:
    """Where an object keeps its values."""
    found: MutableMapping[Any, Any] = output if isinstance(output, MutableMapping) else getattr(output, "__dict__", {})
    return found
