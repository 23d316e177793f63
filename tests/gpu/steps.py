"""The steps of the first hour, cheap ones first."""

import json
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.gpu.hour import TESTS, Place, Step, Verdict, apart, begun, dtrain, judged, losses, rows

GPT = ("model=gpt", "data=synthetic", "log.every=1", "logger=[]", "precision=fp32", "compile=none")
SMALL = (*GPT, "model.layers=2", "model.width=64", "data.sequence=32", "batch=8", "steps=12")
FAULT = ("hook.fault._target_=dtrain.testing.faults.AtStep", "hook.fault.step=6")
AXES = {
    "ddp": ("strategy=ddp",), "zero1": ("strategy=zero1",), "zero2": ("strategy=zero2",), "zero3": ("strategy=zero3",), "fsdp": ("strategy=fsdp",),
    "tp": ("mesh.tp=2",), "pp": ("mesh.pp=2",), "cp": ("mesh.cp=2",), "ep": ("model=moe", "mesh.ep=2"),
}  # fmt: skip
TOLERANCE = {"cpu": 2e-6, "cuda": 2e-5}
"""Of losses in fp32 against one rank; kernels of a GPU differ by shape."""
SIZES: dict[str, dict[str, Any]] = {
    "GPT-2 124M": {
        "vocab": 50304,
        "layers": 12,
        "heads": 12,
        "kv_heads": 12,
        "width": 768,
        "hidden": 2048,
        "sequence": 1024,
        "batch": 32,
        "microbatch": 32,
    },
    "Llama 1B": {
        "vocab": 128256,
        "layers": 16,
        "heads": 32,
        "kv_heads": 8,
        "width": 2048,
        "hidden": 8192,
        "sequence": 4096,
        "batch": 8,
        "microbatch": 2,
    },
    "Llama 8B": {
        "vocab": 128256,
        "layers": 32,
        "heads": 32,
        "kv_heads": 8,
        "width": 4096,
        "hidden": 14336,
        "sequence": 4096,
        "batch": 4,
        "microbatch": 1,
    },
    "tiny": {
        "vocab": 256,
        "layers": 2,
        "heads": 4,
        "kv_heads": 4,
        "width": 64,
        "hidden": 128,
        "sequence": 64,
        "batch": 4,
        "microbatch": 4,
    },
}
"""`batch` is of a rank. 8B needs the state of several GPUs, or about 130 GB of one."""


def doctor(place: Place) -> Verdict:
    found = _doctor(place)
    notes = [each["check"] for each in found["findings"] if each["verdict"] != "ok"]
    facts = next(each["facts"] for each in found["findings"] if each["check"] == "torch")
    return judged(
        found["exit_code"] == 0,
        f"torch {facts['version']}, {facts['gpus']} GPUs",
        f"to be read: {', '.join(notes)}" if notes else "",
    )


def bandwidth(place: Place) -> Verdict:
    links = next(each["facts"]["links"] for each in _doctor(place)["findings"] if each["check"] == "bandwidth")
    best = {
        link["operation"]: max(each["busbw"] for each in links if each["operation"] == link["operation"])
        for link in links
    }
    return judged(
        all(link["right"] for link in links),
        ", ".join(f"{name} {value / 1e9:.1f} GB/s" for name, value in best.items()),
    )


def _doctor(place: Place) -> Any:
    said = subprocess.run(
        [sys.executable, "-m", "dtrain", "doctor", "json", *place.words(), f"out={place.folder / 'doctor'}"],
        capture_output=True,
        text=True,
        cwd=place.folder,
        check=False,
    )
    return json.loads(said.stdout)


def marked(place: Place) -> Verdict:
    files = [str(page) for page in sorted(TESTS.rglob("test_*.py")) if "@pytest.mark.gpu" in page.read_text()]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "--workers", "0", *files],
        capture_output=True,
        text=True,
        cwd=TESTS.parent,
        check=False,
    )
    print(done.stdout)
    passed = re.search(r"(\d+) passed", done.stdout)
    return judged(done.returncode == 0 and passed is not None, done.stdout.strip().splitlines()[-1])


