"""Predicted beside measured step times on the cores of this machine, for RESULTS.md, after `python -m dtrain doctor`.

    python tests/bench/measured.py [--only mlp]

Real runs of `train`; the lowest quarter of their step times counts, so let nothing else run.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from dtrain.cluster import detect
from dtrain.compose import compose
from dtrain.predict.prediction import predict
from dtrain.resolve import resolve
from dtrain.tracing import shapes_of

MLP, CNN = ("model=mlp data=synthetic objective=classification", "model=cnn data=synthetic objective=classification")
GPT, MOE = "model=gpt data=synthetic batch=8", "model=moe data=synthetic batch=8"
LARGER = "model.width=256 model.layers=6 data.sequence=128"
RUNS = (
    f"{MLP} batch=64", f"{MLP} model.width=512 model.layers=4 batch=256", f"{MLP} model.width=1024 model.layers=6 batch=512",
    f"{CNN} data.inputs=[3,32,32] batch=16", f"{CNN} model.width=16 data.inputs=[1,28,28] batch=64",
    GPT, f"{GPT} {LARGER}", "model=gpt data=synthetic batch=4 model.width=384 model.layers=6 model.heads=6 data.sequence=256",
    MOE, f"{MOE} model.width=256 data.sequence=128",
    f"{MLP} model.width=512 model.layers=4 batch=256 devices=2 strategy=ddp",
    f"{MLP} model.width=1024 model.layers=6 batch=512 devices=2 strategy=fsdp",
    *(f"{CNN} data.inputs=[3,32,32] batch=16 devices=2 strategy={strategy}" for strategy in ("ddp", "fsdp")),
    *(f"{GPT} devices=2 {layout}" for layout in ("strategy=ddp", "strategy=fsdp", "mesh.tp=2", "mesh.pp=2 microbatch=2")),
    *(f"{GPT} {LARGER} devices=2 strategy={strategy}" for strategy in ("ddp", "fsdp")),
)  # fmt: skip
WARM, STEPS = 6, 40


def measured(words: str) -> float:
    """Seconds of a step."""
    with tempfile.TemporaryDirectory() as folder:
        quiet = ["log.every=2", "evaluate.every=0", "evaluate.samples=8", "checkpoint.every=0", "logger=[]"]
        command = [sys.executable, "-m", "dtrain", *words.split(), *quiet, f"steps={STEPS}", f"out={folder}/run"]
        subprocess.run(command, check=True, capture_output=True, timeout=300)
        rows = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").open()]
    each = sorted(row["step_seconds"] for row in rows if row["step"] > WARM)
    return float(each[len(each) // 4])


def main(only: str) -> None:
    here, within = detect(), 0
    assert here.figures, here.unmeasured
    runs = [words for words in RUNS if only in words]
    print("| words | measured ms | predicted / measured |\n|---|---|---|")
    for words in runs:
        plan = resolve(compose([*words.split(), f"steps={STEPS}"]), here)
        time = predict(plan, shapes_of(plan)).time
        assert time
        seconds = measured(words)
        within += 1 / 1.3 <= time.seconds / seconds <= 1.3
        print(f"| {words} | {1e3 * seconds:.1f} | {time.seconds / seconds:.2f} |", flush=True)
    print(f"\n{within} of {len(runs)} within 1.3x")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="words that hold this")
    main(parser.parse_args().only)
