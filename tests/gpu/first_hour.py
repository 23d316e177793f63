"""The first hour on GPUs: an ordered list, each step with what it must show and a verdict.

    python -m tests.gpu.first_hour                                   one host, all its GPUs
    python -m tests.gpu.first_hour devices=1                         one of them
    python -m tests.gpu.first_hour nodes=2 address=10.0.0.1:29500    and another host, where somebody types in the same folder,
                                                                     with the same DTRAIN_SECRET (16 characters or more) in the environment of both:
                                                                     while sleep 1; do python -m dtrain.launcher.local.agent 10.0.0.1:29500 600; done
    python -m tests.gpu.first_hour on=cpu                            all of it in small, on the CPU: proves the list itself
    python -m tests.gpu.first_hour only=axes,speed write=no          some steps; nothing is written into tests/bench/RESULTS.md

Logs and runs lie in outputs/first-hour.
"""

import datetime
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.gpu import hour
from tests.gpu.steps import STEPS

RESULTS = hour.TESTS / "bench" / "RESULTS.md"
WORDS = {
    "on": "cuda",
    "devices": "",
    "nodes": "1",
    "address": "",
    "only": "",
    "write": "yes",
    "out": "outputs/first-hour",
    "step": "",
}


def main(words: list[str]) -> int:
    said = dict(word.partition("=")[::2] for word in words)
    if unknown := set(said) - set(WORDS):
        sys.exit(f"{', '.join(sorted(unknown))}: not known. Words: {' '.join(WORDS)}")
    said = WORDS | said
    place = hour.Place(
        said["on"],
        int(said["devices"] or _devices(said["on"])),
        int(said["nodes"]),
        Path(said["out"]).resolve(),
        said["address"],
    )
    if said["step"]:
        hour.do(next(step for step in STEPS if step.name == said["step"]), place)
        return 0
    chosen = [step for step in STEPS if not said["only"] or step.name in said["only"].split(",")]
    entry = [sys.executable, "-m", "tests.gpu.first_hour", *words, f"out={place.folder}"]
    found = hour.run(chosen, place, entry)
    text = f"{_title(place)}\n\n{hour.table(found)}"
    (place.folder / "first-hour.md").write_text(text)
    if said["write"] == "yes" and not said["only"]:
        hour.write(RESULTS, f"first hour on {place.on}, {place.nodes}x{place.devices}", text)
    return int(any(verdict.result == "failed" for _, verdict in found))


def _devices(on: str) -> int:
    import torch

    return torch.cuda.device_count() if on == "cuda" else 2


def _title(place: hour.Place) -> str:
    import torch

    device = torch.cuda.get_device_name() if not place.small else "CPU, in small: proves the list, not the speed"
    day = datetime.datetime.now(datetime.UTC).date()
    return f"### The first hour ({day}): {place.nodes} x {place.devices} ranks, {device}; torch {torch.__version__}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
