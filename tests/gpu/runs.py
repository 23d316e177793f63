"""dtrain's own steps, several sets of words in one process.

    python -m tests.gpu.runs <folder> [profile=<file>] '124M: model=gpt ... batch=32' 'one chunk: ... objective.chunk=32768' ...

Each prints one JSON line, with what the plan predicts beside it: a set of words that fails costs its own line. Steps between two
rows (`log.every`) are the unit: the first of four is dropped, and the last too where its steps are profiled.
"""

import contextlib
import gc
import io
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from dtrain.cluster import detect
from dtrain.compose import compose
from dtrain.planned import Plan
from dtrain.predict.prediction import predict
from dtrain.resolve import resolve
from dtrain.train import train
from dtrain.verb.plan import shapes_of

from . import profiled

ROWS, PROFILED = 4, 3
COMMON = (
    "model=gpt data=synthetic objective=next_token strategy=single devices=1 log.every=10 logger=[] hook=[] evaluate.every=0 checkpoint.every=0 "
    "resume=never steps=100000"
)


class Enough(Exception):
    """The rows are there. A run that reached its last step would save its state, 18 GB for 1.5B weights."""


def measure(name: str, words: str, folder: Path, profile: str = "") -> dict[str, Any]:
    """ms of a step, MFU, tokens/s, GiB, and seconds until the first step was done."""
    out = folder / name.replace(" ", "-").replace(",", "")
    plan = resolve(compose([*COMMON.split(), *words.split(), f"out={out}"]), detect())
    every, began, marks = plan.log_every, time.perf_counter(), list[float]()
    with contextlib.ExitStack() as profiling:

        def watch(step: int) -> None:
            if step == 1:
                marks.append(time.perf_counter() - began)
            if profile and step == (ROWS - 1) * every + 2:
                profiling.enter_context(profiled.kernels(profile, f"dtrain, {name}", PROFILED))
            if profile and step == (ROWS - 1) * every + 2 + PROFILED:
                profiling.close()
            if step == ROWS * every:
                raise Enough

        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        with profiled.each_step(watch), contextlib.suppress(Enough):
            train(plan)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    kept = rows[1 : ROWS - bool(profile)]
    ms = [row["step_seconds"] * 1e3 for row in kept]
    return {
        "name": name, "words": words, "ms": round(statistics.median(ms), 2), "least": round(min(ms), 2), "loss": round(kept[-1]["loss"], 4),
        "tokens/s": round(kept[-1].get("tokens_per_second", 0)), "mfu": round(kept[-1].get("mfu", 0), 4),
        **memory(), "first s": round(marks[0], 1), "predicted": predicted(plan),
    }  # fmt: skip


def memory() -> dict[str, float]:
    """GiB at most of the allocator, what it reserved, and what else of the device is taken."""
    if not torch.cuda.is_available():
        return {}
    free, whole = torch.cuda.mem_get_info()
    bytes_ = {
        "peak GiB": torch.cuda.max_memory_allocated(),
        "reserved GiB": torch.cuda.max_memory_reserved(),
        "beside GiB": whole - free - torch.cuda.memory_reserved(),
    }
    return {each: round(value / 2**30, 2) for each, value in bytes_.items()}


def predicted(plan: Plan) -> dict[str, float]:
    prediction = predict(plan, shapes_of(plan))
    time_ = {"ms": round(prediction.time.seconds * 1e3, 2)} if prediction.time else {}
    return {**time_, "peak GiB": round(prediction.memory.peak / 2**30, 2)}


def main(folder: Path, words: list[str]) -> None:
    profile = ""
    for word in words:
        if word.startswith("profile="):
            profile = word.partition("=")[2]
            continue
        name, _, said = word.partition(": ")
        try:
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                row = measure(name, said, folder, profile)
        except BaseException as error:
            row = {"name": name, "words": said, "error": f"{type(error).__name__}: {str(error)[:400]}"}
            if isinstance(error, KeyboardInterrupt):
                raise
        lines = [line for line in printed.getvalue().splitlines() if line.startswith('{"kernels of"')]
        print(*lines, json.dumps(row), sep="\n", flush=True)
        profile = ""
        torch._dynamo.reset()
        gc.unfreeze()  # a run freezes what it has built
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
