"""The best loop that a good engineer writes by hand for a GPT on GPUs, as variants to measure: the bar for dtrain's own steps.

    python -m tests.gpu.loops '{"on": "cuda", ...}' [profile=<file>] 'bar: whole+bf16' 'one chunk: whole+bf16+chunk=32768' ...
    torchrun --nproc-per-node=8 -m tests.gpu.loops '{"on": "cuda", ...}' 'bar: blocks'             FSDP2 over the ranks

The shape holds the arguments of GPT, `batch` of a rank and `microbatch` in sequences, and `on`: cuda or cpu. A variant is words
joined by +; WORDS says what they mean. Each prints one JSON line: a variant that fails costs its own line.
"""

import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from . import profiled

WORDS = {
    "none": "nothing is compiled",
    "blocks": "each block is compiled, and the loss",
    "whole": "the model and its loss are one graph; with chunk=N, the model without its head",
    "bf16": "the residual stream is bf16: the embedding's rows are cast",
    "split": "q, k, v and gate, up are products of their own, as dtrain's are",
    "scale": "the embedding's rows times the root of the width, as dtrain's are",
    "chunk": "head and loss by N tokens: the gradient takes the place of the logits, that of the head's weight is summed in fp32",
    "nosync": "the host waits for the GPU once after all timed steps, not after each",
    "clipin": "gradients are not clipped",
    "graphs": "CUDA graphs (mode=reduce-overhead)",
}
ARGUMENTS = ("vocab", "layers", "heads", "kv_heads", "width", "hidden", "sequence")
WARM, TIMED, PROFILED = 5, 15, 3
Loss = Callable[[Tensor, Tensor, float], Tensor]
"""tokens_BT, targets_BT, weight -> the mean cross entropy times the weight."""


@dataclass(frozen=True)
class Variant:
    words: frozenset[str]
    rows: int = 0
    """Tokens of a chunk; 0: whole logits."""

    @property
    def mode(self) -> dict[str, str]:
        return {"mode": "reduce-overhead"} if "graphs" in self.words else {}


def parse(text: str) -> Variant:
    """Raises ValueError."""
    pairs = dict(word.partition("=")[::2] for word in text.split("+"))
    if unknown := pairs.keys() - WORDS.keys():
        raise ValueError(f"{text}: there is no word {', '.join(sorted(unknown))}. Words: {' '.join(WORDS)}.")
    if len(pairs.keys() & {"none", "blocks", "whole"}) != 1:
        raise ValueError(f"{text}: type one of none, blocks and whole.")
    return Variant(frozenset(pairs), int(pairs.get("chunk", 0)))


class Products(nn.Module):
    """Products of one input: one whose output is cut into `widths`, or one for each (`split`), with the same weights."""

    def __init__(self, inputs: int, widths: list[int], split: bool) -> None:
        super().__init__()
        weight, self.widths = nn.Linear(inputs, sum(widths), bias=False).weight.detach(), widths
        self.weights = nn.ParameterList(part.clone() for part in (weight.split(widths) if split else [weight]))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        outputs = [F.linear(x, weight) for weight in self.weights]
        return tuple(outputs) if len(outputs) > 1 else outputs[0].split(self.widths, -1)


