"""The weights of a job are those of a run alone, in a process that nobody forked: by their SHA-256."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import commands
import pytest
import yaml
from safetensors.numpy import load

RECIPES = {
    "mlp": "{data: synthetic, model: mlp, data.outputs: 1, objective: regression}",
    "cnn": "{data: synthetic, model: cnn, model.width: 8, data.inputs: [1, 8, 8], objective: classification}",
    "gpt": "{data: synthetic, model: gpt, model.layers: 2, model.width: 32, data.sequence: 16, objective: next_token}",
    "moe": "{data: synthetic, model: moe, model.layers: 2, model.width: 32, model.experts: 4, data.sequence: 16, objective: next_token}",
    "own": "{data: synthetic, model._target_: sweeping.Calling, data.inputs: [16], data.outputs: 1, objective: regression}",
}
COMMON = ["data.samples=64", "steps=5", "batch=16", "logger=[]", "hook=[]", "trust=[sweeping]"]


def weights(run: Path) -> str:
    """Of the names and bytes of all tensors that the last checkpoint of a run holds."""
    (newest,) = {path.parent for path in run.glob("checkpoints/step-*5/*/*.safetensors")}
    tensors = [pair for path in sorted(newest.glob("*.safetensors")) for pair in load(path.read_bytes()).items()]
    digest = hashlib.sha256()
    for name, array in sorted(tensors, key=lambda pair: pair[0]):
        digest.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
    return digest.hexdigest()


def alone(job: Path, out: Path) -> str:
    """The weights of the same run in a new interpreter."""
    words = [f"recipe={job}/config.yaml", "trust=[sweeping]", f"out={out}"]
    done = subprocess.run(
        [sys.executable, "-m", "dtrain", *words], capture_output=True, text=True, timeout=120, cwd=out.parent
    )
    assert done.returncode == 0, done.stderr
    return weights(out)


@pytest.mark.campaign("fuzz")
def test_every_job_has_the_weights_of_a_cold_run_in_any_order_and_any_number_of_slots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a module that counts its calls in a global variable."""
    monkeypatch.delenv("OMP_NUM_THREADS")  # each job has the threads of its slot
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep)
    for name, words in RECIPES.items():
        (tmp_path / f"{name}.yaml").write_text(words)
    cold = dict[tuple[str, int, int], str]()
    for slots in (1, 2, 8):
        files = ",".join(f"{name}.yaml" for name in RECIPES)
        words = [*COMMON, f"recipe=shuffle({files})", "seed=shuffle(0,1)", f"sweep.seed={slots}"]
        done = commands.run("-m", *words, f"sweep.parallel={slots}", f"sweep.out=s{slots}", cwd=tmp_path, timeout=400)
        assert done.returncode == 0, done.stderr
        jobs = [path.parent for path in (tmp_path / f"s{slots}").glob("*/result.json")]
        assert len(jobs) == 2 * len(RECIPES)
        for job in jobs:
            plan = yaml.safe_load((job / "plan.yaml").read_text())
            key = (plan["model"]["_target_"], plan["seed"], plan["threads"])
            if key not in cold:  # a new interpreter for seed 0; of seed 1 the jobs are those of another order
                cold[key] = weights(job) if plan["seed"] else alone(job, tmp_path / f"cold-{len(cold)}")
            assert weights(job) == cold[key], job
    threads = {1, max(1, len(os.sched_getaffinity(0)))}
    assert {key[2] for key in cold} == threads and len(set(cold.values())) >= 2 * len(RECIPES)
