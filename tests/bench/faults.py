"""How long it takes, when something goes wrong with NCCL, until the rank that is the cause is told and no rank lives any more.

    PYTHONPATH=tests:tests/faults OMP_NUM_THREADS=1 python tests/bench/faults.py [--rounds 3]

Four ranks on the CPU, the process group of `tests/nccl_like.py`, a timeout of 6 s for collectives. From the moment at which the fault begins.
"""

import argparse
import statistics
import tempfile
from pathlib import Path

from test_nccl import CASES, last_round

from dtrain.lifecycle import failure, kernel_log

TIMEOUT = 6
WAITING = ("late", "calls_another")
"""Which nobody can know before the timeout."""


def told(fault: str) -> tuple[float, float, bool]:
    """Seconds from the fault until the rank has told it, or another has told that it waits; until the run is over; and whether rank 1 is blamed as it should."""
    with tempfile.TemporaryDirectory() as place:
        kernel_log.KMSG = Path(place) / "kmsg"
        kernel_log.KMSG.touch()
        words = ["devices=4", f"backend.fault={fault}", f"backend.timeout={TIMEOUT}", "backend.at=30"]
        left = last_round(Path(place), *words)
        began, over = float((left / "fault").read_text()), (left.parent / "over.json").stat().st_mtime
        spoke = min(
            (path.stat().st_mtime for path in (*left.glob("failure-*.json"), *left.glob("ended-*.json"))), default=over
        )
        facts = failure.explain(left).facts
        return spoke - began, over - began, facts["rank"] == 1 and facts["kind"] == CASES[fault][0]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    print("| fault | first word | over | after the timeout, at most | blamed rightly |\n|---|---|---|---|---|")
    for fault in CASES:
        spoke, over, right = zip(*(told(fault) for _ in range(rounds)), strict=True)
        late = f"{max(over) - TIMEOUT:.2f} s" if fault in WAITING else "-"
        print(
            f"| `{fault}` | {statistics.median(spoke):.2f} s | {statistics.median(over):.2f} s | {late} | {sum(right)} of {rounds} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
