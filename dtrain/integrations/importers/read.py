"""Parse a file of another tool into a tree of plain values: JSON, YAML, TOML, or the calls in a Python file, which is
never executed.

Errors are one line: the location, the problem, and what to do.
"""

import ast
import json
import re
import tomllib
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import yaml

from dtrain.errors import WordsError, first_line
from dtrain.integrations.importers import fitted, loops, others
from dtrain.integrations.importers.calls import CALLS, DEEPEST, Script, last
from dtrain.integrations.importers.defaults import looked_through
from dtrain.integrations.importers.ledger import Code, Differs, flatten, names
from dtrain.storage import store

ARGUMENTS = ("TrainingArguments", "Seq2SeqTrainingArguments", "SFTConfig", "DPOConfig")
"""Classes of Hugging Face whose arguments configure a run, wherever they are called."""
TRAINERS = ("Trainer", "Seq2SeqTrainer", "SFTTrainer")
"""Trainers of the loss of the model. A file that calls or defines another has a loss of its own."""
ADAPTERS = names(
    "PromptTuningConfig PrefixTuningConfig PromptEncoderConfig MultitaskPromptTuningConfig IA3Config AdaLoraConfig "
    "LoHaConfig LoKrConfig OFTConfig BOFTConfig VeraConfig AdaptionPromptConfig LNTuningConfig FourierFTConfig"
)
"""Adapters of peft beside LoRA."""
PLACES = {f"args.{place}": name for place, name in enumerate(("model", "args", "data_collator", "train_dataset"))}
"""The first arguments of a Trainer, other than DPOTrainer, by their places."""
LONGEST = 1 << 20
"""Bytes."""
MOST = 20_000
"""Values, counting each expansion of an alias."""
LARGEST = 1e30
"""Upper bound of plausible numbers; also excludes nan."""


class Loader(yaml.SafeLoader):
    """A YAML loader that reads 2e-5 as a number and rejects duplicate keys."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set[str]()
        for key in [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key that is not a scalar", key.start_mark)
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value} is given twice", key.start_mark)
            seen.add(key.value)
            key.tag = "tag:yaml.org,2002:str"  # otherwise 1 and true would be the same key
        return super().construct_mapping(node, deep)

    def flatten_mapping(self, node: Any) -> None:
        """Limit the expansion of `<<: *name` merges, which may be nested."""
        super().flatten_mapping(node)
        if len(node.value) > MOST:
            raise yaml.constructor.ConstructorError(None, None, f"more than {MOST} values", node.start_mark)


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:\d[\d_]*)(?:\.[\d_]*)?[eE][-+]?\d+|[-+]?\.\d+[eE][-+]?\d+"),
    list("-+.0123456789"),
)


def read(place: str) -> dict[str, Any]:
    """Read the file at a path or URL into a tree. Raises a one-line WordsError, or StoreError."""
    return parse(store.small(place, LONGEST + 1), place)


def parse(written: bytes, place: str) -> dict[str, Any]:
    """Parse a file's bytes into a tree. Raises a one-line WordsError."""
    if len(written) > LONGEST:
        raise WordsError(
            f"{place}: larger than {LONGEST >> 20} MiB, too large for a config. Give the file that starts the other "
            f"tool."
        )
    try:
        text = written.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise WordsError(
            f"{place}: not a text file: byte {error.start} is not UTF-8. A config is JSON, YAML, TOML or Python."
        ) from error
    if re.match(r"\s*<(!doctype|html)", text, re.IGNORECASE):
        raise WordsError(
            f"{place}: a web page. Give the address of the file itself, such as https://raw.githubusercontent.com/..."
        )
    kind = place.split("?")[0].rsplit(".", 1)[-1].lower()
    try:
        tree = {"json": _json, "toml": _toml, "py": _python}.get(kind, _any)(text, place)
        if _is_larger(tree, MOST):
            raise WordsError(
                f"{place}: more than {MOST} values including expanded aliases, too many for a config. Give the file "
                f"that starts the other tool."
            )
        if _depth(tree) > DEEPEST:
            raise WordsError(f"{place}: nested more than {DEEPEST} deep. Is it a config?")
        for key, value in flatten(tree):
            if isinstance(value, int | float) and not abs(value) < LARGEST:
                raise WordsError(f"{place}: {f'{key}={value}'[:80]}: not a plausible number. Correct it.")
    except RecursionError as error:
        raise WordsError(f"{place}: nested too deep. Is it a config?") from error
    if not isinstance(tree, dict) or not tree:
        problem = "empty" if tree in (None, {}, []) else f"{type(tree).__name__}, where keys and values are expected"
        raise WordsError(f"{place}: {problem}. Give the file that starts the other tool.")
    return tree


