"""Modules and CPU seconds of commands that end at once, beside another checkout of dtrain, for RESULTS.md.

python tests/bench/cold.py <the other checkout> [--rounds 10]

Each command is a whole process, in turn with the same one of the other checkout, in an empty folder; bytecode is kept
from a first round, which is left out.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import dtrain

COMMANDS = ("plan strategy=fsdp nodes=2 devices=2", "--help", "plan strategy=fdsp optim.lrr=1",
            "strategy=fdsp optim.lrr=1", "completion words plan optim.lr=")  # fmt: skip
CODE = "import sys; from dtrain.__main__ import main; main(sys.argv[1:]); print(len(sys.modules), file=sys.stderr)"


def modules(words: list[str], folder: str, environ: dict[str, str]) -> int:
    """How many a command has when it ends."""
    command = [sys.executable, "-c", CODE, *words]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=True)
    return int(done.stderr.splitlines()[-1])


def seconds(words: list[str], folder: str, environ: dict[str, str]) -> float:
    """CPU of a command."""
    command = [sys.executable, "-m", "dtrain", *words]
    quiet = subprocess.DEVNULL
    child = subprocess.Popen(command, cwd=folder, env=environ, stdout=quiet, stderr=quiet)
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    return used.ru_utime + used.ru_stime


def main(other: Path, rounds: int) -> None:
    print("| command | modules, other / this | CPU s, other | this | ratio (min..max) |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environ["PYTHONPYCACHEPREFIX"] = f"{folder}/bytecode"
        both = [{**environ, "PYTHONPATH": str(path)} for path in (other.resolve(), Path(dtrain.__file__).parents[1])]
        for line in COMMANDS:
            words = line.split()
            counts = [modules(words, folder, each) for each in both]
            used = [[seconds(words, folder, each) for each in both] for _ in range(rounds + 1)][1:]
            there, here = zip(*used, strict=True)
            ratios = [mine / theirs for theirs, mine in used]
            print(
                f"| `{line}` | {counts[0]} / {counts[1]} | {statistics.median(there):.3f} | {statistics.median(here):.3f} | "
                f"{statistics.median(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f}) |",
                flush=True,
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("other", type=Path)
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    main(arguments.other, arguments.rounds)
