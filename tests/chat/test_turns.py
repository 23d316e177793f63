"""Rows of any kind are messages of a user and an assistant, or are told apart from those that are not."""

from typing import Any

import pytest

from dtrain.chat.turns import ROLES, BadRow, columns_of, conversations, kind_of, wanted
from dtrain.errors import WordsError

USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
SYSTEM = {"role": "system", "content": "s"}
MORE = [{"role": "user", "content": "more"}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize(
    ("kind", "row", "messages"),
    [
        ("messages", {"messages": [USER, ANSWER]}, [USER, ANSWER]),
        ("messages", {"messages": '[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]'}, [USER, ANSWER]),
        ("messages", {"messages": [{**USER, "name": None}, ANSWER]}, [USER, ANSWER]),
        ("conversations", {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "system": "s"}, [SYSTEM, USER, ANSWER]),
        ("conversations", {"conversations": [USER, ANSWER], "system": ""}, [USER, ANSWER]),
        ("instruction", {"instruction": "q", "output": "a"}, [USER, ANSWER]),
        ("instruction", {"instruction": "q", "input": "", "output": "a", "system": "s"}, [SYSTEM, USER, ANSWER]),
        ("instruction", {"instruction": "q", "input": "x", "output": "a"}, [{"role": "user", "content": "q\n\nx"}, ANSWER]),
        ("prompt", {"prompt": "q", "completion": "a"}, [USER, ANSWER]),
        ("prompt", {"prompt": [SYSTEM, USER], "completion": [ANSWER, *MORE]}, [SYSTEM, USER, ANSWER, *MORE]),
    ],
)  # fmt: skip
def test_a_row_is_a_conversation(kind: str, row: dict[str, Any], messages: list[Any]) -> None:
    (made,) = conversations(kind, row)
    assert made.messages == messages
    assert made.prompt == (len(row["prompt"]) if kind == "prompt" else None)


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, [USER]),
        ({"prompt": [SYSTEM, USER], "chosen": [ANSWER], "rejected": "b"}, [SYSTEM, USER]),
        ({"prompt": "q", "chosen": [USER, ANSWER], "rejected": [USER, {**ANSWER, "content": "b"}]}, [USER]),
        ({"chosen": [USER, ANSWER], "rejected": [USER, {**ANSWER, "content": "b"}]}, [USER]),
        ({"chosen": [USER, ANSWER, MORE[0], ANSWER], "rejected": [USER, ANSWER, MORE[0], {**ANSWER, "content": "b"}]}, [USER, ANSWER, MORE[0]]),
    ],
)  # fmt: skip
def test_a_pair_is_two_conversations_with_one_prompt(row: dict[str, Any], prompt: list[Any]) -> None:
    chosen, rejected = conversations("pairs", row)
    for made in (chosen, rejected):
        assert made.prompt == len(prompt) and list(made.messages[: len(prompt)]) == prompt
    assert chosen.messages[-1]["content"] in ("a", "b") and rejected.messages[-1]["content"] == "b"


@pytest.mark.parametrize(
    ("kind", "row", "sentence"),
    [
        ("messages", {"messages": []}, "the conversation is empty"),
        ("messages", {"messages": None}, "messages is missing, not a list of messages"),
        ("messages", {"messages": "hello"}, "messages is 'hello', not a list of messages"),
        ("messages", {"messages": [USER, "x"]}, "message 2 is 'x', not an object"),
        ("messages", {"messages": [{"content": "q"}]}, "message 1 has no role: it has content"),
        ("messages", {"messages": [{"role": "usr", "content": "q"}]}, "message 1 has the role 'usr', which is not known. Did you mean user?"),
        ("messages", {"messages": [{"role": "user", "text": "q"}]}, "message 1 has no content: it has role, text"),
        ("messages", {"messages": [{"role": "human", "content": "q"}]}, "message 1 has the role 'human', which is not known. Did you mean user?"),
        ("messages", {"messages": [{"role": "user", "content": None}]}, "message 1 has no content: it is null"),
        ("messages", {"messages": [{"role": "user", "content": 5}]}, "the content of message 1 is 5, not text"),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "a.png"}]}]}, "message 1 has a part of the type image_url"),
        ("messages", {"messages": [USER], "tools": "f"}, "tools is 'f', not a list"),
        ("instruction", {"instruction": "q", "output": None}, "output is missing, not text"),
        ("prompt", {"prompt": [], "completion": "a"}, "the prompt is empty"),
        ("prompt", {"prompt": "q", "completion": []}, "completion has no message after the prompt"),
        ("pairs", {"chosen": "a", "rejected": "b"}, "there is no prompt"),
        ("pairs", {"chosen": [USER], "rejected": [USER, ANSWER]}, "chosen has no message after the prompt"),
    ],
)  # fmt: skip
def test_a_row_that_is_none_says_why(kind: str, row: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BadRow) as error:
        conversations(kind, row)
    assert str(error.value).startswith(sentence)