def one_each(place: Place) -> Verdict:
    """Two ranks that take one GPU are refused before they connect, so a run that begins has one for each."""
    out = place.folder / "one-each"
    dtrain(place, *SMALL, "strategy=ddp", *place.words(), f"out={out}", "resume=never")
    begun_with = next(
        json.loads(line) for line in (out / "events.jsonl").read_text().splitlines() if '"started"' in line
    )
    return judged(begun_with["ranks"] == place.ranks and len(rows(out)) == 12, f"{begun_with['ranks']} ranks, 12 steps")


def waits(place: Place) -> Verdict:
    """Steps in the middle, of which the plan says that the host waits for nothing."""
    if place.small:
        from rehearsal import rehearse
        from test_rehearsal import GPT as RUN
        from test_rehearsal import LAGGING

        (found,) = rehearse(*RUN)
        times = sum(count for where, count in found.each_step.items() if where != LAGGING)
        return judged(times == 0, f"{times:g} waits a step", "on the pretended accelerator of tests/pretended.py")
    found_by = _synchronising(place)
    return judged(
        not found_by,
        f"{sum(found_by.values())} waits in 8 steps",
        "; ".join(f"{where} {count}" for where, count in found_by.most_common(5)),
    )


def _synchronising(place: Place) -> Counter[str]:
    """torch warns of operations that synchronise (https://docs.pytorch.org/docs/stable/generated/torch.cuda.set_sync_debug_mode.html)."""
    import warnings

    import torch
    from small import config

    from dtrain.cluster import detect
    from dtrain.lifecycle.watchdog import Watchdog
    from dtrain.resolve import resolve
    from dtrain.train import train

    found, beat = Counter[str](), Watchdog.beat

    def counted(self: Watchdog, step: int, seen: int) -> None:
        with warnings.catch_warnings(action="ignore"):  # the change itself is warned of
            torch.cuda.set_sync_debug_mode("warn" if 4 <= step < 12 else "default")
        beat(self, step, seen)

    def note(message: Any, category: Any, filename: str, lineno: int, *_: Any) -> None:
        if "synchronizing" in str(message):
            found[f"{Path(filename).name}:{lineno}"] += 1

    words = (
        *SMALL,
        "steps=16",
        "log.every=1000",
        "checkpoint.every=1000",
        "devices=1",
        f"out={place.folder / 'waits'}",
    )
    Watchdog.beat = counted  # type: ignore[method-assign]
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        train(resolve(config(*words), detect()))
    return found


def graphs(place: Place) -> Verdict:
    """Blocks that are alike share their graphs."""
    from small import config
    from torch._dynamo.utils import counters

    from dtrain.cluster import detect
    from dtrain.resolve import resolve
    from dtrain.train import train

    words = [word for word in SMALL if word not in ("compile=none", "steps=12")]
    counters.clear()
    train(
        resolve(
            config(
                *words,
                "compile=blocks",
                "steps=4",
                "model.layers=4",
                "evaluate.every=0",
                "devices=1",
                f"out={place.folder / 'graphs'}",
            ),
            detect(),
        )
    )
    found, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    return judged(1 <= found <= 2 and breaks == 0, f"{found} graph(s) of 4 blocks, {breaks} breaks")


def offload(place: Place) -> Verdict:
    one, other = place.folder / "offload-none", place.folder / "offload"
    dtrain(place, *SMALL, "strategy=zero3", *place.words(), f"out={one}", "resume=never")
    dtrain(place, *SMALL, "strategy=zero3", "strategy.offload=cpu", *place.words(), f"out={other}", "resume=never")
    difference = apart(losses(other), losses(one))
    return judged(difference <= TOLERANCE[place.on], f"losses differ by {difference:.1e}")


def spike(place: Place) -> Verdict:
    """A gradient that is not a number, in one step of the model."""
    out = place.folder / "spike"
    words = [word for word in SMALL if word != "model=gpt"]
    dtrain(
        place,
        *words,
        "model._target_=gpu.models.Spikes",
        "model.vocab=auto",
        "model.heads=4",
        "objective=next_token",
        "trust=[gpu]",
        "on_spike=skip",
        "steps=24",
        "devices=1",
        f"out={out}",
        "resume=never",
    )
    told = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines() if '"spike"' in line]
    finite = all(loss == loss for loss in losses(out)[-8:])
    return judged(
        len(told) == 1 and finite and len(rows(out)) >= 23,
        f"{len(told)} spike told, of step {told[0]['step'] if told else 'none'}",
        "",
    )


