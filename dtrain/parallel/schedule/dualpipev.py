"""DualPipe (arXiv 2412.19437) with half the copies of the model, in a V (https://hackmd.io/@ufotalent/r1lVXsa9Jg)."""

from collections.abc import Iterator

from dtrain.parallel.schedule import Action, VShape


class DualPipeV:
    def order(self, pp: int, stages: int, count: int, rank: int) -> Iterator[Action]:
        actions = VShape(pp, rank)
        yield from actions.take("F0", (pp - rank - 1) * 2)
        yield from actions.take("F0F1", rank + 1)
        yield from actions.take("I1W*F1", pp - rank - 1)
        yield from actions.take("F0B1F1B0", count - pp * 2 + rank + 1)
        yield from actions.take("B1F1B0", pp - rank - 1)
        # from the middle of the last backwards on, those of weights are deferred to the end
        yield from actions.take("B1B0", (rank + 1) // 2)
        yield from actions.take("I1I0" if rank % 2 else "B1I0")
        yield from actions.take("I1I0", rank - (rank + 1) // 2)
        yield from actions.take("W*I0", pp - rank - 1)
        yield from actions.take("W*", rank + 1)
