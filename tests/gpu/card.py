"""What the card and its libraries do: versions, attention, a copy, and the products of a head by rows. Fifteen seconds.

python -m tests.gpu.card cuda        prints JSON lines; cpu: the same in small
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .loops import add_product

ATTENTION = ((32, 12, 12, 1024, 64), (2, 32, 8, 4096, 64), (2, 32, 8, 8192, 128))
"""Sequences, heads, heads of keys, tokens, size of a head: GPT-2 124M, Llama 1B, Llama 8B."""
HEADS = ((50304, 768), (128256, 2048), (128256, 4096))
"""Vocabulary and width."""
ROWS = (512, 2048, 8192, 32768)
LARGEST = 5e9
"""Bytes of the logits of a product; larger ones are left out."""


def milliseconds(call: Callable[[], Any], device: str, times: int = 5) -> float:
    """Of one call, after three."""
    wait: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None
    for _ in range(3):
        call()
    wait()
    began = time.perf_counter()
    for _ in range(times):
        call()
    wait()
    return (time.perf_counter() - began) / times * 1e3


def say(**row: Any) -> None:
    print(json.dumps(row), flush=True)


def versions(device: str) -> None:
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    say(card=name, torch=torch.__version__, cuda=torch.version.cuda, cudnn=torch.backends.cudnn.version())


def attention(device: str, size: tuple[int, ...]) -> None:
    """The backend that torch chooses, and ms of a forward and backward with each of two."""
    B, H, K, T, D = size
    q, k, v = (
        torch.randn(B, heads, T, D, device=device, dtype=torch.bfloat16, requires_grad=True) for heads in (H, K, K)
    )
    options = {"is_causal": True, "enable_gqa": H != K}
    chosen = SDPBackend(torch._fused_sdp_choice(q, k, v, **options)).name
    ms: dict[str, float | str] = {}
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        try:
            with sdpa_kernel(backend):
                ms[backend.name] = round(
                    milliseconds(lambda: F.scaled_dot_product_attention(q, k, v, **options).sum().backward(), device), 3
                )
        except RuntimeError as error:
            ms[backend.name] = str(error)[:80]
    say(attention=size, chosen=chosen, ms=ms)


def copy(device: str, count: int) -> None:
    a = torch.empty(count, dtype=torch.uint8, device=device)
    b = torch.empty_like(a)
    say(copy=count, TB_s=round(2 * count / milliseconds(lambda: b.copy_(a), device) / 1e9, 3))


def head(device: str, size: tuple[int, int], rows: int) -> None:
    """ms and TFLOP/s of the three products of a head, and of two ways to sum the third in fp32."""
    V, C = size
    draw: Callable[..., Tensor] = lambda *shape: torch.randn(*shape, device=device, dtype=torch.bfloat16)  # noqa: E731
    weight, x, gradient, total = draw(V, C), draw(rows, C), draw(rows, V), torch.zeros(V, C, device=device)
    products: dict[str, Callable[[], Any]] = {
        "logits": lambda: F.linear(x, weight),
        "dx": lambda: gradient @ weight,
        "dW": lambda: gradient.T @ x,
        "dW, then added": lambda: total.add_(gradient.T @ x),
        "dW added in the product": lambda: add_product(total, gradient.T, x),
    }
    ms = {name: milliseconds(call, device) for name, call in products.items()}
    say(
        head=f"{V} x {C}, {rows} rows",
        ms={name: round(value, 3) for name, value in ms.items()},
        TFLOP_s={name: round(2 * rows * V * C / value / 1e9, 1) for name, value in ms.items()},
    )


def main(device: str) -> None:
    small = device == "cpu"
    versions(device)
    for size in ((1, 4, 2, 64, 16),) if small else ATTENTION:
        attention(device, size)
    copy(device, 1 << (20 if small else 30))
    for size in ((512, 32),) if small else HEADS:
        for rows in (16, 64) if small else ROWS:
            if 2 * rows * size[0] <= LARGEST:
                head(device, size, rows)


if __name__ == "__main__":
    main(sys.argv[1])
