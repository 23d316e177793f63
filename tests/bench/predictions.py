"""What a plan predicts beside what real runs hold, for RESULTS.md.

    python tests/bench/predictions.py [--only zero3]

Bytes of parameters, gradients, optimizer and checkpoint are equal or not; activations kept and the peak are predicted / real, of the class of ranks
where they are furthest apart; operations are predicted / counted. Ranks are forked and talk through gloo; see tests/metering.py.
"""

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

from predicted import ALL, FOREIGN, Compared, compare, planned


def cell(compared: Compared) -> str:
    """`=`, or what differs."""
    wrong = [
        f"{name} {one} != {other}" for row in compared.rows for name, (one, other) in row.exact.items() if one != other
    ]
    wrong += (
        [f"checkpoint {compared.saved[0]} != {compared.saved[1]}"] if compared.saved[0] != compared.saved[1] else []
    )
    return "; ".join(wrong) or "="


def main(only: str) -> None:
    print(
        "| words | parameters, gradients, optimizer, checkpoint | activations | peak | operations |\n|---|---|---|---|---|"
    )
    found: dict[str, Compared] = {}
    for words in (*ALL, *FOREIGN):
        if only in words:
            found[words] = compared = compare(planned(words))
            flops = compared.flops[0] / compared.flops[1]
            print(
                f"| {words or 'one rank'} | {cell(compared)} | {compared.activations:.3f} | {compared.peak:.3f} | {flops:.3f} |",
                flush=True,
            )
    worst = max((abs(compared.activations - 1) for compared in found.values()), default=0.0)
    print(
        f"\n{sum(compared.exact for compared in found.values())} of {len(found)} exact; activations within {worst:.1%}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="words that hold this")
    main(parser.parse_args().only)
