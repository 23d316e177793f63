"""interleaved_1f1b in which backwards of weights come `rank` microbatches later, when the rank would be idle (arXiv
2401.10241).
"""

from collections.abc import Iterator

from dtrain.parallel.schedule import Action, rounds


class InterleavedZeroBubble:
    def order(self, pp: int, stages: int, count: int, rank: int) -> Iterator[Action]:
        warm, forward, backward = rounds(pp, stages, count, rank, ahead=1)
        late = 0
        for step in range(count * stages + warm):
            if step < count * stages:
                yield forward(step)
            if step >= warm:
                yield backward(step - warm, "I")
                if step - warm >= rank:
                    yield backward(late, "W")
                    late += 1
        yield from (backward(step, "W") for step in range(late, count * stages))
