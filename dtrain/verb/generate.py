"""`dtrain generate out=<run> generate.prompt='def '`: text from its newest checkpoint, or from the one at `init=`."""

from collections.abc import Sequence

from dtrain.verb.evaluate import look_back


def run(words: Sequence[str]) -> int:
    look_back(words, loop="dtrain.evaluation.generate.generate")  # its first rank prints
    return 0
