"""One rank of `dtrain evaluate as=lm_eval`: tasks of EleutherAI's lm-evaluation-harness on any mesh, without an export.

Rank 0 runs the harness, with the model of the run in place of its own ones; the others compute with it. A request is
cut, scored and continued as by its Hugging Face models, so an item gets what the export of the run would get there.
"""

import contextlib
import io
import json
import os
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dtrain.data import context_of
from dtrain.errors import DtrainError, WordsError
from dtrain.evaluation.session import load
from dtrain.integrations.lm_eval import tasks
from dtrain.integrations.lm_eval.scoring import Scoring
from dtrain.integrations.lm_eval.spoken import Spoken, spoken
from dtrain.loop.assemble import Parts
from dtrain.planned import Plan
from dtrain.result import Result, versions
from dtrain.secrets import screen
from dtrain.storage import store

RESAMPLES = 1000
"""Of the standard errors that are not known in closed form."""
NEW_TOKENS = 256
"""Most tokens of a text whose task does not say it, as in lm_eval's Hugging Face models."""
NEUTRAL: Mapping[str, Any] = {"num_beams": 1, "repetition_penalty": 1.0, "use_cache": True, "num_return_sequences": 1}
"""Arguments of a generation that change nothing at these values."""
SAMPLED = ("top_k", "typical_p", "min_p")
"""Arguments that only matter where tokens are drawn."""
LENGTHS = ("n_positions", "max_position_embeddings", "n_ctx")
"""Where a config of transformers says how many tokens its model sees, in lm_eval's order."""
FILE, FOLDER = "lm_eval.json", "lm_eval"


def benchmark(plan: Plan) -> Result:
    """Run the tasks; `metrics` of the result has `table`, and `figures`: eval_<task>_<metric> -> value."""
    began = time.perf_counter()
    tasks.quiet()
    with load(plan) as (parts, commit):
        voice = spoken(plan, parts.source)
        context = _context(parts)
        screen_of = sys.stderr  # lm_eval shows bars of its own, which are kept off it

        def tell(text: str) -> None:
            with contextlib.redirect_stderr(screen_of):
                screen.complain(text, begin="lm_eval: ")

        scoring = Scoring(
            parts, batch=plan.tasks["batch"], context=context, ends=voice.ends, decode=voice.decode,
            tell=tell if parts.mesh.rank == 0 else lambda text: None,
        )  # fmt: skip
        figures: dict[str, Any] = {}
        if parts.mesh.rank:
            scoring.serve()
        else:
            problem = "rank 0 failed"
            try:
                figures = _results(plan, scoring, voice, context, commit["step"])
                problem = ""
            except DtrainError as error:
                problem = str(error)
                raise
            finally:
                scoring.end(problem)
    return Result(
        status="finished",
        step=commit["step"],
        loss=None,
        wall_seconds=time.perf_counter() - began,
        metrics=figures,
        versions=versions(),
    )


def _context(parts: Parts) -> int:
    """The tokens that the model sees."""
    asked, config = parts.plan.tasks["context"], getattr(parts.model, "config", None)
    if asked:
        return int(asked)
    config = getattr(config, "text_config", None) or config
    said = next((value for name in LENGTHS if isinstance(value := getattr(config, name, None), int)), None)
    sequence = parts.plan.data.get("sequence")
    return int(said or (sequence if isinstance(sequence, int) else context_of(parts.source)))


def _results(plan: Plan, scoring: Scoring, voice: Spoken, context: int, step: int) -> dict[str, Any]:
    """Run the harness and write its results; `table` and `figures` of them."""
    chosen = _chosen(plan.tasks)
    from lm_eval.evaluator import evaluate
    from lm_eval.utils import handle_non_serializable, make_table

    with _quietly():
        model = _model_of(scoring, voice, context, plan.seed)
        results: Any = evaluate(model, chosen, limit=plan.tasks["limit"], bootstrap_iters=RESAMPLES)
        table = make_table(results) + ("\n" + make_table(results, "groups") if "groups" in results else "")
    for name, items in results.pop("samples").items():
        lines = [json.dumps(item, default=handle_non_serializable, ensure_ascii=False) for item in items]
        store.write(store.join(plan.out, FOLDER, f"{name}.jsonl"), ("\n".join(lines) + "\n").encode())
    text = json.dumps({**results, "step": step}, default=handle_non_serializable, ensure_ascii=False, indent=1)
    store.write(store.join(plan.out, FILE), text.encode())
    return {"table": table.rstrip("\n"), "figures": figures_of(results["results"])}


