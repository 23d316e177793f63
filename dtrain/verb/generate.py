"""`dtrain generate out=<run> generate.prompt='def '`: text from its newest checkpoint, or from the one at `init=`.

dtrain generate out=<run> generate.prompts=questions.jsonl generate.to=answers.jsonl    # many at once
"""

from collections.abc import Sequence

from dtrain.chat import prompts
from dtrain.planned import Plan
from dtrain.verb.evaluate import look_back


def run(words: Sequence[str]) -> int:
    look_back(words, loop="dtrain.evaluation.generate.generate", check=_check)  # its first rank prints
    return 0


def _check(plan: Plan) -> None:
    if plan.generate["prompts"] is not None:
        prompts.read(plan.generate["prompts"])
