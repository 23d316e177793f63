"""Which characters count: by the template's own tags, or by what the answer adds."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat import talks

from dtrain.chat.counted import breaks, counts, written
from dtrain.chat.template import BrokenTemplate, Template
from dtrain.chat.tokenizer import Tokenizer, described
from dtrain.chat.turns import BadRow, Conversation

TALK = talks.said("hi", "hello", "and?", "no")
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}


def learnt(template: str, talk: Any = TALK, train_on: str = "answers", prompt: int | None = None) -> list[str]:
    text, spans = written(Template({"default": template}, NAMES, {}, None), Conversation(talk, None, prompt), train_on)
    return [text[begin:end] for begin, end in spans]


@pytest.mark.parametrize(
    ("template", "answers"),
    [
        ("CHATML", ["hello<|im_end|>\n", "no<|im_end|>\n"]),
        ("MARKED", ["hello<|im_end|>", "no<|im_end|>"]),
        ("LLAMA", ["hello<|eot_id|>", "no<|eot_id|>"]),
    ],
)
def test_answers_count(template: str, answers: list[str]) -> None:
    text = getattr(talks, template)
    assert learnt(text) == answers and learnt(text, train_on="last") == answers[-1:]
    (everything,) = learnt(text, train_on="all")
    assert everything.endswith(answers[-1].strip() if template != "MARKED" else "\n") or everything.strip().endswith(
        answers[-1].strip()
    )
    assert learnt(text, TALK[:2]) == []


@pytest.mark.parametrize("template", ["CHATML", "MARKED"])
def test_an_answer_that_is_not_to_be_learnt_does_not_count(template: str) -> None:
    text, (first, last) = getattr(talks, template), learnt(getattr(talks, template))
    for off in ({"train": False}, {"weight": 0}, {"weight": 0.0}):
        talk = [*TALK[:2], {**TALK[2], **off}, *TALK[3:]]
        assert TALK[2]["role"] == "assistant" and learnt(text, talk) == [last] == learnt(text, talk, train_on="last")
    talk = [*TALK[:-1], {**TALK[-1], "weight": 0}]
    assert learnt(text, talk) == [first] and learnt(text, talk, train_on="last") == []
    assert learnt(text, [{**each, "weight": 1} for each in TALK]) == [first, last]


@pytest.mark.parametrize(
    ("number", "words", "given", "why"),
    [
        (2, {"train": False}, {"train_on": "all"}, "message 3 is not to be learnt, but data.train_on=all counts every"),
        (2, {"weight": 0}, {"prompt": 2}, "message 3 is not to be learnt, but all behind a prompt is"),
        (2, {"weight": 0.5}, {}, r"message 3 has weight: 0.5, not 1 \(it counts\) or 0"),
        (2, {"train": "no"}, {}, "message 3 has train: 'no', not 1"),
        (2, {"train_detail": [{}]}, {}, "message 3 has train_detail"),
        (1, {"train": True}, {}, r"message 2 \(user\) has train: true"),
    ],
)
def test_words_about_learning_that_contradict_are_told(number: int, words: Any, given: Any, why: str) -> None:
    talk = [{**each, **(words if place == number else {})} for place, each in enumerate(TALK)]
    with pytest.raises(BadRow, match=why):
        learnt(talks.CHATML, talk, **given)


def test_all_that_follows_a_prompt_is_one_answer() -> None:
    assert learnt(talks.MARKED, prompt=2) == [
        "hello<|im_end|>\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\nno<|im_end|>\n"
    ]


def test_a_template_whose_prefix_is_no_prefix_is_told() -> None:
    with pytest.raises(
        BrokenTemplate, match=r"it writes messages 1 to 3 otherwise where more follow.*data.train_on=last"
    ):
        learnt(talks.FORGETFUL)
    with pytest.raises(BrokenTemplate, match=r"which text is the answer of message 5 cannot be seen"):
        learnt(talks.FORGETFUL.replace("assistant\\n' }}{% endif %}", "assistant:' }}{% endif %}"), train_on="last")
    assert learnt(talks.FORGETFUL, train_on="last") == ["<think></think>no<|im_end|>\n"]
    with pytest.raises(BrokenTemplate, match="the first message is the assistant's"):
        learnt(talks.CHATML, TALK[2:])


def test_the_message_that_breaks_a_template_is_named() -> None:
    template = Template({"default": talks.ALTERNATING}, NAMES, {}, None)
    talk = [
        *talks.said("hi", "hello", system=""),
        {"role": "assistant", "content": "again, and at such length that it is cut"},
    ]
    with pytest.raises(BrokenTemplate, match="Roles must alternate"):
        written(template, Conversation(talk), "answers")
    assert breaks(template, Conversation(talk)) == "message 3 (assistant: 'again, and at such length that it is cut')"


def test_a_token_counts_if_a_character_of_it_does() -> None:
    offsets = [(0, 3), (3, 4), (4, 4), (4, 8), (8, 9)]
    assert counts(offsets, [(3, 5)]).tolist() == [0, 1, 1, 1, 0]
    assert counts(offsets, [(0, 1), (8, 9)]).tolist() == [1, 0, 0, 0, 1]
    assert counts([], [(0, 1)]).tolist() == [] and counts(offsets, []).sum() == 0


def test_bytes_of_one_character_count_together(tmp_path: Path) -> None:
    inner = Tokenizer(described(talks.tokenizer(tmp_path), None)).inner
    encoded = inner.encode("a😀b", add_special_tokens=False)
    marks = counts(encoded.offsets, [(1, 2)])
    assert inner.decode(np.array(encoded.ids)[marks == 1].tolist()) == "😀"
