"""The config of a W&B sweep becomes a recipe with a space: https://docs.wandb.ai/guides/sweeps/sweep-config-keys

    dtrain import sweep.yaml to=mine.yaml        then: dtrain -m recipe=mine.yaml model=... data=...

A parameter is an argument of somebody's own program. It is carried over where its name is a key of dtrain, or the name
that other tools have for one.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from dtrain.config import files
from dtrain.config.elsewhere import OURS
from dtrain.config.schema import ALLOWED, GROUPS, LISTS, WORDS, of_scope
from dtrain.config.word import spelling
from dtrain.integrations.importers.ledger import Ledger, Rule, count, flatten, names, number, show
from dtrain.integrations.importers.rules import ODD, chosen, refused, says, table, to, unneeded
from dtrain.integrations.importers.terms import DEFAULTS

TITLE = "a W&B sweep"
MARKS = names("method metric parameters early_terminate run_cap distribution goal entity")
SILENT = ("model", "data", "objective", "steps")
SPACE = "sweep.space."
OWN = ("model", "data", "objective")
"""Groups whose argument is not given another name, as a class of your own may take it."""
MOST = 200
"""The most multiples of q that are listed."""
ROUNDING = 1e-9


def translate(ledger: Ledger) -> None:
    _metric(ledger)
    if ledger.leaves.get("early_terminate.type") == "hyperband":
        ledger.imply({"sweep.factor": 3}, "W&B's default of eta")
        for key, rule in HYPERBAND.items():
            ledger.settle(rule, key)
    parameters = ledger.tree.get("parameters")
    if isinstance(parameters, Mapping):
        for base, name, spec in sorted(_flat(parameters), key=lambda one: _word(one[1]) not in GROUPS):
            _parameter(ledger, base, name, spec)
        _drop_foreign(ledger)
    ledger.apply(RULES)
    if ledger.words.get("sweep.search") in ("random", "tpe") and "sweep.trials" not in ledger.words:
        ledger.ask("sweep.trials", "number of jobs")


HELD_OUT = ("val", "valid", "validation", "eval", "test", "dev")
FIGURES = dict.fromkeys(("loss", "train_loss", "training_loss"), "loss") | {
    f"{prefix}_{theirs}": f"eval_{ours}"
    for prefix in HELD_OUT
    for theirs, ours in (("loss", "loss"), ("acc", "accuracy"), ("accuracy", "accuracy"), ("perplexity", "perplexity"))
}
"""Name of a metric, in lower case and joined by _ -> dtrain's."""


def _metric(ledger: Ledger) -> None:
    name = ledger.leaves.get("metric.name")
    if name is None:
        return
    figure = FIGURES.get("".join(letter if letter.isalnum() else "_" for letter in str(name).lower()))
    if figure:
        ledger.carry("metric.name", {"sweep.metric": figure})
    else:
        ledger.refuse(
            "metric.name",
            "your program logs it. Type sweep.metric=eval_loss, eval_accuracy, or eval_<name> for a metric of your "
            "objective or hook.",
        )
        ledger.ask("sweep.metric", "metric of dtrain")


# parameters: their names


def _flat(parameters: Mapping[str, Any], above: str = "", place: str = "parameters") -> Iterator[tuple[str, str, Any]]:
    """(key in the file, name, settings) of each parameter; one inside another has that one's name before its own."""
    for name, spec in parameters.items():
        if isinstance(spec, Mapping) and isinstance(spec.get("parameters"), Mapping):
            yield from _flat(spec["parameters"], f"{above}{name}.", f"{place}.{name}.parameters")
        else:
            yield f"{place}.{name}", f"{above}{name}", spec


def _arguments() -> list[str]:
    """`<group>.<argument>` of every word that takes it."""
    return [
        f"{group}.{name}"
        for group in GROUPS
        if group not in LISTS
        for word in files.groups()[group]
        for name in files.node(group, word)
        if name[0] != "_"
    ]


def _word(name: str) -> str:
    """The key of dtrain that a parameter's name means; empty if there is none."""
    arguments = _arguments()
    keys = {
        key
        for key in (*arguments, *ALLOWED, *GROUPS)
        if key.split(".")[0] not in (*of_scope("typed"), "sweep", "requires", "expect", "verify", "generate")
    }
    first, _, rest = name.partition(".")
    if rest and first in OWN and name not in keys:  # of a class of your own
        return name
    leaf = name.rpartition(".")[2].lower()
    by_leaf = {f"{group}.{leaf}" for group in ("model", "optim", "schedule")}.intersection(arguments)
    known = [name, OURS.get(name.lower()), f"{OURS.get(first, first)}.{rest}", OURS.get(leaf)]
    known += by_leaf if len(by_leaf) == 1 else []
    return next((key for key in known if key in keys), "")


# parameters: their values


