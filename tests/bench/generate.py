"""`generate` with and without a cache of keys and values: 512 tokens of the default gpt, in turn.

OMP_NUM_THREADS=1 python tests/bench/generate.py [--rounds 3] [--tokens 512]
"""

import argparse
import statistics
import time
from contextlib import nullcontext

import torch

from dtrain.model.cache import kv_cache
from dtrain.model.gpt import GPT
from dtrain.model.sampling import complete


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=512)
    asked = parser.parse_args()
    model = GPT(vocab=256, layers=4, heads=4, width=128).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
    words = {"tokens": asked.tokens, "context": 2 * asked.tokens, "temperature": 0.8, "seed": 0}
    ratios = []
    for _ in range(asked.rounds):
        seconds, texts = [], []
        for cached in (False, True):
            with torch.no_grad(), kv_cache(model) if cached else nullcontext() as cache:
                began = time.perf_counter()
                texts.append(complete(model, [1, 2, 3, 4], cache=cache, **words))
                seconds.append(time.perf_counter() - began)
        assert texts[0] == texts[1]
        ratios.append(seconds[0] / seconds[1])
        print(f"without {seconds[0]:.2f} s, with {seconds[1]:.2f} s, {ratios[-1]:.1f} times faster")
    print(f"median {statistics.median(ratios):.1f}")


if __name__ == "__main__":
    main()
