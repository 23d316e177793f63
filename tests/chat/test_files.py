"""Files of conversations become files of tokens once, and what is wrong with them is told before a run."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat import talks

from dtrain.chat import files
from dtrain.chat.tokenizer import described
from dtrain.errors import DtrainError

BROKEN = talks.CHATML.replace(
    "{% for m in messages %}",
    "{% for m in messages %}{% if m.content == 'bad' %}{{ raise_exception('it is bad') }}{% endif %}",
)
SLIP = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.contnt }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


@pytest.fixture
def words(tmp_path: Path) -> Any:
    def made(rows: Any = None, template: str = talks.CHATML, **changed: Any) -> dict[str, Any]:
        path = (
            rows
            if isinstance(rows, str)
            else talks.write(tmp_path / "rows.jsonl", talks.talks(8) if rows is None else rows)
        )
        return {
            "path": path, "kind": "auto", "columns": {}, "split": None, "tokenizer": talks.tokenizer(tmp_path / "tk", template),
            "template": None, "template_args": {}, "date": None, "train_on": "answers", "sequence": 256, "long": "cut",
            "cache": str(tmp_path / "cache"),
        } | changed  # fmt: skip

    return made


def opened(words: dict[str, Any]) -> list[files.TokenFile]:
    return files.opened(*files.job_of(words, described(words["tokenizer"], words["template"])))


def test_tokens_are_made_once_and_again_for_another_template(words: Any, tmp_path: Path) -> None:
    made = words()
    (first,) = opened(made)
    kept = {file: file.stat().st_mtime_ns for file in (tmp_path / "cache").iterdir() if file.suffix != ".lock"}
    (again,) = opened(made)
    assert all(file.stat().st_mtime_ns == when for file, when in kept.items())
    assert np.array_equal(first.ends, again.ends) and len(first) == 8
    (other,) = opened(words(template=talks.MARKED))
    assert sum(int(other.read(row, 999)[0][1].sum()) for row in range(8)) < sum(
        int(first.read(row, 999)[0][1].sum()) for row in range(8)
    )
    assert other._stem != first._stem and not [*(tmp_path / "cache").glob("*.at"), *(tmp_path / "cache").glob("*.part")]


@pytest.mark.parametrize("format", ["parquet", "arrow"])
def test_nested_columns_are_read_from_other_formats(format: str, words: Any, tmp_path: Path) -> None:
    rows = talks.talks(8)
    (lines,) = opened(words())
    path = tmp_path / f"rows.{format}"
    table = pa.Table.from_pylist(rows)
    if format == "parquet":
        pq.write_table(table, path, row_group_size=3)
    else:
        with pa.ipc.new_stream(str(path), table.schema) as out:
            out.write_table(table)
    (other,) = opened(words(str(path)))
    for row in range(8):
        assert all(
            np.array_equal(a, b)
            for one, two in zip(lines.read(row, 999), other.read(row, 999), strict=True)
            for a, b in zip(one, two, strict=True)
        )


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"rows": [{"message": [], "id": 1}]}, "rows.jsonl has the columns message, id, which are no conversations. Did you mean messages?"),
        ({"kind": "pairs"}, "rows.jsonl has no column chosen, which data.kind=pairs reads."),
        ({"columns": {"messages": "mesages"}, "kind": "messages"}, "has no column mesages, which data.kind=messages reads. Did you mean messages?"),
        ({"rows": [*talks.talks(2), {"messages": []}]}, "rows.jsonl: line 3: the conversation is empty."),
        ({"rows": [*talks.talks(1), {"messages": [{"role": "usr", "content": "x"}]}]}, "line 2: message 1 has the role 'usr', which is not known. Did you mean user?"),
        ({"rows": [*talks.talks(1), {"messages": talks.said("hi", "bad")}], "template": BROKEN}, "line 2: the chat template refuses message 3 (assistant: 'bad'): it is bad."),
        ({"rows": [*talks.talks(1), {"messages": talks.said("hi", "\ud800")}]}, "line 2: the chat template refuses message 3 (assistant: '\\ud800'): '\\ud800' is half a character"),
        ({"rows": [*talks.talks(3), *[{"messages": talks.said("hi")}] * 2]}, "has 2 rows of 5 (the first: line 4) in which no token counts: there is no answer of the assistant."),
        ({"sequence": 20}, "whose answer begins behind data.sequence=20 tokens. Type data.sequence="),
        ({"sequence": 20, "long": "skip"}, "all 8 rows are longer than data.sequence=20. Type data.sequence="),
        ({"sequence": 60, "long": "refuse"}, "longer than data.sequence=60. Type data.sequence="),
        ({"template": None}, "it has no chat template. Type data.template="),
        ({"template": "{{ strftime_now('%d') }}"}, "Type data.date="),
        ({"template": talks.FORGETFUL}, "which text is the answer of message 3 cannot be seen"),
        ({"tokenizer": "nowhere"}, "data.tokenizer=nowhere: there is no tokenizer.json"),
        ({"template_args": {"messages": 3}}, "data.template_args={messages: ...}: the template gets messages from dtrain."),
        ({"template_args": {"tools": []}}, "the template gets tools from dtrain. Leave it out, or"),
        ({"template_args": {3: 3}}, "data.template_args={3: ...}: a name is text"),
        ({"template": SLIP}, "no answer of the assistant. The chat template writes contnt, which is not defined"),
        ({"split": "train"}, "is no dataset that save_to_disk of Hugging Face wrote"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_before_a_run(changed: dict[str, Any], sentence: str, words: Any) -> None:
    assert sentence in files.problem(words(**changed), trained=None)


@pytest.mark.parametrize("pairs", [True, False])
def test_pairs_and_conversations_are_for_other_objectives(pairs: bool, words: Any) -> None:
    for rows, is_pairs in ((talks.talks(3), False), (talks.pairs(3), True)):
        text = files.problem(words(rows), trained=None, pairs=pairs)
        assert text.endswith(f"Type objective={'next_token' if pairs else 'dpo'}.") if pairs != is_pairs else not text


def test_a_torn_last_row_is_told_with_its_line(words: Any, tmp_path: Path) -> None:
    path = Path(talks.write(tmp_path / "rows.jsonl", talks.talks(3)))
    path.write_text(path.read_text()[:-20])
    assert "rows.jsonl: its last row, line 3, is torn: this is no JSON" in files.problem(words(str(path)), trained=None)


def test_rows_without_a_fault_have_no_problem(words: Any) -> None:
    assert files.problem(words(), trained="chat-8-" + "0" * 31) == "", "not a fingerprint of these"
    assert (
        files.problem(
            words([*talks.talks(3), {"messages": talks.said("hi " * 99, "no")}], sequence=120, long="skip"),
            trained=None,
        )
        == ""
    )


def test_another_file_under_checkpoints_is_told(words: Any, tmp_path: Path) -> None:
    made = words()
    begun = files.opened(*files.job_of(made, described(str(made["tokenizer"]), made["template"])))
    trained = files.fingerprint(begun, 8, made)
    talks.write(tmp_path / "rows.jsonl", talks.talks(9))
    assert files.problem(made, trained=trained) == "", "a row was added"
    earlier = files.fingerprint(begun, 8, made, files.VERSION - 1)
    assert "began with an earlier dtrain" in files.problem(made, trained=earlier)
    talks.write(tmp_path / "rows.jsonl", talks.talks(9)[1:])
    for _ in range(2):
        assert "the files, or the tokenizer, changed since this run" in files.problem(made, trained=trained)
    assert files.problem(made, trained=None) == "", "another run makes an index of it"
    talks.write(tmp_path / "rows.jsonl", talks.talks(8))
    assert files.problem(made, trained=trained) == "", "it was put back"


def test_messages_to_be_answered(words: Any) -> None:
    of = described(words()["tokenizer"], None)
    tokens, ends = files.rendered(of, [talks.said("hi"), talks.said("What?", system="")], {}, None)
    assert [each[-1] for each in tokens] and ends == {talks.SPECIAL.index("<|im_end|>")}
    with pytest.raises(
        DtrainError, match=r"prompt 2: the chat template refuses message 1 \(user: 'bad'\): it is bad\."
    ):
        files.rendered(
            described(words()["tokenizer"], BROKEN), [talks.said("hi"), talks.said("bad", system="")], {}, None
        )


@pytest.mark.campaign("kills")
@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(9) %}{% endfor %}{% endfor %}{% endfor %}", "line 1: the chat template takes more than 3 s for one conversation"),
        ("{% if messages|length > 3 %}{{ lipsum(n=10000000) }}{% endif %}" + talks.CHATML, "line 2: the chat template takes more than 3 s"),
        ("{{ 'a' * 10 ** 11 }}", "line 1: the chat template refuses message 1 (system: 'You are kind.'): it takes more memory than a template may"),
    ],
)  # fmt: skip
def test_a_template_that_takes_all_time_or_memory_ends_alone(
    template: str, sentence: str, words: Any, tmp_path: Path
) -> None:
    assert sentence in files.problem(words(template=template), trained=None)
    assert not [*(tmp_path / "cache").glob("*.at")]