def _parameter(ledger: Ledger, base: str, name: str, spec: Any) -> None:
    keys = [key for key, _ in flatten(spec, base)]
    settings = {key.removeprefix(f"{base}."): ledger.leaves[key] for key in keys}
    word = _word(name)
    if not word:
        leaf = name.rpartition(".")[2]
        instead = f"model.{leaf}" if leaf.isidentifier() else "its name here"
        ledger.settle(
            refused(f"dtrain has no word of this name. If your model takes it, add {instead} to sweep.space."), *keys
        )
        return
    try:
        value, used = _drawn(settings, is_grid=ledger.tree.get("method") == "grid")
        value = _named(word, value) if word in GROUPS else value
        if any("${" in str(item) for item in (value if isinstance(value, list) else [value])):
            raise ValueError("a reference")
    except ValueError as error:
        ledger.settle(refused(f"{error}. Type {word}=<values> with -m, or add them to sweep.space."), *keys)
        return
    is_single = used == {"value"} and f"{SPACE}{word.split('.')[0]}" not in ledger.words
    note = "" if name == word else f"its name in other tools: check that {name} means the same"
    for key in keys:
        setting = key.removeprefix(f"{base}.")
        if setting in used or setting == "distribution":
            ledger.carry(key, {word if is_single else f"{SPACE}{word}": value}, note)
        elif setting == "probabilities":
            alike = isinstance(settings[setting], list) and len(set(settings[setting])) == 1
            ledger.settle(unneeded("all are equal") if alike else refused("each value is equally probable here."), key)
        elif setting == "q":
            ledger.refuse(key, "values of an interval are not rounded to multiples; with a whole q they are integers.")
        elif setting in SETTINGS:
            ledger.skip(key, "its distribution does not use it")
        else:
            ledger.refuse(key, f"{TITLE} has no such setting of a parameter. Remove it, or look up its current name.")


SETTINGS = names("distribution values value probabilities min max mu sigma q a b")


def _drawn(settings: Mapping[str, Any], *, is_grid: bool) -> tuple[Any, set[str]]:
    """A list of values, the text of an interval, or one value; and the settings that say it. Raises ValueError."""
    kind = settings.get("distribution") or _implied(settings)
    if kind == "constant":
        return settings.get("value"), {"value"}
    if kind in ("categorical", "categorical_w_probabilities"):
        values = settings.get("values")
        if not isinstance(values, list) or not values:
            raise ValueError("a list of values is missing")
        return values, {"values"}
    if not isinstance(kind, str) or kind not in INTERVALS:
        raise ValueError(f"dtrain does not draw from the distribution {show(kind)}")
    low, high = (_bound(settings, name) for name in ("min", "max"))
    if not low < high:
        raise ValueError(f"min is {low:g}, which is not less than max, {high:g}")
    listed = _multiples(kind, low, high, settings)
    if listed:
        return listed, {"min", "max", "q"}
    if is_grid and kind == "int_uniform":
        return f"range({math.ceil(low)},{math.floor(high) + 1})", {"min", "max"}
    if is_grid:
        raise ValueError("a grid tries all values, and an interval has no end of them")
    return INTERVALS[kind](low, high, settings.get("q")), {"min", "max"}


def _implied(settings: Mapping[str, Any]) -> str:
    """The distribution that W&B takes where none is named."""
    if "values" in settings:
        return "categorical"
    if "value" in settings:
        return "constant"
    if {"min", "max"} <= settings.keys():
        return "int_uniform" if all(type(settings[name]) is int for name in ("min", "max")) else "uniform"
    raise ValueError("it has neither values, nor a value, nor min and max")


def _bound(settings: Mapping[str, Any], name: str) -> float:
    try:
        return number(settings.get(name))
    except ValueError as error:
        raise ValueError(f"{name} is {error}") from error


def _multiples(kind: str, low: float, high: float, settings: Mapping[str, Any]) -> list[int | float]:
    """The multiples of q from low to high, for a distribution in which each is equally probable."""
    if kind != "q_uniform":
        return []
    step = settings.get("q", 1)
    if number(step) <= 0 or not low <= high or (high - low) / step > MOST:
        raise ValueError(f"its multiples of q are none, or more than {MOST}")
    first, last = math.ceil(low / step - ROUNDING), math.floor(high / step + ROUNDING)
    multiples = [float(f"{step * index:.12g}") for index in range(first, last + 1)]
    return [int(value) for value in multiples] if isinstance(step, int) else [*multiples]


def _interval(low: float, high: float, *, log: bool = False, whole: bool = False) -> str:
    """The text of an interval. Raises ValueError if it has no numbers that may be drawn."""
    if log and low <= 0:
        raise ValueError(f"min is {low:g}, and its logarithm is drawn")
    if whole and math.ceil(low) >= math.floor(high):
        raise ValueError(f"from {low:g} to {high:g} there are no two integers")
    if whole:
        text = f"interval({math.ceil(low)},{math.floor(high)})"
        text = text if log else f"int({text})"
    else:
        text = f"interval({spelling(float(low))},{spelling(float(high))})"
    tags = ",".join(["int"] * (whole and log) + ["log"] * log)
    return f"tag({tags},{text})" if tags else text


