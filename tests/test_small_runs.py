"""What `dtrain plan` accepts trains, and what it refuses does not: small runs drawn at random end their two steps with exit code 0, or are refused with a reason.

What only the code of the user's own tells, a model or a dataset, may be refused by the ranks alone, in a sentence, before any of them makes a step.

python -m pytest tests/test_small_runs.py -m slow
"""

import shutil
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pool import RankFailed, ranks
from small_runs import drawn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers.models.llama import modeling_llama  # noqa: F401  # once, not in each rank

from dtrain.cluster import Cluster
from dtrain.compose import compose
from dtrain.errors import WordsError
from dtrain.launcher import preflight
from dtrain.planned import Plan
from dtrain.predict.prediction import predict
from dtrain.resolve import resolve
from dtrain.tracing import shapes_of
from dtrain.train import train

pytestmark = pytest.mark.campaign("fuzz")

HERE = Cluster(gpus=0, cpus=4)
SENTENCE = "dtrain.errors.WordsError: "


def decided(words: tuple[str, ...], folder: Path, corpus: Path) -> Plan | None:
    """The plan of a run; None when the words or a look at the machine are enough to refuse it."""
    places = [f"data.path={corpus}/*.py"] * ("data=text" in words) + [f"data.path={folder}/tokens.npy"] * (
        "data=tokens" in words
    )
    try:
        plan = resolve(compose([*words, *places, f"out={folder}/run"]), HERE)
    except WordsError as refused:
        assert all(len(problem) > 20 for problem in refused.problems), "a reason, not a code"
        return None
    return None if preflight.missing(plan) else plan


def error_of(world: int, work: Callable[..., Any], *arguments: Any) -> str:
    """The traceback of the first rank that has one; empty when all of them end well."""
    try:
        ranks(world, work, *arguments, seconds=300)
    except RankFailed as failed:
        return str(failed)
    return ""


def predicted(plan: Plan) -> None:
    """What `dtrain plan` does, in a process of its own: it runs code of the user's."""
    predict(plan, shapes_of(plan))


def trained(plan: Plan, mark: Path) -> None:
    """A rank that leaves a mark before its first step of an optimizer."""
    register_optimizer_step_pre_hook(lambda *_: mark.touch())
    result, last = train(plan), min(plan.stop_after or plan.steps, plan.steps)
    assert result.step == last and result.status in ("finished", "stopped"), result


def sentence(error: str) -> bool:
    """Whether a traceback ends with words for the user."""
    return error.strip().rpartition("\n")[2].startswith(SENTENCE)


def own(words: tuple[str, ...]) -> bool:
    """Whether the words name a model or a dataset that is not dtrain's."""
    return any(
        word.startswith(key) and not word.startswith(f"{key}dtrain.")
        for word in words
        for key in ("model._target_=", "data.dataset._target_=")
    )


def failures(seeds: Iterable[int], folder: Path, corpus: Path, *, most: int) -> tuple[Counter[str], list[str]]:
    """How many runs were drawn, accepted by plan (`most` at most) or refused by it, trained, refused by their ranks alone, and made a step; and what went wrong."""
    np.save(folder / "tokens.npy", np.arange(5000, dtype=np.uint16) % 251)
    counts, wrong, mark = Counter[str](), list[str](), folder / "stepped"
    for seed in seeds:
        if counts["accepted"] == most:
            break
        words = drawn(seed)
        counts["drawn"] += 1
        plan = decided(words, folder, corpus)
        if plan is None:
            continue
        said, error = error_of(1, predicted, plan), error_of(plan.world, trained, plan, mark)
        before = own(words) and sentence(error) and not mark.exists()
        counts["refused by plan" if said else "accepted"] += 1
        counts["trained" if not error else "refused by the ranks"] += not said
        if not (before and sentence(said) if said else before or not error):
            wrong.append(
                f"{seed}: {' '.join(words)}\n    plan: {said[-800:] or 'accepted'}\n    ranks: {error[-800:] or 'trained'}"
            )
        counts["stepped"] += mark.exists()
        mark.unlink(missing_ok=True)
        shutil.rmtree(folder / "run", ignore_errors=True)
    return counts, wrong


def test_what_is_accepted_trains(tmp_path: Path, corpus: Path) -> None:
    counts, wrong = failures(range(1000, 1100), tmp_path, corpus, most=8)
    assert not wrong, "\n".join(wrong)
    assert counts["accepted"] == 8 and counts["stepped"], counts


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_two_hundred_that_are_accepted_train(part: int, tmp_path: Path, corpus: Path) -> None:
    counts, wrong = failures(range(part * 200, part * 200 + 200), tmp_path, corpus, most=20)
    assert not wrong, f"{counts}\n" + "\n".join(wrong)
    assert counts["accepted"] == 20 and counts["stepped"], counts
