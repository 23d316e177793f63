"""One rank of `dtrain generate`: text from a checkpoint."""

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import torch

from dtrain.chat import prompts
from dtrain.chat.prompts import Prompt
from dtrain.data import Chatting, TextSource, context_of
from dtrain.errors import PreflightError, WordsError
from dtrain.evaluation.session import load, quiet
from dtrain.model import evaluating
from dtrain.model.cache import kv_cache
from dtrain.model.sampling import answers
from dtrain.objective import answer
from dtrain.planned import Plan
from dtrain.result import Result, versions
from dtrain.secrets import screen
from dtrain.storage import store

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""The end of a text whose last character lacks bytes."""


def generate(plan: Plan) -> Result:
    """Generate text; `metrics["text"]` of the result is the prompt and its continuation, or the answer to a message,
    or the list of answers to the prompts of a file.
    """
    began, given = time.perf_counter(), plan.generate
    asked: Sequence[Prompt] = [str(given["prompt"])]
    if given["prompts"] is not None:
        asked = prompts.read(given["prompts"])
    with load(plan) as (parts, commit):
        source, is_chat = parts.source, given["chat"]
        if not hasattr(source, "decode"):
            raise WordsError("generate: the data of this run is not text.")
        if is_chat == "auto":
            is_chat = isinstance(source, Chatting)
        encoded, ends = _encoded(source, asked, is_chat)
        forward = quiet(parts.forward, parts.mesh, parts.precision, step=plan.tokens_step)
        single = quiet(parts.forward, parts.mesh, parts.precision, step=plan.mesh.tp)  # of the same length each time
        is_whole = plan.mesh.pp == plan.mesh.cp == 1  # the model and each sequence are in one place
        with (
            evaluating(parts.forward),
            torch.inference_mode(parts.mesh.world == 1),  # ranks may pass on their tensors in ways of their own
            kv_cache(parts.model, padded=plan.tokens_step > 1) if is_whole else nullcontext() as cache,
        ):
            options = {name: given[name] for name in ("tokens", "temperature", "top_p")}
            options |= {"context": context_of(source), "seed": plan.seed, "cache": cache, "ends": ends}
            write = partial(answers, lambda new: answer((single if new.shape[1] == 1 else forward)(new)), **options)
            said = _Answers(cast(TextSource, source), asked, encoded, write, with_prompts=not is_chat)
            is_first = parts.mesh.rank == 0
            if given["prompts"]:
                batch = min(given["batch"], cache.most if cache else math.inf)
                texts = said.of_file(batch, is_first and not given["to"])
            else:
                texts = said.one(is_first)
        if given["to"] and is_first:
            rows = [json.dumps(prompts.row_of(*row), ensure_ascii=False) for row in zip(asked, texts, strict=True)]
            store.write(given["to"], ("\n".join(rows) + "\n").encode())
    text: Any = texts if given["prompts"] else texts[0]
    return Result(
        status="finished",
        step=commit["step"],
        loss=None,
        wall_seconds=time.perf_counter() - began,
        metrics={"text": text},
        versions=versions(),
    )


def _encoded(source: Any, asked: Sequence[Prompt], is_chat: bool) -> tuple[list[list[int]], set[int]]:
    """The tokens of prompts, and those that end an answer. Raises PreflightError."""
    if is_chat:
        if not isinstance(source, Chatting):
            raise WordsError("generate.chat=true: the data of this run has no chat template. Train with data=chat.")
        return source.prompts([prompts.messages_of(prompt) for prompt in asked])
    for number, prompt in enumerate(asked, 1):
        if not isinstance(prompt, str):
            raise PreflightError(
                f"generate.prompts: prompt {number} has messages, and generate.chat=false continues texts."
            )
    return [source.encode(prompt) for prompt in asked], set()


class _Answers:
    """Answers to prompts. `with_prompts`: a text is shown with its prompt."""

    def __init__(
        self, source: TextSource, asked: Sequence[Prompt], encoded: Sequence[list[int]],
        write: Callable[..., list[list[int]]], *, with_prompts: bool,
    ) -> None:  # fmt: skip
        self._source, self._asked, self._encoded, self._write = source, asked, encoded, write
        self._with_prompts = with_prompts

    def one(self, is_shown: bool) -> list[str]:
        """The text of the only prompt, shown as it comes."""
        before = self._encoded[0] if self._with_prompts else []
        show = _Shown(lambda tokens: self._source.decode(before + tokens)) if is_shown else None
        (new,) = self._write(self._encoded, show=show)
        text = self._source.decode(before + new)
        if show:
            show.end(text)
        return [text]

    def of_file(self, batch: int, is_shown: bool) -> list[str]:
        """The answers to all prompts, in order; `batch` of them are written at once."""
        texts = list[str]()
        for text in self._batches(batch):
            if is_shown:
                screen.say(json.dumps(prompts.row_of(self._asked[len(texts)], text), ensure_ascii=False))
            texts.append(text)
        return texts

    def _batches(self, batch: int) -> Iterator[str]:
        for first in range(0, len(self._encoded), batch):
            for new in self._write(self._encoded[first : first + batch], first=first):
                yield self._source.decode(new)


class _Shown:
    """Prints text as it comes."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode, self._shown = decode, 0

    def __call__(self, tokens: list[int]) -> None:
        text = self._decode(tokens)
        if not text.endswith(UNFINISHED):
            screen.say(text[self._shown :], end="")
            self._shown = len(text)

    def end(self, text: str) -> None:
        screen.say(text[self._shown :])
