"""A tokenizer and its chat template: a tokenizer.json, or the folder, URL or hub name of one of Hugging Face."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from typing import Any

from dtrain.chat.template import BrokenTemplate, Template
from dtrain.config.installed import version
from dtrain.config.word import cut
from dtrain.errors import PreflightError, StoreError
from dtrain.storage import hub, store
from dtrain.tokenizer import LARGEST, SLOWEST

FILE, CONFIG, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
OLDER, GENERATION = "special_tokens_map.json", "generation_config.json"
SAFE = (3, 1, 6)
"""The first jinja2 without known ways out of its sandbox."""
ANSWER = "dtrain reads where an answer ends"
"""An answer that no template writes itself."""


@dataclass(frozen=True)
class Described:
    """The files of a tokenizer, as text: `tokenizer` is its tokenizer.json, `config` what stands beside it."""

    name: str
    tokenizer: str
    config: Mapping[str, Any]
    templates: Mapping[str, str]
    ends: Sequence[int] = ()
    """Tokens that end a text, as generation_config.json has them."""
    template: str = ""
    """data.template, if it takes the place of the tokenizer's own."""

    @property
    def special(self) -> dict[str, str]:
        """Names such as bos_token -> their texts."""
        named = {name: _text(token) for name, token in self.config.items() if name.endswith("_token")}
        return {name: text for name, text in named.items() if text}

    @cached_property
    def digest(self) -> str:
        """Of all that decides about the tokens of a conversation."""
        added = self.config.get("added_tokens_decoder") or {}
        parts = [self.tokenizer, self.special, added, self.templates]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


class Tokenizer:
    """The tokenizer itself. Raises PreflightError if it is none, or the tokenizers package is not installed."""

    def __init__(self, of: Described) -> None:
        try:
            from tokenizers import AddedToken
            from tokenizers import Tokenizer as Loaded
        except ImportError:
            raise PreflightError(
                f"data.tokenizer={of.name} needs the tokenizers package. Type: pip install 'dtrain[text]'"
            ) from None
        try:
            self.inner = Loaded.from_str(of.tokenizer)
        except Exception as error:  # the package raises bare Exception
            raise PreflightError(f"data.tokenizer={of.name}: not a tokenizer.json: {error}") from None
        self.inner.no_truncation()
        self.inner.no_padding()
        known = {token.content for token in self.inner.get_added_tokens_decoder().values()}
        for number, token in sorted(
            (of.config.get("added_tokens_decoder") or {}).items(), key=lambda each: int(each[0])
        ):
            if token["content"] not in known:
                self.inner.add_tokens([AddedToken(**{name: token[name] for name in ADDED if name in token})])
                if self.inner.token_to_id(token["content"]) != int(number):
                    raise PreflightError(
                        f"data.tokenizer={of.name}: {CONFIG} gives {token['content']!r} the number {number}, which "
                        f"{FILE} does not. Save the tokenizer again."
                    )
        rest = {*of.special.values()} - {token.content for token in self.inner.get_added_tokens_decoder().values()}
        self.inner.add_special_tokens([text for text in dict.fromkeys(of.special.values()) if text in rest])
        self.special = of.special

    @cached_property
    def vocab(self) -> int:
        return 1 + max(self.inner.get_vocab(with_added_tokens=True).values())

    def encode(self, text: str) -> list[int]:
        """The tokens of a text that a template has written: it has its special tokens."""
        return list(self.inner.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.inner.decode(list(tokens)))

    def number(self, name: str) -> int | None:
        """The token of a name such as eos_token; None if there is none."""
        text = self.special.get(name)
        number: int | None = None if text is None else self.inner.token_to_id(text)
        return number

    def ends(self, template: Template, known: Sequence[int]) -> set[int]:
        """Tokens that end an answer: `known`, eos_token, and what the template writes behind one."""
        ends = {*known, *[number for number in [self.number("eos_token")] if number is not None]}
        try:
            text, _ = template.render([{"role": "user", "content": "?"}, {"role": "assistant", "content": ANSWER}])
        except BrokenTemplate:
            return ends
        special = self.inner.get_added_tokens_decoder()
        after = self.encode(text.rpartition(ANSWER)[2])
        return ends | ({after[0]} if ANSWER in text and after and after[0] in special else set())


