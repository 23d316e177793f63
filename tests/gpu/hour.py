"""A list of steps, each in a process of its own with an end: what is slow, hangs or crashes costs its own row and no other."""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Place:
    """Where the steps run. `on`: cuda, or cpu for all of it in small. `address`: of the server, where other hosts join (nodes above 1)."""

    on: str
    devices: int
    nodes: int
    folder: Path
    address: str = ""

    @property
    def small(self) -> bool:
        return self.on == "cpu"

    @property
    def ranks(self) -> int:
        return self.devices * self.nodes

    def words(self) -> list[str]:
        """That put a run on all ranks."""
        elsewhere = ["launcher=local", f"launcher.address={self.address}", "launcher.here=1"] if self.address else []
        return [f"devices={self.devices}", f"nodes={self.nodes}", *elsewhere]


@dataclass(frozen=True)
class Verdict:
    """`result`: passed, failed or not run. `figure` is what was measured, `said` a sentence."""

    result: str
    figure: str = ""
    said: str = ""


@dataclass(frozen=True)
class Step:
    """`ranks`: how many it needs; `cuda`: whether it shows nothing on a CPU, and why; `seconds`: then it is ended."""

    name: str
    shows: str
    work: Callable[[Place], Verdict]
    ranks: int = 1
    cuda: str = ""
    seconds: float = 600.0


def judged(holds: bool, figure: str, said: str = "") -> Verdict:
    return Verdict("passed" if holds else "failed", figure, said)


def fresh(folder: Path) -> Path:
    """A new folder in `folder`: 1, 2, 3, ... Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        with contextlib.suppress(FileExistsError):
            (folder / str(number)).mkdir()
            return folder / str(number)
    raise AssertionError


def run(
    steps: Sequence[Step], place: Place, entry: Sequence[str], tell: Callable[[str], None] = print
) -> list[tuple[Step, Verdict]]:
    """`entry` is the command that does one step: it takes `step=<name>` and leaves <folder>/<name>.json. Logs lie beside it."""
    found = []
    for step in steps:
        verdict = _not_here(step, place) or _one(step, place, entry)
        tell(f"{verdict.result:8} {step.name}: {_cell(verdict)}")
        found.append((step, verdict))
    return found


def _not_here(step: Step, place: Place) -> Verdict | None:
    if place.small and step.cuda:
        return Verdict("not run", said=step.cuda)
    if place.ranks < step.ranks:
        return Verdict("not run", said=f"needs {step.ranks} ranks")
    return None


def _one(step: Step, place: Place, entry: Sequence[str]) -> Verdict:
    log, left = place.folder / f"{step.name}.log", place.folder / f"{step.name}.json"
    left.unlink(missing_ok=True)
    with log.open("w") as file:
        process = subprocess.Popen(
            [*entry, f"step={step.name}"], stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: int | None = process.wait(step.seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code == 0 and left.exists():
        return Verdict(**json.loads(left.read_text()))
    how = f"no end within {step.seconds:g} s" if code is None else f"exit code {code}"
    last = next((line for line in reversed(log.read_text(errors="replace").splitlines()) if line.strip()), "")
    return Verdict("failed", said=f"{how}: {last[:300]} ({log.name})")


def do(step: Step, place: Place) -> None:
    """In the step's own process."""
    (place.folder / f"{step.name}.json").write_text(json.dumps(asdict(step.work(place))))


def table(found: Sequence[tuple[Step, Verdict]]) -> str:
    rows = [f"| {step.name} | {step.shows} | {verdict.result} | {_cell(verdict)} |" for step, verdict in found]
    return "\n".join(["| step | what it must show | verdict | seen |", "|---|---|---|---|", *rows])


def _cell(verdict: Verdict) -> str:
    return " · ".join(part.replace("|", "/") for part in (verdict.figure, verdict.said) if part)


def write(page: Path, name: str, text: str) -> None:
    """Put `text` between the two marks of `name` in a page, at its end when they are not there; all else stays."""
    begin, end = (f"<!-- {name}: {side} -->" for side in ("begin", "end"))
    old = page.read_text()
    if begin in old:
        before, _, rest = old.partition(begin)
        after = rest.partition(end)[2]
        page.write_text(f"{before}{begin}\n{text}\n{end}{after}")
    else:
        page.write_text(f"{old.rstrip()}\n\n{begin}\n{text}\n{end}\n")


def dtrain(place: Place, *words: str, code: int = 0, seconds: float = 300.0) -> str:
    """The command as users type it; what it printed. Raises AssertionError for another exit code."""
    done = begun(place, *words)
    said, _ = done.communicate(timeout=seconds)
    assert done.returncode == code, f"dtrain {' '.join(words)}: exit code {done.returncode}\n{said}"
    return said


def begun(place: Place, *words: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "dtrain", *words]
    folders = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    print("$", " ".join(command), flush=True)
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=place.folder, env=env
    )


def rows(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def losses(out: Path) -> list[float]:
    return [row["loss"] for row in rows(out)]


def apart(some: Sequence[float], others: Sequence[float]) -> float:
    """The largest relative difference; infinite for lists of two lengths, or none."""
    if len(some) != len(others) or not some:
        return float("inf")
    return max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(some, others, strict=True))
