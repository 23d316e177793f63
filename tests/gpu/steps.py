"""What runs must show on GPUs beside their speed: one step of a list, which prints its verdict as a JSON line.

    python -m tests.gpu.steps <name> cuda|cpu <devices> <folder>

A step needs no limit of its own: tests/gpu/quarter.py ends it together with all that it started.
"""

import json
import shutil
import statistics
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dtrain.model.gpt import GPT

from . import cells
from .profiled import each_step

RUN = (
    "model=gpt",
    "data=synthetic",
    "log.every=1",
    "logger=[]",
    "precision=fp32",
    "compile=none",
    "model.layers=2",
    "model.width=64",
)
SMALL = (*RUN, "data.sequence=32", "batch=8", "steps=12")
AXES = {
    "ddp": ("strategy=ddp",), "zero1": ("strategy=zero1",), "zero2": ("strategy=zero2",), "zero3": ("strategy=zero3",), "fsdp": ("strategy=fsdp",),
    "tp": ("mesh.tp=2",), "pp": ("mesh.pp=2",), "cp": ("mesh.cp=2",), "ep": ("model=moe", "mesh.ep=2"),
}  # fmt: skip
TOLERANCE = {"cpu": 2e-6, "cuda": 2e-5}
"""Of losses in fp32 against one rank; kernels of a GPU differ by shape."""


@dataclass(frozen=True)
class Place:
    """Where a step runs. `on`: cuda, or cpu for all of it in small."""

    on: str
    devices: int
    folder: Path

    @property
    def small(self) -> bool:
        return self.on == "cpu"


@dataclass(frozen=True)
class Verdict:
    """`result`: passed, failed or not run. `figure` is what was measured, `note` a sentence."""

    result: str
    figure: str = ""
    note: str = ""


class Spikes(GPT):
    """In the tenth forward of training the outputs are infinite."""

    calls = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        self.calls += self.training
        return out * float("inf") if self.training and self.calls == 10 else out


def doctor(place: Place) -> Verdict:
    report = diagnosis(place)
    notes = [each["check"] for each in report["findings"] if each["verdict"] != "ok"]
    facts = next(each["facts"] for each in report["findings"] if each["check"] == "torch")
    return judged(
        report["exit_code"] == 0,
        f"torch {facts['version']}, {facts['gpus']} GPUs",
        f"not ok: {', '.join(notes)}" if notes else "",
    )


def bandwidth(place: Place) -> Verdict:
    links = next(each["facts"]["links"] for each in diagnosis(place)["findings"] if each["check"] == "bandwidth")
    best = Counter[str]()
    for link in links:
        best[link["operation"]] = max(best[link["operation"]], link["busbw"])
    figure = ", ".join(f"{name} {value / 1e9:.1f} GB/s" for name, value in best.items())
    return judged(all(link["right"] for link in links), figure)


def diagnosis(place: Place) -> Any:
    """What `dtrain doctor` answers."""
    process = begin(
        place, "doctor", "json", f"devices={place.devices}", f"out={place.folder / 'doctor'}", stderr=subprocess.PIPE
    )
    answer, _ = process.communicate()
    return json.loads(answer)


def one_each(place: Place) -> Verdict:
    """Two ranks that take one GPU are refused before they connect, so a run that starts has one for each."""
    out = place.folder / "run"
    dtrain(place, *SMALL, "strategy=ddp", f"devices={place.devices}", f"out={out}")
    (started,) = (event for event in events(out) if event["event"] == "started")
    return judged(started["ranks"] == place.devices and len(losses(out)) == 12, f"{started['ranks']} ranks, 12 steps")


def waits(place: Place) -> Verdict:
    """Steps in the middle, for which the plan says that the host waits for nothing."""
    if place.small:
        from rehearsal import rehearse
        from test_rehearsal import GPT as WORDS
        from test_rehearsal import LAGGING

        (rank,) = rehearse(*WORDS)
        times = sum(count for where, count in rank.each_step.items() if where != LAGGING)
        return judged(times == 0, f"{times:g} waits a step", "on the pretended accelerator of tests/pretended.py")
    lines = synchronizing(place)
    return judged(
        not lines,
        f"{lines.total()} waits in 8 steps",
        "; ".join(f"{where} {count}" for where, count in lines.most_common(5)),
    )


