"""Plants the faults of planting.yaml in a copy of the tree, one at a time, and says which tests notice.

    python -m tests.planting                       every fault
    python -m tests.planting loop optim/muon.py    those of these folders and modules
    python -m tests.planting loop --rounds near    a part of the rounds

First (own) the tests of the module's name run, and those that the table names, then (near) the others of its folder, then
(reached) the rest of the default tier that a change of the module reaches, then (campaigns) those of that tier. What they name is run once more without a fault. Exit code 1: a fault went unnoticed, or such a test fails anyway.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
TABLE = Path(__file__).with_suffix(".yaml")
GUARD = ROOT / "tests/test_planting.py"
"""The test of the table, which would notice them all."""
SECONDS = 240.0
"""Time for the tests of a fault in each round."""
ROUNDS = ("own", "near", "reached", "campaigns")


@dataclass(frozen=True)
class Fault:
    """`before` stands once in `module`, a path below dtrain/, and becomes `after`. `loses`: what a user would lose; `by`: test files of other folders
    that are known to notice; `unseen`: why nobody can.
    """

    module: str
    before: str
    after: str
    loses: str
    by: tuple[str, ...] = ()
    unseen: str = ""

    def planted(self, source: str) -> str:
        """The module with the fault. Raises ValueError unless `before` stands in it once."""
        if source.count(self.before) != 1:
            raise ValueError(f"{self.module} has {self.before!r} {source.count(self.before)} times")
        return source.replace(self.before, self.after)


def faults() -> list[Fault]:
    return [Fault(**{**row, "by": tuple(row.get("by", ()))}) for row in yaml.safe_load(TABLE.read_text())]


def tests_of(fault: Fault, round: str) -> list[str]:
    """The test files of a round; those of an earlier one only again for their campaigns."""
    path, tests = Path(fault.module), ROOT / "tests"
    room, name = path.parts[0].removesuffix(".py"), path.parent.name if path.stem == "__init__" else path.stem
    every = [each for each in tests.rglob("test_*.py") if each != GUARD]
    near = [each for each in every if tests / room in each.parents or each == tests / f"test_{room}.py"]
    files = {"own": [*(tests / name for name in fault.by), *(each for each in near if each.stem == f"test_{name}")]}
    files["near"] = [each for each in near if each not in files["own"]]
    if round not in files:
        from changed import is_reached

        reached = [each for each in every if is_reached(each, [f"dtrain/{fault.module}"])]
        files["reached"] = [each for each in reached if each not in (*files["own"], *near)]
        files["campaigns"] = [*files["own"], *near, *reached]
    return sorted({str(each.relative_to(ROOT)) for each in files[round]})


def run(copy: Path, words: Sequence[str]) -> tuple[str, list[str]]:
    """The end of pytest in the copy (passed, failed or late), and the names of the tests that failed. Raises
    RuntimeError if it could not run them.
    """
    command = [sys.executable, "-m", "pytest", "--tb=no", "-rfE", "--workers", "2", *words]
    env = {**os.environ, "PYTHONPATH": str(copy)}
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, cwd=copy, env=env, stdout=output, stderr=output, stdin=subprocess.DEVNULL, start_new_session=True
        )
        try:
            code = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        lines = output.read().splitlines()
    failed = (line.partition(" ") for line in lines if line.startswith(("FAILED ", "ERROR ")) and "::" in line)
    names = [name.split(" - ")[0] for _, _, name in failed]
    if code is None:
        return "late", names
    if code in (0, 5):  # 5: there are no tests of this tier
        return "passed", names
    if code > 2:
        raise RuntimeError("\n".join([f"pytest ended with exit code {code}:", *lines[-10:]]))
    return "failed", names or lines[-1:]


def search(copy: Path, chosen: Sequence[Fault], rounds: Sequence[str]) -> Iterator[tuple[Fault, str, list[str]]]:
    """(fault, the round in which it was caught or "missed", the tests that failed): the first round of all faults first."""
    left = list(chosen)
    for round in rounds:
        for fault in list(left):
            began, path = time.monotonic(), copy / "dtrain" / fault.module
            words = tests_of(fault, round) + (["-m", "campaign and not slow"] if round == "campaigns" else [])
            source = path.read_text()
            path.write_text(fault.planted(source))
            try:
                end, names = run(copy, ["-x", *words]) if words else ("passed", [])
            finally:
                path.write_text(source)
            print(
                f"{round:<9} {end:<7} {time.monotonic() - began:4.0f} s  {fault.module}: {fault.before[:50]!r}  {' '.join(names)}",
                flush=True,
            )
            if end == "failed":
                left.remove(fault)
                yield fault, round, names
    for fault in left:
        yield fault, "missed", []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", help="folders and modules below dtrain/; all if there are none")
    parser.add_argument("--rounds", nargs="+", choices=ROUNDS, default=ROUNDS)
    asked = parser.parse_args()
    chosen = [
        each
        for each in faults()
        if not asked.modules or any(f"{each.module}/".startswith(f"{name}/") for name in asked.modules)
    ]
    with tempfile.TemporaryDirectory(prefix="dtrain-planting-") as folder:
        copy = Path(folder) / "tree"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", "__pycache__", "outputs", "runs", GUARD.name))
        results = [*search(copy, chosen, asked.rounds)]
        names = sorted({name for _, _, names in results for name in names if "::" in name})
        _, wrong = run(copy, names) if names else ("passed", [])
    for round in (*asked.rounds, "missed"):
        print(f"{sum(each == round for _, each, _ in results):3} {round}")
    missed = [fault for fault, round, _ in results if round == "missed" and not fault.unseen]
    for fault in missed:
        print(f"nobody notices {fault.module}: {fault.before!r}. A user would lose {fault.loses}")
    for name in wrong:
        print(f"{name} fails without a fault too")
    return 1 if missed or wrong else 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests"))
    sys.exit(main())
