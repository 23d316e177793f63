"""One rank of `dtrain generate`: text from a checkpoint."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import cast

import numpy as np

from dtrain.data import TextSource
from dtrain.errors import WordsError
from dtrain.evaluation.session import load, watch
from dtrain.model.cache import kv_cache
from dtrain.model.sampling import complete
from dtrain.objective import answer
from dtrain.planned import Plan
from dtrain.result import Result, versions
from dtrain.secrets import screen

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""The end of a text whose last character lacks bytes."""


def generate(plan: Plan) -> Result:
    """Generate text; `metrics["text"]` of the result is the prompt and its continuation."""
    began = time.perf_counter()
    with load(plan) as (parts, commit):
        if not hasattr(parts.source, "decode"):
            raise WordsError("generate: the data of this run is not text.")
        source = cast(TextSource, parts.source)
        context = source.take(np.array([0]), np.array([0]))["inputs"].shape[1]
        forward = watch(parts.forward, parts.mesh, parts.precision, step=plan.tokens_step)
        options = {name: plan.generate[name] for name in ("tokens", "temperature", "top_p")}
        prompt = source.encode(str(plan.generate["prompt"]))
        show = _Shown(source.decode) if parts.mesh.rank == 0 else None
        single = watch(parts.forward, parts.mesh, parts.precision, step=plan.mesh.tp)  # of the same length each time
        is_whole = plan.mesh.pp == plan.mesh.cp == 1  # the model and each sequence are in one place
        with kv_cache(parts.model, padded=plan.tokens_step > 1) if is_whole else nullcontext() as cache:
            tokens = complete(
                lambda new: answer((single if new.shape[1] == 1 else forward)(new)),
                prompt, context=context, seed=plan.seed, cache=cache, show=show, **options,
            )  # fmt: skip
        text = source.decode(tokens)
        if show:
            show.end(text)
    return Result("finished", commit["step"], None, time.perf_counter() - began, {"text": text}, versions())


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