def synchronizing(place: Place) -> Counter[str]:
    """Lines where the host waits (https://docs.pytorch.org/docs/stable/generated/torch.cuda.set_sync_debug_mode.html)."""
    import torch

    lines = Counter[str]()

    def watch(step: int) -> None:
        with warnings.catch_warnings(action="ignore"):  # the change of the mode warns too
            torch.cuda.set_sync_debug_mode("warn" if 4 <= step < 12 else "default")

    def note(message: Any, category: Any, filename: str, lineno: int, *_: Any) -> None:
        lines[f"{Path(filename).name}:{lineno}"] += "synchronizing" in str(message)

    with each_step(watch), warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        train_here(*SMALL, "steps=16", "log.every=1000", "checkpoint.every=1000", f"out={place.folder / 'run'}")
    return +lines


def graphs(place: Place) -> Verdict:
    """Blocks that are alike share their graphs."""
    from torch._dynamo.utils import counters

    train_here(*SMALL, "compile=blocks", "steps=4", "model.layers=4", "evaluate.every=0", f"out={place.folder / 'run'}")
    count, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    return judged(1 <= count <= 2 and breaks == 0, f"{count} graph(s) of 4 blocks, {breaks} breaks")


def train_here(*words: str) -> None:
    from dtrain.cluster import detect
    from dtrain.compose import compose
    from dtrain.resolve import resolve
    from dtrain.train import train

    train(resolve(compose([*words, "devices=1"]), detect()))


def offload(place: Place) -> Verdict:
    runs = {"none": place.folder / "none", "cpu": place.folder / "cpu"}
    for where, out in runs.items():
        dtrain(place, *SMALL, "strategy=zero3", f"strategy.offload={where}", f"devices={place.devices}", f"out={out}")
    difference = apart(losses(runs["cpu"]), losses(runs["none"]))
    return judged(difference <= TOLERANCE[place.on], f"losses differ by {difference:.1e}")


def spike(place: Place) -> Verdict:
    """A gradient that is not a number, in one step of the model."""
    out, model = (
        place.folder / "run",
        ("model._target_=gpu.steps.Spikes", "model.vocab=auto", "model.heads=4", "trust=[gpu]"),
    )
    common = [word for word in SMALL if word != "model=gpt"]
    dtrain(place, *common, *model, "objective=next_token", "on_spike=skip", "steps=24", "devices=1", f"out={out}")
    noted = [event["step"] for event in events(out) if event["event"] == "spike"]
    finite = all(loss == loss for loss in losses(out)[-8:])
    return judged(len(noted) == 1 and finite and len(losses(out)) >= 23, f"spikes noted at steps {noted}")


def kill_and_resume(place: Place) -> Verdict:
    words = (
        *SMALL,
        "steps=40",
        "checkpoint.every=5",
        "strategy=ddp",
        "launcher=local",
        "launcher.restarts=0",
        f"devices={place.devices}",
    )
    whole, out = place.folder / "whole", place.folder / "killed"
    dtrain(place, *words, f"out={whole}")
    process = begin(place, *words, *fault("kill", 23), f"out={out}")
    process.communicate()
    dtrain(place, *words, f"out={out}")
    difference = apart(losses(out), losses(whole))
    holds = process.returncode != 0 and difference <= TOLERANCE[place.on]
    return judged(holds, f"killed at step 23, then losses of 40 steps differ by {difference:.1e}")


def axes(place: Place) -> Verdict:
    alone = {model: place.folder / model for model in ("gpt", "moe")}
    for model, out in alone.items():
        dtrain(place, *SMALL, f"model={model}", "devices=1", f"out={out}")
    differences = {}
    for name, words in AXES.items():
        out = place.folder / name
        dtrain(place, *SMALL, *words, f"devices={place.devices}", f"out={out}")
        differences[name] = apart(losses(out), losses(alone["moe" if name == "ep" else "gpt"]))
    figure = ", ".join(f"{name} {value:.0e}" for name, value in differences.items())
    return judged(max(differences.values()) <= TOLERANCE[place.on], figure)


def named(place: Place) -> Verdict:
    """Seconds from the last row of a run to its end: an error, a kill, a hang (which has backend.timeout=10 seconds)."""
    ends, holds = [], True
    where = (
        "launcher=local",
        "launcher.restarts=0",
        f"backend={'gloo' if place.small else 'nccl'}",
        "backend.timeout=10",
    )
    for action, most in (("raise", 10.0), ("kill", 10.0), ("hang", 25.0)):
        out = place.folder / action
        process = begin(
            place,
            *SMALL,
            "strategy=ddp",
            *fault(action, 6),
            "hook.fault.rank=1",
            *where,
            f"devices={place.devices}",
            f"out={out}",
        )
        output, _ = process.communicate()
        seconds = time.time() - (out / "metrics.jsonl").stat().st_mtime
        names = "rank 1" in output
        holds = holds and names and process.returncode != 0 and seconds <= most
        ends.append(f"{action} {seconds:.1f} s{'' if names else ' (rank 1 is not named)'}")
    return judged(holds, ", ".join(ends))


