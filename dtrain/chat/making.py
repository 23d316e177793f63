"""The process that renders conversations: a chat template comes with a tokenizer that somebody may have downloaded, so
it gets time and memory of its own, and ends alone when they end.

    python -m dtrain.chat.making    # a job as JSON in, its result as JSON out
"""

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from dtrain.chat import counted, turns
from dtrain.chat.template import BrokenTemplate, Template
from dtrain.chat.tokenizer import Described, Tokenizer, template_of
from dtrain.errors import DtrainError, PreflightError
from dtrain.files.rowfile import Reader
from dtrain.files.rowindex import File
from dtrain.tokenizer import kind_of

SECONDS, ROOM = 3, 1 << 31
"""Seconds of CPU that a template may take for one conversation, and bytes beside those that the process has."""
ROWS = 512
"""Rows that are rendered, then encoded, together."""
NEVER = (1 << 31) - 1
"""The place of the first token that counts, where none does."""
PARENT_DEATH = 1  # PR_SET_PDEATHSIG of prctl


def main() -> None:
    ctypes.CDLL(None).prctl(PARENT_DEATH, signal.SIGKILL)
    job = json.loads(sys.stdin.buffer.readline())
    acts: dict[str, Callable[..., Any]] = {"tokens": tokens_of_file, "prompts": prompts}
    try:
        result = {"result": acts[job.pop("act")](Described(**job.pop("described")), **job)}
    except DtrainError as error:
        result = {"error": str(error)}
    sys.stdout.write(json.dumps(result))


def tokens_of_file(
    described: Described, *, url: str, reader: Mapping[str, Any], kind: str, columns: Mapping[str, str], train_on: str,
    arguments: Mapping[str, Any], day: str | None, stem: str,
) -> dict[str, Any]:  # fmt: skip
    """Write the tokens of the rows of a file beside `stem`, and return facts of them. Raises PreflightError for the
    first row that has none.
    """
    place = open_progress(stem)
    with limited():
        template = template_of(described, arguments, day)
    tokenizer = Tokenizer(described)
    (file,) = Reader(**{**reader, "cache": Path(reader["cache"])}).opened([url], [*columns.values()])
    known = [*turns.ROLES, *(role for role in _quoted(described.templates) if role not in turns.ROLES)]
    type_ = kind_of(tokenizer.vocab)
    ends, firsts, written = array("q"), array("q"), 0
    with Path(f"{stem}.tokens.part").open("wb") as tokens, Path(f"{stem}.counts.part").open("wb") as counts:
        for start, rows in _rows(file):
            texts = list[counted.Written]()
            with limited():
                for number, row in enumerate(rows, start):
                    os.pwrite(place, b"%20d" % number, 0)
                    named = {name: row.get(column) for name, column in columns.items()}
                    texts += _texts(
                        template,
                        kind,
                        row=named,
                        known=known,
                        train_on=train_on,
                        where=f"data.path={url}: {file.where(number)}",
                    )
            for encoded, (_, spans) in zip(
                tokenizer.inner.encode_batch([text for text, _ in texts], add_special_tokens=False), texts, strict=True
            ):
                marks = counted.counts(encoded.offsets, spans)
                tokens.write(np.array(encoded.ids, type_).tobytes())
                counts.write(marks.tobytes())
                written += len(marks)
                ends.append(written)
                firsts.append(1 + int(marks[1:].argmax()) if marks[1:].any() else NEVER)
    for name in ("tokens", "counts"):
        Path(f"{stem}.{name}.part").replace(f"{stem}.{name}")
    for name, values in (("ends", ends), ("firsts", firsts)):
        with Path(f"{stem}.{name}.part").open("wb") as out:
            np.save(out, np.frombuffer(values, np.int64) if values else np.zeros(0, np.int64))
        Path(f"{stem}.{name}.part").replace(f"{stem}.{name}")
    size = sum(file.facts["sizes"])
    return {
        "sizes": [size], "sha256": file.digest(), "kinds": {}, "tokens": written, "type": np.dtype(type_).name,
        "undefined": [*template.undefined],
    }  # fmt: skip


def prompts(
    described: Described, *, messages: Sequence[Sequence[Any]], arguments: Mapping[str, Any], day: str | None, stem: str
) -> dict[str, Any]:  # fmt: skip
    """The tokens of conversations that end where the assistant is to answer, and the tokens that end an answer."""
    place, rendered = open_progress(stem), list[str]()
    with limited():
        template = template_of(described, arguments, day)
        for number, each in enumerate(messages):
            os.pwrite(place, b"%20d" % number, 0)
            try:
                rendered.append(template.render(each, prompt=True)[0])
            except BrokenTemplate as error:
                where = counted.breaks(template, turns.Conversation(each))
                raise PreflightError(f"prompt {number + 1}: the chat template refuses {where}: {error}.") from None
        tokenizer = Tokenizer(described)
        ends = tokenizer.ends(template, described.ends)
    return {"tokens": [tokenizer.encode(text) for text in rendered], "ends": sorted(ends)}


def open_progress(stem: str) -> int:
    return os.open(f"{stem}.at", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)


@contextmanager
def limited() -> Iterator[None]:
    """A context in which a template is compiled or rendered: out of time the process ends, out of memory a MemoryError
    is raised.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text("utf-8").split()[0])
    most = pages * resource.getpagesize() + ROOM
    with contextlib.suppress(ValueError, OSError):  # a lower limit is there already
        resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _texts(
    template: Template, kind: str, row: Mapping[str, Any], known: Sequence[str], train_on: str, where: str
) -> list[counted.Written]:
    """The texts of a row's conversations. Raises PreflightError."""
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        several = turns.conversations(kind, row, known)
    except turns.BadRow as error:
        raise PreflightError(f"{where}: {error.sentence}") from None
    of = several[0]
    try:
        texts = list[counted.Written]()
        for of in several:
            texts.append(counted.written(template, of, train_on if len(several) == 1 else "answers"))
        return texts
    except turns.BadRow as error:
        raise PreflightError(f"{where}: {error.sentence}") from None
    except BrokenTemplate as error:
        raise PreflightError(
            f"{where}: the chat template refuses {counted.breaks(template, of)}: {error}."
        ) from None  # fmt: skip


def _rows(file: File) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """(number of the first, rows) of one part of a file after another."""
    begin = 0
    for block, size in enumerate(file.facts["sizes"]):
        for start in range(0, size, ROWS):
            columns = file.read(block, np.arange(start, min(start + ROWS, size)))
            rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
            yield begin + start, rows
        begin += size


def _quoted(templates: Mapping[str, str]) -> list[str]:
    """Words in quotes in a template: among them are the roles that it knows."""
    parts = [part for text in templates.values() for quote in "'\"" for part in text.split(quote)[1::2]]
    return [part for part in dict.fromkeys(parts) if part.isidentifier()]


if __name__ == "__main__":
    main()
