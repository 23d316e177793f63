"""What a job of a sweep costs, beside the same loop started by other tools, which save nothing, and beside processes of
their own.

    OMP_NUM_THREADS=1 python tests/bench/sweeps.py [--jobs 300] [--rounds 3] [--ray 30]

CPU seconds are of all processes: the command, the process that forks, and the jobs; where the system lets us, counted
by a control group, as the processes of Ray are nobody's children. The tools are run in turn.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

WORDS = ["model=mlp", "data=synthetic", "objective=regression", "steps=20"]
LOOPS = str(Path(__file__).with_name("loops.py"))
GROUP = Path(f"/sys/fs/cgroup/cpuacct/dtrain-bench-{os.getpid()}")


def measured(*command: str, place: Path) -> tuple[float, float]:
    """Wall and CPU seconds of a command and all its processes."""
    with suppress(OSError):
        GROUP.mkdir(exist_ok=True)

    def enter() -> None:
        (GROUP / "cgroup.procs").write_text(str(os.getpid()))

    counts = (GROUP / "cpuacct.usage").exists()
    before, began = _cpu(counts), time.perf_counter()
    subprocess.run(
        [sys.executable, *command], cwd=place, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        preexec_fn=enter if counts else None,
    )  # fmt: skip
    return time.perf_counter() - began, _cpu(counts) - before


def _cpu(counts: bool) -> float:
    if counts:
        return int((GROUP / "cpuacct.usage").read_text()) / 1e9
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ray", type=int, default=30, help="jobs of Ray, which needs seconds for each; 0: none")
    asked = parser.parse_args()
    sweep = ["-m", "dtrain", "-m", *WORDS, f"seed=range(0,{asked.jobs})", "sweep.out=s"]
    cold = [["-m", "dtrain", *WORDS, f"seed={seed}", f"out=r{seed}"] for seed in range(4)]
    others = [
        (name, tool, jobs)
        for name, tool, jobs in (
            ("bare forked loops", "forked", asked.jobs),
            ("joblib, one loop after another in two processes", "joblib", asked.jobs),
            ("Optuna, one loop after another in its process", "optuna", asked.jobs),
            (f"Ray Tune ({asked.ray} jobs)", "ray", asked.ray),
        )
        if jobs and (tool == "forked" or find_spec(tool))
    ]
    rows: dict[str, list[tuple[float, float]]] = {}
    for number in range(asked.rounds):
        with tempfile.TemporaryDirectory() as folder:
            place, began = Path(folder), time.time()
            for name, count, commands in (
                ("a sweep", asked.jobs, [sweep]),
                *((name, jobs, [[LOOPS, tool, str(jobs)]]) for name, tool, jobs in others),
                ("processes of their own (4)", 4, cold),
            ):
                both = [measured(*command, place=place) for command in commands]
                took = (sum(wall for wall, _ in both) / count, sum(cpu for _, cpu in both) / count)
                rows.setdefault(name, []).append(took)
                print(f"round {number}: {name}: {60 / took[0]:.0f} a minute, {1e3 * took[1]:.0f} CPU ms", flush=True)
            first = min(path.stat().st_mtime for path in place.glob("s/*/config.yaml")) - began
            again = measured(*sweep, place=place)
            listed = measured("-m", "dtrain", "sweep", "ls", "s", place=place)
            print(
                f"round {number}: the first job began after {first:.1f} s; the finished sweep asked again {again[0]:.1f} "
                f"s, {again[1]:.1f} CPU s; sweep ls {listed[0]:.2f} s",
                flush=True,
            )
    ours = [cpu for _, cpu in rows["a sweep"]]
    for name, taken in rows.items():
        wall, cpu = (statistics.median(each) for each in zip(*taken, strict=True))
        ratio = statistics.median(its[1] / mine for its, mine in zip(taken, ours, strict=True))
        low, high = (1e3 * end(cpu for _, cpu in taken) for end in (min, max))
        print(f"| {name} | {60 / wall:.0f} | {1e3 * cpu:.0f} ({low:.0f}..{high:.0f}) | {ratio:.2f} |")
    with suppress(OSError):
        GROUP.rmdir()


if __name__ == "__main__":
    main()