ADDED = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
"""Properties of an added token in tokenizer_config.json."""


def described(name: str, template: str | None) -> Described:
    """The tokenizer at `name`; `template`, a file or its text, in place of its own. Raises PreflightError."""
    place = hub.place(name)
    is_file = place.endswith(".json")
    whole = _read(name, place, None if is_file else FILE)
    if whole is None:
        raise PreflightError(
            f"data.tokenizer={name}: there is no {FILE}. Give a folder, URL or hub name of a tokenizer of Hugging "
            f"Face.{hub.longer(name)}"
        )
    folder = place.rpartition("/")[0] or "." if is_file else place
    config = {**_json(name, folder, OLDER), **_json(name, folder, CONFIG)}
    templates = {"default": _own(template)} if template else _templates(name, folder, config)
    ends = _json(name, folder, GENERATION).get("eos_token_id")
    numbers = [each for each in (ends if isinstance(ends, list) else [ends]) if isinstance(each, int)]
    return Described(
        name=name, tokenizer=whole, config=config, templates=templates, ends=tuple(numbers), template=template or ""
    )


def template_of(of: Described, arguments: Mapping[str, Any], day: str | None) -> Template:
    """The chat template. Raises PreflightError if there is none or it cannot be read."""
    if tuple(int(part) for part in version("jinja2").split(".")[:3] if part.isdigit()) < SAFE:
        raise PreflightError(
            f"data=chat needs jinja2 {'.'.join(map(str, SAFE))} or newer: there are ways out of the sandbox of older "
            "ones. Type: pip install -U jinja2"
        )
    if not of.templates:
        raise PreflightError(
            f"data.tokenizer={of.name}: it has no chat template. Type data.template=<a file with one>, or name the "
            "tokenizer of a model that was trained on conversations."
        )
    try:
        known = None if day is None else date.fromisoformat(day)
    except ValueError:
        raise PreflightError(f"data.date={day} is no day. Write it as in data.date=2026-11-26.") from None
    try:
        return Template(of.templates, of.special, arguments, known)
    except BrokenTemplate as error:
        if of.template:
            raise PreflightError(f"data.template={cut(of.template, 80)}: it is no chat template: {error}.") from None
        raise PreflightError(f"data.tokenizer={of.name}: its chat template is none: {error}.") from None


def _templates(name: str, folder: str, config: Mapping[str, Any]) -> dict[str, str]:
    found = _read(name, folder, TEMPLATE)
    if found is not None:
        return {"default": found}
    known = config.get("chat_template")
    if isinstance(known, str):
        return {"default": known}
    named = {str(each["name"]): str(each["template"]) for each in known} if isinstance(known, list) else {}
    return named if "default" in named else {}


def _own(template: str) -> str:
    """The template of `data.template`: a text has tags, a place has none. Raises PreflightError."""
    if "{{" in template or "{%" in template:
        return template
    try:
        return store.small(template, LARGEST).decode()
    except (StoreError, UnicodeDecodeError) as error:
        raise PreflightError(f"data.template={template}: {error}. Give a file with a template, or its text.") from error


def _json(name: str, folder: str, file: str) -> dict[str, Any]:
    text = _read(name, folder, file)
    try:
        parsed = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise PreflightError(f"data.tokenizer={name}: {file} is not JSON: {error}") from None
    return parsed if isinstance(parsed, dict) else {}


def _read(name: str, place: str, file: str | None) -> str | None:
    """The text of a file; None if it is not there. Raises PreflightError."""
    try:
        if place.startswith(hub.SCHEME) and file:
            return hub.read(place, file).decode()
        return store.small(store.join(place, file) if file else place, LARGEST, pace=SLOWEST).decode()
    except StoreError as error:
        if error.kind == "missing":
            return None
        raise PreflightError(f"data.tokenizer={name}: {error}") from error
    except UnicodeDecodeError as error:
        raise PreflightError(f"data.tokenizer={name}: {file or 'it'} is not text: {error}") from None
    except PreflightError:
        if file == FILE:
            raise
        return None  # the hub has no such file of this repository


def _text(token: Any) -> str:
    """The text of a token, which is written as such or as an object."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else ""
