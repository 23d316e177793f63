"""`dtrain generate out=<run> generate.prompt='def '`: text from its newest checkpoint, or from the one at `init=`."""

from collections.abc import Sequence

from dtrain.secrets import screen
from dtrain.verb.evaluate import look_back


def run(words: Sequence[str]) -> int:
    _, result = look_back(words, loop="dtrain.evaluation.generate.generate")
    if result is not None:
        screen.say(result.metrics["text"])
    return 0