def _exponential(low: float, high: float, q: Any) -> str:
    if max(abs(low), abs(high)) > 80:
        raise ValueError("min and max are exponents of e, and these are too large")
    return _interval(math.exp(low), math.exp(high), log=True, whole=type(q) is int)


INTERVALS: Mapping[str, Callable[[float, float, Any], str]] = {
    "uniform": lambda low, high, q: _interval(low, high),
    "int_uniform": lambda low, high, q: _interval(low, high, whole=True),
    "q_uniform": lambda low, high, q: _interval(low, high),
    "log_uniform_values": lambda low, high, q: _interval(low, high, log=True),
    "q_log_uniform_values": lambda low, high, q: _interval(low, high, log=True, whole=type(q) is int),
    "log_uniform": lambda low, high, q: _exponential(low, high, None),
    "q_log_uniform": lambda low, high, q: _exponential(low, high, q),
}
"""Distribution between min and max -> the text of its interval, given q."""


def _named(group: str, value: Any) -> Any:
    """Words of a group by the names that W&B's users have for them. Raises ValueError."""
    values = value if isinstance(value, list) else [value]
    meant = [DEFAULTS.get(str(item).lower(), (item,))[0] if group == "optim" else item for item in values]
    unknown = [item for item in meant if item not in files.groups()[group]]
    if unknown:
        raise ValueError(f"there is no {group} {show(unknown[0])}; there are {', '.join(files.groups()[group])}")
    words = list(dict.fromkeys(meant))
    return words if isinstance(value, list) else words[0]


def _drop_foreign(ledger: Ledger) -> None:
    """Refuse arguments that no word of their group in this sweep takes."""
    for word in [word for word in ledger.words if word.startswith(SPACE)]:
        group, _, name = word.removeprefix(SPACE).partition(".")
        if not name or group not in GROUPS:
            continue
        choices = ledger.words.get(f"{SPACE}{group}") or [ledger.words.get(group, WORDS[group])]
        having = [other for other in files.groups()[group] if name in files.node(group, other)]
        if having and not any(name in files.node(group, choice) for choice in choices if choice != "auto"):
            values = ledger.words[word]
            typed = ",".join(map(show, values)) if isinstance(values, list) else values
            ledger.withdraw(
                word,
                f"{group}={choices[0]} does not take it. Type {group}={having[0]} {group}.{name}={typed} with -m.",
            )


# the rest

COMMAND = names("${env} ${interpreter} ${program} ${args} ${args_no_hyphens} ${args_no_boolean_flags} ${args_json}")


def _command(ledger: Ledger, key: str, value: Any) -> None:
    items: Sequence[Any] = value if isinstance(value, list) else [value]
    own = [show(item) for item in items if str(item) not in COMMAND and str(item) not in ("python", "python3")]
    own = [item for item in own if item != ledger.leaves.get("program") and not item.endswith(".py")]
    if own:
        ledger.refuse(key, f"a job is a run of dtrain. Type the words that mean the same as {' '.join(own)}.")
    else:
        ledger.skip(key, "a job is a run of dtrain")


def _factor(value: Any) -> int:
    if count(value) < 2:
        raise ValueError("an integer >= 2")
    return count(value)


HYPERBAND = table(
    {
        "early_terminate": {
            "type": says({"sweep.stop": "halving"}),
            "eta": to("sweep.factor", _factor),
            "min_iter": refused("it counts what your program logs. Type sweep.rung=<steps> if auto is not right."),
            "max_iter s strict": unneeded(
                "each rung is sweep.factor times as long as the one before, up to the last step"
            ),
        }
    }
)
OUT = unneeded("a sweep is a folder, anywhere: sweep.out=<folder or URL>")
OWN_PROGRAM: Rule = unneeded(
    "dtrain does not read your own program. It runs its own loop, or yours: loop=<yours> trust=[<its package>]"
)
RULES = table(
    {
        "method": chosen(
            {
                "grid": says({"sweep.search": "grid"}),
                "random": says({"sweep.search": "random"}),
                "bayes": says({"sweep.search": "tpe"}, "needs pip install 'dtrain[optuna]'"),
            },
            refused("type sweep.search=random, tpe or another one: dtrain help sweep lists them."),
        ),
        "metric.goal": chosen(
            {"minimize": says({"sweep.goal": "min"}), "maximize": says({"sweep.goal": "max"})}, refused(ODD)
        ),
        "metric.target": refused(
            "a sweep does not end at a value. Type sweep.time_limit=3:00:00, or stop it yourself."
        ),
        "run_cap": to("sweep.trials", count),
        "command": _command,
        "program": OWN_PROGRAM,
        "name project entity": OUT,
        "description": unneeded("a comment"),
        "version controller.type": unneeded("dtrain runs the sweep itself"),
        "job image_uri imageuri queue settings.**": refused(
            "where jobs run is given where they are started. Type dtrain sweep work <sweep.out> on each host."
        ),
        "parameters parameters.** metric early_terminate early_terminate.**": refused(ODD),
    }
)
