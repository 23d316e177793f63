"""Two stages on each rank, in a V; every backward is split in two (arXiv 2401.10241, section 6)."""

from collections.abc import Iterator

from dtrain.parallel.schedule import Action, VShape


class ZBV:
    def order(self, pp: int, stages: int, count: int, rank: int) -> Iterator[Action]:
        most, actions = max(2 * pp - 1, count), VShape(pp, rank)
        counts = actions.counts
        yield from actions.take("F0", 2 * (pp - rank) - 1)
        yield from actions.take("F1F0", rank)
        yield from actions.take("F1I1W1", pp - rank)
        while counts["F1"] < counts["F0"] or counts["F0"] < most:
            yield from actions.take("F0", int(counts["F0"] < most))
            yield from actions.take("I0W0F1I1W1")
        yield from actions.take("I0I1", rank)
        yield from actions.take("I0W0", pp - rank)
        yield from actions.take("W1", counts["I1"] - counts["W1"])
        yield from actions.take("W0", counts["I0"] - counts["W0"])
