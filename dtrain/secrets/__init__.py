"""Secrets: recognised by name, by shape, or because they were passed as one; none is written to disk, shown or hashed.

    dtrain logger.mine._target_=mypkg.Tracker logger.mine.api_key='${oc.env:MY_KEY}' trust=[mypkg]
    # the plan says ${secret:logger.mine.api_key}

A Config and a Plan hold no secrets: `seal` replaces each by `${secret:<its key>}`, the value stays in memory and
reaches the ranks over standard input, and `dtrain.build` puts it back when it builds the part. Other text (errors,
notes, events) goes through `masked`. What user code prints or writes by itself is not masked.
"""

import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

from dtrain.secrets.near import after_flags, spans
from dtrain.secrets.patterns import (
    BESIDE,
    DIGEST,
    FOLDERS,
    HINT,
    HOLDERS,
    LOT,
    SHAPES,
    is_folder,
    is_high_entropy,
    is_secret,
    plain,
    random,
    shapes,
    strength,
    unquoted,
)

MASK = "***"
HERE = re.compile(r"\$\{secret:([^}]*)\}")
"""The placeholder of a secret, with the key of its value."""
ASK = (
    "a secret, which is never saved. Type {key}=<value>, or {key}='${{oc.env:<NAME>}}' to take it from the environment."
)
REFUSED = (
    "it holds a secret and would be saved. Only arguments of parts may hold one, such as "
    "logger.<name>.<argument>; for storage, type out_options.<name>=<value>."
)
PASSWORD = re.compile(
    r"(\w://)(?!\*\*\*@)(?:[^/\s:@'\"]*:(?!\$\{)[^/\s'\"]+|(?=[^/\s@]*\d)(?=[^/\s@]*[A-Za-z])[A-Za-z0-9_-]{16,})(?=@)"
)
IN_PATH = re.compile(
    r"(?<=[\w-]/)((?:webhooks?|webhookb2|hooks?|secrets?|api_?keys?|auth)/)(?!\*\*\*|\$\{)(?:[\w@.-]{1,100}/){0,3}?"
    r"(?=[A-Za-z_-]{0,100}\d)(?=[\d_-]{0,100}[A-Za-z])[\w@-]{16,}(?![\w.-])(?:/[\w@-]+){0,3}",
    re.I,
)
IN_URL = re.compile(
    r"([?&](?:[\w.-]*(?:sig|signature|token|secret|password|passwd|pwd|credential|key|keyid|code|auth)|"
    r"GoogleAccessId)=)(?!\*\*\*|\$\{)[^&#\s'\"<>]+",
    re.I,
)
COOKIES = re.compile(r"(\bcookie\\*[\"']?\s*[:=,]\s*\\*[\"']?)(?!\*\*\*|\$\{|\()[^\s\"'\\]+=[^\"'\\\n]+", re.I)
HEADER = re.compile(
    r"(authorization\\*[\"']?\s*[:=,]\s*\\*[\"']?(?:(?:bearer|basic|token|apikey|digest|key|negotiate|sharedkey|"
    r"aws4-hmac-sha256)\s+)?+)(?!\*\*\*|\$\{|\()[^\s\"',;\\]+",
    re.I,
)
SCHEME = re.compile(r"\b((?i:bearer|basic)\s+)(?=[\w.~+/-]*(?:\d|[a-z][A-Z]|=))[\w.~+/-]{8,}=*")
NAMED = re.compile(
    r"(?<!\w)(?<!\w[.-])(?<!\w--)(?:(?<=\\)[nrt]|(?<=%)[0-9A-Fa-f]{2})?([A-Za-z_][\w.-]*+)"
    r"(\\*[\"']?\s*(?:=>|:=|[:=]|%3[AaDd])\s*|\\*[\"']\s*,\s*(?=\\*[\"'])|(?<=\w)\s+(?=\S))"
)
VALUE = re.compile(r"\\*\"[^\"]*\"|\\*'[^']*'|[^\s,;&\"'`()\[\]{}<>|\\]+")
"""The value in name=value, name: value, "name": "value", ("name", "value") and --name value."""
_kept: dict[str, Any] = {}
"""key -> the secret that plans of this process leave out."""
SCAN_SECONDS = 0.2
_scan: list[Any] = [0.0, ()]
"""When to scan the environment again, and the secrets found in it."""
_known: dict[str, None] = {}
"""Every form in which a known secret may appear in text."""