def _any(text: str, place: str) -> Any:
    """Parse a file without a known extension, by its content."""
    if text.lstrip().startswith("{"):
        return _json(text, place)
    if re.search(rf"^[^#\n]*\b({'|'.join(CALLS)})\(", text, re.MULTILINE):
        return _python(text, place)
    return _toml(text, place) if re.search(r"^\[\w[\w.]*\]\s*$", text, re.MULTILINE) else _yaml(text, place)


def _json(text: str, place: str) -> Any:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        twice = next((name for name, times in Counter(name for name, _ in pairs).items() if times > 1), None)
        if twice is not None:
            raise WordsError(f"{place}: {twice} is given twice. Remove one of them.")
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=once)
    except json.JSONDecodeError as error:
        raise WordsError(f"{place}:{error.lineno}:{error.colno}: not JSON: {_json_mistake(text, error)}") from error
    except ValueError as error:  # such as a number of 5,000 digits
        raise WordsError(f"{place}: not JSON: {first_line(error)}.") from error


def _json_mistake(text: str, error: json.JSONDecodeError) -> str:
    """Describe a common JSON mistake from the text around the error."""
    before, here = text[: error.pos].rstrip(), text[error.pos :].lstrip()
    mistakes = (
        (here[:2] in ("//", "/*") or here[:1] == "#", "JSON has no comments. Remove this one."),
        (before[-1:] == "," and here[:1] in ("}", "]"), "a comma after the last value. Remove it."),
        (here[:1] in ("}", "]") and "trailing comma" in error.msg, "a comma after the last value. Remove it."),
        (here[:1] == "'", 'strings need double quotes: "...".'),
        (bool(re.match(r"True|False|None", here)), "JSON writes true, false and null, not True, False and None."),
        (here.startswith(","), "an extra comma. Remove it."),
        (not here, "it ends too early: a bracket or quote is not closed."),
        ("Expecting ',' delimiter" in error.msg, "a comma is missing before this."),
        ("property name" in error.msg, 'a name in double quotes is expected: "name": value.'),
    )
    return next((message for matches, message in mistakes if matches), f"{error.msg}.")


def _yaml(text: str, place: str) -> Any:
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = f"{place}:{mark.line + 1}:{mark.column + 1}" if mark else place
        problem = getattr(error, "problem", None) or first_line(error)
        raise WordsError(f"{at}: not YAML: {problem}. Check the indentation, colons and brackets there.") from error
    except ValueError as error:  # such as an invalid date
        raise WordsError(f"{place}: not YAML: {first_line(error)}.") from error


def _toml(text: str, place: str) -> Any:
    try:
        return tomllib.loads(text)
    except ValueError as error:
        raise WordsError(f"{place}: not TOML: {first_line(error)}.") from error


