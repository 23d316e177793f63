"""Which tensors of a checkpoint are the weights, and what they are called here."""

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import yaml

from dtrain.errors import nearest
from dtrain.storage import store
from dtrain.weights import ForeignError, Stored, plain

WRAPPERS = ("module.", "_orig_mod.")
"""Prefixes that DistributedDataParallel and torch.compile give to all names."""
STATE_DICTS = ("state_dict", "model_state_dict", "model", "module", "weights", "net", "network")
"""Usual names of the weights in a dict that holds more, such as the state of an optimizer."""
TABLE_BYTES = 16 << 20
EXAMPLE = (
    "Type init_names={'transformer.*': 'model.*', 'lm_head.bias': null}, or the URL of a YAML file with such lines"
)

Table = tuple[tuple[re.Pattern[str], str | None], ...]


def weights_in(url: str, tensors: Mapping[tuple[str, ...], Stored]) -> dict[str, Stored]:
    """The tensors of the state dict in a checkpoint, by name: those in the dict with one of the usual names, or else
    those at the top level. Raises ForeignError if there is none, or several.
    """
    dicts: set[tuple[str, ...]] = {path[:-1] for path in tensors}
    named = [path for name in STATE_DICTS for path in sorted(dicts) if path and path[-1] == name]
    first = [path for path in named if len(path) == 1]
    alone = [next(iter(dicts))] if len(dicts) == 1 else []
    top = [path for path in dicts if not path]
    chosen = (first or top or sorted(named, key=len) or alone)[:1]
    if not chosen:
        there = ", ".join(sorted({plain(path[0], 40) for path in dicts})[:5])
        cause = (
            "it has no tensors" if not dicts else f"its tensors are in {there}, and none is called as a state dict is"
        )
        hint = f"Save one with torch.save(<the state dict>, <file>), or call it {STATE_DICTS[0]}"
        raise ForeignError.during("find the weights in", url, cause, hint)
    length = len(chosen[0])
    return {".".join(path[length:]): tensor for path, tensor in tensors.items() if path[:-1] == chosen[0]}


def table(given: Any) -> Table:
    """The patterns of `init_names`: a mapping, or the URL of a YAML or JSON file with one. Each maps names of the
    checkpoint to names of the model: `*` stands for any text, in order on both sides; null leaves a tensor out. The
    first that matches counts. Raises StoreError.
    """
    if given is None:
        return ()
    where = given if isinstance(given, str) and not given.startswith("{") else "init_names"
    patterns = _parsed(where, given) if isinstance(given, str) else given
    if not isinstance(patterns, Mapping):
        cause = "it is not a mapping from their names to those of the model"
        raise ForeignError.during("read", where, cause, EXAMPLE)
    return tuple(_rule(where, theirs, ours) for theirs, ours in patterns.items())


def held(given: Any) -> Any:
    """The value of `init_names` without the URL of a file, which may change: the mapping in it."""
    return _parsed(given, given) if isinstance(given, str) else given


def renamed(names: Iterable[str], rules: Table) -> tuple[dict[str, str], list[str]]:
    """(our name -> theirs, what is wrong with the table) for names of a checkpoint."""
    ours, used, faults = dict[str, str](), set[int](), list[str]()
    for name in names:
        new: str | None = name
        for number, (pattern, target) in enumerate(rules):
            if match := pattern.fullmatch(name):
                used.add(number)
                new = None if target is None else _filled(target, match.groups())
                break
        if new in ours:
            faults.append(f"{ours[new]} and {name} both become {new}")
        elif new is not None:
            ours[new] = name
    idle = [pattern.pattern.replace("(.*)", "*").replace("\\", "") for number, (pattern, _) in enumerate(rules)
            if number not in used]  # fmt: skip
    return ours, [*faults, *(f"{pattern} matches no name there that an earlier line leaves" for pattern in idle)]


def unwrapped(theirs: Mapping[str, str]) -> dict[str, str]:
    """`theirs` without the prefixes of wrappers of torch, if all names have them."""
    names = dict(theirs)
    while prefix := next((each for each in WRAPPERS if names and all(name.startswith(each) for name in names)), ""):
        names = {name.removeprefix(prefix): source for name, source in names.items()}
    return names


def without_prefix(theirs: Mapping[str, str], wanted: Collection[str]) -> dict[str, str]:
    """`theirs` without the prefix that all names of the model have there, such as `model.` or `module.`, if that gives
    more of the `wanted` names than no prefix does.
    """
    counts = Counter[str]()
    for name in theirs:
        parts = name.split(".")
        for cut in range(len(parts)):
            if ".".join(parts[cut:]) in wanted:
                counts[".".join([*parts[:cut], ""])] += 1
    best = max(counts.values(), default=0)
    if not best or counts[""] == best:
        return dict(theirs)
    prefix = min(prefix for prefix, count in counts.items() if count == best)
    return {name.removeprefix(prefix): source for name, source in theirs.items()}


def listed(what: str, names: Collection[str]) -> list[str]:
    """One text with the first three of these names and their number; none if there are none."""
    some = sorted(names)
    more = f" and {len(some) - 3} more" if len(some) > 3 else ""
    return [f"{what} ({len(some)}): {', '.join(map(plain, some[:3]))}{more}"] if some else []


def hint(missing: Collection[str], left: Collection[str]) -> str:
    """A table to type: for the first name that is missing the one left over that is most like it, or null."""
    if not missing:
        return f"Type init_names={{'{plain(min(left))}': null, ...}} for what the model does not need"
    name, near = min(missing), nearest(min(missing), left)
    theirs = plain(near.removeprefix(" Did you mean ").rstrip("?")) if "Did you mean" in near else "<its name there>"
    return f"Type init_names={{'{theirs}': '{name}', ...}}, or the URL of a YAML file with such lines"


def _parsed(where: str, given: str) -> Any:
    """The table in a text that is one, or in the file at a URL."""
    data = store.small(given, TABLE_BYTES) if where == given else given.encode()
    try:
        return json.loads(data) if where.endswith(".json") else yaml.safe_load(data)
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        cause = f"it is neither YAML nor JSON ({plain(str(error).splitlines()[0])})"
        raise ForeignError.during("read", where, cause, EXAMPLE) from error


def _rule(where: str, theirs: Any, ours: Any) -> tuple[re.Pattern[str], str | None]:
    line = f"{str(theirs)[:80]}: {str(ours)[:80]}"
    if not isinstance(theirs, str) or not isinstance(ours, str | None):
        raise ForeignError.during("read", where, f"{line} does not map a name to a name, or to null", EXAMPLE)
    if ours is not None and ours.count("*") > theirs.count("*"):
        raise ForeignError.during("read", where, f"{line} has more * than the name that it replaces", EXAMPLE)
    return re.compile("(.*)".join(map(re.escape, theirs.split("*"))), re.DOTALL), ours


def _filled(target: str, groups: tuple[str, ...]) -> str:
    """`target` with each * replaced by what the * of the pattern stood for."""
    parts = target.split("*")
    return parts[0] + "".join(group + part for group, part in zip(groups, parts[1:], strict=False))
