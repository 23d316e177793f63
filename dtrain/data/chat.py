"""Conversations: the answers of the assistant are learnt, everything else is read.

    data=chat data.path=chats.jsonl data.tokenizer=<a folder of Hugging Face>            # messages, instructions, ...
    data=chat data.path=chats.jsonl data.tokenizer=<...> data.packing=pack               # several fill data.sequence
    data=chat data.path=pairs.parquet data.tokenizer=<...> objective=dpo                 # chosen and rejected

A sample is a row: inputs [T] are its first data.sequence tokens, and a target is the next token if that counts. Of
pairs inputs are [2, T] and targets [2, T], the chosen conversation first. With data.mask inputs are {input_ids,
attention_mask}.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from dtrain.chat import files
from dtrain.chat.files import TokenFile
from dtrain.chat.tokenizer import Tokenizer, described
from dtrain.data import IGNORE, Batch, Indices, Loading
from dtrain.data.collate import MASK
from dtrain.data.packing import Packed
from dtrain.data.split import Scattered
from dtrain.errors import PreflightError, WordsError
from dtrain.storage import caching

STEP = 64
"""Rows that are padded to the longest of them are as long as a multiple of this: few shapes, which any mesh divides."""


class Chat:
    """A Source of conversations. Its files are opened when a sample is first needed: text is generated without them.
    Raises PreflightError and WordsError.
    """

    dense = False
    loading: Loading = "thread"

    def __init__(
        self, *, path: str | Sequence[str], kind: str, columns: Mapping[str, str], split: str | None, tokenizer: str,
        template: str | None, template_args: Mapping[str, Any], date: str | None, train_on: str, sequence: int,
        long: str, padding: str, padding_token: int | None, mask: bool, holdout: float, cache: str | None,
        bucket: int | None = None,
    ) -> None:  # fmt: skip
        self._words: Mapping[str, Any] = {
            "path": path, "kind": kind, "columns": columns, "split": split, "train_on": train_on, "date": date,
            "template_args": template_args, "sequence": sequence, "long": long, "cache": cache,
        }  # fmt: skip
        self.sequence = sequence
        """The most tokens of a sample."""
        self._described = described(tokenizer, template)
        self._tokenizer = Tokenizer(self._described)
        self._padding, self._pad, self._mask, self._holdout = padding, padding_token, mask, holdout
        self.bucket, self.cache = bucket, caching.folder(cache)
        self._seen: int | None = None

    @property
    def facts(self) -> Mapping[str, Any]:
        return {"vocab": self._tokenizer.vocab}

    @property
    def fingerprint(self) -> str:
        return self._print(self._rows)

    @property
    def notes(self) -> list[str]:
        """Sentences about files that are not read, and about pairs of which both answers are the same as far as they
        are read.
        """
        unread, alike = files.unread(self._words), files.alike(self._files, self.sequence)[: self._rows]
        if not (count := int(np.count_nonzero(alike[self._usable]))):
            return unread
        pairs = f"{count} of {len(self._usable)} pairs have the same answer twice"
        return [*unread, f"{pairs} within data.sequence={self.sequence} tokens: nothing is learnt from them"]

    def __len__(self) -> int:
        return len(self.part)

    @property
    def lengths(self) -> Indices:
        """The tokens of each sample, at most data.sequence; of a pair those of the longer one."""
        return self.lengths_of(self.part)

    def sizes(self, index: Indices) -> Indices:
        """The tokens of some samples."""
        return self._lengths[self._usable[self.part.original(index)]]

    def take(self, index: Indices, epoch: Indices) -> Batch:
        return self.batch(self.part.original(index))

    def holdout(self) -> "Heldout | None":
        return Heldout(self) if self.part.rest() else None

    def as_of(self, fingerprint: str) -> list[str] | None:
        """Become the source of the rows that files had before others were added."""
        rows = re.fullmatch(r"chat-(\d+)-\w+", fingerprint)
        if not rows or not 0 < int(rows[1]) < self._whole or self._print(int(rows[1])) != fingerprint:
            return None
        if self._seen != int(rows[1]):
            self._seen = int(rows[1])
            for name in ("part", "_usable"):
                self.__dict__.pop(name, None)
        return [
            f"{self._whole - self._rows} rows were added since this run began, which goes on with the {self._rows} "
            "that it has. To train on all type out=<another place>."
        ]

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    def decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens)

    def prompts(self, messages: Sequence[Any]) -> tuple[list[list[int]], set[int]]:
        """The tokens of conversations to be answered, and the tokens that end an answer. Raises PreflightError."""
        return files.rendered(self._described, messages, self._words["template_args"], self._words["date"])

    def lengths_of(self, split: Scattered) -> Indices:
        return self._lengths[self._usable[split.original(np.arange(len(split)))]]

    @cached_property
    def _lengths(self) -> Indices:
        """The tokens of each row, at most data.sequence."""
        lengths: Indices = np.concatenate([file.lengths.max(1) for file in self._files])
        return np.minimum(lengths, self.sequence)

    @property
    def ends(self) -> Indices:
        """The number of samples up to the end of each file."""
        return np.searchsorted(self._usable, self._ends)

    def tokens(self, index: Indices) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """(tokens, targets) of some of the rows that are samples. Raises WordsError for pairs."""
        for each in index:
            (row, counts), *other = self._conversations(np.array([each]))
            if other:
                raise WordsError("data.packing=pack: the rows are pairs, which are compared. Type data.packing=none.")
            yield row, np.append(np.where(counts[1:] == 1, row[1:].astype(np.int64), IGNORE), IGNORE)

    def _conversations(self, samples: Indices) -> list[tuple[NDArray[Any], NDArray[Any]]]:
        """(tokens, which of them count) of each conversation of some rows."""
        parts = list[tuple[NDArray[Any], NDArray[Any]]]()
        for row in self._usable[samples].tolist():
            number = int(np.searchsorted(self._ends, row, side="right"))
            before = int(self._ends[number - 1]) if number else 0
            parts += self._files[number].read(row - before, self.sequence)
        return parts

    def batch(self, samples: Indices) -> Batch:
        """The batch of some of the rows that are samples."""
        parts = self._conversations(samples)
        tokens = self.sequence
        if self._padding == "longest":
            tokens = min(tokens, STEP * -(-max(len(each) for each, _ in parts) // STEP))
        inputs = np.full((len(parts), tokens), self.fill, np.int64)
        targets, mask = np.full_like(inputs, IGNORE), np.zeros_like(inputs)
        for number, (row, counts) in enumerate(parts):
            inputs[number, : len(row)], mask[number, : len(row)] = row, 1
            targets[number, : len(row) - 1] = np.where(counts[1:] == 1, row[1:].astype(np.int64), IGNORE)
        is_pair = len(parts) > len(samples)
        shape = (len(samples), 2, tokens) if is_pair else (len(samples), tokens)
        ids, hides, wanted = (torch.from_numpy(each.reshape(shape)) for each in (inputs, mask, targets))
        named = {"input_ids": ids, MASK: hides} if self._mask else ids
        return {"inputs": named, "targets": wanted}

    @property
    def fill(self) -> int:
        """The token of padding."""
        known = (self._pad, self._tokenizer.number("pad_token"), self._tokenizer.number("eos_token"), 0)
        return next(number for number in known if number is not None)

    @cached_property
    def _files(self) -> list[TokenFile]:
        return files.opened(*files.job_of(self._words, self._described))

    @cached_property
    def _ends(self) -> Indices:
        return np.cumsum([len(file) for file in self._files])

    @property
    def _whole(self) -> int:
        return int(self._ends[-1])

    @property
    def _rows(self) -> int:
        return self._whole if self._seen is None else self._seen

    @cached_property
    def _usable(self) -> Indices:
        return np.flatnonzero(files.usable(self._files, self._words)[: self._rows])

    @cached_property
    def part(self) -> Scattered:
        """The samples that are trained on, of all."""
        if not len(self._usable):
            raise PreflightError(f"data.path={self._files[0].url}: no row is a sample. Type a larger data.sequence.")
        return Scattered.of(len(self._usable), self._holdout)

    def _print(self, rows: int) -> str:
        return files.fingerprint(self._files, rows, self._words)


@final
class PackedChat(Packed):
    """A Source of windows of conversations."""

    def __init__(self, chat: Chat) -> None:
        super().__init__(chat, window=chat.sequence, pad=chat.fill, cache=chat.cache)
        self._chat, self.sequence = chat, chat.sequence

    @property
    def notes(self) -> list[str]:
        return [*self._chat.notes, *super().notes]

    def encode(self, text: str) -> list[int]:
        return self._chat.encode(text)

    def decode(self, tokens: list[int]) -> str:
        return self._chat.decode(tokens)

    def prompts(self, messages: Sequence[Any]) -> tuple[list[list[int]], set[int]]:
        """As those of a Chat."""
        return self._chat.prompts(messages)


def build(
    *, path: str | Sequence[str], kind: str, columns: Mapping[str, str], split: str | None, tokenizer: str,
    template: str | None, template_args: Mapping[str, Any], date: str | None, train_on: str, sequence: int,
    long: str, packing: str, padding: str, padding_token: int | None, mask: bool, holdout: float, cache: str | None,
    bucket: int | None = None,
) -> Chat | PackedChat:  # fmt: skip
    """A Source of conversations, of which several fill a window if they are packed."""
    chat = Chat(
        path=path, kind=kind, columns=columns, split=split, tokenizer=tokenizer, template=template,
        template_args=template_args, date=date, train_on=train_on, sequence=sequence, long=long, padding=padding,
        padding_token=padding_token, mask=mask, holdout=holdout, cache=cache, bucket=bucket,
    )  # fmt: skip
    return PackedChat(chat) if packing == "pack" else chat


class Heldout:
    """A Source of the samples that a Chat holds out."""

    dense = False
    loading: Loading = "thread"

    def __init__(self, of: Chat) -> None:
        self._of, self.sequence = of, of.sequence

    @property
    def facts(self) -> Mapping[str, Any]:
        return self._of.facts

    @property
    def fingerprint(self) -> str:
        return self._of.fingerprint

    @property
    def _split(self) -> Scattered:
        rest = self._of.part.rest()
        assert rest is not None
        return rest

    @property
    def lengths(self) -> Indices:
        return self._of.lengths_of(self._split)

    def __len__(self) -> int:
        return len(self._split)

    def take(self, index: Indices, epoch: Indices) -> Batch:
        return self._of.batch(self._split.original(index))

    def holdout(self) -> None:
        return None

    def encode(self, text: str) -> list[int]:
        return self._of.encode(text)

    def decode(self, tokens: list[int]) -> str:
        return self._of.decode(tokens)
