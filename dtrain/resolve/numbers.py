"""Plain numbers and words of the top level: in range, or refused."""

import math
from collections.abc import Mapping
from typing import Any

from dtrain.cluster import Cluster
from dtrain.config import Config
from dtrain.errors import WordsError, nearest

RESUME = ("auto", "never", "must")
ON_SPIKE = ("stop", "skip", "rewind")
SIGMA = 6.0
"""Standard deviations above the mean that skip and rewind call a spike."""


def positive(config: Config, cluster: Cluster, draft: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers that make sense alone."""
    least = {
        "nodes": (config.nodes, 1), "steps": (config.steps, 1), "batch": (config.batch, 1), "microbatch": (config.microbatch, 1),
        "accumulate": (config.accumulate, 1), "stop_after": (config.stop_after, 1), "seed": (config.seed, 0), "log.every": (config.log.every, 1),
        "evaluate.every": (config.evaluate.every, 0), "evaluate.samples": (config.evaluate.samples, 1),
        "checkpoint.every": (config.checkpoint.get("every"), 0), "checkpoint.keep": (config.checkpoint.get("keep"), 1),
        "checkpoint.keep_every": (config.checkpoint.get("keep_every"), 1), "checkpoint.ephemeral": (config.checkpoint.get("ephemeral"), 0),
        "checkpoint.memory": (config.checkpoint.get("memory"), 0),
        "optim.lr": (config.optim.get("lr"), 0), "schedule.floor": (config.schedule.get("floor"), 0), "data.holdout": (config.data.get("holdout"), 0),
        "schedule.warmup": (config.schedule.get("warmup"), 0), "data.sequence": (config.data.get("sequence"), 1),
        "spike.window": (config.spike.window, 8), "verify.steps": (config.verify.steps, 1), "generate.tokens": (config.generate.tokens, 1), "generate.temperature": (config.generate.temperature, 0),
    }  # fmt: skip
    problems = [] if config.generate.prompt else ["generate.prompt is empty: a model goes on from something. Type generate.prompt='def '."]
    problems += [
        f"{key}={value}: at least {low} is needed. Type {key}={low}."
        for key, (value, low) in least.items()
        if isinstance(value, int | float) and value < low
    ]
    most = {"schedule.floor": (config.schedule.get("floor"), 1), "data.holdout": (config.data.get("holdout"), 0.99)}
    problems += [f"{key}={value}: at most {high}." for key, (value, high) in most.items() if isinstance(value, int | float) and value > high]
    if config.clip is not None and config.clip <= 0:
        problems.append(f"clip={config.clip}: a gradient norm is above 0. Type clip=1.0, or clip=null for no clipping.")
    if config.ema is not None and not 0 <= config.ema < 1:
        problems.append(f"ema={config.ema}: a decay is at least 0 and below 1. Type ema=0.999, or ema=null for no average.")
    if config.resume not in RESUME:
        problems.append(f"resume={config.resume}:{nearest(config.resume, RESUME)}")
    sigma = _sigma(config, problems)
    if problems:
        raise WordsError(*problems)
    if config.spike.sigma == "auto":
        counts = "nan and inf" if sigma is None else f"nan, inf, and what is {sigma:g} standard deviations above the last {config.spike.window} steps"
        draft["why"]["spike"] = f"{config.on_spike} at {counts}"
    return {
        "loop": config.loop, "steps": config.steps, "stop_after": config.stop_after, "seed": config.seed, "clip": config.clip, "ema": config.ema,
        "on_spike": config.on_spike, "spike": {"sigma": sigma, "window": config.spike.window},
        "resume": config.resume, "init": config.init, "trust": tuple(config.trust), "log_every": config.log.every,
        "evaluate_every": config.evaluate.every, "evaluate_samples": config.evaluate.samples, "generate": vars(config.generate).copy(),
    }  # fmt: skip


def _sigma(config: Config, problems: list[str]) -> float | None:
    """Standard deviations that make a spike; None: only nan and inf do."""
    sigma = config.spike.sigma
    if config.on_spike not in ON_SPIKE:
        problems.append(f"on_spike={config.on_spike}:{nearest(config.on_spike, ON_SPIKE)}")
    if sigma == "auto":
        return None if config.on_spike == "stop" else SIGMA
    if sigma is not None and (isinstance(sigma, bool) or not isinstance(sigma, int | float) or not 0 < sigma < math.inf):
        problems.append(
            f"spike.sigma={sigma}: a number of standard deviations is above 0. Type spike.sigma={SIGMA:g}, or spike.sigma=null for nan and inf alone."
        )
        return None
    return None if sigma is None else float(sigma)
