"""Tokenizers of the size of a test, chat templates of several styles, and conversations."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<s>",
    "</s>",
    "<|eot_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MARKED = """{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
LLAMA = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' + system + '<|eot_id|>' }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
ALTERNATING = """{{ bos_token }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"""
FORGETFUL = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' and loop.last %}{{ '<think></think>' }}{% endif %}{{ m.content + '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""As Qwen3, whose thoughts are written in the last answer alone."""
TEXTS = "hello how are you, I am fine. What is the capital of France? Paris is the capital. The square of 12 is 144."


def tokenizer(folder: Path, template: str | None = CHATML, **config: Any) -> str:
    """A folder as transformers saves one: byte-level BPE of some 400 tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([TEXTS] * 3, trainer)
    made.save(str(folder / "tokenizer.json"))
    known = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
    }
    known |= {"chat_template": template} if template else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(known | config))
    return str(folder)


def said(*turns: str, system: str = "You are kind.") -> list[dict[str, str]]:
    """A user and an assistant in turn."""
    roles = ("user", "assistant")
    begin = [{"role": "system", "content": system}] if system else []
    return begin + [{"role": roles[number % 2], "content": text} for number, text in enumerate(turns)]


def talks(count: int = 50) -> list[dict[str, Any]]:
    """Rows of one and of two turns, of many lengths."""
    rows = []
    for i in range(count):
        turns = [f"What is the square of {i}?", f"The square of {i} is {i * i}." + " I am fine." * (i % 5)]
        rows.append({"messages": said(*turns, *(["And é?", f"Paris {'is ' * (i % 3)}😀"] if i % 2 else []))})
    return rows


def pairs(count: int = 30) -> list[dict[str, Any]]:
    return [
        {
            "prompt": said(f"What is {i}?"), "chosen": [{"role": "assistant", "content": f"It is {i}." + " fine" * (i % 4)}],
            "rejected": [{"role": "assistant", "content": "no " * (1 + i % 3)}],
        }
        for i in range(count)
    ]  # fmt: skip


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)
