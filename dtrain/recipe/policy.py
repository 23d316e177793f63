"""Permissions of a recipe, by the trust level of its place.

No recipe may set `trust`, the output folder, credentials or search paths. A remote recipe, moreover, may set open keys
alone (dtrain/config/permission.py), and may not read the environment or files, open private addresses, or bring code to
parts that act on the machine. Try it with `dtrain plan recipe=<URL>`.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dtrain.config import grammar, permission
from dtrain.config.schema import GROUPS, ROWS, of_scope
from dtrain.config.trust import from_elsewhere
from dtrain.config.word import Word, spelling, text
from dtrain.recipe.document import HIDDEN, KEY
from dtrain.recipe.fetch import named_hosts, refusal, resolves_inside, servers
from dtrain.recipe.locate import Place
from dtrain.secrets import HERE, masked, redact_arg, screen
from dtrain.secrets.patterns import is_secret
from dtrain.storage import clients

REFERENCE = re.compile(r"\$\{\s*(\w+(?:\.\w+)*)\s*\}", re.ASCII)
"""${model.width}: another key; no resolver."""
FOREIGN_CODE: Mapping[str, Any] = {
    "trust_remote_code": lambda value: value not in (False, None),
    "allow_pickle": lambda value: value not in (False, None),
    "weights_only": lambda value: value is not True,
    "attn_implementation": lambda value: "/" in str(value),
    "custom_generate": lambda value: value is not None,
}
"""Argument that makes a package run downloaded code -> whether a value does."""
OF_A_RECIPE = ("recipe", "expect", "requires")
"""Keys that neither `expect.small` nor `sweep.space` may contain."""
SPACE = "sweep.space."
"""Prefix of the keys that a recipe sweeps."""


def is_typed_only(key: str) -> bool:
    """Whether no recipe may set this key."""
    return key.split(".")[0] in of_scope("typed") or (key in ROWS and "typed" in ROWS[key].metadata["scope"].split())


def is_left_to_type(word: Word, place: Place) -> bool:
    """Whether a recipe at this place could not say a word, so that whoever uses it does."""
    return is_typed_only(word.key) or is_closed(replace(word, place=place))


def refused(word: Word, place: Place) -> Iterable[str]:
    """A sentence for each rule that this word breaks in a recipe at this place, with words to type instead."""
    shown = HIDDEN.sub("?", masked(f"{str(word)[:200]} ({word.source})").replace("\n", "\\n"))
    top = word.key.split(".")[0]
    if word.key.startswith(SPACE):
        yield from _inside_space(word, place, shown)
        return
    if top == "hydra" or is_typed_only(word.key):
        name = word.key if word.key == "sweep.out" else top
        yield f"{shown}: {name} cannot come from a recipe. Type it on the command line."
        return
    if word.key == "expect.small":
        yield from _inside_small(word, place, shown)
    if place.trust == "remote":
        yield from _from_elsewhere(word, place, shown, top)


def _from_elsewhere(word: Word, place: Place, shown: str, top: str) -> Iterable[str]:
    if closed := next(_closed(word), ""):
        yield f"{shown}: {closed} cannot come from a recipe from elsewhere. Type it on the command line."
    for key, value in _inside(word.key, word.value):
        if key.endswith("._target_") and not from_elsewhere(str(value), top):
            package = str(value).split(".")[0]
            instead = f"{screen.typed(f'{word.key}={spelling(word.value)}')} {screen.typed(f'trust=[{package}]')}"
            yield (
                f"{shown}: a recipe from elsewhere cannot bring code to {top}. Leave it out, or read the source of "
                f"{package} first, and then type {instead}."
            )
        assignment = f"{key}={HERE.sub('', value)}" if isinstance(value, str) else ""
        if redact_arg(assignment) != assignment:
            yield f"{masked(shown)}: a recipe from elsewhere cannot bring credentials. Put yours into the environment."
        leaf = key.rsplit(".", 1)[-1]
        if leaf in FOREIGN_CODE and FOREIGN_CODE[leaf](value):
            yield (
                f"{shown}: a recipe from elsewhere cannot run downloaded code. Leave it out, or read that code first, "
                f"and then type {word.key}=<value>."
            )
        is_text = isinstance(value, str) and not key.endswith("._target_") and not closed
        if is_text and (why := _unreachable(key, value, place)):
            yield f"{shown}: a recipe from elsewhere {why}. Type {word.key}=<value> if you mean it."
        if isinstance(value, str) and HIDDEN.search(value):
            yield f"{shown}: a recipe from elsewhere cannot contain control characters."
        if isinstance(value, str) and not _looks_up_keys_only(value, word.key):
            yield (
                f"{shown}: a recipe from elsewhere may not read the environment, files or what it may not set: only "
                f"other keys, as ${{model.width}}. "
                f"Type {word.key}=<value>. A copy in a local file may read them: read all of it first."
            )


def _closed(word: Word) -> Iterator[str]:
    """The closed keys that a word sets to another value than the one that they have anyway."""
    if word.key in GROUPS and not permission.is_choice_of_ours(word.key, word.value) and _is_name(word.value):
        yield f"{word.key}={text(word.value)}"
    yield from (f"{key}={value}" for key, value in _inside(word.key, word.value) if permission.joins(key, value))
    for key in dict.fromkeys((word.key, *(key for key, _ in _inside(word.key, word.value)))):
        if permission.is_row(key) and not permission.is_open(key) and not permission.is_default(word.key, word.value):
            yield key


def _is_name(value: Any) -> bool:
    """Whether a value names words; a text such as range(0,2), of a space, is judged when it has become its values."""
    return isinstance(value, list) or (isinstance(value, str) and re.fullmatch(r"[\w.+-]+", value) is not None)


def _unreachable(key: str, value: str, place: Place) -> str | None:
    """Why a recipe at this place may not give a text to a key; None if it may."""
    data = key.split(".")[0] == "data"
    if permission.is_passed_on(key) and not permission.is_plain(value) and not (data and "://" in value):
        return "may not give a path or URL to code that dtrain does not know"
    return refusal(key, value, place.url)


def is_closed(word: Word) -> bool:
    """Whether a word comes from a remote recipe, which may not set its key."""
    return word.place is not None and word.place.trust == "remote" and not permission.is_open(word.key)


def is_idle(word: Word) -> bool:
    """Whether a word of a remote recipe is a closed one that changes nothing, so that it need not be read."""
    return is_closed(word) and permission.is_default(word.key, word.value)


def borrowed(word: Word, settled: Sequence[Word], written: Sequence[Word], *, foreign: bool) -> Iterable[str]:
    """A sentence for each private key that a remote recipe looks up: one that the command line or a local file sets.

    A number that overrides one of the recipe's own is not private. `foreign`: words come from the user's own folders,
    so that defaults are private too.
    """
    if word.place is None or word.place.trust != "remote":
        return
    for name in dict.fromkeys(
        name
        for _, value in _inside(word.key, word.value)
        if isinstance(value, str)
        for name in REFERENCE.findall(value)
    ):
        meant = [
            other
            for other in settled
            if f"{other.key}.".startswith(f"{name}.") or f"{name}.".startswith(f"{other.key}.")
        ]
        private = [other for other in meant if _is_of_here(other) and not _is_number_of(other, written)]
        if private or (foreign and not meant):
            yield (
                f"{HIDDEN.sub('?', masked(str(word)[:200]))} ({word.source}): a recipe from elsewhere may not look up "
                f"{name}, which "
                f"{f'{private[0].source} says' if private else 'no recipe says'}. Type {word.key}=<value> if you mean "
                "it."
            )


def reaches(words: Iterable[Word], value_of: Mapping[str, Any]) -> Iterable[str]:
    """A sentence for each word of a remote recipe that leads to this machine or its network after interpolation.
    Redirects are judged again when the address is opened.
    """
    hosts = dict[str, Word]()
    for word in words:
        if word.place is not None and word.place.trust == "remote":
            whole = value_of.get(word.key, word.value)
            for key, value in _inside(word.key, whole):
                if whole != word.value and permission.joins(key, value):
                    yield (
                        f"{key}={value} ({word.source}) cannot come from a recipe from elsewhere. Type it on the "
                        "command line."
                    )
                if isinstance(value, str) and not key.endswith("._target_"):
                    if whole != word.value and (why := _unreachable(key, value, word.place)):
                        instead = f"Type {word.key}=<value> if you mean it."
                        yield f"{key} ({word.source}): a recipe from elsewhere {why}. {instead}"
                    for url in servers(value):
                        clients.wary(url)
                    hosts |= dict.fromkeys(named_hosts(value, word.place.url), word)
    for host in resolves_inside(hosts):
        word = hosts[host]
        yield (
            f"{word.key} ({word.source}): a recipe from elsewhere cannot reach {host}, which is of this machine or "
            "its network."
        )


def _is_of_here(word: Word) -> bool:
    """Whether the word was typed, or comes from a local file."""
    return word.place is None or word.place.trust == "local"


def _is_number_of(word: Word, written: Sequence[Word]) -> bool:
    """Whether the word is a plain number that overrides a word of a remote or built-in recipe."""
    number = isinstance(word.value, bool | int | float) and not is_secret(word.key, word.value)
    return number and any(other.key == word.key and not _is_of_here(other) for other in written)


def _inside_small(word: Word, place: Place, shown: str) -> Iterable[str]:
    """Apply the rules of the recipe to the words in expect.small."""
    for small in word.value if isinstance(word.value, list) else []:
        key, equals, value = str(small).partition("=")
        if not equals or not KEY.fullmatch(key) or key.split(".")[0] in (*OF_A_RECIPE, "sweep"):
            yield f"{shown}: {small!r:.60} is not a word. Write words such as steps=50."
        elif place.trust == "remote" and grammar.FOR_HYDRA.search(value):
            yield f"{shown}: {small!r:.60}: a recipe from elsewhere makes itself small with plain values alone."
        else:
            yield from refused(Word(key, _plain(value), value, word.source), place)


def _inside_space(word: Word, place: Place, shown: str) -> Iterable[str]:
    """Apply the rules of the recipe to each value of a key in sweep.space."""
    key = word.key.removeprefix(SPACE)
    if key.split(".")[0] in (*OF_A_RECIPE, "sweep", "hydra") or is_typed_only(key):
        yield f"{shown}: a recipe cannot sweep {key}. Leave it out."
        return
    for value in word.value if isinstance(word.value, list) else [word.value]:
        yield from refused(replace(word, key=key, value=value, text=text(value)), place)


def swept(values: Sequence[Word]) -> Iterable[str]:
    """A sentence for each value of a swept key that the recipe at its place may not give it. What a remote one gives is
    plain, as each job is composed as if its values were typed.
    """
    for word in values:
        yield from refused(word, word.place)
        if word.place.trust == "remote" and "${" in str(word.value):
            yield f"{masked(str(word)[:200])} ({word.source}): a recipe from elsewhere sweeps plain values alone."
    yield from reaches(values, {})


def _plain(text: str) -> Any:
    """The value of a typed text."""
    try:
        values = grammar.read(text)
    except grammar.Unread:
        return text
    return values[0] if len(values) == 1 else values


def _inside(key: str, value: Any) -> Iterable[tuple[str, Any]]:
    """(key, value) of each leaf of a value."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _inside(f"{key}.{name}", item)
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _inside(f"{key}.{number}", item)
    else:
        yield key, value


def _looks_up_keys_only(value: str, own_key: str) -> bool:
    """Whether the interpolations of a text use only keys that its recipe may set. `${secret:<own key>}` is allowed: it
    asks the person.
    """
    if value == f"${{secret:{own_key}}}":
        return True
    keys = REFERENCE.findall(value)
    forbidden = any(
        key.split(".")[0] in ("init", "init_names", "fork") or is_typed_only(key) or not permission.is_open(key)
        for key in keys
    )
    return len(keys) == value.count("${") and not forbidden