class Norm(nn.RMSNorm):
    """Its weight takes the type of its input, which the fused kernel needs."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype))


class Block(nn.Module):
    """RMSNorm, rotary attention, SwiGLU: dtrain's gpt without a word of it."""

    def __init__(self, width: int, hidden: int, heads: int, kv_heads: int, split: bool) -> None:
        super().__init__()
        self.size = width // heads
        self.norm1, self.norm2 = Norm(width), Norm(width)
        self.qkv = Products(width, [width, kv_heads * self.size, kv_heads * self.size], split)
        self.out = nn.Linear(width, width, bias=False)
        self.gate_up, self.down = Products(width, [hidden, hidden], split), nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = (part.view(B, T, -1, self.size).transpose(1, 2) for part in self.qkv(self.norm1(x)))
        q, k = (F.rms_norm(part, (self.size,)) for part in (q, k))
        q, k = ((part * cos + part.roll(self.size // 2, -1) * sin).to(v.dtype) for part in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        x = x + self.out(y.transpose(1, 2).reshape(B, T, C)).to(x.dtype)
        gate, up = self.gate_up(self.norm2(x))
        out: Tensor = x + self.down(F.silu(gate) * up).to(x.dtype)
        return out


class GPT(nn.Module):
    def __init__(
        self, vocab: int, layers: int, heads: int, kv_heads: int, width: int, hidden: int, sequence: int, words: frozenset[str]
    ) -> None:  # fmt: skip
        super().__init__()
        self.factor, self.half = width**0.5 if "scale" in words else 1.0, "bf16" in words
        self.embedding = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width, hidden, heads, kv_heads, "split" in words) for _ in range(layers))
        self.norm, self.head = Norm(width), nn.Linear(width, vocab, bias=False)
        nn.init.normal_(self.head.weight, std=0.02)
        size = width // heads
        angles = torch.outer(torch.arange(sequence).float(), 10000.0 ** (-torch.arange(0, size, 2).float() / size))
        self.register_buffer("cos", torch.cat((angles.cos(), angles.cos()), -1), persistent=False)
        self.register_buffer("sin", torch.cat((-angles.sin(), angles.sin()), -1), persistent=False)

    def features(self, tokens: Tensor) -> Tensor:
        """What the head reads, [B, T, C]."""
        x = self.embedding(tokens)
        x = x.bfloat16() if self.half else x
        x = x * self.factor if self.factor != 1.0 else x
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        out: Tensor = self.norm(x)
        return out

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.features(tokens))
        return out


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def into_gradient(logits_RV: Tensor, targets_R: Tensor, weight: float) -> Tensor:
    """The sum of cross entropies; the logits become its gradient times `weight`."""
    logits = logits_RV.float()
    below = logits - logits.amax(1, keepdim=True)
    total = below.exp().sum(1, keepdim=True)  # keepdim: Inductor's pattern of an online softmax has it
    target = targets_R[:, None]
    hit = torch.arange(logits.shape[1], device=logits.device) == target
    loss = (total.log() - below.gather(1, target)).sum()
    logits_RV.copy_((below.exp() / total - hit.to(logits.dtype)) * weight)
    return loss


class ChunkedLoss(torch.autograd.Function):
    """Head and cross entropy by `rows` tokens at a time; gradients are computed in the forward, times `weight`, and the backward returns them."""

    @staticmethod
    def forward(
        ctx: Any, x_NC: Tensor, head_VC: Tensor, targets_N: Tensor, chunk: tuple[int, Any], weight: float
    ) -> Tensor:
        rows, kernel = chunk
        on = x_NC.device.type
        dtype = torch.get_autocast_dtype(on) if torch.is_autocast_enabled(on) else head_VC.dtype
        x, head = x_NC.to(dtype), head_VC.to(dtype)
        dx, dhead, loss = torch.empty_like(x), None, x.new_zeros((), dtype=torch.float32)
        for x_RC, targets_R, dx_RC in zip(x.split(rows), targets_N.split(rows), dx.split(rows), strict=True):
            logits_RV = F.linear(x_RC, head)
            loss += kernel(logits_RV, targets_R, weight)
            torch.mm(logits_RV, head, out=dx_RC)
            dhead = add_product(dhead, logits_RV.T, x_RC)
        ctx.save_for_backward(dx, dhead)
        return loss * weight

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Any, ...]:
        return *ctx.saved_tensors, None, None, None


def add_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """`total` + a @ b in fp32; on a GPU without a product in the type of a between."""
    if a.is_cuda and a.dtype != torch.float32:
        if total is None:
            return torch.mm(a, b, out_dtype=torch.float32)
        return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    product = torch.mm(a, b).float()
    return product if total is None else total.add_(product)


def build(shape: dict[str, Any], variant: Variant, device: torch.device) -> tuple[GPT, Loss]:
    """The model, alike for all variants, and what it learns from."""
    torch.manual_seed(0)
    with device:
        model = GPT(**{name: shape[name] for name in ARGUMENTS}, words=variant.words)
    compiled: Callable[..., Any] = lambda call: torch.compile(call, **variant.mode)  # noqa: E731
    if "blocks" in variant.words:
        for block in model.blocks:
            block.compile(**variant.mode)
    kernel, loss_of = into_gradient, cross_entropy
    if "none" not in variant.words:  # compiled apart, without graphs: it writes into its input
        kernel, loss_of = torch.compile(into_gradient), torch.compile(cross_entropy)
    whole, features = "whole" in variant.words, model.features
    if whole and variant.rows:
        features = compiled(model.features)

    def chunked(tokens: Tensor, targets: Tensor, weight: float) -> Tensor:
        x_NC, chunk = features(tokens).flatten(0, 1), (variant.rows, kernel)
        loss: Tensor = ChunkedLoss.apply(x_NC, model.head.weight, targets.flatten(), chunk, weight / targets.numel())
        return loss

    def plain(tokens: Tensor, targets: Tensor, weight: float) -> Tensor:
        return (cross_entropy if whole else loss_of)(model(tokens), targets) * weight

    if variant.rows:
        return model, chunked
    return model, compiled(plain) if whole else plain


