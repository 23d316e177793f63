"""Checks a run with a loop of the user's own: words that only the loop can act on must occur in its source."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from dtrain.cluster import Cluster
from dtrain.config.facts import fact
from dtrain.config.schema import GROUPS, WORDS, Config, default
from dtrain.config.trust import allowed
from dtrain.config.word import spelling
from dtrain.errors import nearest
from dtrain.resolve.signature import Missing, home_of, search_folders, signature
from dtrain.resolve.source import file_of, module_of

READ_AS: Mapping[str, tuple[str, ...]] = {
    "clip": ("clip",), "ema": ("ema",), "init": ("init",), "init_names": ("init_names",), "fork": ("fork",),
    "on_spike": ("on_spike",),
    "spike.sigma": ("spike",), "spike.window": ("spike",), "stop_after": ("stop_after", "last_step"),
    "time_limit": ("time_limit", "stop_seconds"), "grace": ("grace", "stop_seconds"), "log.every": ("log_every",),
    "evaluate.every": ("evaluate_every",), "evaluate.samples": ("evaluate_samples",),
    "evaluate.metrics": ("evaluate_metrics",), "stop.metric": ("stop",),
    "evaluate.sets": ("evaluate_sets",), "logger": ("loggers",),
    "hook": ("hooks",),
}  # fmt: skip
"""Key that only a loop acts on -> the attributes of the Plan that hold its value."""
ATTRIBUTE = re.compile(r"(?:\.\s*|[\"'])(\w+)")
"""An attribute in Python source, or its name as text for `getattr`."""
PREPARES = "dtrain.loop.assemble"
"""It makes the average of the weights and the stream for any loop; what it reads, the loop may still ignore."""


def words(config: Config, cluster: Cluster, draft: Mapping[str, Any]) -> Iterable[str]:
    """Refuse a loop that is not in its module, and words that the loop does not read."""
    loop = config.loop
    if loop == default("loop") or not allowed(loop, "loop", config.trust):
        return
    named = signature(loop)
    if isinstance(named, Missing):
        yield f"loop={loop}: {named.module} has no {named.name}.{nearest(named.name, named.others)}"
        return
    text = source(loop, tuple(config.trust))
    if not text or _calls_ours(text):
        return
    names = set(ATTRIBUTE.findall(text))
    unread = {
        f"{key}={spelling(value)}": f"plan.{attributes[0]}"
        for key, attributes in READ_AS.items()
        if names.isdisjoint(attributes) and _is_typed(config, key) and (value := _value(config, key))
    }
    if unread:
        yield (
            f"loop={loop} does not read {', '.join(unread)}, and only a loop can act on that. Leave it out, or read "
            f"{', '.join(dict.fromkeys(unread.values()))} in the loop."
        )
    if fact(draft["precision"], "scale") and names.isdisjoint(("scale", "scaled_by")):
        yield (
            f"precision={config.word('precision')}: gradients are multiplied by a loss scale, and loop={loop} does "
            "not read parts.precision.scale. Type precision=bf16."
        )


def writes_rows(loop: str, trusted: tuple[str, ...]) -> bool:
    """Whether a loop is dtrain's, or calls it, as far as its source shows."""
    text = source(loop, trusted)
    return loop == default("loop") or not text or _calls_ours(text)


def _calls_ours(text: str) -> bool:
    return "dtrain.train" in text or bool(re.search(r"from dtrain import [^\n]*\btrain\b", text))


def source(loop: str, trusted: tuple[str, ...]) -> str:
    """The source of the module of a loop and of the modules that it imports: those of trusted packages or beside it,
    with what these import, and dtrain's own. Empty if it cannot be found.
    """
    paths, texts, seen = search_folders(), list[str](), {"", "dtrain", PREPARES}
    home = home_of(loop)
    waiting = [home]
    while waiting:
        name = waiting.pop()
        module = None if name in seen else module_of(name, paths)
        seen.add(name)
        if module is None or not (name.startswith("dtrain.") or _is_own(name, home, trusted)):
            continue
        texts.append(module.path.read_text(encoding="utf-8", errors="replace"))
        if not name.startswith("dtrain."):
            for origin, inner in module.imported.values():
                waiting += [origin, f"{origin}.{inner}"]
    return "\n".join(texts)


def _is_own(name: str, home: str, trusted: tuple[str, ...]) -> bool:
    """Whether a module is the user's own: in the package of `home`, in a trusted one, or in a folder beside it."""
    top, paths = name.split(".")[0], search_folders()
    here, there = (file_of(module.split(".")[0], paths) for module in (name, home))
    beside = here and there and here.parent == there.parent and here.parent.name != "site-packages"
    return bool(beside) or top in (home.split(".")[0], *trusted)


def _value(config: Config, key: str) -> Any:
    top, _, name = key.partition(".")
    value = config.choices[top] if top in GROUPS else getattr(config, top)
    return getattr(value, name) if name else value


def _is_typed(config: Config, key: str) -> bool:
    """Whether the words or a recipe set a key to another value than its default."""
    usual = WORDS[key] if key in GROUPS else default(key)
    return key in config.sources and _value(config, key) != usual
