"""Which characters of a rendered conversation count: those of the answers.

A template that has the tag `generation` says so itself. Of another, an answer is what its message adds to the text that
the messages before it have, with the beginning of an answer (add_generation_prompt).
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dtrain.chat import turns
from dtrain.chat.template import BrokenTemplate, Message, Span, Template
from dtrain.chat.turns import ANSWERS, BadRow, Conversation

Written = tuple[str, list[Span]]
"""The text of a conversation, and the spans that count."""


def written(template: Template, of: Conversation, train_on: str) -> Written:
    """`train_on`: answers, last (the last answer) or all; of a conversation with a prompt, all that follows it is one
    answer. An answer whose message has `train: false` or `weight: 0` does not count. Raises BrokenTemplate and BadRow.
    """
    off = _unwanted(of, train_on)
    text, marked = template.render(of.messages, tools=of.tools)
    if train_on == "all":
        return text, [(0, len(text))]
    if of.prompt is not None:
        return text, [_added(template, of, text, of.prompt, len(of.messages))]
    answers = [number for number, message in enumerate(of.messages) if message["role"] == ANSWERS]
    chosen = slice(None) if train_on == "answers" else slice(-1, None)
    if not template.marks(of.tools):
        counted = [number for number in answers[chosen] if number not in off]
        return text, [_added(template, of, text, number, number + 1) for number in counted]
    if not off:
        return text, marked[chosen]
    if len(marked) != len(answers):
        raise BadRow(
            f"message {min(off) + 1} is not to be learnt, and the chat template marks {len(marked)} spans for "
            f"{len(answers)} answers, so which is its own cannot be seen"
        )
    return text, [span for number, span in list(zip(answers, marked, strict=True))[chosen] if number not in off]


def _unwanted(of: Conversation, train_on: str) -> set[int]:
    """The answers that do not count though they are answers. Raises BadRow for words that contradict `train_on`."""
    off = set[int]()
    for number, message in enumerate(of.messages):
        wanted, is_answer = turns.wanted(message, number + 1), message["role"] == ANSWERS
        if wanted is False and (train_on == "all" or (of.prompt is not None and number >= of.prompt)):
            what = "data.train_on=all counts every token" if of.prompt is None else "all behind a prompt is learnt"
            raise BadRow(f"message {number + 1} is not to be learnt, but {what}")
        if message.get("train") and not is_answer and train_on != "all":
            raise BadRow(
                f"message {number + 1} ({message['role']}) has train: true, and of a conversation the messages of the "
                "assistant are learnt. Leave it out, or type data.train_on=all"
            )
        if wanted is False and is_answer:
            off.add(number)
    return off


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
