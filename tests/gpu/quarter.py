"""A quarter of an hour on one GPU: cells in the order of their value, each a process of its own with a limit. Nothing is lost when it is cut.

    python -m tests.gpu.quarter out=<folder> seconds=570                    the most valuable question first
    python -m tests.gpu.quarter out=<folder> seconds=280                    again: goes on after the last cell that ended
    python -m tests.gpu.quarter out=<folder> only=card,hand-124M            some cells
    python -m tests.gpu.quarter out=<folder> on=cpu                         all of it in small: proves the cells, not the speed

<out> has each line as it comes (cells.jsonl), the longest kernels (kernels.txt), and after each cell figures.json and figures.md, with the
decisions of docs/benchmarks.md. outputs/quarter/<on> keeps the same for the next call, which need not find <out> again; remove it to begin anew.
A cell that was cut is run again in its place; one that failed or ran over its limit once in each call, after all others. A cell whose
usual seconds are not left waits for the next call.
"""

import ctypes
import importlib.util
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, TextIO

from . import figures
from .cells import ROOT, Cell, cells, obstacle

WORDS = {
    "out": (r".+", "a folder for what is to be read"),
    "seconds": (r"\d+(\.\d+)?", "after which all has ended"),
    "only": (r".*", "names of cells, with commas between; also of cells that are done"),
    "on": (r"cuda|cpu", "cuda, or cpu: in small"),
}
DEFAULTS = {"out": "outputs/quarter/out", "seconds": "570", "only": "", "on": "cuda"}
PACKAGES = {
    "torch": "torch", "hydra": "hydra-core", "omegaconf": "hydra-core", "antlr4": "hydra-core", "yaml": "hydra-core", "numpy": "numpy",
    "fsspec": "fsspec", "tensorboard": "tensorboard", "safetensors": "safetensors", "rich": "rich",
}  # fmt: skip
"""Module that dtrain needs -> the package that brings it."""
BRING = """With an index: pip install {packages}
Without one, on another machine with this Python ({python}), where pip builds antlr4-python3-runtime, a source distribution only:
  pip wheel -w wheels {packages}
  pip install --no-deps --no-index --target site wheels/*.whl
and here: PYTHONPATH=.:site python -m tests.gpu.quarter ..."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
END_SECONDS = 10.0
"""A process that was killed ends in these, unless its driver hangs."""
LIBC = ctypes.CDLL(None)


class Journal:
    """Lines of cells, each on the disk before the next is read; in `kept` for the next call and in `out` for whoever reads."""

    def __init__(self, out: Path, kept: Path) -> None:
        self._folders = [kept, *([out] if out != kept else [])]
        self.entries = list(entries(kept / "cells.jsonl"))
        for folder in self._folders:
            folder.mkdir(parents=True, exist_ok=True)
            replace(folder / "cells.jsonl", "".join(f"{json.dumps(entry)}\n" for entry in self.entries))
        self._files: list[TextIO] = [(folder / "cells.jsonl").open("a") for folder in self._folders]

    def add(self, cell: str, **entry: Any) -> None:
        self.entries.append({"cell": cell, **entry})
        for file in self._files:
            file.write(f"{json.dumps(self.entries[-1])}\n")
            file.flush()

    def write_figures(self) -> None:
        found = figures.outcomes(self.entries)
        kernels = self._folders[0] / "kernels.txt"
        for folder in self._folders:
            replace(folder / "figures.json", json.dumps({name: asdict(cell) for name, cell in found.items()}, indent=1))
            replace(folder / "figures.md", figures.table(found))
            if kernels.exists() and folder != kernels.parent:
                replace(folder / kernels.name, kernels.read_text())


def entries(page: Path) -> Iterator[dict[str, Any]]:
    """Those that a former call wrote; a line that was cut is none."""
    for line in page.read_text().splitlines() if page.exists() else ():
        if row := figures.parsed(line):
            yield row


def replace(page: Path, text: str) -> None:
    """Whoever reads sees the old text or the new one."""
    new = page.with_suffix(".new")
    new.write_text(text)
    new.replace(page)


def run(todo: Sequence[Cell], journal: Journal, seconds: float) -> dict[str, str]:
    """Cell -> how it ended: done, failed, over its limit, or cut; for those that ran in this call."""
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)
    end, waiting, ends = time.monotonic() + seconds, list(todo), dict[str, str]()
    while cell := next((each for each in waiting if each.seconds <= end - time.monotonic()), None):
        waiting.remove(cell)
        left = end - time.monotonic()
        print(f"-- {cell.name}: {cell.decides}; {left:.0f} s left", flush=True)
        ends[cell.name] = attempt(cell, journal, left)
        print(f"-- {cell.name}: {ends[cell.name]}", flush=True)
    if waiting:
        print(f"-- for the next call: {' '.join(cell.name for cell in waiting)}", flush=True)
    return ends


def attempt(cell: Cell, journal: Journal, left: float) -> str:
    """How it ended. Nothing that it started lives on, also when this process is asked to end meanwhile."""
    began, result, process, reader = time.monotonic(), "cut", None, None
    journal.add(cell.name, begun=time.strftime("%Y-%m-%dT%H:%M:%S"))
    try:
        process = subprocess.Popen(
            cell.command, cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", start_new_session=True, preexec_fn=partial(LIBC.prctl, PR_SET_PDEATHSIG, signal.SIGKILL),
        )  # fmt: skip
        reader = Thread(target=read, args=(process, cell, journal), daemon=True)
        reader.start()
        result = "done" if process.wait(min(cell.most, left)) == 0 else "failed"
    except subprocess.TimeoutExpired:
        result = "over its limit" if cell.most <= left else "cut"
    finally:
        code = kill(process)
        if reader:
            reader.join(END_SECONDS)
        journal.add(cell.name, end=result, seconds=round(time.monotonic() - began, 1), code=code)
        journal.write_figures()
    return result


def read(process: "subprocess.Popen[str]", cell: Cell, journal: Journal) -> None:
    for line in process.stdout or ():
        journal.add(cell.name, line=line.rstrip())
        if line.startswith("{"):
            print(line.rstrip()[:400], flush=True)


def environment() -> dict[str, str]:
    """Of a cell: it finds dtrain and what tests import, wherever it runs; what it compiles is kept."""
    path = [str(ROOT), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    given = {"TORCHINDUCTOR_CACHE_DIR": str(Path("outputs/quarter/inductor").resolve()), "PYTHONUNBUFFERED": "1"}
    return {**given, **os.environ, "PYTHONPATH": os.pathsep.join(path)}


def kill(process: "subprocess.Popen[str] | None") -> int | None:
    """A cell with all its descendants: those of other sessions become children of this process, their subreaper, once their parents are gone.
    Returns its exit code. None: it was cut while it began.
    """
    if process:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
    deadline = time.monotonic() + END_SECONDS
    while (pids := children()) and time.monotonic() < deadline:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)
    return process.returncode if process else None


def children() -> list[int]:
    """Of this process, from /proc."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.append(int(stat.parent.name))
    return found