def test_other_words_of_a_template_are_no_roles_to_suggest() -> None:
    with pytest.raises(BadRow) as error:
        conversations("messages", {"messages": [{"role": "5", "content": "q"}]}, [*ROLES, "content"])
    assert error.value.sentence == (
        "message 1 has the role '5', which is not known. Allowed: assistant, developer, function, ipython, system, tool, user."
    )


def test_a_tool_may_return_a_number() -> None:
    (of,) = conversations("messages", {"messages": [USER, {"role": "tool", "content": 5}, ANSWER]})
    assert of.messages[1]["content"] == 5


def test_a_template_may_know_more_roles() -> None:
    row = {"messages": [{"role": "critic", "content": "q"}]}
    with pytest.raises(BadRow):
        conversations("messages", row)
    assert conversations("messages", row, ["critic"])[0].messages == row["messages"]


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["id", "messages"], "messages"), (["conversations"], "conversations"), (["prompt", "chosen", "rejected"], "pairs"),
        (["instruction", "input", "output"], "instruction"), (["prompt", "completion"], "prompt"),
    ],
)  # fmt: skip
def test_the_kind_follows_from_the_columns(names: list[str], kind: str) -> None:
    assert kind_of(names, "auto", {}, "x") == kind


def test_columns_of_other_names() -> None:
    renamed = {"instruction": "question", "output": "answer"}
    assert kind_of(["question", "answer", "system"], "auto", renamed, "x") == "instruction"
    assert columns_of("instruction", ["question", "answer", "system"], renamed) == {
        "instruction": "question",
        "output": "answer",
        "system": "system",
    }


@pytest.mark.parametrize(
    ("names", "kind", "renamed", "sentence"),
    [
        (["message", "id"], "auto", {}, "x has the columns message, id, which are no conversations. Did you mean messages?"),
        (["message", "id"], "messages", {}, "x has no column messages, which data.kind=messages reads. Did you mean message?"),
        (["messages"], "auto", {"mesages": "y"}, "data.columns.mesages: no row of a chat has such a column. Did you mean messages?"),
    ],
)  # fmt: skip
def test_columns_that_are_not_there_are_told_with_the_nearest(
    names: list[str], kind: str, renamed: dict[str, str], sentence: str
) -> None:
    with pytest.raises(WordsError) as error:
        kind_of(names, kind, renamed, "x")
    assert str(error.value).startswith(sentence)


def test_turns_before_an_instruction_and_marks_of_what_counts_are_read() -> None:
    row = {"instruction": "q", "input": "", "output": "a", "history": [["q1", "a1"], ["q2", "a2"]]}
    (of,) = conversations("instruction", row)
    assert [each["content"] for each in of.messages] == ["q1", "a1", "q2", "a2", "q", "a"]
    assert columns_of("instruction", ["instruction", "output", "history"], {})["history"] == "history"
    with pytest.raises(BadRow, match="turn 1 of history is "):
        conversations("instruction", {**row, "history": [["q1"]]})
    for mark, counts in (({"loss_mask": 0}, False), ({"loss": True}, True), ({"loss_mask": 1}, True), ({}, None)):
        assert wanted({**ANSWER, **mark}, 1) is counts
    with pytest.raises(WordsError, match=r"has the column loss_mask, and what counts is read off each message"):
        kind_of(["messages", "loss_mask"], "auto", {}, "x")
