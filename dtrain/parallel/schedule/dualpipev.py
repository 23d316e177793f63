"""DualPipe (arXiv 2412.19437) with half the copies, in a V (https://hackmd.io/@ufotalent/r1lVXsa9Jg)."""

from collections.abc import Iterator

from dtrain.parallel.schedule import Action, Counts


class DualPipeV:
    def order(self, pp: int, stages: int, count: int, rank: int) -> Iterator[Action]:
        here, back, counts = rank, 2 * pp - 1 - rank, Counts()

        def some(text: str, times: int = 1) -> Iterator[Action]:
            for _ in range(times):
                for kind, end in zip(text[::2], text[1::2], strict=True):
                    yield from counts.oldest() if kind == "W" else [counts.take(kind, here if end == "0" else back)]

        yield from some("F0", (pp - rank - 1) * 2)
        yield from some("F0F1", rank + 1)
        yield from some("I1W*F1", pp - rank - 1)
        yield from some("F0B1F1B0", count - pp * 2 + rank + 1)
        yield from some("B1F1B0", pp - rank - 1)
        split = False  # from the middle of the last backwards on, those of weights are kept for the end
        for turn in range(rank + 1):
            split = split or (turn == (rank + 1) // 2 and rank % 2 == 1)
            yield counts.take("I" if split else "B", back)
            split = split or (turn == (rank + 1) // 2 and rank % 2 == 0)
            yield counts.take("I" if split else "B", here)
        yield from some("W*I0" if split else "W*B0", pp - rank - 1)
        yield from some("W*", rank + 1)