def fault(action: str, step: int) -> tuple[str, ...]:
    return (
        "hook.fault._target_=dtrain.testing.faults.AtStep",
        f"hook.fault.action={action}",
        f"hook.fault.step={step}",
    )


def fsdp(place: Place) -> Verdict:
    """Of the loop by hand, in turns. On a CPU it proves the commands alone."""
    shape = cells.SHAPES["tiny" if place.small else "1B"]
    words, ratios = sharded(shape, place), []
    variant = f"bar: {'none' if place.small else 'blocks'}"
    loop = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={place.devices}", "-m", "tests.gpu.loops")
    for turn in range(2):
        out = place.folder / f"turn-{turn}"
        dtrain(place, *words, "steps=30", "log.every=10", f"out={out}")
        ours = statistics.median(row["step_seconds"] for row in rows(out, "metrics")[1:]) * 1e3
        command = [sys.executable, *loop, json.dumps({**shape, "on": place.on}), variant]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=cells.ROOT, check=True)
        ratios.append(ours / json.loads(done.stdout.splitlines()[-1])["ms"])
    figure = f"{', '.join(f'{ratio:.3f}' for ratio in ratios)} of the loop by hand"
    if place.small:
        return Verdict("not run", figure, "a tiny step on a CPU says nothing of a GPU")
    return judged(statistics.median(ratios) <= 1.05, figure)


def sharded(shape: dict[str, int], place: Place) -> tuple[str, ...]:
    """The run of this shape on each rank; its last step leaves a checkpoint."""
    batch = (f"batch={shape['batch'] * place.devices}", "strategy=fsdp", f"devices={place.devices}")
    return (
        "model=gpt",
        "data=synthetic",
        "logger=[]",
        "evaluate.every=0",
        "checkpoint.every=0",
        *cells.words(shape, place.on).split(),
        *batch,
    )


def overlap(place: Place) -> Verdict:
    """How much of the time of NCCL's kernels runs beside other kernels, in a step of Llama 1B under FSDP."""
    if place.small:
        return Verdict("not run", note="there are no kernels of a GPU on a CPU")
    hook = ("trust=[gpu]", "hook.overlap._target_=gpu.profiled.Overlap", f"hook.overlap.to={place.folder}/trace")
    dtrain(place, *sharded(cells.SHAPES["1B"], place), "steps=8", "log.every=1", *hook, f"out={place.folder / 'run'}")
    share = json.loads((place.folder / "trace.json").read_text())["hidden"]
    return judged(share >= 0.5, f"{share:.0%} of communication runs beside computation")


STEPS: dict[str, Callable[[Place], Verdict]] = {
    "doctor": doctor, "waits": waits, "graphs": graphs, "spike": spike, "one-each": one_each, "axes": axes, "bandwidth": bandwidth,
    "offload": offload, "kill-resume": kill_and_resume, "named": named, "fsdp": fsdp, "overlap": overlap,
}  # fmt: skip


def judged(holds: bool, figure: str, note: str = "") -> Verdict:
    return Verdict("passed" if holds else "failed", figure, note)


def dtrain(place: Place, *words: str) -> None:
    """The command as users type it. Raises AssertionError if it fails."""
    process = begin(place, *words)
    output, _ = process.communicate()
    assert process.returncode == 0, f"dtrain {' '.join(words)}: exit code {process.returncode}\n{output[-2000:]}"


def begin(place: Place, *words: str, stderr: int = subprocess.STDOUT) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "dtrain", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, cwd=place.folder)


def rows(out: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / f"{name}.jsonl").read_text().splitlines()]


def events(out: Path) -> list[dict[str, Any]]:
    return rows(out, "events")


def losses(out: Path) -> list[float]:
    return [row["loss"] for row in rows(out, "metrics")]


def apart(some: Sequence[float], others: Sequence[float]) -> float:
    """The largest relative difference; infinite for lists of two lengths, or none."""
    if len(some) != len(others) or not some:
        return float("inf")
    return max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(some, others, strict=True))


def main(name: str, on: str, devices: str, folder: str) -> int:
    place = Place(on, int(devices), Path(folder))
    shutil.rmtree(place.folder, ignore_errors=True)  # of an attempt that was cut
    place.folder.mkdir(parents=True)
    verdict = STEPS[name](place)
    print(json.dumps({"name": name, **asdict(verdict)}))
    return int(verdict.result == "failed")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
