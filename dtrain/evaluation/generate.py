"""One rank of `dtrain generate`: text from a checkpoint."""

import time
from typing import cast

import numpy as np

from dtrain.data import TextSource
from dtrain.errors import WordsError
from dtrain.evaluation.session import look_at, watch
from dtrain.model.sampling import complete
from dtrain.objective import answer
from dtrain.plan import Plan
from dtrain.result import Result, versions


def generate(plan: Plan) -> Result:
    """`metrics["text"]` is the prompt and what follows it."""
    began = time.perf_counter()
    with look_at(plan) as seen:
        if not hasattr(seen.source, "decode"):
            raise WordsError("generate: the data of this run is not text.")
        source = cast(TextSource, seen.source)
        context = source.take(np.array([0]), np.array([0]))["inputs"].shape[1]
        forward = watch(seen.model, seen.mesh, seen.precision, step=plan.tokens_step)
        tokens = complete(
            lambda tokens: answer(forward(tokens)),
            source.encode(str(plan.generate["prompt"])),
            tokens=plan.generate["tokens"],
            context=context,
            temperature=plan.generate["temperature"],
            seed=plan.seed,
        )
        text = source.decode(tokens)
    return Result("finished", seen.commit["step"], None, time.perf_counter() - began, {"text": text}, versions())
