"""Files of conversations as files of tokens, made once and kept in the cache; what is wrong with them, before a run."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dtrain.chat import turns
from dtrain.chat.making import NEVER, ROOM, SECONDS
from dtrain.chat.template import RESERVED
from dtrain.chat.tokenizer import Described, described
from dtrain.errors import PreflightError, WordsError
from dtrain.files import rowfile, rowindex
from dtrain.files.rowfile import EARLY, SUFFIXES, Reader
from dtrain.files.rowindex import File, Indices
from dtrain.storage import caching, store

VERSION = 3
EARLIER = (
    "data.path={}: this run began with an earlier dtrain, which read conversations in another way: its place is not in "
    "these samples. Type out=<another place> init=<this run> to train on with its weights."
)
PRINT = re.compile(r"chat-(\d+)-\w{32}")
KNOWN = ("jsonl", "parquet", "hf")
BESIDE = (".tokens", ".counts", ".ends", ".firsts")
SAVED = ("state.json", "dataset_dict.json")
"""Files of a folder that save_to_disk of Hugging Face's datasets wrote."""


@dataclass(frozen=True)
class Job:
    """How the rows of files become tokens."""

    tokenizer: Described
    reader: Reader
    kind: str
    columns: Mapping[str, str]
    train_on: str
    arguments: Mapping[str, Any]
    day: str | None

    @property
    def how(self) -> list[Any]:
        """All that the tokens depend on beside the rows."""
        return self.how_in(VERSION)

    def how_in(self, version: int) -> list[Any]:
        """The same in a version of this file."""
        of = [self.kind, dict(self.columns), self.train_on, dict(self.arguments), self.day, self.tokenizer.digest]
        return ["chat", version, *of]


@dataclass(frozen=True)
class TokenFile:
    """The tokens of the conversations of a file: one of each row, or two of a pair. Raises PreflightError for a row
    that is none.
    """

    rows: File
    url: str
    job: Job
    facts: Mapping[str, Any] = field(init=False)
    _stem: Path = field(init=False)

    def __post_init__(self) -> None:
        facts, stem = rowindex.kept(self.job.reader.cache, self.url, self.job.how, self._made, BESIDE)
        object.__setattr__(self, "facts", facts)
        object.__setattr__(self, "_stem", stem)

    def __len__(self) -> int:
        return int(self.facts["sizes"][0])

    @cached_property
    def ends(self) -> Indices:
        """[rows, conversations of a row]: where the tokens of each end."""
        return self._array("ends")

    @cached_property
    def firsts(self) -> Indices:
        """[rows, conversations of a row]: the place of the first token that counts, NEVER if none does."""
        return self._array("firsts")

    @cached_property
    def lengths(self) -> Indices:
        """[rows, conversations of a row], in tokens."""
        flat = self.ends.ravel()
        return np.diff(flat, prepend=0).reshape(self.ends.shape)

    def read(self, row: int, most: int) -> list[tuple[NDArray[Any], NDArray[Any]]]:
        """(tokens, which of them count) of each conversation of a row, `most` tokens of each."""
        parts = []
        for end, length in zip(self.ends[row].tolist(), self.lengths[row].tolist(), strict=True):
            begin = end - length
            parts.append(
                (self._tokens[begin : begin + min(length, most)], self._counts[begin : begin + min(length, most)])
            )
        return parts

    @cached_property
    def _tokens(self) -> NDArray[Any]:
        return self._mapped("tokens", self.facts["type"])

    @cached_property
    def _counts(self) -> NDArray[Any]:
        return self._mapped("counts", "uint8")

    def _mapped(self, name: str, kind: str) -> NDArray[Any]:
        return np.memmap(f"{self._stem}.{name}", dtype=kind, mode="r") if self.facts["tokens"] else np.zeros(0, kind)

    def _array(self, name: str) -> Indices:
        with Path(f"{self._stem}.{name}").open("rb") as file:
            flat: Indices = np.load(file, allow_pickle=False)
        return flat.reshape(-1, 2 if self.job.kind == "pairs" else 1)

    def _made(self, stem: Path) -> Mapping[str, Any]:
        job = self.job
        reader = {"format": job.reader.format, "cache": str(job.reader.cache), "split": job.reader.split, "raw": True}
        return called(
            job.tokenizer, str(stem), lambda row: f"data.path={self.url}: {self.rows.where(row)}", act="tokens",
            url=self.url, reader=reader, kind=job.kind, columns=dict(job.columns), train_on=job.train_on,
            arguments=dict(job.arguments), day=job.day,
        )  # fmt: skip


