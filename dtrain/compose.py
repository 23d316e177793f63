"""Words -> Config: composed once, in the parent; ranks never import it.

Every word is judged before anything is composed, and what is wrong with the rest of the run is told with it. Recipes are flattened into
words that come before the user's own; whoever picks another word of a group, or another `_target_`, also drops the arguments a recipe gave
to the old one. Words of ours are composed here, as Hydra would; with folders of the user's own, Hydra does it (dtrain/hydra.py).
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import is_dataclass, replace
from functools import cache
from typing import Any, get_args, get_type_hints

from dtrain import conf, grammar, options, provenance, recipe, secrets
from dtrain.check import NAMELESS, Vocabulary, judge, no_dashes, no_word, sayable, shown
from dtrain.cluster import look
from dtrain.config import GROUPS, LISTS, Config, Schema
from dtrain.errors import DtrainError, WordsError, deciding
from dtrain.kinds import wants_text
from dtrain.resolve import further
from dtrain.resolve.unknown import UNKNOWN
from dtrain.store import is_local, local_path
from dtrain.words import Word, cut, quote, slug

LONGEST = 100_000
"""Characters of a value that are still read as more than a text."""
KEY = re.compile(r"[a-zA-Z_$][\w$-]*(?:\.[\w$-]+)*(?:/\w+)*", re.ASCII)
REPEATED = ("recipe", "hydra.searchpath")
"""Words of which several stand beside each other."""
OF_THE_MESH = (
    "nodes", "devices", "mesh", "microbatch", "accumulate", "strategy", "launcher", "backend", "loop", "stop_after", "resume", "init",
)  # fmt: skip
"""What another verb does not take over from the run it looks at: it may look from any mesh."""


@deciding()
def compose(words: Sequence[str], *, run: str | None = None) -> Config:
    """The words, and before them those of the run at URL `run`, as one typed Config.

    Raises WordsError with every mistake found; when there is one, also with those of the rules of resolve over what is left.
    """
    asked, problems = _parse_all(words)
    problems += [
        f"{shown(word)}: of Hydra's own words only hydra.searchpath is taken here, and with -m hydra/launcher and hydra/sweeper."
        for word in asked
        if word.key.startswith("hydra") and word.key != "hydra.searchpath"
    ]
    asked = [word for word in asked if not word.key.startswith("hydra") or word.key == "hydra.searchpath"]
    problems += options.tell(asked, next((str(word.value) for word in reversed(asked) if word.key == "out" and word.value), None))
    written = recipe.of_run(run) if run else []
    written = [word for word in written if word.key.split(".")[0] not in OF_THE_MESH and not _not_needed(word)]
    said = [*written, *_with_recipes(asked, problems)]
    settled = _settle(said)
    vocabulary = _vocabulary(_searchpath(asked, problems), settled)
    judged = {word.key: [*provenance.untold([word]), *judge(word, vocabulary)] for word in settled}
    problems += [problem for found in judged.values() for problem in found]
    config = provenance.noted(_config([word for word in settled if not judged[word.key]], vocabulary, problems), said, settled)
    if problems:
        for group in GROUPS:
            if judged.get(group):
                setattr(config, group, UNKNOWN)
                config.choices[group] = UNKNOWN
        raise WordsError(*dict.fromkeys([*problems, *further(config, look())]))
    return config


def said_again(words: Sequence[str]) -> Iterable[str]:
    """One sentence for each key of which a person says several values. The last counts, as scripts that add words to others need it."""
    said: dict[str, dict[str, None]] = {}
    for word in words:
        key, equals, value = word.lstrip("+").partition("=")
        if equals and key not in REPEATED and not key.startswith("-"):
            values = said.setdefault(key.strip(), {})
            values.pop(value, None)  # the last one is to stand last
            values[value] = None
    for key, values in said.items():
        if len(values) > 1:
            *before, last = (cut(secrets.shown(f"{key}={value}")) for value in values)
            yield f"{', '.join(before[:3])} (command line): said again, {last} counts."


def connect(words: Sequence[str], url: str) -> None:
    """Tell the storage of `url` the out_options among the words, before anything is read there. Raises WordsError."""
    problems = options.tell(_parse_all(words)[0], url)
    if problems:
        raise WordsError(*problems)


def value_of(words: Sequence[str], key: str) -> str | None:
    """The last value of `key` among plain words, before anything is composed."""
    found = [word.value for word in _parse_all(words)[0] if word.key == key]
    return None if not found or found[-1] is None else str(found[-1])


def multirun(words: Sequence[str], job: Callable[[Sequence[str]], float | None], *, check: Callable[[Sequence[str]], object]) -> list[Any]:
    """Run `job` with the words of every combination of the swept ones, through Hydra's own sweeper and launcher. Returns what the jobs returned.

    Each job gets a folder of its own below `sweep.out` (or `out`), named after its values. `check` sees the words of every job of
    Hydra's own sweeper before the first one runs; the WordsErrors it raises are collected.
    """
    asked, problems = _parse_all(words)
    for_hydra = [word for word in asked if re.match(r"hydra[/.](launcher|sweeper)\b", word.key)]
    ours = [word for word in asked if word not in for_hydra]
    problems += [
        f"{word} ({word.source}): with -m Hydra takes hydra/launcher, hydra/sweeper and what they hold." for word in ours if word.key[:5] == "hydra"
    ]
    swept = [word for word in ours if word.sweep]
    if not swept and not problems and not for_hydra:
        problems.append("-m: no word has several values. Type optim.lr=1e-3,3e-3 for example, or leave -m out.")
    private = [word.key for word in ours if options.is_one(word.key) or secrets.shown(str(word)) != str(word)]
    if private and any(word.key.startswith("hydra/launcher") for word in for_hydra):
        problems.append(f"{private[0]}: a launcher of Hydra's writes the words of its jobs to files. Put the credentials into the environment.")
    problems += [f"{shown(word)}: the folder of a job is named after what is swept, and a secret cannot be." for word in swept if word.key in private]
    problems += [
        f"{shown(word)}: a folder or URL. Type {word.key}=<text>."
        for word in ours
        if word.key in ("out", "sweep.out") and not isinstance(word.value, str | int | None)
    ]
    if problems:
        raise WordsError(*problems)
    plain = [word for word in ours if not word.sweep and word.key not in ("out", "sweep.out")]
    named = [str(word.value) for key in ("sweep.out", "out") for word in ours if word.key == key]
    root = named[0].rstrip("/") if named else f"outputs/sweep-{slug(secrets.shown(str(word)).replace('=', '-', 1) for word in ours)}"

    def task(values: Sequence[str]) -> float | None:
        out = f"{root}/{slug(value.replace('=', '-') for value in values)}"
        return job([*map(str, plain), *values, f"out={quote(out)}"])

    if not any(word.key == "hydra/sweeper" for word in for_hydra):
        _check_all(plain, swept, check)
    # Hydra composes every job too; `++` lets it take what only our own composition can judge
    told = [f"{'' if word.key in GROUPS else '++'}{word}" for word in swept] + [str(word) for word in for_hydra]
    from dtrain.hydra import sweep

    return sweep(told, task)


def _check_all(plain: Sequence[Word], swept: Sequence[Word], check: Callable[[Sequence[str]], object]) -> None:
    """Raises WordsError with the mistakes of all jobs."""
    from dtrain.hydra import jobs

    problems: dict[str, None] = {}
    for words in jobs(swept):
        try:
            check([*map(str, plain), *words])
        except WordsError as error:
            problems |= dict.fromkeys(error.problems)
    if problems:
        raise WordsError(*problems)


def _parse_all(words: Sequence[str]) -> tuple[list[Word], list[str]]:
    """The words that can be read, and a sentence for each that cannot."""
    secrets.hear(words)
    read, problems, values = [], list[str](), set[int]()
    for at, text in enumerate(words):
        if at in values:
            continue
        following = words[at + 1] if at + 1 < len(words) else None
        if re.match(r"--?[a-zA-Z]", text) and "=" not in text and following and "=" not in following and not following.startswith("--"):
            values.add(at + 1)  # `--flag value`
        try:
            read.append(_parse(text, following if at + 1 in values else None))
        except WordsError as error:
            problems += error.problems
    return read, problems


def _parse(text: str, following: str | None) -> Word:
    if text in ("-m", "--multirun"):
        raise WordsError(f"{text} (command line): only train takes it.")
    if text.startswith("-"):
        raise WordsError(no_dashes(text, following))
    if text.startswith("~"):
        key = text[1:].split("=")[0]
        hint = f" Type {key}=<another word>." if key in sayable() else ""
        raise WordsError(f"{cut(text)} (command line): nothing is taken away with ~.{hint}")
    if "=" not in text:
        raise WordsError(no_word(text))
    key, raw = text.lstrip("+").split("=", 1)
    key = key.strip()
    if not KEY.fullmatch(key):
        raise WordsError(
            f"{cut(text)} (command line): {f'{cut(key)!r} is no key' if key else 'there is no key before the ='}. Words look like key=value."
        )
    try:
        values = _read(raw)
    except grammar.Unread:  # a URL with `=`, a sentence with commas: what cannot be read as more is a text
        return Word(key, raw, quote(raw), "command line")
    return Word(key, values[0] if len(values) == 1 else None, raw, "command line", len(values) > 1)


def _read(raw: str) -> list[Any]:
    if raw != raw.strip() or len(raw) > LONGEST:
        raise grammar.Unread(raw)
    if grammar.FOR_HYDRA.search(raw):
        from dtrain.hydra import read

        return read(raw)
    return grammar.read(raw) if raw else [""]


def _with_recipes(asked: list[Word], problems: list[str]) -> list[Word]:
    """The words of the recipes, in the order they were named, then everything else."""
    written: list[Word] = []
    said = {word.key for word in asked}
    for name in [name for word in asked if word.key == "recipe" for name in (word.value if isinstance(word.value, list) else [word.value])]:
        try:
            written += recipe.read(str(name), said=said)
        except DtrainError as error:
            problems += getattr(error, "problems", (str(error),))
    return written + [word for word in asked if word.key != "recipe"]


def _settle(words: list[Word]) -> list[Word]:
    """The last word wins; what was said about a choice that lost is dropped with it."""
    final: list[Word] = []
    for word in words:
        group = word.key.removesuffix("._target_")
        replaces = word.key in GROUPS or word.key.endswith("._target_")
        again = any(old.key == word.key and old.value == word.value for old in final)
        lost = [old for old in final if replaces and not again and _place(old) != _place(word) and old.key.startswith(f"{group}.")]
        final = [old for old in final if old.key != word.key and old not in lost] + [word]
    return [word for word in final if word.key != "hydra.searchpath"]


def _place(word: Word) -> str:
    """Where it was said, without the line."""
    return re.sub(r":\d+$", "", word.source)


def _searchpath(asked: Sequence[Word], problems: list[str]) -> list[str]:
    """The user's own folders of words."""
    found: list[str] = []
    for word in asked:
        if word.key == "hydra.searchpath":
            if isinstance(word.value, list) and all(isinstance(path, str) for path in word.value):
                found += word.value
            else:
                problems.append(f"{shown(word)}: a list of folders. Type {word.key}=[{cut(word.text) or '<folder>'}].")
    absent = [path for path in found if is_local(path) and not local_path(path).is_dir()]
    problems += [f"hydra.searchpath=[{cut(path)}] (command line): there is no such folder." for path in absent if not path.startswith("pkg://")]
    return [path for path in found if path not in absent]


