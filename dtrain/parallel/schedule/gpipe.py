"""All forwards, then all backwards in the same order (arXiv 1811.06965)."""

from collections.abc import Iterator

from dtrain.parallel.schedule import Action


class GPipe:
    def order(self, pp: int, stages: int, count: int, rank: int) -> Iterator[Action]:
        for kind in "FB":
            for microbatch in range(count):
                yield Action(kind, rank, microbatch)
