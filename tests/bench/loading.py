"""Loading a folder of Hugging Face on two ranks (fsdp) beside from_pretrained on each, alone and with fully_shard after it,
in turn: seconds, and seconds of the CPU, until every number was read once, as a forward does, and seconds until every number
was written once more, as the first step of an optimizer does; bytes that a rank reads; its peak of memory.

OMP_NUM_THREADS=1 PYTHONPATH=tests python tests/bench/loading.py [--rounds 5] [--place /tmp/llama-2gb]

Makes a random llama of 2.05 GB at the place if nothing is there; remove it afterwards.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from pool import resident
from small import PARTS, STRATEGIES, mesh_of
from torch.distributed.fsdp import fully_shard

from dtrain.build import build
from dtrain.checkpoint import adopt
from dtrain.checkpoint.state import TrainState
from dtrain.mesh import Mesh
from dtrain.mesh.sharding import local
from dtrain.model.hf import load
from dtrain.parallel.order import parallelize

SIZES = {
    "vocab_size": 32000, "hidden_size": 1280, "intermediate_size": 3456, "num_hidden_layers": 22,
    "num_attention_heads": 20, "num_key_value_heads": 20,
}  # fmt: skip


def ours(mesh: Mesh, place: str) -> list[torch.Tensor]:
    model = load(name=place, task="causal_lm", weights="pretrained", config={})
    strategy, precision = build(STRATEGIES["fsdp"]), build(PARTS["precision"])
    parallelize(model, mesh, strategy, precision=precision, seed=0, brought=True)
    adopt.adopt(place, TrainState(model), mesh)
    return [local(parameter) for parameter in model.parameters()]


def theirs(mesh: Mesh, place: str) -> list[torch.Tensor]:
    return list(transformers.AutoModelForCausalLM.from_pretrained(place).parameters())


def theirs_sharded(mesh: Mesh, place: str) -> list[torch.Tensor]:
    """As a loop for FSDP is written by hand."""
    model = transformers.AutoModelForCausalLM.from_pretrained(place)
    for layer in [*model.model.layers, model]:
        fully_shard(layer, mesh=mesh.axis("dp_shard"))
    return [local(parameter) for parameter in model.parameters()]


def measured(way: Callable[[Mesh, str], list[torch.Tensor]], place: str) -> dict[str, Any]:
    with mesh_of(dp_shard=2) as mesh:
        mesh.barrier()
        Path("/proc/self/clear_refs").write_text("5")  # the peak is that from here on
        before, began, used = {**_memory(), "read": _read()}, time.perf_counter(), time.process_time()
        tensors = way(mesh, place)
        loaded = time.perf_counter() - began
        for tensor in tensors:  # a mapped file is read when it is used
            tensor.sum()
        processor = time.process_time() - used
        mesh.barrier()
        seconds, after = time.perf_counter() - began, _memory()
        with torch.no_grad():
            for tensor in tensors:  # a page of a mapped file becomes memory when it is written
                tensor.add_(1)
        mesh.barrier()
        written = time.perf_counter() - began
        sizes = sorted(tensor.nbytes for tensor in tensors)
        return {
            "seconds": seconds, "written": written, "loaded": loaded, "processor": processor, "read": _read() - before["read"], "shard": sum(sizes),
            "peak": after["VmHWM"] - before["VmRSS"], "largest": 2 * sizes[-1] + 2 * sizes[-2],
        }  # fmt: skip


def _memory() -> dict[str, int]:
    lines = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
    return {line[0][:-1]: 1024 * int(line[1]) for line in lines if line[0] in ("VmHWM:", "VmRSS:")}


def _read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--place", default="/tmp/llama-2gb")
    asked = parser.parse_args()
    if not Path(asked.place).exists():
        config = transformers.LlamaConfig(**SIZES)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(asked.place, max_shard_size="350MB")
    whole = sum(path.stat().st_size for path in Path(asked.place).glob("*.safetensors"))
    resident_ranks, ways = partial(resident, 2), (ours, theirs, theirs_sharded)
    times: dict[str, list[list[float]]] = {way.__name__: [] for way in ways}
    for number in range(-1, asked.rounds):  # the first one imports
        for way in ways:
            ranks = resident_ranks(partial(measured, way, asked.place))
            if number < 0:
                continue
            times[way.__name__].append(
                [max(rank[what] for rank in ranks) for what in ("seconds", "written", "processor")]
            )
            slowest, written, processor = times[way.__name__][-1]
            room = max(rank["peak"] / (rank["shard"] + rank["largest"]) for rank in ranks)
            print(
                f"{way.__name__}: {slowest:.2f} s (loaded {max(rank['loaded'] for rank in ranks):.2f}, written "
                f"{written:.2f}), {processor:.2f} s of the CPU; reads {max(rank['read'] for rank in ranks) / whole:.3f} of the bytes; peak "
                f"{max(rank['peak'] for rank in ranks) / 1e9:.2f} GB, {room:.2f} of shard + two largest tensors"
            )
    for other in ("theirs", "theirs_sharded"):
        for index, what in enumerate(("seconds", "seconds until written", "of the CPU")):
            ratios = [mine[index] / one[index] for mine, one in zip(times["ours"], times[other], strict=True)]
            print(
                f"ours / {other}, {what}: median {statistics.median(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f})"
            )


if __name__ == "__main__":
    main()
