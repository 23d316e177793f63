"""The share of targets that are among the five highest scores."""

from dtrain.metric import Hits


class Top5(Hits):
    """Of tokens, if the targets are tokens."""

    def __init__(self) -> None:
        super().__init__(5)
