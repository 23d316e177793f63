"""The share of targets with the highest score."""

from dtrain.metric import Hits


class Accuracy(Hits):
    """Of tokens, if the targets are tokens."""

    def __init__(self) -> None:
        super().__init__(1)
