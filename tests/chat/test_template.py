"""Chat templates say what they say under transformers, and do nothing else."""

import json
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import commands
import pytest
from chat import talks

from dtrain.chat import counted
from dtrain.chat.template import BrokenTemplate, Template
from dtrain.chat.tokenizer import Tokenizer, described, template_of

ASKED: Any = {"role": "user", "content": "hi"}
CALLS = [
    ASKED,
    {"role": "assistant", "reasoning_content": "hm", "content": "hello"},
    {"role": "user", "content": "f?"},
    {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]},
    {"role": "tool", "name": "f", "content": "3"},
    {"role": "assistant", "content": "It is <b>3</b>."},
]
TALKS = [talks.said("What is é 😀?", " Paris \n", "and?", "no"), talks.said("hi", "hello", system=""), CALLS]
THEIRS = """
import json, sys
from importlib.util import find_spec
from pathlib import Path
from transformers import AutoTokenizer
folder, talks = sys.argv[1], json.loads(sys.argv[2])
place = Path(find_spec("trl").origin).parent / "chat_templates"  # read: to import it takes seconds
known = {path.name: path.read_text() for path in sorted(place.glob("*.jinja"))}
texts = {**known, **json.loads(sys.argv[3])}
tokenizer, answers = AutoTokenizer.from_pretrained(folder), []
for name, text in texts.items():
    for number, talk in enumerate(talks):
        try:
            marked = "generation %}" in text or "generation -%}" in text
            given = tokenizer.apply_chat_template(talk, chat_template=text, return_dict=True, return_assistant_tokens_mask=marked)
            answers.append([name, number, given["input_ids"], given["assistant_masks"] if marked else None])
        except Exception as error:
            answers.append([name, number, None, None])
json.dump([texts, answers], open(sys.argv[4], "w"))
"""
MINE = {name: getattr(talks, name) for name in ("CHATML", "MARKED", "LLAMA", "ALTERNATING", "FORGETFUL")}


def rendered(text: str, **given: Any) -> str:
    return Template({"default": text}, {"eos_token": "</s>"}, given, None).render([ASKED])[0]


def test_tokens_and_answers_are_those_of_transformers_for_every_template_that_trl_has(tmp_path: Path) -> None:
    if find_spec("trl") is None:
        pytest.skip("trl is not here")
    folder, out = talks.tokenizer(tmp_path / "tk", None), tmp_path / "theirs.json"
    done = commands.python("-c", THEIRS, folder, json.dumps(TALKS), json.dumps(MINE), str(out))
    assert done.returncode == 0, done.stderr
    texts, answers = json.loads(out.read_text())
    of, same, marked = described(folder, None), 0, 0
    tokenizer = Tokenizer(of)
    for name, number, tokens, mask in answers:
        template = Template({"default": texts[name]}, of.special, {}, date.today())
        if tokens is None:
            with pytest.raises(BrokenTemplate):
                template.render(TALKS[number])
            continue
        text, spans = template.render(TALKS[number])
        encoded = tokenizer.inner.encode(text, add_special_tokens=False)
        assert encoded.ids == tokens, (name, number)
        if mask is not None:
            assert counted.counts(encoded.offsets, spans).tolist() == mask, (name, number)
            marked += 1
        same += 1
    assert same > 100 and marked > 50 and {name for name, *_ in answers} > {*MINE}


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('touch owned').read() }}",
        "{{ lipsum.__globals__['os'].system('touch owned') }}",
        "{% set n = namespace(__class__=1) %}",
        "{% set n = namespace() %}{% set n.__init__ = 1 %}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ dict.__class__ }}{{ (dict.__call__).__globals__ }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 'a' * 20000000 }}",
    ],
)
def test_a_hostile_template_is_refused(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BrokenTemplate):
        rendered(text)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{% if %}", "line 1: Expected an expression"),
        ("a\n{% for m in messages %}", "Unexpected end of template"),
        ("{{ raise_exception('only ' ~ 'users') }}", "^only users$"),
        ("{{ messages[3].content.upper() }}", "no element 3"),
        ("{{ 1 + 'a' }}", "TypeError: unsupported operand"),
        ("{{ strftime_now('%d') }}", "Type data.date="),
    ],
)
def test_a_template_that_fails_says_why(text: str, sentence: str) -> None:
    with pytest.raises(BrokenTemplate, match=sentence):
        rendered(text)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (
            [{"type": "text", "text": "hi"}],
            r"^it writes \"\[\{'type': 'text'.* as Python shows it. Give the content as text",
        ),
        ("a\ud800", "half a character"),
    ],
)
def test_a_content_that_a_template_or_a_tokenizer_cannot_read_is_refused(content: Any, sentence: str) -> None:
    template = Template({"default": "{{ messages[0].content }}"}, {}, {}, None)
    with pytest.raises(BrokenTemplate, match=sentence):
        template.render([{"role": "user", "content": content}])
    parts = Template({"default": "{{ messages[0].content[0].text }}"}, {}, {}, None)
    assert parts.render([{"role": "user", "content": [{"type": "text", "text": "hi"}]}])[0] == "hi"


def test_names_days_and_filters() -> None:
    assert (
        rendered("{{ eos_token }} {{ x }} {{ tools }} {{ add_generation_prompt }} {{ nothing }}|", x=3)
        == "</s> 3 None False |"
    )
    assert rendered("{{ {'a': '<é>'} | tojson }} {{ [1] | tojson(indent=1) }}") == '{"a": "<é>"} [\n 1\n]'
    dated = Template({"default": "{{ strftime_now('%d %b %Y') }}"}, {}, {}, date(2024, 7, 26))
    assert dated.render([ASKED])[0] == "26 Jul 2024"


def test_conversations_with_tools_have_a_template_of_their_own() -> None:
    both = Template({"default": "no tools", "tool_use": "{{ tools[0].name }}"}, {}, {}, None)
    assert [both.render([ASKED], tools=tools)[0] for tools in (None, [{"name": "f"}])] == ["no tools", "f"]


def test_a_template_that_is_none_names_the_tokenizer(tmp_path: Path) -> None:
    folder = talks.tokenizer(tmp_path, "{% if %}")
    with pytest.raises(Exception, match=r"its chat template is none: line 1"):
        template_of(described(folder, None), {}, None)
    with pytest.raises(Exception, match=r"^data.template={% for %}: it is no chat template: line 1: [^.]*\.$"):
        template_of(described(folder, "{% for %}"), {}, None)