def _python(text: str, place: str) -> Any:
    """Return the arguments of the outermost CALLS; those of Ray's Trainer, which contains the others, are at the
    top.
    """
    try:
        module = ast.parse(text)
    except (SyntaxError, ValueError, MemoryError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise WordsError(
            f"{place}{line}: not Python: {getattr(error, 'msg', str(error)) or 'nested too deep'}."
        ) from error
    module = looked_through(module)
    script = Script(module)
    tree: dict[str, Any] = {}
    owned = {node.name for node in ast.walk(module) if isinstance(node, ast.ClassDef)} & set(CALLS)
    made = [node for node in ast.walk(module) if isinstance(node, ast.Call) and last(node.func) not in owned]
    if any(last(call.func) in ARGUMENTS for call in made):
        classes = [node for node in ast.walk(module) if isinstance(node, ast.ClassDef)]
        own = [each.name for each in classes if any(last(base).endswith("Trainer") for base in each.bases)]
        other = [last(call.func) for call in made if re.fullmatch(r"\w+Trainer", last(call.func))]
        return _hugging_face(script, made, {*own, *other} - {*CALLS, *TRAINERS})
    foreign = {last(call.func): script.arguments(call) for call in made if last(call.func) in others.ARGUMENTS}
    others.refuse_python(module, foreign, place)
    read = [(call, script.arguments(call)) for call in made if last(call.func) in CALLS]
    for call, arguments in read:
        name = CALLS[last(call.func)]
        if id(call) not in script.inside:
            tree[name] = _merge(tree[name], arguments) if name in tree else arguments
    if "trainer" in tree:
        tree |= fitted.read(module, script, made, {*script.inside})
    if not tree:
        if tree := loops.read(module, script):
            return tree
        others.refuse_assignments(module, place)
        raise WordsError(f"{place}: calls none of {', '.join(CALLS)}. Give the file that creates the run.")
    for name, value in tree.pop("ray_trainer", {}).items():
        tree["train_loop_per_worker" if name == "args.0" else name] = value
    return _cli_defaults(tree, place) if "cli" in tree else tree


def _hugging_face(script: Script, made: Collection[ast.Call], own: Collection[str]) -> dict[str, Any]:
    """Return the arguments of Hugging Face's classes by class, of its Trainer and the file's `own` ones, and the class
    and name of the model.
    """
    tree: dict[str, Any] = {}
    trainers = {*TRAINERS, *own}
    for call in made:
        name, arguments = last(call.func), script.arguments(call)
        if name == "from_pretrained" and isinstance(call.func, ast.Attribute) and "For" in last(call.func.value):
            place = arguments.get("args.0", arguments.get("pretrained_model_name_or_path"))
            more = {key: value for key, value in arguments.items() if value is not place}
            name, arguments = "model", {"class": last(call.func.value), "name": place, **more}
        elif name in trainers:
            given = _trainer(arguments, name)
            tree["Trainer"] = _merge(tree["Trainer"], given) if "Trainer" in tree else given
            place = given.get("model", given.get("args.0"))
            if not isinstance(place, str) or isinstance(place, Code):
                continue
            name, arguments = "model", {"name": place}
        if name in ARGUMENTS and "args.0" in arguments:
            arguments = {"output_dir": arguments.pop("args.0"), **arguments}
        if name in ADAPTERS:
            name, arguments = "peft", {"kind": name}
        if name in ("LoraConfig", *ARGUMENTS):
            arguments |= script.later(call)
        if name in ("model", "LoraConfig", "peft", *ARGUMENTS):
            tree[name] = _merge(tree[name], arguments) if name in tree else arguments
    for name, key in (("model", "model"), ("peft_config", "LoraConfig")):
        if key in tree and "Trainer" in tree:
            tree["Trainer"].pop(name, None)
    return {name: value for name, value in tree.items() if value or name != "Trainer"}


def _trainer(arguments: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The arguments of a Trainer by name, without `args`, whose own are read where they are made."""
    named = {PLACES.get(key, key) if name != "DPOTrainer" else key: value for key, value in arguments.items()}
    named.pop("args.1" if name == "DPOTrainer" else "args", None)
    return {key: value for key, value in named.items() if key != "args"} | ({} if name in TRAINERS else {"class": name})


def _merge(one: Any, other: Any) -> Any:
    """Merge the arguments of several calls; values that differ become Differs."""
    if isinstance(one, dict) and isinstance(other, dict):
        return {name: _merge(one.get(name), other.get(name)) for name in {**one, **other}}
    if one == other and type(one) is type(other):
        return one
    return Differs(" or ".join("nothing" if each is None else str(each) for each in (one, other)))


def _cli_defaults(tree: dict[str, Any], place: str) -> dict[str, Any]:
    """Return the defaults that a script passes to LightningCLI, in the form of its YAML."""
    cli = tree.pop("cli")
    trainer, seed = cli.get("trainer_defaults"), cli.get("seed_everything_default")
    if not isinstance(trainer, dict) and not tree:
        raise WordsError(
            f"{place}: LightningCLI reads its trainer from a YAML file here. Import the file after --config."
        )
    model = cli.get("args.0", cli.get("model_class"))
    defaults: dict[str, Any] = {"seed_everything": seed} if isinstance(seed, int) else {}
    if model is not None:
        defaults["model"] = {"class_path": str(model)}
    data = cli.get("args.1", cli.get("datamodule_class"))
    if data is not None:
        defaults["data"] = {"class_path": str(data)}
    defaults |= tree
    if isinstance(trainer, dict):
        defaults["trainer"] = trainer
    return defaults


def _inside(tree: Any) -> Collection[Any]:
    if isinstance(tree, Mapping):
        return tree.values()
    return tree if isinstance(tree, list) else ()


def _is_larger(tree: Any, most: int) -> bool:
    """Return whether a tree has more than `most` values, without walking endless aliases."""
    left, seen = [tree], 0
    while left and seen <= most:
        one, seen = left.pop(), seen + 1
        left += _inside(one)
    return seen > most


def _depth(tree: Any) -> int:
    items = _inside(tree)
    return 1 + max(map(_depth, items), default=0)
