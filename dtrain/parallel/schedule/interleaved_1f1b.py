"""1f1b whose ranks hold several stages each (arXiv 2104.04473)."""

from collections.abc import Iterator

from dtrain.parallel.schedule import Action, rounds


class Interleaved1F1B:
    def order(self, pp: int, stages: int, count: int, rank: int) -> Iterator[Action]:
        warm, forward, backward = rounds(pp, stages, count, rank, ahead=2)
        for step in range(count * stages + warm):
            if step < count * stages:
                yield forward(step)
            if step >= warm:
                yield backward(step - warm, "B")
