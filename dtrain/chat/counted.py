"""Which characters of a rendered conversation count: those of the answers.

A template that has the tag `generation` says so itself. Of another, an answer is what its message adds to the text that
the messages before it have, with the beginning of an answer (add_generation_prompt).
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dtrain.chat.template import BrokenTemplate, Message, Span, Template
from dtrain.chat.turns import ANSWERS, Conversation

Written = tuple[str, list[Span]]
"""The text of a conversation, and the spans that count."""


def written(template: Template, of: Conversation, train_on: str) -> Written:
    """`train_on`: answers, last (the last answer) or all; of a conversation with a prompt, all that follows it is one
    answer. Raises BrokenTemplate.
    """
    text, marked = template.render(of.messages, tools=of.tools)
    if train_on == "all":
        return text, [(0, len(text))]
    if of.prompt is not None:
        return text, [_added(template, of, text, of.prompt, len(of.messages))]
    if template.marks(of.tools):
        return text, marked if train_on == "answers" else marked[-1:]
    answers = [number for number, message in enumerate(of.messages) if message["role"] == ANSWERS]
    if train_on == "last":
        answers = answers[-1:]
    return text, [_added(template, of, text, number, number + 1) for number in answers]


def counts(offsets: Sequence[Span], spans: Sequence[Span]) -> NDArray[np.uint8]:
    """1 for each token of which a character is in one of the spans, which are in order."""
    marks = np.zeros(len(offsets), np.uint8)
    if not len(offsets):
        return marks
    begins, ends = np.array(offsets, np.int64).T
    for first, last in spans:
        marks[(begins < last) & (ends > first)] = 1
    return marks


def breaks(template: Template, of: Conversation) -> str:
    """The message at which a template fails, as far as shorter conversations tell."""
    for number in range(1, len(of.messages) + 1):
        try:
            template.render(of.messages[:number], tools=of.tools)
        except BrokenTemplate:
            return f"message {number} ({_shown(of.messages[number - 1])})"
    return "its messages"


def _added(template: Template, of: Conversation, text: str, first: int, end: int) -> Span:
    """The span of messages `first` to `end`. Raises BrokenTemplate unless each text goes on from the one before."""
    if not first:
        raise BrokenTemplate("the first message is the assistant's, so nothing is there that it answers" + _remedy(of))
    before, _ = template.render(of.messages[:first], tools=of.tools, prompt=True)
    until = text if end == len(of.messages) else template.render(of.messages[:end], tools=of.tools)[0]
    if not text.startswith(until) or not until.startswith(before):
        raise BrokenTemplate(
            f"it writes messages 1 to {end if until.startswith(before) else first} otherwise where more follow, so "
            f"which text is the answer of message {first + 1} cannot be seen" + _remedy(of)
        )
    return len(before), len(until)


def _remedy(of: Conversation) -> str:
    own = "data.template=<a file with {% generation %} around the answers>"
    return f". Type {own}" if of.prompt is not None else f". Type {own}, data.train_on=last or data.train_on=all"


def _shown(message: Message) -> str:
    content = message.get("content")
    text = " ".join(content.split()) if isinstance(content, str) else str(content)
    return f"{message['role']}: {text[:40]!r}"