def masked(text: str) -> str:
    """`text` without known secrets, texts shaped like a secret, and values beside the name of a secret."""
    if len(text) < 3:
        return text
    text = _exact(tuple(_known), _environment()).sub(MASK, text)
    near = "A" in text and bool(re.search(SHAPES["AWS access key id"], text))
    text = shapes().sub(MASK, text)
    text = BESIDE.sub(MASK, text) if near else text
    if "://" in text:
        text = IN_PATH.sub(rf"\1{MASK}", PASSWORD.sub(rf"\1{MASK}", text))
    for begin, end in sorted(spans(text, strength), reverse=True):
        text = text[:begin] + MASK + text[end:] if not plain(text[begin:end]) else text
    if not HINT.search(text):
        return text
    for pattern in (IN_URL, HEADER, COOKIES, SCHEME):
        text = pattern.sub(rf"\1{MASK}", text)
    return "".join(_pieces(text))


def redact_tree(value: Any) -> Any:
    """A tree of plain values with every text masked, and every value under the name of a secret."""
    if isinstance(value, str):
        return masked(value)
    if isinstance(value, Mapping):
        known = _exact(tuple(_known), _environment()).pattern
        return {
            _name(name, known) if isinstance(name, str) and len(name) > 7 else name: _redacted(name, item)
            for name, item in value.items()
        }
    if not isinstance(value, list | tuple):
        return value
    flagged = {at for at in after_flags(value, strength) if not plain(value[at])}
    return [MASK if at in flagged else redact_tree(item) for at, item in enumerate(value)]


def _redacted(name: Any, item: Any) -> Any:
    if isinstance(item, float):  # most of what is logged
        return item
    return MASK if isinstance(item, str) and is_secret(str(name), item) else redact_tree(item)


def redact_arg(word: str) -> str:
    """`key=value` as it may be shown."""
    key, equals, value = word.partition("=")
    return f"{key}={MASK}" if equals and is_secret(key.lstrip("+-~"), unquoted(value)) else masked(word)


def redact_suspect(text: str) -> str:
    """`text` of an invalid word, without random-looking values, which may be a secret under a misspelt name. Digests
    such as a git commit stay.
    """
    return LOT.sub(
        lambda found: MASK if is_high_entropy(found[0]) and not DIGEST.fullmatch(found[0]) else found[0], text
    )


def hear(words: Sequence[str]) -> None:
    """Register the secrets among the words of a command, before any error could show them."""
    before = ""
    for word in words:
        for begin, end in spans(word, strength):
            know(word[begin:end])
        key, equals, value = word.partition("=")
        if equals and is_secret(key.lstrip("+-~"), unquoted(value)):
            know(unquoted(value), sure=strength(key.lstrip("+-~")) > 1)
        elif not equals and strength(before.strip("-{[,:=\"'")) > (
            not before.startswith("--") and not before.endswith(":")
        ):
            know(word.strip("{}[],\"'"))
        value = value if value.endswith(":") else ""
        before = value if equals else word


def know(value: Any, *, sure: bool = True) -> None:
    """From now on, mask `value` in every text, in all its usual encodings. Short values are masked only if `sure`."""
    text, _scan[0] = str(value), 0.0
    if len(text) < (3 if sure else 8) or plain(text):
        return
    from base64 import b64encode
    from urllib.parse import quote, quote_plus

    forms = [text, quote(text), quote(text, safe=""), quote_plus(text)]
    forms += [repr(text)[1:-1], json.dumps(text)[1:-1], text.replace("'", "\\'")]
    if len(text) >= 8:
        forms.append(b64encode(text.encode()).decode())
        forms += [line.strip() for line in text.splitlines() if len(line.strip()) >= 16 and "-----" not in line]
    _known.update(dict.fromkeys(forms))


