"""Tokenizers as Hugging Face saves them: their templates, special tokens and ends of answers."""

import json
from pathlib import Path
from typing import Any

import commands
import fsspec
import pytest
from chat import talks

from dtrain.chat.tokenizer import Tokenizer, described, template_of
from dtrain.errors import PreflightError


def test_a_template_of_ones_own_a_file_of_its_own_or_the_config(tmp_path: Path) -> None:
    folder = talks.tokenizer(tmp_path / "tk")
    assert described(folder, None).templates == {"default": talks.CHATML}
    Path(folder, "chat_template.jinja").write_text("{{ file }}")
    assert described(folder, None).templates == {"default": "{{ file }}"}
    (tmp_path / "mine.jinja").write_text("{{ mine }}")
    for template, text in (
        (str(tmp_path / "mine.jinja"), "{{ mine }}"),
        ("{% set x = 1 %}text", "{% set x = 1 %}text"),
    ):
        assert described(folder, template).templates == {"default": text}
        assert described(folder, template).digest != described(folder, None).digest
    several = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    other = talks.tokenizer(tmp_path / "other", None, chat_template=several)
    assert described(other, None).templates == {"default": "a", "tool_use": "b"}
    assert described(f"{other}/tokenizer.json", None) == described(other, None).__class__(
        **{**vars(described(other, None)), "name": f"{other}/tokenizer.json"}
    )


def test_a_tokenizer_comes_from_any_url(tmp_path: Path) -> None:
    folder = talks.tokenizer(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        fsspec.filesystem("memory").pipe_file(f"/tk/{name}", Path(folder, name).read_bytes())
    assert described("memory://tk", None).digest == described(folder, None).digest


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"chat_template": None}, "it has no chat template. Type data.template="),
        ({"chat_template": [{"name": "rag", "template": "x"}]}, "it has no chat template"),
    ],
)
def test_no_template_is_told(config: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match=sentence):
        template_of(described(talks.tokenizer(tmp_path, None, **config), None), {}, None)


def test_what_is_no_tokenizer_is_told(tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match=r"there is no tokenizer\.json\. Give a folder"):
        described(str(tmp_path / "nowhere"), None)
    folder = talks.tokenizer(tmp_path / "tk")
    with pytest.raises(PreflightError, match=r"data\.template=mine\.jinja: .*Give a file with a template"):
        described(folder, "mine.jinja")
    with pytest.raises(PreflightError, match=r"data\.date=today is no day"):
        template_of(described(folder, None), {}, "today")
    Path(folder, "tokenizer_config.json").write_text("{")
    with pytest.raises(PreflightError, match=r"tokenizer_config\.json is not JSON"):
        described(folder, None)
    Path(folder, "tokenizer_config.json").unlink()
    Path(folder, "tokenizer.json").write_text("[]")
    with pytest.raises(PreflightError, match=r"not a tokenizer\.json"):
        Tokenizer(described(folder, None))


def test_special_tokens_come_once_and_nothing_is_cut(tmp_path: Path) -> None:
    folder = talks.tokenizer(tmp_path, "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}")
    made = json.loads(Path(folder, "tokenizer.json").read_text())
    made["truncation"] = {"max_length": 4, "direction": "Right", "strategy": "LongestFirst", "stride": 0}
    Path(folder, "tokenizer.json").write_text(json.dumps(made))
    of = described(folder, None)
    text, _ = template_of(of, {}, None).render([{"role": "user", "content": "hello how are you"}])
    tokens = Tokenizer(of).encode(text)
    assert tokens[0] == talks.SPECIAL.index("<s>") and tokens[-1] == talks.SPECIAL.index("<|im_end|>")
    assert sum(token < len(talks.SPECIAL) for token in tokens) == 2 and len(tokens) > 4


def test_tokens_that_stand_beside_the_tokenizer_are_those_of_transformers(tmp_path: Path) -> None:
    """In its config alone, by number or by name."""
    size = json.loads(Path(talks.tokenizer(tmp_path), "tokenizer.json").read_text())["model"]["vocab"].__len__()
    added = {
        str(size): {
            "content": "<|mine|>",
            "special": True,
            "normalized": False,
            "lstrip": False,
            "rstrip": False,
            "single_word": False,
        }
    }
    folder = talks.tokenizer(
        tmp_path, added_tokens_decoder=added, unk_token="<unk>", extra_special_tokens={"image_token": "<img>"}
    )
    code = "import sys, transformers; t = transformers.AutoTokenizer.from_pretrained(sys.argv[1]); print(t.encode(sys.argv[2], add_special_tokens=False), len(t))"
    text = "a<|mine|>b<unk>c<|im_end|>"
    done = commands.python("-c", code, folder, text)
    tokenizer = Tokenizer(described(folder, None))
    assert done.stdout.startswith(str(tokenizer.encode(text))), done.stdout + done.stderr


@pytest.mark.parametrize(
    ("template", "ends"),
    [("CHATML", {"<|im_end|>"}), ("LLAMA", {"<|im_end|>", "<|eot_id|>"}), ("ALTERNATING", {"<|im_end|>"})],
)
def test_the_tokens_that_end_an_answer(template: str, ends: set[str], tmp_path: Path) -> None:
    of = described(talks.tokenizer(tmp_path, getattr(talks, template)), None)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [0, 4]}')
    made = Tokenizer(of)
    assert made.ends(template_of(of, {}, None), of.ends) == {talks.SPECIAL.index(end) for end in ends}
    assert described(str(tmp_path), None).ends == (0, 4)