def kill_and_resume(place: Place) -> Verdict:
    words = (
        *SMALL,
        "steps=40",
        "checkpoint.every=5",
        "strategy=ddp",
        "launcher=local",
        "launcher.restarts=0",
        *place.words(),
    )
    whole, out = place.folder / "whole", place.folder / "killed"
    dtrain(place, *words, f"out={whole}", "resume=never")
    first = begun(
        place,
        *words,
        "hook.fault._target_=dtrain.testing.faults.AtStep",
        "hook.fault.action=kill",
        "hook.fault.step=23",
        f"out={out}",
    )
    first.communicate(timeout=300)
    dtrain(place, *words, f"out={out}")
    difference = apart(losses(out), losses(whole))
    return judged(
        first.returncode != 0 and difference <= TOLERANCE[place.on],
        f"killed at step 23, then losses of 40 steps differ by {difference:.1e}",
    )


def axes(place: Place) -> Verdict:
    alone = {model: place.folder / f"alone-{model}" for model in ("gpt", "moe")}
    for model, out in alone.items():
        dtrain(place, *SMALL, f"model={model}", "devices=1", f"out={out}", "resume=never")
    found = {}
    for name, words in AXES.items():
        out = place.folder / f"axis-{name}"
        dtrain(place, *SMALL, *words, *place.words(), f"out={out}", "resume=never")
        found[name] = apart(losses(out), losses(alone["moe" if name == "ep" else "gpt"]))
    return judged(
        max(found.values()) <= TOLERANCE[place.on], ", ".join(f"{name} {value:.0e}" for name, value in found.items())
    )


def named_in_time(place: Place) -> Verdict:
    """Seconds from the last row of a run to its end: an error, a kill, a hang (of which backend.timeout=10 are waited for)."""
    said = []
    holds = True
    for action, most in (("raise", 10.0), ("kill", 10.0), ("hang", 25.0)):
        out = place.folder / f"named-{action}"
        words = (
            *SMALL,
            "strategy=ddp",
            *FAULT,
            f"hook.fault.action={action}",
            "hook.fault.rank=1",
            "launcher=local",
            "launcher.restarts=0",
            f"backend={'gloo' if place.small else 'nccl'}",
            "backend.timeout=10",
            *place.words(),
        )
        process = begun(place, *words, f"out={out}", "resume=never")
        output, _ = process.communicate(timeout=300)
        print(output[-2000:])
        seconds = time.time() - (out / "metrics.jsonl").stat().st_mtime
        named = "rank 1" in output
        holds = holds and named and process.returncode != 0 and seconds <= most
        said.append(f"{action} {seconds:.1f} s{'' if named else ' (rank 1 is not named)'}")
    return judged(holds, ", ".join(said))


def memory(place: Place) -> Verdict:
    """Of the allocator, beside the peak of the plan."""
    found = {}
    for name in ("GPT-2 124M", "Llama 1B"):
        words, out = (*_size(name, place), "steps=5", *place.words()), place.folder / f"memory-{name.replace(' ', '-')}"
        planned = json.loads(dtrain(place, "plan", "json", *words, f"out={out}"))["prediction"]["memory"]["peak"]
        dtrain(place, *words, f"out={out}", "resume=never", seconds=550)
        found[name] = rows(out)[-1]["peak_bytes"] / planned
    return judged(
        all(0.95 <= ratio <= 1.05 for ratio in found.values()),
        ", ".join(f"{name} {ratio:.3f} of the plan" for name, ratio in found.items()),
    )


