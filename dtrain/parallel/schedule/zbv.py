"""Two stages on each rank, in a V; every backward in two (arXiv 2401.10241, section 6)."""

from collections.abc import Iterator

from dtrain.parallel.schedule import Action, Counts


class ZBV:
    def order(self, pp: int, stages: int, count: int, rank: int) -> Iterator[Action]:
        here, back, most, counts = rank, 2 * pp - 1 - rank, max(2 * pp - 1, count), Counts()

        def some(text: str, times: int = 1) -> Iterator[Action]:
            for _ in range(times):
                for kind, end in zip(text[::2], text[1::2], strict=True):
                    yield counts.take(kind, here if end == "0" else back)

        yield from some("F0", 2 * (pp - rank) - 1)
        yield from some("F1F0", rank)
        yield from some("F1I1W1", pp - rank)
        while counts["F", back] < counts["F", here] or counts["F", here] < most:
            yield from some("F0", int(counts["F", here] < most))
            yield from some("I0W0F1I1W1")
        yield from some("I0I1", rank)
        yield from some("I0W0", pp - rank)
        yield from some("W1", counts["I", back] - counts["W", back])
        yield from some("W0", counts["I", here] - counts["W", here])
