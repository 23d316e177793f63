"""A chat template, rendered as transformers does: jinja2's sandbox, the same globals and the tag `generation`.

jinja2 alone is enough, and comes with torch: transformers takes three seconds to import, which every launch would wait
for. Names, globals and what they do are those of transformers/utils/chat_template_utils.py; tests hold one against the
other.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, Undefined, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

Message = Mapping[str, Any]
Span = tuple[int, int]
"""Characters of a text, from the first to behind the last."""
TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning; templates read the first, some the second."""
HALF = re.compile("[\ud800-\udfff]")
LONGEST = 1 << 24
"""Characters of one conversation."""
DATED = (
    "the chat template writes today's date, and a run has the same tokens on every day. Type data.date={today}, or "
    "another day"
)


RESERVED = ("messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now")
"""Names that a template gets from dtrain alone."""


class BrokenTemplate(ValueError):
    """A template cannot be read, or does not take a conversation; says why."""


class Template:
    """`texts`: the template `default`, and `tool_use` if conversations with tools have another. `tokens`: names such as
    bos_token and their texts; `arguments`: more names for the template; `day`: that of strftime_now, None if there is
    none. Raises BrokenTemplate.
    """

    def __init__(
        self, texts: Mapping[str, str], tokens: Mapping[str, str], arguments: Mapping[str, Any], day: date | None
    ) -> None:  # fmt: skip
        self._day, self._names = day, {**tokens, **arguments}
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _json
        environment.globals |= {
            "raise_exception": _refuse, "strftime_now": self._now, "dict": _Dict(), "namespace": _Namespace,
        }  # fmt: skip
        self.undefined = dict[str, None]()
        """Names that are not defined, of which it has written or read the value: a slip of the pen may be there."""
        environment.undefined = _noted_in(self.undefined)
        self._spans = list[Span]()
        self._written = 0
        environment.extend(written=lambda: self._written, spans=self._spans)
        try:
            self._compiled = {name: environment.from_string(text) for name, text in texts.items()}
        except TemplateSyntaxError as error:
            raise BrokenTemplate(f"line {error.lineno}: {_plain(error)}") from None
        except (RecursionError, MemoryError, OverflowError) as error:
            raise BrokenTemplate(f"it cannot be compiled ({type(error).__name__})") from None
        self._marked = {name: bool(TAG.search(text)) for name, text in texts.items()}

    def marks(self, tools: Any) -> bool:
        """Whether the template marks answers itself, with the tag `generation`."""
        return self._marked[self._which(tools)]

    def render(
        self, messages: Sequence[Message], *, tools: Any = None, prompt: bool = False
    ) -> tuple[str, list[Span]]:  # fmt: skip
        """The text of a conversation, and the spans in tags `generation`. `prompt`: it ends where the assistant is to
        answer. Raises BrokenTemplate.
        """
        self._spans.clear()
        self._written, blocks = 0, list[str]()
        names = {"tools": tools, "documents": None, "add_generation_prompt": prompt, **self._names}
        try:
            for block in self._compiled[self._which(tools)].generate(messages=[*map(_aliased, messages)], **names):
                blocks.append(block)
                self._written += len(block)
                if self._written > LONGEST:
                    raise BrokenTemplate(f"it writes more than {LONGEST:,} characters for one conversation")
        except BrokenTemplate:
            raise
        except SecurityError as error:
            raise BrokenTemplate(f"it does what no template may: {_plain(error)}") from None
        except TemplateError as error:
            raise BrokenTemplate(_plain(error)) from None
        except MemoryError:
            raise BrokenTemplate("it takes more memory than a template may") from None
        except RecursionError:
            raise BrokenTemplate("it calls itself without end") from None
        except Exception as error:  # of any expression in it
            raise BrokenTemplate(f"{type(error).__name__}: {_plain(error)}") from None
        text = "".join(blocks)
        _check(text, messages)
        return text, [*self._spans]

    def _which(self, tools: Any) -> str:
        return "tool_use" if tools is not None and "tool_use" in self._compiled else "default"

    def _now(self, format: str) -> str:
        if self._day is None:
            raise BrokenTemplate(DATED.format(today=date.today().isoformat()))
        return self._day.strftime(format)


def _check(text: str, messages: Sequence[Message]) -> None:
    """Raises BrokenTemplate if a rendered text has half a character, or a list as Python shows it."""
    if half := HALF.search(text):
        raise BrokenTemplate(f"{half[0]!r} is half a character (a lone surrogate), which no tokenizer takes")
    for content in (message.get("content") for message in messages):
        if content and isinstance(content, list | Mapping) and str(content) in text:
            raise BrokenTemplate(
                f"it writes {str(content)[:40]!r} as Python shows it. Give the content as text, or type data.template="
                "<a template that reads the parts of a content>"
            )


class _Generation(Extension):
    """{% generation %}...{% endgeneration %}: where in the text the assistant writes."""

    tags = {"generation"}  # noqa: RUF012 # as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_note"), [], [], body).set_lineno(line)

    def _note(self, caller: Any) -> str:
        text: str = caller()
        begin: int = self.environment.written()  # type: ignore[attr-defined]
        self.environment.spans.append((begin, begin + len(text)))  # type: ignore[attr-defined]
        return text


class _Dict:
    """The part of `dict` that a template may use."""

    def __call__(self, *arguments: Any, **named: Any) -> dict[Any, Any]:
        return dict(*arguments, **named)

    def fromkeys(self, *arguments: Any) -> dict[Any, Any]:
        return dict.fromkeys(*arguments)


class _Namespace(Namespace):
    """Without names that begin with an underscore, by which the sandbox could be left."""

    def __init__(*arguments: Any, **named: Any) -> None:
        self, *values = arguments
        attributes = dict(*values, **named)
        for name in attributes:
            _public(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _public(name)
        Namespace.__setitem__(self, name, value)


def _noted_in(names: dict[str, None]) -> type[Undefined]:
    """The value of a name that is not defined: nothing, but noted where it is written or gone through."""

    class Noted(Undefined):
        __slots__ = ()

        def __str__(self) -> str:
            names[str(self._undefined_name)] = None
            return super().__str__()

        def __iter__(self) -> Iterator[Any]:
            names[str(self._undefined_name)] = None
            return super().__iter__()

    return Noted


def _public(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"it sets {name!r} of a namespace")


def _refuse(message: str) -> str:
    raise TemplateError(str(message))


def _json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:  # fmt: skip
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )  # fmt: skip


def _aliased(message: Message) -> dict[str, Any]:
    """A message without what is null, and with its reasoning under each name that templates read."""
    known = {name: value for name, value in message.items() if value is not None}
    reasoning = next((known[name] for name in REASONING if name in known), None)
    return known if reasoning is None else {"thinking": reasoning, **known, "reasoning_content": reasoning}


def _plain(error: Exception) -> str:
    return " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__
