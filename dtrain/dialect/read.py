"""A file of another tool -> a tree of plain values: JSON, YAML, TOML, or the calls in a Python file, of which no line
is run.

What cannot be read is one line: the place, what is wrong there, what to do.
"""

import ast
import json
import re
import tomllib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import yaml

from dtrain.dialect import others
from dtrain.dialect.ledger import Code, Differs, flatten
from dtrain.errors import WordsError, first_line
from dtrain.storage import store

CALLS = {
    "Trainer": "trainer",
    "LightningCLI": "cli",
    "ScalingConfig": "scaling_config",
    "RunConfig": "run_config",
    "FailureConfig": "failure_config",
    "CheckpointConfig": "checkpoint_config",
    "TorchTrainer": "ray_trainer",
    "DataParallelTrainer": "ray_trainer",
}
"""Calls that say how a run is made -> the name their arguments get in the tree."""
DEEPEST = 50
LONGEST = 1 << 20
"""Bytes."""
MOST = 20_000
"""Values, those that aliases repeat counted each time."""
LARGEST = 1e30
"""Above all numbers that mean something; nan is not below it."""


class Loader(yaml.SafeLoader):
    """YAML as the tools mean it: 2e-5 is a number, and a key comes once."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set[str]()
        for key in [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key that is no name", key.start_mark)
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value} is said twice", key.start_mark)
            seen.add(key.value)
            key.tag = "tag:yaml.org,2002:str"  # else 1 and true would be one key
        return super().construct_mapping(node, deep)

    def flatten_mapping(self, node: Any) -> None:
        """`<<: *name` writes in what it stands for, which may do so itself."""
        super().flatten_mapping(node)
        if len(node.value) > MOST:
            raise yaml.constructor.ConstructorError(None, None, f"more than {MOST} values", node.start_mark)


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:\d[\d_]*)(?:\.[\d_]*)?[eE][-+]?\d+|[-+]?\.\d+[eE][-+]?\d+"),
    list("-+.0123456789"),
)


def read(place: str) -> dict[str, Any]:
    """The tree of the file at a path or URL. Raises WordsError in one line, and StoreError."""
    return parse(store.small(place, LONGEST + 1), place)


def parse(written: bytes, place: str) -> dict[str, Any]:
    """The tree. Raises WordsError in one line."""
    if len(written) > LONGEST:
        raise WordsError(
            f"{place}: more than {LONGEST >> 20} MiB is no config. Give the file that the other tool is started with."
        )
    try:
        text = written.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise WordsError(
            f"{place}: not a text: byte {error.start} is no UTF-8. A config is JSON, YAML, TOML or Python."
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
                f"{place}: more than {MOST} values, with those that aliases repeat, are no config. Give the file that "
                "the other tool is started with."
            )
        if _depth(tree) > DEEPEST:
            raise WordsError(f"{place}: nested more than {DEEPEST} deep. Is it a config?")
        odd = next(
            (
                f"{key}={value}"
                for key, value in flatten(tree)
                if isinstance(value, int | float) and not abs(value) < LARGEST
            ),
            None,
        )
        if odd:
            raise WordsError(f"{place}: {odd[:80]}: no number that a config may mean.")
    except RecursionError as error:
        raise WordsError(f"{place}: nested too deep. Is it a config?") from error
    if not isinstance(tree, dict) or not tree:
        what = "empty" if tree in (None, {}, []) else f"{type(tree).__name__}, where keys and values are expected"
        raise WordsError(f"{place}: {what}. Give the file that the other tool is started with.")
    return tree


def _any(text: str, place: str) -> Any:
    """A file whose name does not tell: by how it looks."""
    if text.lstrip().startswith("{"):
        return _json(text, place)
    if re.search(rf"^[^#\n]*\b({'|'.join(CALLS)})\(", text, re.MULTILINE):
        return _python(text, place)
    return _toml(text, place) if re.search(r"^\[\w[\w.]*\]\s*$", text, re.MULTILINE) else _yaml(text, place)


def _json(text: str, place: str) -> Any:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        twice = next((name for name, times in Counter(name for name, _ in pairs).items() if times > 1), None)
        if twice is not None:
            raise WordsError(f"{place}: {twice} is said twice. Take one of them out.")
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=once)
    except json.JSONDecodeError as error:
        raise WordsError(f"{place}:{error.lineno}:{error.colno}: not JSON: {_slip(text, error)}") from error
    except ValueError as error:  # such as a number of 5,000 digits
        raise WordsError(f"{place}: not JSON: {first_line(error)}.") from error


def _slip(text: str, error: json.JSONDecodeError) -> str:
    """Common mistakes in JSON, by the text where reading ended."""
    before, here = text[: error.pos].rstrip(), text[error.pos :].lstrip()
    slips = (
        (here[:2] in ("//", "/*") or here[:1] == "#", "a comment, and JSON has none. Take it out."),
        (before[-1:] == "," and here[:1] in ("}", "]"), "a comma after the last value. Take it out."),
        (here[:1] in ("}", "]") and "trailing comma" in error.msg, "a comma after the last value. Take it out."),
        (here[:1] == "'", 'texts stand in double quotes: "...".'),
        (bool(re.match(r"True|False|None", here)), "Python's True, False and None are true, false and null in JSON."),
        (here.startswith(","), "a comma too many. Take it out."),
        (not here, "it ends too early: a bracket or quote is not closed."),
        ("Expecting ',' delimiter" in error.msg, "a comma is missing before this."),
        ("property name" in error.msg, 'a name in double quotes is expected: "name": value.'),
    )
    return next((said for holds, said in slips if holds), f"{error.msg}.")


def _yaml(text: str, place: str) -> Any:
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = f"{place}:{mark.line + 1}:{mark.column + 1}" if mark else place
        said = getattr(error, "problem", None) or first_line(error)
        raise WordsError(f"{at}: not YAML: {said}. Look at the indentation, colons and brackets there.") from error
    except ValueError as error:  # such as a date that is none
        raise WordsError(f"{place}: not YAML: {first_line(error)}.") from error


def _toml(text: str, place: str) -> Any:
    try:
        return tomllib.loads(text)
    except ValueError as error:
        raise WordsError(f"{place}: not TOML: {first_line(error)}.") from error


def _python(text: str, place: str) -> Any:
    """The outermost calls of CALLS, their arguments by name; those of a Trainer of Ray, which holds the others, at the
    top.
    """
    try:
        module = ast.parse(text)
    except (SyntaxError, ValueError, MemoryError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise WordsError(
            f"{place}{line}: not Python: {getattr(error, 'msg', str(error)) or 'nested too deep'}."
        ) from error
    script = _Script(module)
    tree: dict[str, Any] = {}
    made = [node for node in ast.walk(module) if isinstance(node, ast.Call)]
    others.refuse_python(
        module,
        {_last(call.func): script.arguments(call) for call in made if _last(call.func) in others.ARGUMENTS},
        place,
    )
    calls = [call for call in made if _last(call.func) in CALLS]
    read = [(call, script.arguments(call)) for call in calls]
    for call, arguments in read:
        name = CALLS[_last(call.func)]
        if id(call) not in script.inside:
            tree[name] = _together(tree[name], arguments) if name in tree else arguments
    if not tree:
        raise WordsError(f"{place}: calls none of {', '.join(CALLS)}. Give the file in which the run is made.")
    outer = tree.pop("ray_trainer", {})
    tree = {
        **tree,
        **(
            {"train_loop_per_worker" if name == "args.0" else name: value for name, value in outer.items()}
            if outer
            else {}
        ),
    }
    return _of_cli(tree, place) if "cli" in tree else tree


def _together(one: Any, other: Any) -> Any:
    """Several calls merged: values that are alike in all, and a note where they differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        return {name: _together(one.get(name), other.get(name)) for name in {**one, **other}}
    if one == other and type(one) is type(other):
        return one
    return Differs(" or ".join("nothing" if each is None else str(each) for each in (one, other)))


