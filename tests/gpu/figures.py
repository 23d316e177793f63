"""What a plan predicts beside what a GPU does, what logits in chunks cost, and steps beside the loop by hand: tables for tests/bench/RESULTS.md, one GPU.

    python -m tests.gpu.figures predicted chunks losses beside [only=<part of a row's name>] [out=<folder>]

Each row is a run of its own, 14 steps, of which the last eight count; figures.json in the folder has them all. Whether the loss is as fast as the
whole model compiled: `losses beside only=124M`, two minutes, then `only=1B`.
"""

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.gpu import hour, steps

STEPS, COUNTED = 14, 8
FAST = "precision=bf16 compile=blocks"
GPT2 = "model.vocab=50304 model.layers=12 model.heads=12 model.width=768 model.hidden=2048 data.sequence=1024"
MEDIUM = "model.vocab=50304 model.layers=24 model.heads=16 model.width=1024 model.hidden=2752 data.sequence=1024"
LLAMA = "model.vocab=128256 model.layers=16 model.heads=32 model.kv_heads=8 model.width=2048 model.hidden=8192"
LLAMA_3B = "model.vocab=128256 model.layers=28 model.heads=24 model.kv_heads=8 model.width=3072 model.hidden=8192"
RUNS = {
    "124M": f"{GPT2} batch=32 microbatch=32 {FAST}",
    "124M, not compiled": f"{GPT2} batch=32 microbatch=32 precision=bf16 compile=none",
    "350M": f"{MEDIUM} batch=32 microbatch=16 {FAST}",
    "1B, 4k tokens": f"{LLAMA} data.sequence=4096 batch=8 microbatch=2 {FAST}",
    "1B, bf16_true": f"{LLAMA} data.sequence=4096 batch=8 microbatch=2 precision=bf16_true compile=blocks",
    "1B, remat": f"{LLAMA} data.sequence=4096 batch=8 microbatch=4 remat=full {FAST}",
    "1B, 16k tokens": f"{LLAMA} data.sequence=16384 batch=2 microbatch=1 remat=selective {FAST}",
    "1B, 32k tokens": f"{LLAMA} data.sequence=32768 batch=1 microbatch=1 remat=full {FAST}",
    "3B, remat": f"{LLAMA_3B} data.sequence=4096 batch=4 microbatch=2 remat=full {FAST}",
    "moe": "model=moe model.vocab=50304 model.layers=12 model.heads=12 model.width=768 model.experts=8 model.active=2 "
    f"data.sequence=1024 batch=16 microbatch=16 {FAST}",
    "124M, fp32": f"{GPT2} batch=16 microbatch=16 precision=fp32 compile=blocks",
}
COMMON = (
    "model=gpt data=synthetic objective=next_token data.vocab=50000 strategy=single log.every=1 logger=[] evaluate.every=0 checkpoint.every=1000 resume=never "
    f"steps={STEPS} trust=[gpu] hook.kept._target_=gpu.models.Kept"
)


def measured(words: str, place: hour.Place, out: Path) -> dict[str, Any]:
    """Seconds of a step, MFU, the allocator's peak, what it reserved and what else the device holds, each with what was predicted."""
    said = [*COMMON.split(), *words.split(), f"out={out}"]
    prediction = json.loads(hour.dtrain(place, "plan", "json", *said))["prediction"]
    hour.dtrain(place, *said)
    rows = hour.rows(out)[-COUNTED:]
    kept = next(
        event for event in map(json.loads, (out / "events.jsonl").read_text().splitlines()) if "reserved" in event
    )
    return {
        "seconds": statistics.median(row["step_seconds"] for row in rows),
        "seconds predicted": prediction["time"]["seconds"],
        "mfu": statistics.median(row.get("mfu", 0.0) for row in rows),
        "mfu predicted": prediction["time"]["mfu"],
        "peak": kept["peak"],
        "peak predicted": prediction["memory"]["peak"],
        "reserved": kept["reserved"],
        "beside": kept["beside"],
        "loss": rows[-1]["loss"],
    }