def called(tokenizer: Described, stem: str, where: Any, **job: Any) -> dict[str, Any]:
    """The answer of a process of dtrain.chat.making. `where(number)`: what a user calls the row at which it ended.
    Raises PreflightError.
    """
    of = {**asdict(tokenizer), "ends": list(tokenizer.ends)}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-P", "-m", "dtrain.chat.making"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as child:
        answer, _ = child.communicate(json.dumps({**job, "stem": stem, "described": of}).encode() + b"\n")
    at = Path(f"{stem}.at")
    number = at.read_text("utf-8").strip() if at.exists() else ""
    at.unlink(missing_ok=True)
    if child.returncode:
        place = f"{where(int(number))}: " if number else ""
        if child.returncode == -signal.SIGPROF:
            raise PreflightError(f"{place}the chat template takes more than {SECONDS} s for one conversation.")
        raise PreflightError(
            f"{place}the process that renders conversations ended ({_ended(child.returncode)}); a template may take "
            f"{ROOM >> 30} GiB."
        )
    known: dict[str, Any] = json.loads(answer)
    if "error" in known:
        raise PreflightError(known["error"])
    result: dict[str, Any] = known["result"]
    return result


def rendered(
    tokenizer: Described, messages: Sequence[Any], arguments: Mapping[str, Any], day: str | None
) -> tuple[list[list[int]], set[int]]:
    """The tokens of conversations to be answered, and the tokens that end an answer. Raises PreflightError."""
    with tempfile.TemporaryDirectory(prefix="dtrain-") as folder:
        answer = called(
            tokenizer, f"{folder}/prompts", lambda number: f"prompt {number + 1}", act="prompts",
            messages=list(messages), arguments=dict(arguments), day=day,
        )  # fmt: skip
    return answer["tokens"], set(answer["ends"])


def job_of(data: Mapping[str, Any], tokenizer: Described) -> tuple[Job, list[str]]:
    """How the files of `data` are read, and their URLs. Raises PreflightError, StoreError and WordsError."""
    reader = _reader(data)
    urls = reader.found(data["path"])
    names, renamed = reader.names(urls[0]), dict(data["columns"])
    where = f"data.path={urls[0]}"
    kind = turns.kind_of(names, data["kind"], renamed, where)
    columns = turns.columns_of(kind, names, renamed)
    for column in renamed.values():
        rowindex.column(column, names, where)
    for name in data["template_args"]:
        if name in RESERVED:
            raise WordsError(
                f"data.template_args={{{name}: ...}}: the template gets {name} from dtrain. Leave it out, or give it "
                "another name."
            )
        if not isinstance(name, str):
            raise WordsError(f"data.template_args={{{name}: ...}}: a name is text, such as enable_thinking.")
    train_on = "answers" if kind == "pairs" else data["train_on"]
    job = Job(
        tokenizer=tokenizer,
        reader=reader,
        kind=kind,
        columns=columns,
        train_on=train_on,
        arguments=dict(data["template_args"]),
        day=data["date"],
    )
    return job, urls


def unread(data: Mapping[str, Any]) -> list[str]:
    """A sentence about files that match data.path and are not read."""
    return _reader(data).matched(data["path"])[1]


def rows(data: Mapping[str, Any]) -> int | None:
    """The number of conversations, or of pairs, that are samples; None if that is not known before they are tokens, or
    before files of other storage are read. Raises PreflightError, StoreError and WordsError.
    """
    if data["long"] == "skip" or data["packing"] == "pack":
        return None
    job, urls = job_of(data, Described("", "", {}, {}))
    if not all(map(store.is_local, urls)):
        return None
    files = job.reader.opened(urls, [*job.columns.values()])
    return sum(sum(file.facts["sizes"]) for file in files)


def opened(job: Job, urls: Sequence[str]) -> list[TokenFile]:
    """The files of tokens, which are made where they are missing. Raises PreflightError."""
    files = job.reader.opened(urls, [*job.columns.values()])
    with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)))) as pool:
        return list(pool.map(lambda file, url: TokenFile(file, url, job), files, urls))


def fingerprint(files: Sequence[TokenFile], rows: int, data: Mapping[str, Any], version: int = VERSION) -> str:
    """That of the first rows of files, as `data` uses them: the same as when there were no others."""
    how = json.dumps([*files[0].job.how_in(version), data["sequence"], data["long"]], sort_keys=True)
    return f"chat-{rows}-{rowfile.digest_of([file.rows for file in files], rows, how)}"


def problem(data: Mapping[str, Any], *, trained: str | None, pairs: bool = False) -> str:
    """The problem with files of conversations, as far as their ends tell, or all rows where they are few; empty if
    there is none. `trained`: the fingerprint of those that a run has a position in; `pairs`: its objective takes pairs.
    """
    try:
        job, urls = job_of(data, described(str(data["tokenizer"]), data["template"]))
        if pairs != (job.kind == "pairs"):
            return (
                f"data.path={urls[0]} has {'no ' * pairs}pairs of a chosen and a rejected answer: its rows are of "
                f"data.kind={job.kind}. Type objective={'next_token' if pairs else 'dpo'}."
            )
        columns = [*job.columns.values()]
        for url in urls:
            job.reader.check(url, [column for column in columns if column in job.reader.names(url)])
        if all(map(store.is_local, urls)) and sum(map(store.size, urls)) < EARLY:
            files = opened(job, urls)
            usable(files, data)
            if (then := PRINT.match(trained or "")) and fingerprint(files, int(then[1]), data) != then[0]:
                if any(fingerprint(files, int(then[1]), data, old) == then[0] for old in range(1, VERSION)):
                    return EARLIER.format(data["path"])
                return rowfile.changed(data["path"], "the files, or the tokenizer,", int(then[1]))
            if data.get("bucket") is not None:
                _check_bucket(files, data["sequence"])
    except (PreflightError, WordsError) as error:
        return str(error)
    return ""