def _not_needed(word: Word) -> bool:
    """The secret of a logger or hook, which a verb that looks at a run has no use for."""
    return word.key.split(".")[0] in LISTS and any(secrets.places(word.value, word.key))


def _vocabulary(searchpath: Sequence[str], words: Sequence[Word]) -> Vocabulary:
    """What can be said, given the words that were: options of every group, the choices made, targets of the user's own."""
    options, node = conf.groups(), conf.node
    if searchpath:
        from dtrain.hydra import Shelf

        shelf = Shelf(searchpath)
        options, node = shelf.words, shelf.node
    choices = conf.defaults() | {word.key: word.value for word in words if word.key in GROUPS}
    targets = tuple(
        word.key.removesuffix("._target_")
        for word in words
        if word.key.endswith("._target_") and word.key not in NAMELESS and word.value != _own_target(word.key, choices, options, node)
    )
    return Vocabulary(options, choices, targets, node, bool(searchpath))


def _own_target(key: str, choices: Mapping[str, Any], options: Mapping[str, Sequence[str]], node: Callable[[str, str], conf.Node]) -> Any:
    """What stands in conf/ where `key` says it."""
    group, *rest = key.split(".")
    if group not in GROUPS or (group in LISTS and len(rest) < 2):
        return None
    word, rest = (rest[0], rest[1:]) if group in LISTS else (choices[group], rest)
    found: Any = node(group, word) if isinstance(word, str) and word in options[group] else {}
    for name in rest:
        found = found.get(name) if isinstance(found, dict) else None
    return found


