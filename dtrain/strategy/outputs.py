"""Makes the tensors of any output class visible to wrappers that search only tuples and mappings.

FSDP2 and DDP attach their backward hooks to the tensors of an output, and silently ignore those they cannot find, whose
gradients are then not reduced. `show`, a forward hook that runs before theirs, puts the fields of an object in a tuple;
`restore`, which runs after theirs, makes it an object again.
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
    """The mapping in which an object keeps its values."""
    fields: MutableMapping[Any, Any] = output if isinstance(output, MutableMapping) else getattr(output, "__dict__", {})
    return fields
