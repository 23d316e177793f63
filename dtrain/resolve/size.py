"""How large a model is, by arithmetic on its arguments: parameters, blocks, and what the backward keeps. No torch.

Of the models of this package; one of the user's own is not known before it is built.
"""

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Size:
    """`parameters` in all, in `blocks` equal blocks for the most part. `kept`: numbers that the backward needs of one sample; `width`: of
    them, what crosses from block to block; `work`: multiply-adds of one sample's forward.
    """

    parameters: int
    blocks: int
    kept: int
    width: int
    work: int


def size_of(word: str | None, part: Mapping[str, Any], data: Mapping[str, Any], facts: Mapping[str, Any]) -> Size | None:
    """None for a model that is not known, or whose arguments are not numbers. `facts`: what `auto` stands for, as far as the data's word says."""
    formula = FORMULAS.get(word or "")
    if formula is None:
        return None
    try:
        return formula({name: facts.get(name, 256) if value == "auto" else value for name, value in part.items()}, data)
    except (TypeError, KeyError, ZeroDivisionError):  # wrong arguments are told by others
        return None


def gpt(part: Mapping[str, Any], data: Mapping[str, Any]) -> Size:
    C, L, V, T = part["width"], part["layers"], part["vocab"], data.get("sequence") or 1024
    kv = C // part["heads"] * (part["kv_heads"] or part["heads"])
    hidden = part["hidden"] or 64 * math.ceil(C * 8 / 3 / 64)
    block = 2 * C * C + 2 * C * kv + 3 * C * hidden + 2 * C
    ends = V * C * (1 if part["tied"] else 2) + C
    kept = T * (L * (8 * C + 4 * kv + 4 * hidden) + 2 * C + 3 * V)
    return Size(block * L + ends, L, kept, T * C, T * (block * L + V * C + L * T * C))


def moe(part: Mapping[str, Any], data: Mapping[str, Any]) -> Size:
    C, L, E, K, shared = part["width"], part["layers"], part["experts"], part["active"], part["shared"]
    hidden = part["hidden"] or 64 * math.ceil(C * 8 / 3 / (K + shared) / 64)
    dense = gpt({**part, "hidden": hidden * (K + shared)}, data)
    more = 3 * C * hidden * (E - K) + C * E
    return Size(dense.parameters + L * more, L, dense.kept, dense.width, dense.work)


def mlp(part: Mapping[str, Any], data: Mapping[str, Any]) -> Size:
    inputs = part["inputs"] if isinstance(part["inputs"], int) else math.prod(part["inputs"])
    sizes = [inputs, *[part["width"]] * part["layers"], part["outputs"]]
    weights = sum(a * b for a, b in itertools.pairwise(sizes))
    return Size(weights + sum(sizes[1:]), max(1, part["layers"]), 3 * sum(sizes), part["width"], weights)


FORMULAS: Mapping[str, Callable[[Mapping[str, Any], Mapping[str, Any]], Size]] = {"gpt": gpt, "moe": moe, "mlp": mlp}
