"""Values as JSON may hold them, for files and for other tools."""

import math
from collections.abc import Mapping
from typing import Any

from dtrain.secrets import redact_tree


def clean(value: Any) -> Any:
    """`value` with secrets masked, and with null for numbers that JSON does not have."""
    return _finite(redact_tree(value))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return {key: _finite(item) for key, item in value.items()} if isinstance(value, Mapping) else value
