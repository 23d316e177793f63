"""What a save, a table and a restore cost beside a thousand checkpoints, against beside ten: local disk, one process, in interleaved rounds.

OMP_NUM_THREADS=1 python tests/bench/many.py [--rounds 5]
"""

import argparse
import contextlib
import io
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from checkpoint.test_sharded import alone, sharded, state_on
from invariance.test_many_checkpoints import plant

from dtrain.mesh import Mesh
from dtrain.storage import lease
from dtrain.verb import checkpoint as verb

SAVES, COUNTS = 20, (10, 1000)


def seconds(act: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin


def once(mesh: Mesh, out: str) -> dict[str, float]:
    """Medians of `SAVES` saves behind the first, which lists what is there: how long the loop waits, and until all is committed."""
    with lease.hold(out):
        state, checkpoint = state_on(mesh), sharded(mesh, out)
        restore = seconds(lambda: checkpoint.restore(state))
        state.step = max(state.step, 2000)  # above those of `plant`
        stalls, drains = list[float](), list[float]()
        for _ in range(SAVES + 1):
            state.step += 1
            stalls.append(seconds(lambda: checkpoint.save(state)))
            drains.append(stalls[-1] + seconds(checkpoint.wait))
    with contextlib.redirect_stdout(io.StringIO()):
        table = seconds(lambda: verb.run(["ls", f"out={out}"]))
    return {
        "stall": statistics.median(stalls[1:]),
        "until committed": statistics.median(drains[1:]),
        "restore": restore,
        "ls": table,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        rows = []
        for number in range(rounds):
            found = {}
            for count in COUNTS:
                out = f"{folder}/{number}-{count}"
                alone(lambda mesh: once(mesh, out))  # noqa: B023  # a checkpoint that can be restored, the newest
                plant(out, count)
                found[count] = alone(lambda mesh: once(mesh, out))  # noqa: B023
            rows.append(found)
        for name in rows[0][10]:
            ratios = [row[1000][name] / row[10][name] for row in rows]
            print(f"{name:<16} {statistics.median(row[10][name] for row in rows) * 1e3:8.2f} ms beside 10, {statistics.median(row[1000][name] for row in rows) * 1e3:8.2f} ms beside 1,000: "
                  f"{statistics.median(ratios):.3f} ({min(ratios):.3f}..{max(ratios):.3f})")  # fmt: skip


if __name__ == "__main__":
    main()