def guard(visible: Callable[[str], str] = str) -> None:
    """Mask what Python itself prints: uncaught tracebacks, also those of threads, and warnings."""
    import sys
    import threading
    import traceback
    import warnings

    def show(kind: Any, error: Any, trace: Any) -> None:
        text = visible(masked("".join(traceback.format_exception(kind, error, trace))))
        print(text, end="", file=sys.stderr, flush=True)

    before = warnings.formatwarning
    sys.excepthook = show
    threading.excepthook = lambda failed: (
        None if failed.exc_type is SystemExit else show(failed.exc_type, failed.exc_value, failed.exc_traceback)
    )
    warnings.formatwarning = lambda *args, **kwargs: visible(masked(before(*args, **kwargs)))


def know_options(options: Mapping[str, Any]) -> None:
    """Register the secrets among the options of a storage, where an option named `key` is one."""
    for name, value in options.items():
        if isinstance(value, Mapping):
            know_options(value)
        elif isinstance(value, str) and (strength(name) or name.lower() == "key"):
            know(value)


def seal(part: Any, key: str, *, read: Iterable[str] = ()) -> Any:
    """The arguments of a group with secrets replaced by placeholders; the secrets are kept in memory. `read`: keys
    whose value came from an environment variable with a secret's name.
    """
    sealed = _seal(part, key, frozenset(read), held=False, near=False)
    # again, for values that contain a secret just found
    return _seal(sealed, key, frozenset(), held=False, near=False) if _kept else sealed


def opened(value: Any) -> Any:
    """The secret behind the placeholder `value`, or `value` itself if it is none. Raises KeyError with the key if this
    process does not have the secret.
    """
    placeholder = HERE.fullmatch(value) if isinstance(value, str) else None
    return _kept[placeholder[1]] if placeholder else value


