"""The trackers of other tools as words of `logger`, each of which adds to those that other keys of a file name."""

from collections.abc import Mapping
from typing import Any

from dtrain.integrations.importers.ledger import Code, Ledger, Rule, text
from dtrain.integrations.importers.rules import OFF, lacking, refused, says, switched, unneeded, unread, when

WORDS: Mapping[str, str] = {
    "wandb": "wandb", "wandblogger": "wandb", "mlflow": "mlflow", "mlflowlogger": "mlflow", "comet": "comet",
    "comet_ml": "comet", "cometlogger": "comet", "cometmllogger": "comet", "trackio": "trackio", "aim": "aim",
    "aimlogger": "aim", "csv": "csv", "csvlogger": "csv", "tensorboard": "tensorboard",
    "tensorboardlogger": "tensorboard",
}  # fmt: skip
"""Name in another tool, in lower case -> word."""
ARGUMENTS: Mapping[str, Mapping[str, str]] = {
    "wandb": {"project": "project", "entity": "entity", "name": "name", "group": "group", "tags": "tags"},
    "mlflow": {"experiment_name": "experiment", "run_name": "name", "tracking_uri": "uri"},
    "comet": {
        "project": "project", "project_name": "project", "workspace": "workspace", "name": "name",
        "experiment_name": "name",
    },
    "trackio": {"project": "project"},
    "aim": {"repo": "repo", "experiment": "experiment", "run_name": "name"},
}  # fmt: skip
"""Word -> argument of its logger in other tools -> ours."""
OTHER = (
    "there are the loggers console, tensorboard, wandb, mlflow, trackio, aim, comet and csv. Type logger=[console] and "
    "those you want; one of your own is logger.mine._target_=<yours> trust=[<its package>]."
)
KEY = lacking("a key is not written to a recipe. Set it in the environment, as its client reads it.")
WATCH = lacking("gradients and weights are not sent. Write a hook, which returns numbers of them. Leave it out.")


def named(name: str) -> str:
    """The word for a tracker of another tool; empty."""
    return WORDS.get(name.rpartition(".")[2].lower(), "")


def add(ledger: Ledger, key: str, *words: str, further: Mapping[str, Any] | None = None) -> None:
    """Carry a key as loggers beside those that other keys name, with the words `further`."""
    there = ledger.words.pop("logger", None)
    ledger.carry(key, {"logger": [*dict.fromkeys([*(there or ["console"]), *words])], **(further or {})})
    if there is not None:
        ledger.words.setdefault("logger", there)


def on(word: str) -> Rule:
    """Carry a key that is true as a logger."""
    return switched(lambda ledger, key, value: add(ledger, key, word), OFF)


def tensorboard(ledger: Ledger, key: str, value: Any) -> None:
    """Carry a key that is true or false; without a key it would be on."""
    named = "logger" in ledger.words
    off = OFF if named else says({"logger": ["console"]})
    switched(lambda ledger, key, value: add(ledger, key, "tensorboard"), off)(ledger, key, value)


def argument(word: str, name: str, switch: str = "", *, silent: bool = True) -> Rule:
    """Carry a key as an argument of a logger, and that logger with it, unless the key `switch` turns it off; `silent`:
    what that means where it is missing.
    """

    def rule(ledger: Ledger, key: str, value: Any) -> None:
        ours = f"logger.{word}.{name}"
        if unread(ledger, key, value, ours):
            return
        try:
            further = {ours: value if isinstance(value, list) else text(value)}
        except ValueError as error:
            ledger.refuse(key, f"{ledger.tool} takes {error} here, not {value!r}. Type {ours}=<value>.")
        else:
            add(ledger, key, word, further=further)

    return when(lambda ledger, key, value: not value or not ledger.get(switch, silent), OFF, rule)


def mode(word: str) -> Rule:
    """Carry online, offline and disabled."""

    def rule(ledger: Ledger, key: str, value: Any) -> None:
        if value in ("online", "offline"):
            add(ledger, key, word, further={f"logger.{word}.mode": value})
        else:
            (unneeded("off, as here") if value in ("disabled", None, "") else refused(OTHER))(ledger, key, value)

    return rule


def reported(ledger: Ledger, key: str, value: Any) -> None:
    """Carry a name, or a list of names."""
    if isinstance(value, Code):
        refused(f"{value.why}. Type logger=[console] and those you want.")(ledger, key, value)
        return
    names = [str(name).lower() for name in (value if isinstance(value, list | tuple) else [value])]
    words = [named(name) for name in names]
    if names in (["none"], []):
        OFF(ledger, key, value)
    elif names == ["all"]:
        refused("it means whatever is installed. Type logger=[console] and those you want.")(ledger, key, value)
    elif not all(words):
        refused(f"no logger {', '.join(name for name in names if not named(name))}: {OTHER}")(ledger, key, value)
    else:
        add(ledger, key, *words)


def arguments(ledger: Ledger, word: str, prefix: str) -> None:
    """Carry the arguments of a logger that lie below `prefix`; others are those of its client."""
    for key in ledger.under(prefix):
        name = ARGUMENTS.get(word, {}).get(key.removeprefix(f"{prefix}."), "")
        if name and ledger.get(key) is not None:
            argument(word, name)(ledger, key, ledger.get(key))
        else:
            unneeded("an option of its client")(ledger, key, ledger.get(key))
