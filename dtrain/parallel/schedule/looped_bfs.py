"""Every microbatch through one stage before the next stage begins; backwards from the last (arXiv 2211.05953)."""

from collections.abc import Iterator

from dtrain.parallel.schedule import Action


class LoopedBFS:
    def order(self, pp: int, stages: int, count: int, rank: int) -> Iterator[Action]:
        mine = range(rank, pp * stages, pp)
        yield from (Action("F", stage, microbatch) for stage in mine for microbatch in range(count))
        yield from (Action("B", stage, microbatch) for stage in reversed(mine) for microbatch in reversed(range(count)))