def speed(place: Place) -> Verdict:
    """dtrain beside the loop of tests/gpu/loops.py, in turns; the ratio of their median steps."""
    place = replace(place, nodes=1, address="")  # where the loop by hand runs too
    sizes = (
        ["tiny"]
        if place.small
        else [name for name in SIZES if name != "tiny" and (name != "Llama 8B" or place.ranks >= 4)]
    )
    said, holds = [], True
    for name in sizes:
        shape = SIZES[name] | {"on": place.on, "compile": not place.small}
        turns = []
        for turn in range(3):
            out = place.folder / f"speed-{name.replace(' ', '-')}-{turn}"
            dtrain(
                place,
                *_size(name, place),
                "steps=30",
                "log.every=10",
                "checkpoint.every=1000",
                *place.words(),
                f"out={out}",
                "resume=never",
                seconds=900,
            )
            mine, theirs = statistics.median(row["step_seconds"] for row in rows(out)[1:]), by_hand(place, shape)
            turns.append(mine / theirs)
            mfu = rows(out)[-1].get("mfu")
        ratio = statistics.median(turns)
        holds = holds and ratio <= 1.05
        said.append(
            f"{name}: {ratio:.3f} ({min(turns):.3f}..{max(turns):.3f}) of the loop by hand"
            + (f", MFU {mfu:.1%}" if mfu else "")
        )
    return Verdict(
        "not run" if place.small else "passed" if holds else "failed",
        "; ".join(said),
        "a tiny step on a CPU says nothing of a GPU" if place.small else "",
    )


def _size(name: str, place: Place) -> tuple[str, ...]:
    shape = SIZES[name]
    model = [f"model.{key}={shape[key]}" for key in ("vocab", "layers", "heads", "kv_heads", "width", "hidden")]
    ranks = place.ranks
    batch = (
        f"batch={shape['batch'] * ranks}",
        f"microbatch={shape['microbatch']}",
        f"data.sequence={shape['sequence']}",
        f"data.vocab={min(shape['vocab'], 50000)}",
    )
    fast = () if place.small else ("precision=bf16", "compile=blocks")
    return (
        "model=gpt",
        *model,
        "data=synthetic",
        *batch,
        "log.every=1",
        "logger=[]",
        "evaluate.every=0",
        "strategy=fsdp" if ranks > 1 else "strategy=single",
        *fast,
    )


def by_hand(place: Place, shape: dict[str, Any]) -> float:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nproc-per-node={place.devices}",
        "--master-port=0",
        "--standalone",
        str(TESTS / "gpu" / "loops.py"),
        json.dumps(shape),
    ]
    if place.ranks == 1:
        command = [sys.executable, str(TESTS / "gpu" / "loops.py"), json.dumps(shape)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=place.folder, check=False)
    assert done.returncode == 0, done.stderr
    return float(json.loads(done.stdout.strip().splitlines()[-1])["seconds"])


def overlap(place: Place) -> Verdict:
    """How much of the time of NCCL's kernels runs beside other kernels, in a step of Llama 1B under FSDP."""
    out = place.folder / "overlap"
    words = (
        *_size("Llama 1B", place),
        "steps=8",
        "trust=[gpu]",
        "hook.profile._target_=gpu.models.Profile",
        f"hook.profile.to={place.folder}/trace",
    )
    dtrain(place, *words, *place.words(), f"out={out}", "resume=never", seconds=900)
    share = json.loads((place.folder / "trace.json").read_text())["hidden"]
    return judged(share >= 0.5, f"{share:.0%} of communication runs beside computation")


CPU = "there are no kernels of a GPU on a CPU"
STEPS = [
    Step("doctor", "nothing would stop a run", doctor, seconds=120),
    Step("marked", "tests marked gpu pass", marked, cuda="there is no GPU that they need", seconds=900),
    Step("one-each", "each rank has a GPU of its own", one_each),
    Step("waits", "no wait for the device in a step in which nothing is due", waits),
    Step("graphs", "blocks are compiled once, without a break", graphs),
    Step("spike", "a gradient that is no number is left out and told, once", spike),
    Step("offload", "strategy.offload=cpu has the losses of a run without it", offload, ranks=2),
    Step("kill-resume", "after SIGKILL the same words end with the same losses", kill_and_resume, ranks=2),
    Step("axes", "every axis has the losses of one rank", axes, ranks=2, seconds=1200),
    Step("named", "an error, a kill and a hang are told, with the rank, in time", named_in_time, ranks=2),
    Step("bandwidth", "collectives are right; their bus bandwidth", bandwidth, ranks=2, seconds=300),
    Step(
        "memory",
        "the peak is within 5% of the plan",
        memory,
        cuda="the peak of a process on a CPU holds Python and torch too",
        seconds=900,
    ),
    Step("speed", "at most 1.05 of the best loop by hand", speed, seconds=3600),
    Step("overlap", "half of the communication at least is hidden", overlap, ranks=2, cuda=CPU, seconds=1200),
]