def _chosen(asked: Mapping[str, Any]) -> Any:
    """The tasks with their number of solved examples, and the seeds that lm_eval begins with."""
    loaded = tasks.loaded(asked).load(list(asked["names"]))
    from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED

    random.seed(DEFAULT_RANDOM_SEED)
    np.random.seed(DEFAULT_OTHER_SEED)  # tasks draw from it
    for task in loaded["tasks"].values():
        own = task.get_config("num_fewshot")
        if own is None or (asked["shots"] is not None and own != 0):
            task.set_config(key="num_fewshot", value=asked["shots"] or 0)
        task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
    return loaded


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Keep lm_eval from printing, and from forking this rank, which has threads."""
    before = os.environ.get("DISABLE_MULTIPROC")
    os.environ["DISABLE_MULTIPROC"] = "1"
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        if before is None:
            del os.environ["DISABLE_MULTIPROC"]


def figures_of(results: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """eval_<task>_<metric>, and _<filter> if there is one, -> value; without standard errors."""
    figures = dict[str, float]()
    for task, row in results.items():
        for key, value in row.items():
            metric, _, kind = key.partition(",")
            if kind and isinstance(value, int | float) and not metric.endswith("_stderr"):
                figures[f"eval_{task}_{metric}" + ("" if kind == "none" else f"_{kind}")] = float(value)
    return figures


def options_of(given: Mapping[str, Any], task: str) -> dict[str, Any]:
    """The options of a generation, of those that a task gives. Raises WordsError for one that dtrain has not."""
    from lm_eval.models.utils import normalize_gen_kwargs

    known: dict[str, Any] = dict(normalize_gen_kwargs(dict(given), NEW_TOKENS))
    until, tokens = known.pop("until"), known.pop("max_gen_toks")
    sampled, temperature = known.pop("do_sample", False), known.pop("temperature", 0.0)
    top_p = known.pop("top_p", None)
    left = {name: value for name, value in known.items() if NEUTRAL.get(name, ()) != value}
    if not sampled:
        left = {name: value for name, value in left.items() if name not in SAMPLED}
    if left:
        name, value = next(iter(left.items()))
        raise WordsError(
            f"evaluate.tasks: {task} generates with {name}={value}, which dtrain has not. Export the run, and type "
            f"lm_eval run --model hf --tasks {task}."
        )
    return {
        "tokens": int(tokens), "until": [text for text in until if text],
        "temperature": float(temperature) if sampled else 0.0, "top_p": float(top_p or 1.0) if sampled else 1.0,
    }  # fmt: skip


def _model_of(scoring: Scoring, voice: Spoken, context: int, seed: int) -> Any:
    """The model of the run, as a model of lm_eval."""
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    class OnMesh(TemplateLM):  # type: ignore[misc,unused-ignore]
        """A TemplateLM encodes pairs of a context and what follows it."""

        @property
        def eot_token_id(self) -> int:
            return voice.first

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            return voice.encode(string, special=add_special_tokens)

        def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
            return _scored(scoring, [(before, wanted) for _, before, wanted in requests], context)

        def loglikelihood(self, requests: Any, disable_tqdm: bool = True) -> list[tuple[float, bool]]:
            pairs: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
            return pairs

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = True) -> list[float]:
            windows = list[tuple[list[int], list[int]]]()
            ends = list[int]()
            for request in requests:
                cut = get_rolling_token_windows(
                    token_list=voice.encode(request.args[0]), prefix_token=voice.first, max_seq_len=context,
                    context_len=1,
                )  # fmt: skip
                windows += map(make_disjoint_window, cut)
                ends.append(len(windows))
            chances = [chance for chance, _ in _scored(scoring, windows, context)]
            return [sum(chances[begin:end]) for begin, end in zip([0, *ends], ends, strict=False)]

        def generate_until(self, requests: Any, disable_tqdm: bool = True) -> list[str]:
            return _written(scoring, voice, requests, context, seed)

    return OnMesh()


def _scored(
    scoring: Scoring, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], most: int
) -> list[tuple[float, bool]]:
    """(log-likelihood, whether greedy) of the second tokens of each pair after the first ones; equal rows are computed
    once.
    """
    rows: dict[tuple[int, ...], list[int]] = {}
    for number, (before, wanted) in enumerate(pairs):
        rows.setdefault(tuple([*before, *wanted][-(most + 1) : -1]), []).append(number)
    ordered = sorted(rows, key=lambda row: -len(row))
    asked = [(place, pairs[number][1]) for place, row in enumerate(ordered) for number in rows[row]]
    known = scoring.likelihoods(ordered, asked) if asked else []
    numbers = [number for row in ordered for number in rows[row]]
    of = dict(zip(numbers, known, strict=True))
    return [(of[number][0], bool(of[number][1])) for number in range(len(pairs))]


def _written(scoring: Scoring, voice: Spoken, requests: Any, most: int, seed: int) -> list[str]:
    """The text of each request, up to the first of the texts that end it."""
    groups: dict[str, list[int]] = {}
    for number, request in enumerate(requests):
        groups.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(number)
    texts = [""] * len(requests)
    for numbers in groups.values():
        task = requests[numbers[0]].task_name
        options = options_of(requests[numbers[0]].args[1], task)
        room = most - options["tokens"]
        if room < 1:
            raise WordsError(
                f"evaluate.tasks: {task} writes {options['tokens']} tokens, and the model sees {most}. Type "
                "evaluate.context=<more>, or give the task a smaller max_gen_toks."
            )
        prompts = {number: voice.encode(requests[number].args[0])[-room:] for number in numbers}
        order = sorted(numbers, key=lambda number: -len(prompts[number]))
        ends = [*options["until"], *voice.end_texts]
        for number, new in zip(
            order, scoring.texts([prompts[number] for number in order], seed=seed, **options), strict=True
        ):
            text = voice.decode(new)
            for end in ends:
                text = text.split(end)[0]
            texts[number] = text
    return texts