def gradients(model: GPT, loss: Loss, tokens: Tensor, microbatch: int, half: bool) -> float:
    """The forward and backward of a batch; its loss stays on the device until it is read."""
    parts, total = tokens.split(microbatch), torch.zeros((), device=tokens.device)
    for index, part in enumerate(parts):
        if isinstance(model, FSDPModule):  # gradients cross the ranks once a step, as dtrain's do
            model.set_requires_gradient_sync(index == len(parts) - 1)
        with torch.autocast(tokens.device.type, torch.bfloat16) if half else nullcontext():
            value = loss(part[:, :-1], part[:, 1:], 1 / len(parts))
        value.backward()
        total += value.detach()
    return total


def measure(shape: dict[str, Any], name: str, words: str, profile: str = "") -> dict[str, Any]:
    """ms of a step, the median and least of TIMED after WARM; tokens/s of this rank, GiB, seconds of the first step."""
    variant, world = parse(words), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cpu")
    if shape["on"] == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    model, loss = build(shape, variant, device)
    if world > 1:
        shard(model, variant, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    generator = torch.Generator().manual_seed(int(os.environ.get("RANK", 0)))
    half = (device.type == "cuda" or "bf16" in variant.words) and world == 1

    def batch() -> Tensor:
        tokens = torch.randint(shape["vocab"], (shape["batch"], shape["sequence"] + 1), generator=generator)
        return tokens.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tokens

    def step(tokens: Tensor) -> Tensor:
        value = gradients(model, loss, tokens, shape["microbatch"], half)
        if "clipin" not in variant.words:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return value

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    warm = [timed(device, step, [batch()]) for _ in range(WARM)]
    if "nosync" in variant.words:
        seconds = [timed(device, step, [batch() for _ in range(TIMED)]) / TIMED]
    else:
        seconds = [timed(device, step, [batch()]) for _ in range(TIMED)]
    last = float(step(batch()))
    if profile:
        with profiled.kernels(profile, f"by hand, {name}", PROFILED):
            for _ in range(PROFILED):
                step(batch())
    ms, peak = statistics.median(seconds) * 1e3, torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return {
        "name": name, "words": words, "ms": round(ms, 2), "least": round(min(seconds) * 1e3, 2), "loss": round(last, 4),
        "tokens/s": round(shape["batch"] * shape["sequence"] / ms * 1e3), "peak GiB": round(peak / 2**30, 2), "first s": round(warm[0], 1),
    }  # fmt: skip


def shard(model: GPT, variant: Variant, device: torch.device) -> None:
    """FSDP2: each block, then the rest."""
    if variant.rows or "whole" in variant.words:
        raise ValueError("chunk=N and whole are for one rank: several gather the head where the model is called.")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if device.type == "cuda" else MixedPrecisionPolicy()
    for module in (*model.blocks, model):
        fully_shard(module, mp_policy=policy)


def timed(device: torch.device, step: Callable[[Tensor], Tensor], batches: list[Tensor]) -> float:
    """Seconds until the device has done a step with each batch; the copies of the batches are not timed."""
    wait: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    began = time.perf_counter()
    for batch in batches:
        step(batch)
    wait()
    return time.perf_counter() - began


def main(shape: dict[str, Any], words: list[str]) -> None:
    rank, several, profile = os.environ.get("RANK", "0"), "WORLD_SIZE" in os.environ, ""
    if shape["on"] == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if several:
        dist.init_process_group("nccl" if shape["on"] == "cuda" else "gloo")
    for word in words:
        if word.startswith("profile="):
            profile = word.partition("=")[2]
            continue
        name, _, variant = word.partition(": ")
        try:
            row = measure(shape, name, variant, profile)
        except Exception as error:
            row = {"name": name, "words": variant, "error": f"{type(error).__name__}: {str(error)[:300]}"}
        if rank == "0":
            print(json.dumps(row), flush=True)
        profile = ""
        torch._dynamo.reset()
        gc.collect()
        if shape["on"] == "cuda":
            torch.cuda.empty_cache()
    if several:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2:])
