"""Rows as conversations. The kind of a row follows from the columns of its file:

    messages        messages: [{role, content}, ...]
    conversations   conversations: [{from, value}, ...], as ShareGPT has them
    instruction     instruction, input (optional), output, history (optional: [[question, answer], ...] before it)
    prompt          prompt, completion
    pairs           chosen, rejected, prompt (optional)

`tools` (a list, or JSON of one) and `system` are read where a file has them.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dtrain.chat.template import Message
from dtrain.errors import WordsError, nearest

KINDS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "messages": (("messages",), ("tools",)),
    "conversations": (("conversations",), ("system", "tools")),
    "pairs": (("chosen", "rejected"), ("prompt", "system", "tools")),
    "instruction": (("instruction", "output"), ("input", "history", "system")),
    "prompt": (("prompt", "completion"), ("system", "tools")),
}
"""Kind -> columns that a row has, and columns that it may have. The first kind that fits is taken."""
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
NAMES = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
    "model": "assistant", "function_response": "tool", "observation": "tool", "tool_response": "tool",
}  # fmt: skip
"""Roles as ShareGPT calls them."""
ANSWERS = "assistant"
RESULTS = ("tool", "function", "ipython")
"""Roles of what a tool returns, which may be any value."""
COUNTS = ("train", "weight", "loss_mask", "loss")
"""Entries of a message that say whether it is to be learnt: 1 or true, 0 or false."""
WHOLE = ("loss_mask", "loss_weight", "loss_weights")
"""Columns of other tools that say what of a row counts, which is not read off columns here."""
UNSEEN = ("image", "audio", "video", "file")
"""Types of parts of a content that are no text."""


class BadRow(ValueError):
    """A row is no conversation; says why."""

    @property
    def sentence(self) -> str:
        """The message, with one full stop."""
        return str(self) if str(self).endswith((".", "?")) else f"{self}."


@dataclass(frozen=True)
class Conversation:
    """`prompt`: the messages that are no answer; None if every message of the assistant is one."""

    messages: Sequence[Message]
    tools: Any = None
    prompt: int | None = None


def kind_of(names: Sequence[str], kind: str, renamed: Mapping[str, str], where: str) -> str:
    """The kind of rows with columns of these `names`; `kind` is a kind, or auto. `renamed`: name here -> name in the
    file. Raises WordsError.
    """
    if wrong := [name for name in renamed if not any(name in sum(each, ()) for each in KINDS.values())]:
        every = dict.fromkeys(name for each in KINDS.values() for name in sum(each, ()))
        raise WordsError(f"data.columns.{wrong[0]}: no row of a chat has such a column.{nearest(wrong[0], every)}")
    if marks := [name for name in WHOLE if name in names and name not in renamed.values()]:
        raise WordsError(
            f"{where} has the column {marks[0]}, and what counts is read off each message: "
            f"{{role: ..., content: ..., {COUNTS[0]}: 0}}. Write it there, or leave the column out."
        )
    if kind != "auto":
        lacking = [each for name in KINDS[kind][0] if (each := renamed.get(name, name)) not in names]
        if lacking:
            raise WordsError(
                f"{where} has no column {lacking[0]}, which data.kind={kind} reads.{nearest(lacking[0], names)}"
            )
        return kind
    for each, (needed, _) in KINDS.items():
        if all(renamed.get(name, name) in names for name in needed):
            return each
    known = "; ".join(f"{', '.join(needed)} (data.kind={each})" for each, (needed, _) in KINDS.items())
    near = next((f" Did you mean {n}?" for name in names if (n := _near(name))), "")
    raise WordsError(
        f"{where} has the columns {', '.join(names)}, which are no conversations.{near} Known: {known}. Type "
        "data.columns.<name>=<its name in the file> for columns of other names."
    )


def columns_of(kind: str, names: Sequence[str], renamed: Mapping[str, str]) -> dict[str, str]:
    """Name here -> column of the file, of all that is read."""
    needed, optional = KINDS[kind]
    columns = {name: renamed.get(name, name) for name in (*needed, *optional)}
    return {name: column for name, column in columns.items() if name in needed or name in renamed or column in names}


def conversations(kind: str, row: Mapping[str, Any], known: Sequence[str] = ROLES) -> list[Conversation]:
    """The conversation of a row, or the two of a pair: the chosen one first. `known`: roles. Raises BadRow."""
    tools = _tools(row.get("tools"))
    if kind in ("messages", "conversations"):
        messages = _system(row, _messages(row[kind], known, kind))
        if not messages:
            raise BadRow("the conversation is empty")
        return [Conversation(messages, tools)]
    if kind == "instruction":
        asked = "\n\n".join(_text(row[name], name) for name in ("instruction", "input") if row.get(name))
        answer = {"role": ANSWERS, "content": _text(row["output"], "output")}
        turn: list[Message] = [*_history(row.get("history")), {"role": "user", "content": asked}, answer]
        return [Conversation(_system(row, turn), tools)]
    if kind == "prompt":
        prompt = _system(row, _turn(row["prompt"], "user", known, "prompt"))
        return [_answered(prompt, _turn(row["completion"], ANSWERS, known, "completion"), tools, "completion")]
    return _pair(row, known, tools)


def wanted(message: Message, number: int) -> bool | None:
    """Whether a message is to be learnt, by one of COUNTS; None if it does not say. Raises BadRow."""
    if message.get("train_detail"):
        raise BadRow(f"message {number} has train_detail, and a message counts as a whole or not at all")
    for name in COUNTS:
        value = message.get(name)
        if value is None:
            continue
        if not isinstance(value, int | float) or value not in (0, 1):
            raise BadRow(f"message {number} has {name}: {value!r}, not 1 (it counts) or 0 (it does not)")
        return bool(value)
    return None


def _pair(row: Mapping[str, Any], known: Sequence[str], tools: Any) -> list[Conversation]:
    both = [_turn(row[name], ANSWERS, known, name) for name in ("chosen", "rejected")]
    begun = all(each and each[0]["role"] != ANSWERS for each in both)
    if row.get("prompt") is None or (begun and isinstance(row["prompt"], str)):
        if not begun:
            raise BadRow("there is no prompt, and chosen does not begin with one: give a column prompt, or messages")
        shared = next((n for n, (a, b) in enumerate(zip(*both, strict=False)) if a != b), min(map(len, both)))
        prompt, both = both[0][:shared], [each[shared:] for each in both]
    else:
        prompt = _turn(row["prompt"], "user", known, "prompt")
    prompt = _system(row, prompt)
    return [_answered(prompt, each, tools, name) for name, each in zip(("chosen", "rejected"), both, strict=True)]


def _history(value: Any) -> list[Message]:
    """The turns before an instruction: pairs of a question and its answer. Raises BadRow."""
    turns = _parsed(value) or []
    if not isinstance(turns, list):
        raise BadRow(f"history is {_said(turns)}, not a list of [question, answer]")
    messages = list[Message]()
    for number, pair in enumerate(turns, 1):
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(each, str) for each in pair):
            raise BadRow(f"turn {number} of history is {_said(pair)}, not [question, answer]")
        messages += [{"role": "user", "content": pair[0]}, {"role": ANSWERS, "content": pair[1]}]
    return messages


def _answered(prompt: list[Message], answer: list[Message], tools: Any, name: str) -> Conversation:
    if not prompt:
        raise BadRow("the prompt is empty")
    if not answer:
        raise BadRow(f"{name} has no message after the prompt")
    return Conversation([*prompt, *answer], tools, len(prompt))


def _turn(value: Any, role: str, known: Sequence[str], name: str) -> list[Message]:
    """A text as one message, or messages as they are."""
    return [{"role": role, "content": value}] if isinstance(value, str) else _messages(value, known, name)


def _messages(value: Any, known: Sequence[str], name: str) -> list[Message]:
    value = _parsed(value)
    if not isinstance(value, list):
        raise BadRow(f"{name} is {_said(value)}, not a list of messages")
    return [_message(each, number, known) for number, each in enumerate(value, 1)]


def _message(value: Any, number: int, known: Sequence[str]) -> Message:
    if not isinstance(value, Mapping):
        raise BadRow(f"message {number} is {_said(value)}, not an object such as {{role: user, content: ...}}")
    message = {str(key): each for key, each in value.items() if each is not None}
    if "role" not in message and "from" in message:
        role, content = message.pop("from"), message.pop("value", "")
        message = {"role": NAMES.get(role, role) if isinstance(role, str) else role, "content": content, **message}
    if "role" not in message:
        raise BadRow(f"message {number} has no role: it has {', '.join(message) or 'nothing'}")
    if not isinstance(message["role"], str) or message["role"] not in known:
        raise BadRow(f"message {number} has the role {_shown_role(message['role'], known)}")
    if not {"content", "tool_calls", "thinking", "reasoning_content", "reasoning"} & message.keys():
        has = "it is null" if value.get("content", "") is None else f"it has {', '.join(message)}"
        raise BadRow(f"message {number} has no content: {has}")
    _check_content(message, number)
    return message


def _shown_role(role: Any, known: Sequence[str]) -> str:
    """A role that is not known, and what is near to it: `known` has other words of the template, too."""
    shown = str(role)[:40]
    hint = f" Did you mean {NAMES[shown]}?" if shown in NAMES else nearest(shown, known)
    return f"{shown!r}, which is not known.{hint if 'Did you mean' in hint else nearest(shown, ROLES)}"


def _check_content(message: Message, number: int) -> None:
    """Raises BadRow for a content that is neither text nor made of texts."""
    content = message.get("content", "")
    if not isinstance(content, str | list | Mapping) and message["role"] not in RESULTS:
        raise BadRow(f"the content of message {number} is {content!r}, not text")
    for part in content if isinstance(content, list) else []:
        kind = str(part.get("type") or "") if isinstance(part, Mapping) else ""
        if kind.removeprefix("input_").removesuffix("_url") in UNSEEN:
            raise BadRow(f"message {number} has a part of the type {kind}, and data=chat gives a model text alone")


def _system(row: Mapping[str, Any], messages: list[Message]) -> list[Message]:
    system = row.get("system")
    return [{"role": "system", "content": _text(system, "system")}, *messages] if system else messages


def _tools(value: Any) -> Any:
    value = _parsed(value)
    if not value:
        return None
    if not isinstance(value, list):
        raise BadRow(f"tools is {_said(value)}, not a list")
    return value


def _parsed(value: Any) -> Any:
    """The value of a text that is JSON: columns of objects are often written as one."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise BadRow(f"{name} is {_said(value)}, not text")
    return value


def _said(value: Any) -> str:
    return "missing" if value is None else f"{str(value)[:40]!r}"


def _near(name: str) -> str:
    hint = nearest(name, [column for needed, _ in KINDS.values() for column in needed])
    return hint.removeprefix(" Did you mean ").rstrip("?") if "Did you mean" in hint else ""