def _config(words: Sequence[Word], vocabulary: Vocabulary, problems: list[str]) -> Config:
    """What words that were found good make together; problems with what they refer to are added."""
    sources = {word.key: word.source for word in words}
    words = [_as_meant(word, vocabulary) for word in words if not options.is_one(word.key)]
    replaced = [group for group in GROUPS if group in vocabulary.targets]
    if vocabulary.foreign:
        from dtrain.hydra import composed

        tree = composed([_of_files(word, vocabulary) for word in words], replaced)
    else:
        tree = _composed(words, replaced, vocabulary)
    late = [word for word in words if "${" in word.text]
    if late:
        from dtrain.hydra import resolved

        problems += resolved(tree, late, vocabulary.allowed)
    types = _types()
    config = Config(**{key: types[key](**value) if is_dataclass(types[key]) else value for key, value in tree.items()})
    said = {word.key for word in words}
    for group in replaced:  # a target of the user's own keeps what its word says about itself, when that word was said
        about = vocabulary.node(group, vocabulary.choices[group]).get("_about_") if group in said else None
        getattr(config, group)["_about_"] = about or {}
    config.choices = {group: None if group in replaced else vocabulary.choices[group] for group in GROUPS}
    config.sources = sources
    config.options = {
        group: {name: vocabulary.node(group, name) for name in vocabulary.options[group]} for group in GROUPS if vocabulary.choices[group] == "auto"
    }
    return config