def predicted(place: hour.Place, only: str) -> dict[str, Any]:
    found = {}
    print(
        "| run | step, ms | predicted / measured | MFU | predicted | peak, GiB | predicted / measured | reserved / peak |"
    )
    for name, words in RUNS.items():
        if only not in name:
            continue
        try:
            row = measured(words, place, place.folder / name.replace(" ", "-").replace(",", ""))
        except (AssertionError, StopIteration) as error:
            print(f"| {name} | {str(error)[-1500:]}", flush=True)
            continue
        found[name] = row
        print(
            f"| {name} | {row['seconds'] * 1e3:.1f} | {row['seconds predicted'] / row['seconds']:.2f} | {row['mfu']:.1%} | "
            f"{row['mfu predicted']:.1%} | {row['peak'] / 2**30:.2f} | {row['peak predicted'] / row['peak']:.3f} | "
            f"{row['reserved'] / row['peak']:.3f} |",
            flush=True,
        )
    return found


def chunks(place: hour.Place, only: str) -> dict[str, Any]:
    """Logits in chunks and whole, in turns."""
    found = {}
    print("| run | chunked / whole, seconds | chunked / whole, peak | losses apart |")
    for name in ("124M", "1B, 4k tokens"):
        if only not in name:
            continue
        ratios = []
        for turn in range(2):
            both = [
                measured(
                    f"{RUNS[name]} objective.chunk={chunk}", place, place.folder / f"chunk-{chunk}-{turn}-{name[:2]}"
                )
                for chunk in (("auto", "0") if turn else ("0", "auto"))
            ]
            chunked, whole = reversed(both) if not turn else both
            ratios.append(
                [
                    chunked["seconds"] / whole["seconds"],
                    chunked["peak"] / whole["peak"],
                    chunked["loss"] / whole["loss"] - 1,
                ]
            )
        found[name] = ratios
        print(
            f"| {name} | {', '.join(f'{ratio[0]:.3f}' for ratio in ratios)} | {ratios[0][1]:.3f} | {ratios[0][2]:.1e} |",
            flush=True,
        )
    return found


def losses(place: hour.Place, only: str) -> dict[str, Any]:
    """The loss alone, as it is written and compiled, beside whole logits; the table of tests/bench/losses.py."""
    program = Path(__file__).resolve().parents[1] / "bench" / "losses.py"
    for name, sizes in {"124M": "32768,768,50304", "1B": "8192,2048,128256"}.items():
        if only in name:
            command = [sys.executable, str(program), "loss", "--types", "bf16", "--sizes", sizes]
            subprocess.run(command, check=True, cwd=program.parents[2])
    return {}


def beside(place: hour.Place, only: str) -> dict[str, Any]:
    """Seconds of a step beside those of tests/gpu/loops.py, which compiles the whole loss, in turns."""
    found = {}
    print("| run | dtrain, ms | by hand, ms | ratio |")
    for name, size in {"124M": "GPT-2 124M", "1B, 4k tokens": "Llama 1B"}.items():
        if only not in name:
            continue
        shape = steps.SIZES[size] | {"on": "cuda", "compile": True}
        pairs = []
        for turn in range(2):
            row = measured(RUNS[name], place, place.folder / f"beside-{turn}-{name[:2]}")
            pairs.append((row["seconds"], steps.by_hand(place, shape)))
        found[name] = pairs
        for mine, theirs in pairs:
            print(f"| {name} | {mine * 1e3:.1f} | {theirs * 1e3:.1f} | {mine / theirs:.3f} |", flush=True)
    return found


PARTS = {"predicted": predicted, "chunks": chunks, "losses": losses, "beside": beside}


def main(words: list[str]) -> None:
    said = dict(word.partition("=")[::2] for word in words if "=" in word)
    place = hour.Place("cuda", 1, 1, hour.fresh(Path(said.get("out", "outputs/figures")).resolve()))
    found = {part: PARTS[part](place, said.get("only", "")) for part in words if part in PARTS}
    (place.folder / "figures.json").write_text(json.dumps(found))
    kept = [row for rows in found.values() if isinstance(rows, dict) for row in rows.values() if isinstance(row, dict)]
    for row in kept[:1]:
        print(f"beside the allocator: {row['beside'] / 2**20:.0f} MiB")


if __name__ == "__main__":
    main(sys.argv[1:])