def _of_cli(tree: dict[str, Any], place: str) -> dict[str, Any]:
    """The defaults that a script gives to LightningCLI, as its YAML has them."""
    cli = tree.pop("cli")
    trainer, seed = cli.get("trainer_defaults"), cli.get("seed_everything_default")
    if not isinstance(trainer, dict) and not tree:
        raise WordsError(
            f"{place}: LightningCLI takes its trainer from a YAML here. Import that: the file after --config."
        )
    said = {"seed_everything": seed} if isinstance(seed, int) else {}
    model = (
        {"model": {"class_path": str(cli.get("args.0", cli.get("model_class")))}}
        if "args.0" in cli or "model_class" in cli
        else {}
    )
    return {**said, **model, **tree, **({"trainer": trainer} if isinstance(trainer, dict) else {})}


class _Script:
    """The values of a Python file that can be told without running it; `inside` are calls that are arguments of
    another.
    """

    def __init__(self, module: ast.Module) -> None:
        self.inside: set[int] = set()
        given: dict[str, ast.expr] = {}
        for node in ast.walk(module):
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                given[node.targets[0].id] = node.value
        times = Counter(name for node in ast.walk(module) for name in _changes(node, given))
        self._names = {
            name: value for name, value in given.items() if times[name] == 1
        }  # else which value is meant is not known

    def arguments(self, call: ast.Call, deep: int = 0) -> dict[str, Any]:
        """By name; what **mapping holds too, where the file says it."""
        found = {f"args.{number}": self.value(node, deep) for number, node in enumerate(call.args)}
        for word in call.keywords:
            value = self.value(word.value, deep)
            if word.arg is not None:
                found[word.arg] = value
            else:
                found |= (
                    value
                    if isinstance(value, dict) and "class_path" not in value
                    else {f"**{ast.unparse(word.value)}": Code(value)}
                )
        return found

    def value(self, node: ast.expr, deep: int = 0) -> Any:
        """A plain value; a call of another class in the form of class_path and init_args; what is computed as Code."""
        if isinstance(node, ast.Name) and node.id in self._names and deep < DEEPEST:
            return self.value(self._names[node.id], deep + 1)
        if isinstance(node, ast.List | ast.Tuple):
            return [self.value(item, deep) for item in node.elts]
        if isinstance(node, ast.Dict) and all(key is None or isinstance(key, ast.Constant) for key in node.keys):
            return self._entries(node, deep)
        if isinstance(node, ast.Call) and _last(node.func) == "dict" and not node.args:
            return self.arguments(node, deep)
        if isinstance(node, ast.Call):
            self.inside.add(id(node))
            name = ast.unparse(node.func)
            arguments = self.arguments(node, deep)
            return arguments if _last(node.func) in CALLS else {"class_path": name, "init_args": arguments}
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError, MemoryError):
            return Code(ast.unparse(node))

    def _entries(self, node: ast.Dict, deep: int) -> dict[str, Any]:
        """Of a mapping that is written out; one that it takes in with ** is said as such where the file does not hold
        it.
        """
        found: dict[str, Any] = {}
        for key, item in zip(node.keys, node.values, strict=True):
            value = self.value(item, deep)
            if isinstance(key, ast.Constant):
                found[str(key.value)] = value
            else:
                found |= (
                    value
                    if isinstance(value, dict) and "class_path" not in value
                    else {f"**{ast.unparse(item)}": Code(value)}
                )
        return found


def _changes(node: ast.AST, given: Mapping[str, ast.expr]) -> Iterator[str]:
    """The names that a node binds, or whose list or mapping it may change."""
    if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        yield node.id
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, ast.Attribute) or (isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load)):
        root: ast.expr = node
        while isinstance(root, ast.Subscript | ast.Attribute):
            root = root.value
        held = given.get(root.id) if isinstance(root, ast.Name) else None
        if isinstance(held, ast.List | ast.Dict) or (
            isinstance(held, ast.Call) and _last(held.func) in ("dict", "list")
        ):
            yield ast.unparse(root)


def _last(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _inside(tree: Any) -> Collection[Any]:
    if isinstance(tree, Mapping):
        return tree.values()
    return tree if isinstance(tree, list) else ()


def _is_larger(tree: Any, most: int) -> bool:
    """Told without walking what an alias repeats for ever."""
    left, seen = [tree], 0
    while left and seen <= most:
        one, seen = left.pop(), seen + 1
        left += _inside(one)
    return seen > most


def _depth(tree: Any) -> int:
    items = _inside(tree)
    return 1 + max(map(_depth, items), default=0)