def ordered(todo: Iterable[Cell], found: figures.Outcomes, only: str) -> list[Cell]:
    """What is to be run: what never ended, then what failed."""
    if only:
        return [cell for cell in todo if cell.name in only.split(",")]
    ends = {cell.name: found[cell.name].end if cell.name in found else "cut" for cell in todo}
    return sorted((cell for cell in todo if ends[cell.name] != "done"), key=lambda cell: ends[cell.name] != "cut")


def problems(said: dict[str, str], names: Iterable[str]) -> Iterator[str]:
    for name, value in said.items():
        if name not in WORDS:
            yield f"{name}={value}: there is no such word. Words: {' '.join(WORDS)}; --help explains them."
        elif not re.fullmatch(WORDS[name][0], value):
            yield f"{name}={value}: {WORDS[name][1]}."
    if unknown := {*filter(None, said.get("only", "").split(","))} - {*names}:
        yield f"only={','.join(sorted(unknown))}: there is no such cell. Cells: {' '.join(names)}."


def lacking(modules: Iterable[str]) -> set[str]:
    return {module for module in modules if importlib.util.find_spec(module) is None}


def needs(todo: Iterable[Cell]) -> set[str]:
    """Modules without which no cell, or none but those by hand, can run."""
    return {*PACKAGES} if any("dtrain" in cell.needs for cell in todo) else {"torch"}


def devices(on: str) -> int:
    """GPUs of this machine; 2 ranks on a CPU."""
    if on == "cpu":
        return 2
    import torch

    return torch.cuda.device_count()


def main(words: list[str]) -> int:
    if {"--help", "-h", "help"} & set(words):
        print(__doc__, *(f"  {name:<8} {sentence}" for name, (_, sentence) in WORDS.items()), sep="\n")
        return 0
    said = DEFAULTS | dict(word.partition("=")[::2] for word in words)
    kept = Path("outputs/quarter", said["on"]).resolve()
    every, modules, count = cells(said["on"], 0, kept), lacking(PACKAGES), 0
    wrong = list(problems(said, [cell.name for cell in every]))
    if not wrong and (needed := needs(ordered(every, {}, said["only"])) & modules):
        packages = " ".join(dict.fromkeys(PACKAGES[module] for module in PACKAGES if module in modules))
        bring = BRING.format(packages=packages, python=".".join(platform.python_version_tuple()[:2]))
        wrong = [f"missing: {', '.join(sorted(needed))}.", *bring.splitlines()]
    if not wrong:
        count = devices(said["on"])
        wrong = [] if count else ["there is no GPU that this torch can use. Type on=cpu to try the cells in small."]
    if wrong:
        print(*(f"quarter: {sentence}" for sentence in wrong), sep="\n", file=sys.stderr)
        return 2
    os.environ.setdefault("OMP_NUM_THREADS", "1" if said["on"] == "cpu" else "8")
    missing = lacking(["pytest"])
    journal = Journal(Path(said["out"]).resolve(), kept)
    todo = []
    for cell in ordered(cells(said["on"], count, kept), figures.outcomes(journal.entries), said["only"]):
        if why := obstacle(cell, missing, count):
            print(f"-- {cell.name}: left out, {why}", flush=True)
        else:
            todo.append(cell)
    ends = run(todo, journal, float(said["seconds"]))
    journal.write_figures()
    return int(any(end in ("failed", "over its limit") for end in ends.values()))


def command(words: list[str]) -> int:
    """`main`, which ends its cell on the way out when it is asked to end."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    return main(words)


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:]))
