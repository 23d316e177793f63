"""The first hour on GPUs: an ordered list, each step with what it must show and a verdict.

    python -m tests.gpu.first_hour                                   one host, all its GPUs
    python -m tests.gpu.first_hour devices=1                         one of them
    python -m tests.gpu.first_hour nodes=2 address=10.0.0.1:29500    and another host, where somebody types in the same folder,
                                                                     with the same DTRAIN_SECRET (16 characters or more) in the environment of both:
                                                                     while sleep 1; do python -m dtrain.launcher.local.agent 10.0.0.1:29500 600; done
    python -m tests.gpu.first_hour on=cpu                            all of it in small, on the CPU: proves the list itself
    python -m tests.gpu.first_hour only=axes,speed write=no          some steps; nothing is written into tests/bench/RESULTS.md

Logs and runs lie in a new folder of outputs/first-hour.
"""

import datetime
import os
import re
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.gpu import hour
from tests.gpu.steps import STEPS

RESULTS = hour.TESTS / "bench" / "RESULTS.md"
WORDS = {
    "on": ("cuda", r"cuda|cpu", "cuda, or cpu: in small, to prove the list"),
    "devices": ("", r"[1-9]\d{0,3}|", "GPUs of this host; all of them where it is left out"),
    "nodes": ("1", r"[12]", "1 or 2 hosts"),
    "address": ("", r"\S+:\d+|", "<host>:<port> of this host, which the other one reaches; with nodes=2"),
    "only": ("", rf"({'|'.join(step.name for step in STEPS)}|,)*", "names of steps, with commas between"),
    "write": ("yes", r"yes|no", "whether the table goes into tests/bench/RESULTS.md"),
    "out": ("outputs/first-hour", r".+", "a folder; each hour has a new one in it"),
    "step": ("", rf"{'|'.join(step.name for step in STEPS)}|", "one step alone, in the folder out"),
}
"""word -> its default, what it may be, what it means."""


def main(words: list[str]) -> int:
    if {"--help", "-h", "help"} & set(words):
        print(__doc__, *(f"  {name:<8} {sentence}" for name, (*_, sentence) in WORDS.items()), sep="\n")
        return 0
    said = {name: default for name, (default, *_) in WORDS.items()} | dict(word.partition("=")[::2] for word in words)
    wrong = list(_wrong(said))
    if not wrong and said["on"] == "cuda" and not _gpus():
        wrong = ["there is no GPU that this torch can use. Type on=cpu to try the list in small."]
    if wrong:
        print(*(f"first_hour: {sentence}" for sentence in wrong), sep="\n", file=sys.stderr)
        return 2
    devices = int(said["devices"] or (_gpus() if said["on"] == "cuda" else 2))
    place = hour.Place(said["on"], devices, int(said["nodes"]), Path(said["out"]).resolve(), said["address"])
    if said["step"]:
        hour.do(next(step for step in STEPS if step.name == said["step"]), place)
        return 0
    try:
        place = replace(place, folder=hour.fresh(place.folder))
    except OSError as error:
        print(f"first_hour: out={said['out']}: {error}. Type out=<a folder to write to>.", file=sys.stderr)
        return 2
    chosen = [step for step in STEPS if not said["only"] or step.name in said["only"].split(",")]
    entry = [sys.executable, "-m", "tests.gpu.first_hour", *words, f"out={place.folder}"]
    found = hour.run(chosen, place, entry)
    text = f"{_title(place)}\n\n{hour.table(found)}"
    (place.folder / "first-hour.md").write_text(text)
    if said["write"] == "yes" and not said["only"]:
        hour.write(RESULTS, f"first hour on {place.on}, {place.nodes}x{place.devices}", text)
    return int(any(verdict.result == "failed" for _, verdict in found))


def _wrong(said: dict[str, str]) -> Iterator[str]:
    for name, value in said.items():
        if name not in WORDS:
            yield f"{name}={value}: there is no such word. Words: {' '.join(WORDS)}; --help explains them."
        elif not re.fullmatch(WORDS[name][1], value):
            yield (
                f"{name}={value}: {WORDS[name][2]}. Steps: {' '.join(step.name for step in STEPS)}."
                if name
                in (
                    "only",
                    "step",
                )
                else f"{name}={value}: {WORDS[name][2]}."
            )
    if said["nodes"] == "2" and not said["address"]:
        yield "nodes=2 needs address=<host>:<port> of this host."


def _gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _title(place: hour.Place) -> str:
    import torch

    device = torch.cuda.get_device_name() if not place.small else "CPU, in small: proves the list, not the speed"
    day = datetime.datetime.now(datetime.UTC).date()
    return f"### The first hour ({day}): {place.nodes} x {place.devices} ranks, {device}; torch {torch.__version__}"


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))  # the step that runs is ended on the way out
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
