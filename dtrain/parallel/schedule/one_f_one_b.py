"""One forward for this rank and for each later one, then one backward and one forward in turn (arXiv 1806.03377)."""

from collections.abc import Iterator

from dtrain.parallel.schedule import Action


class OneFOneB:
    def order(self, pp: int, stages: int, count: int, rank: int) -> Iterator[Action]:
        ahead = min(count, pp - rank)
        yield from (Action("F", rank, microbatch) for microbatch in range(ahead))
        for microbatch in range(count):
            yield Action("B", rank, microbatch)
            if ahead + microbatch < count:
                yield Action("F", rank, ahead + microbatch)