def places(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """(key, key in the placeholder) for each `${secret:...}` in a value: the secrets to pass again when a saved run is
    repeated.
    """
    if isinstance(value, str):
        yield from ((key, name) for name in HERE.findall(value))
    value = dict(enumerate(value)) if isinstance(value, list | tuple) else value
    for name, item in value.items() if isinstance(value, Mapping) else ():
        yield from places(item, f"{key}.{name}")


def hand_over() -> dict[str, Any]:
    """State for the ranks."""
    return {"kept": dict(_kept), "known": list(_known)}


def take_over(state: Mapping[str, Any]) -> None:
    """Restore the state of the parent's `hand_over`."""
    _kept.update(state["kept"])
    _known.update(dict.fromkeys(state["known"]))


def _seal(value: Any, key: str, read: frozenset[str], *, held: bool, near: bool) -> Any:
    """As `seal`. `held`: below a name that holds secrets; `near`: beside an AWS access key id."""
    if isinstance(value, Mapping | list | tuple):
        items = dict(value if isinstance(value, Mapping) else enumerate(value))
        leaf = key.rsplit(".", 1)[-1].lower()
        inside = held or ("." in key and (bool(HOLDERS.search(leaf)) or strength(key) == 2))
        if isinstance(value, Mapping) and leaf.endswith(("headers", "cookies")):
            inside = False
        flagged = {*after_flags(value, strength)} if isinstance(value, list | tuple) else set()
        beside = any(isinstance(item, str) and re.search(SHAPES["AWS access key id"], item) for item in items.values())
        sealed = dict(items)
        for name, item in items.items():
            if name not in ("_target_", "_about_"):
                sealed[name] = _seal(item, f"{key}.{name}", read, held=inside or name in flagged, near=beside)
        return sealed if isinstance(value, Mapping) else list(sealed.values())
    if (
        not isinstance(value, str | int)
        or isinstance(value, bool)
        or (isinstance(value, str) and HERE.fullmatch(value))
    ):
        return value
    if not _sealed_here(value, key, key in read, held=held, near=near):
        return value
    _kept[key] = value
    know(value, sure=strength(key) > 1 or held)
    return f"${{secret:{key}}}"


def _sealed_here(value: Any, key: str, read: bool, *, held: bool, near: bool) -> bool:
    if is_secret(key, value) or (read and not plain(str(value))):
        return True
    if isinstance(value, int):
        return False
    return (
        masked(value) != value
        or (near and bool(BESIDE.search(value)))
        or (held and not plain(value) and "://" not in value)
    )


def _pieces(text: str) -> Iterator[str]:
    """The text in pieces, each value beside the name of a secret masked. A value that is no secret may itself be the
    next name: `Error: token=...`.
    """
    done, at = 0, 0
    while name := NAMED.search(text, at):
        at = name.end()
        sure = strength(name[1])
        value = VALUE.match(text, at) if sure or name[1].rsplit(".", 1)[-1].lower() == "key" else None
        mask = _hides(name, value, sure) if value else None
        if value and mask is not None:
            yield from (text[done:at], mask)
            done = at = value.end()
    yield text[done:]


def _hides(named: "re.Match[str]", value: "re.Match[str]", sure: int) -> str | None:
    """The mask of a value if it is a secret, else None. A `key` counts as one if its value looks random."""
    name, between = named.groups()
    quoted = re.fullmatch(r"(\\*[\"'])(.*?)(\\*[\"'])", value[0], re.S)
    inner = quoted[2] if quoted else value[0].rstrip(".")
    sure = sure or int(is_high_entropy(inner))
    apart = not re.search(r"[:=%]", between)
    if apart and not (
        value.string[named.start() - 1 : named.start()] == "-" or quoted or (sure == 2 and is_high_entropy(inner))
    ):
        return None
    if is_folder(name, inner) or (name in FOLDERS and value.string[named.start() - 1 : named.start()] == "$"):
        return None  # $PWD:/more is a list of folders
    if not sure or plain(inner) or (not quoted and _is_code(value, name)):
        return None
    # a sentence, such as "the password: it is asked for"
    prose = ":" in between and not quoted and re.compile(r"\s+\w").match(value.string, value.end())
    if (apart or prose or (sure == 1 and not quoted)) and not random(inner):
        return None
    return f"{quoted[1]}{MASK}{quoted[3]}" if quoted else MASK


def _is_code(value: "re.Match[str]", name: str) -> bool:
    """Whether the value looks like source code: `token=self.token`, `password = getpass(`, `key: str`."""
    text, follows = value[0].rstrip("."), value.string[value.end() : value.end() + 1]
    return re.fullmatch(r"[A-Za-z_][\w.]*", text) is not None and (
        follows in ("(", "[") or strength(text) > 0 or text.endswith(name)
    )


@cache
def _environment_of(names: frozenset[tuple[str, str]]) -> tuple[str, ...]:
    return tuple(
        value
        for name, value in names
        if name not in FOLDERS
        and strength(name)
        and len(value) > 7
        and (strength(name) > 1 or random(value))
        and not plain(value)
    )


def _environment() -> tuple[str, ...]:
    """Values of environment variables that have the name of a secret. Scanned only every SCAN_SECONDS, since a scan
    costs as much as masking ten texts.
    """
    now = time.monotonic()
    if now > _scan[0]:
        _scan[:] = [
            now + SCAN_SECONDS,
            _environment_of(frozenset((name, value) for name, value in os.environ.items() if HINT.search(name))),
        ]
    values: tuple[str, ...] = _scan[1]
    return values


@lru_cache(4096)
def _name(name: str, known: str) -> str:
    """A masked name; `known` makes the cache notice new secrets."""
    return masked(name)


@lru_cache(8)
def _exact(known: tuple[str, ...], environment: tuple[str, ...]) -> re.Pattern[str]:
    """A pattern of all known secrets, longest first; short ones match only as whole words."""
    forms = sorted({form for form in (*known, *environment) if form}, key=len, reverse=True)
    whole = [re.escape(form) if len(form) > 5 else rf"(?<!\w){re.escape(form)}(?!\w)" for form in forms]
    return re.compile("|".join(whole) or r"(?!)")
