"""`dtrain generate out=<run> generate.prompt='def '`: text from its newest checkpoint, or from the one at `init=`.

dtrain generate out=<run> generate.prompts=questions.jsonl generate.to=answers.jsonl    # many at once
"""

from collections.abc import Sequence

from dtrain.chat import prompts
from dtrain.planned import Plan
from dtrain.verb.evaluate import check_place, look_back


def run(words: Sequence[str]) -> int:
    look_back(words, loop="dtrain.evaluation.generate.generate", check=_check)  # its first rank prints
    return 0


def _check(plan: Plan) -> None:
    """Refuse prompts that cannot be read, and a place that cannot be written, before ranks start."""
    if plan.generate["prompts"] is not None:
        prompts.read(plan.generate["prompts"])
    to = plan.generate["to"] or ""
    if folder := to.rpartition("/")[0]:
        check_place(f"generate.to={to}", folder)