def _check_bucket(files: Sequence[TokenFile], sequence: int) -> None:
    """Raises WordsError if all rows are of one length."""
    lengths = np.minimum(np.concatenate([file.lengths.max(1) for file in files]), sequence)
    if (lengths == lengths[0]).all():
        raise WordsError(f"data.bucket: all rows have {lengths[0]} tokens. Leave data.bucket out.")


def usable(files: Sequence[TokenFile], data: Mapping[str, Any]) -> NDArray[np.bool_]:
    """Which rows are samples, by data.sequence and data.long. Raises PreflightError for rows of which no token
    counts.
    """
    sequence, long, words = data["sequence"], data["long"], f"data.path={files[0].url}"
    lengths = np.concatenate([file.lengths.max(1, initial=0) for file in files])
    firsts = np.concatenate([file.firsts.max(1, initial=0) for file in files])
    if not len(lengths):
        raise PreflightError(f"{words}: there is no row in {len(files)} file(s).")
    nothing = "{count} in which no token counts: there is no answer of the assistant"
    _refuse(files, firsts == NEVER, nothing, _slip(files))
    is_long = lengths > sequence
    if long == "refuse":
        hint = f"data.sequence={int(lengths.max())}, data.long=cut or data.long=skip"
        _refuse(files, is_long, "{count} longer than " + f"data.sequence={sequence}. Type {hint}")
    kept = ~is_long if long == "skip" else np.ones(len(lengths), bool)
    hint = f"data.sequence={int(firsts.max()) + 1} or more, or data.long=skip"
    _refuse(
        files,
        kept & (firsts >= sequence),
        f"{{count}} whose answer begins behind data.sequence={sequence} tokens. Type {hint}",
    )
    if not kept.any():
        raise PreflightError(
            f"{words}: all {len(kept)} rows are longer than data.sequence={sequence}. Type "
            f"data.sequence={int(lengths.min())} or more, or data.long=cut."
        )
    return kept


def _slip(files: Sequence[TokenFile]) -> str:
    """A sentence about names that the template writes and nothing defines."""
    names = dict.fromkeys(name for file in files for name in file.facts.get("undefined", []))
    if not names:
        return ""
    are = "are" if len(names) > 1 else "is"
    return f" The chat template writes {', '.join(names)}, which {are} not defined: look for a slip of the pen there."


def alike(files: Sequence[TokenFile], sequence: int) -> NDArray[np.bool_]:
    """Which rows are pairs of two conversations with the same first `sequence` tokens."""
    parts = list[NDArray[np.bool_]]()
    for file in files:
        lengths = np.minimum(file.lengths, sequence)
        same = (lengths == lengths[:, :1]).all(1) if file.job.kind == "pairs" else np.zeros(len(file), bool)
        for row in np.flatnonzero(same).tolist():
            (one, _), (two, _) = file.read(row, sequence)
            same[row] = np.array_equal(one, two)
        parts.append(same)
    return np.concatenate(parts)


def _refuse(files: Sequence[TokenFile], wrong: NDArray[np.bool_], sentence: str, hint: str = "") -> None:
    if not wrong.any():
        return
    count, first = int(wrong.sum()), int(wrong.argmax())
    for file in files:
        if first < len(file):
            rows = "1 row" if count == 1 else f"{count} rows"
            text = sentence.format(count=f"{rows} of {len(wrong)} (the first: {file.rows.where(first)})")
            raise PreflightError(f"data.path={file.url} has {text}.{hint}")
        first -= len(file)


def _reader(data: Mapping[str, Any]) -> Reader:
    cache, paths = caching.folder(data.get("cache")), data["path"]
    first = paths if isinstance(paths, str) else paths[0]
    if any(store.exists(store.join(first, name)) for name in SAVED):
        return Reader("hf", cache, split=data.get("split"), raw=True)
    if data.get("split") is not None:
        raise WordsError(f"data.split={data['split']}: {first} is no dataset that save_to_disk of Hugging Face wrote.")
    suffixes = {name: SUFFIXES[name] for name in KNOWN}
    (url, *_) = rowindex.found(paths, [suffix for each in suffixes.values() for suffix in each])
    for name, ends in suffixes.items():
        if url.lower().endswith(ends):
            return Reader(name, cache, text=name == "hf", raw=True)
    every = ", ".join(suffix for each in suffixes.values() for suffix in each)
    raise PreflightError(f"data.path={url}: conversations are read from files whose names end in {every}.")


def _ended(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
