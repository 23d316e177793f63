"""All forwards, then all backwards, the newest first: no class of torch runs it."""

from collections.abc import Iterator
from typing import ClassVar

from dtrain.parallel.schedule import Action


class Stack:
    about: ClassVar = {"stages": 1, "layout": "loop", "keeps": "all"}

    def order(self, pp: int, stages: int, count: int, rank: int) -> Iterator[Action]:
        for microbatch in range(count):
            yield Action("F", rank, microbatch)
        for microbatch in reversed(range(count)):
            yield Action("B", rank, microbatch)
