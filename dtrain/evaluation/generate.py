"""One rank of `dtrain generate`: text from a checkpoint."""

import time
from typing import cast

import numpy as np

from dtrain.data import TextSource
from dtrain.errors import WordsError
from dtrain.evaluation.session import load, watch
from dtrain.model.sampling import complete
from dtrain.objective import answer
from dtrain.planned import Plan
from dtrain.result import Result, versions


def generate(plan: Plan) -> Result:
    """Generate text; `metrics["text"]` of the result is the prompt and its continuation."""
    began = time.perf_counter()
    with load(plan) as (parts, commit):
        if not hasattr(parts.source, "decode"):
            raise WordsError("generate: the data of this run is not text.")
        source = cast(TextSource, parts.source)
        context = source.take(np.array([0]), np.array([0]))["inputs"].shape[1]
        forward = watch(parts.forward, parts.mesh, parts.precision, step=plan.tokens_step)
        options = {name: plan.generate[name] for name in ("tokens", "temperature")}
        prompt = source.encode(str(plan.generate["prompt"]))
        tokens = complete(lambda tokens: answer(forward(tokens)), prompt, context=context, seed=plan.seed, **options)
        text = source.decode(tokens)
    return Result("finished", commit["step"], None, time.perf_counter() - began, {"text": text}, versions())
