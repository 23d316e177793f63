"""Prompts of a file, and what is no prompt, with its line."""

import json
from pathlib import Path

import pytest
from chat import talks

from dtrain.chat.prompts import messages_of, read, row_of
from dtrain.errors import PreflightError


def test_each_line_is_a_prompt(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text('Hello\n\n{"prompt": 1}\n')
    assert read(f"{tmp_path}/a.txt") == ["Hello", '{"prompt": 1}']
    talk = talks.said("hi")
    (tmp_path / "a.jsonl").write_text(
        json.dumps({"prompt": "Hello\nyou", "id": 3}) + "\n" + json.dumps({"messages": talk}) + "\n"
    )
    assert read(f"{tmp_path}/a.jsonl") == ["Hello\nyou", talk]
    assert messages_of("Hello") == [{"role": "user", "content": "Hello"}] and messages_of(talk) is talk
    assert row_of("Hello", "Hi") == {"prompt": "Hello", "answer": "Hi"}
    assert row_of(talk, "Hi") == {"messages": talk, "answer": "Hi"}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("\n\n", "there is no prompt in it"),
        ('{"prompt": "a"}\n{"prompt"', "line 2: this is no JSON"),
        ('{"prompt": "a", "prompt": "b"}', "line 1: 'prompt' is given twice. Leave one out."),
        ("[1]", 'line 1: a row is an object, such as {"prompt": "Hello"}.'),
        ('{"promt": "a"}', "line 1 has neither prompt nor messages: it has promt. Did you mean prompt?"),
        ('\n{"prompt": ""}', "line 2: the prompt is empty"),
        (
            '{"messages": [{"role": "usr", "content": "a"}]}',
            "line 1: message 1 has the role 'usr', which is not known. Did you mean user?",
        ),
        ('{"messages": null}', "line 1: messages is null. Give a list of messages."),
        ('{"prompt": 5}', "line 1: prompt is 5. Give a text."),
        ('{"messages": []}', "line 1: the conversation is empty"),
    ],
)
def test_what_is_no_prompt_is_told_with_its_line(text: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(PreflightError) as error:
        read(f"{tmp_path}/a.jsonl")
    assert sentence in str(error.value) and f"generate.prompts={tmp_path}/a.jsonl" in str(error.value)


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match=r"generate\.prompts=.*nowhere"):
        read(f"{tmp_path}/nowhere.txt")
