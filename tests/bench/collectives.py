"""Collectives of a step, predicted and seen, as a table of RESULTS.md.

python tests/bench/collectives.py            # the quick layouts
python tests/bench/collectives.py foreign    # models that are not dtrain's
python tests/bench/collectives.py all        # every layout of tests/predict/test_collectives.py: an hour on two cores
"""

import sys
from collections.abc import Iterable

from predict.counted import Totals, hold
from predict.foreign import LAYOUTS
from predict.test_collectives import MORE, QUICK

ASKED = {
    "": QUICK,
    "all": (*QUICK, *MORE),
    "foreign": tuple((model, words) for model in LAYOUTS for words in LAYOUTS[model]),
}


def told(totals: Iterable[Totals]) -> str:
    """Of the ranks of all stages: calls and bytes by kind."""
    kinds: dict[str, list[float]] = {}
    for (kind, _), (calls, bytes_) in sorted(item for each in totals for item in each.items()):
        entry = kinds.setdefault(kind, [0, 0])
        entry[0] += calls
        entry[1] += bytes_
    return ", ".join(f"{kind} {calls:.0f}x {bytes_:,.0f}" for kind, (calls, bytes_) in kinds.items())


def main() -> None:
    equal = total = 0
    print("| model | words | predicted = seen in a step: calls, bytes |\n|---|---|---|")
    for model, words in ASKED["".join(sys.argv[1:])]:
        here, there = hold(model, words)
        total, equal = total + 1, equal + (here == there)
        print(
            f"| {model} | `{words}` | {told(here) if here == there else f'**{told(here)}** predicted, **{told(there)}** seen'} |",
            flush=True,
        )
    print(f"\n{equal} of {total} equal")


if __name__ == "__main__":
    main()
