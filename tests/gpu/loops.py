"""The best loop that a good engineer writes by hand for a GPT on GPUs: bf16, compiled, fused AdamW, FSDP2 where there are several ranks.

torchrun --nproc-per-node=N tests/gpu/loops.py '{"layers": 12, ...}'        prints the median seconds of a step as JSON
"""

import json
import os
import statistics
import sys
import time
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

WARM, TIMED = 10, 20


class Block(nn.Module):
    """RMSNorm, rotary attention, SwiGLU: dtrain's gpt without a word of it."""

    def __init__(self, width: int, hidden: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * self.size, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate_up, self.down = nn.Linear(width, 2 * hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = self.qkv(self.norm1(x)).split(
            [self.heads * self.size, self.kv_heads * self.size, self.kv_heads * self.size], -1
        )
        q, k, v = (part.view(B, T, -1, self.size).transpose(1, 2) for part in (q, k, v))
        q, k = (F.rms_norm(part, (self.size,)) for part in (q, k))
        q, k = ((part * cos + part.roll(self.size // 2, -1) * sin).to(v.dtype) for part in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        x = x + self.out(y.transpose(1, 2).reshape(B, T, C))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        out: Tensor = x + self.down(F.silu(gate) * up)
        return out


class GPT(nn.Module):
    def __init__(
        self, vocab: int, layers: int, heads: int, kv_heads: int, width: int, hidden: int, sequence: int
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width, hidden, heads, kv_heads) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocab, bias=False)
        size = width // heads
        angles = torch.outer(torch.arange(sequence).float(), 10000.0 ** (-torch.arange(0, size, 2).float() / size))
        self.register_buffer("cos", torch.cat((angles.cos(), angles.cos()), -1), persistent=False)
        self.register_buffer("sin", torch.cat((-angles.sin(), angles.sin()), -1), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        out: Tensor = self.head(self.norm(x))
        return out


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def step_seconds(shape: dict[str, Any]) -> float:
    """The median of TIMED steps after WARM. `shape`: the arguments of GPT, `batch` of a rank, `microbatch`, `remat`, `on`, `compile`."""
    rank, world, on = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)), shape["on"]
    device = torch.device("cpu")
    if on == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if world > 1:
        dist.init_process_group("nccl" if on == "cuda" else "gloo", device_id=device if on == "cuda" else None)
    torch.manual_seed(0)
    names = ("vocab", "layers", "heads", "kv_heads", "width", "hidden", "sequence")
    with device:
        model = GPT(**{name: shape[name] for name in names})
    half, loss_of = on == "cuda", torch.compile(cross_entropy) if shape["compile"] else cross_entropy
    for block in model.blocks:
        if shape["compile"]:
            block.compile()
    if world > 1:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if half else MixedPrecisionPolicy()
        for module in (*model.blocks, model):
            fully_shard(module, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    generator = torch.Generator().manual_seed(rank)
    seconds = []
    for number in range(WARM + TIMED):
        tokens = torch.randint(shape["vocab"], (shape["batch"], shape["sequence"] + 1), generator=generator)
        tokens = tokens.pin_memory().to(device, non_blocking=True) if half else tokens
        _wait(device)
        began = time.perf_counter()
        parts = tokens.split(shape["microbatch"])
        for index, part in enumerate(parts):
            if isinstance(model, FSDPModule):  # gradients cross the ranks once a step, as dtrain's do
                model.set_requires_gradient_sync(index == len(parts) - 1)
            with torch.autocast("cuda", torch.bfloat16) if half and world == 1 else nullcontext():
                logits = model(part[:, :-1])
            (loss_of(logits, part[:, 1:]) / len(parts)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        _wait(device)
        if number >= WARM:
            seconds.append(time.perf_counter() - began)
    if world > 1:
        dist.destroy_process_group()
    return statistics.median(seconds)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    found = step_seconds(json.loads(sys.argv[1]))
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps({"seconds": found}))