def _as_meant(word: Word, vocabulary: Vocabulary) -> Word:
    """A number that was typed where text is meant is that text."""
    allowed, value = vocabulary.allowed(word.key), word.value
    if allowed is None or isinstance(value, bool) or not isinstance(value, int | float) or not wants_text(value, allowed):
        return word
    return replace(word, value=word.text, text=quote(word.text))


def _of_files(word: Word, vocabulary: Vocabulary) -> Word:
    """Without the parts of a list that no file holds: their `_target_` says what they are."""
    names = word.value if isinstance(word.value, list) else [word.value]
    if word.key not in LISTS or all(name in vocabulary.options[word.key] for name in names):
        return word
    names = [name for name in names if name in vocabulary.options[word.key]]
    return replace(word, value=names, text=f"[{','.join(names)}]")


def _composed(words: Sequence[Word], replaced: Sequence[str], vocabulary: Vocabulary) -> conf.Node:
    """As Hydra composes them: the defaults, the choices in their places, then the values in order."""
    tree = conf.top()
    for group in GROUPS:
        choice = vocabulary.choices[group]
        names = [name for name in (choice if isinstance(choice, list) else [choice]) if name != "auto" and name in vocabulary.options[group]]
        nodes = {name: vocabulary.node(group, name) for name in names} if group not in replaced else {}
        tree[group] = nodes if group in LISTS else next(iter(nodes.values()), {})
    for word in words:
        if word.key not in GROUPS:
            *path, name = word.key.split(".")
            holder = tree
            for part in path:
                if not isinstance(holder.get(part), dict):
                    holder[part] = {}
                holder = holder[part]
            holder[name] = _merged(holder.get(name), conf.copied(word.value))
    return {key: _converted(key, value) for key, value in tree.items()}


def _merged(old: Any, new: Any) -> Any:
    if isinstance(old, dict) and isinstance(new, dict):
        return {**old, **{key: _merged(old.get(key), value) for key, value in new.items()}}
    return new


def _converted(key: str, value: Any) -> Any:
    """Whole numbers where the schema has fractions become those."""
    kind = _types().get(key)
    if is_dataclass(kind) and isinstance(value, dict):
        fields = get_type_hints(kind)
        return {name: float(item) if _is_fraction(fields.get(name)) and type(item) is int else item for name, item in value.items()}
    if kind == list[str] and isinstance(value, list):
        return [item if isinstance(item, dict | list) else str(item) for item in value]
    return float(value) if _is_fraction(kind) and type(value) is int and abs(value) < 2**63 else value


def _is_fraction(kind: Any) -> bool:
    return kind is float or float in get_args(kind)


@cache
def _types() -> Mapping[str, Any]:
    return get_type_hints(Schema)
