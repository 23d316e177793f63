"""`generate` with and without a cache of keys and values: 512 tokens of the default gpt, or of a llama of transformers of
the same size, in turn.

OMP_NUM_THREADS=1 python tests/bench/generate.py [--rounds 3] [--tokens 512] [--prompt 4] [--llama]
"""

import argparse
import statistics
import time
from contextlib import nullcontext

import torch
from torch import nn

from dtrain.model.cache import kv_cache
from dtrain.model.gpt import GPT
from dtrain.model.sampling import complete
from dtrain.objective import answer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=4)
    parser.add_argument("--llama", action="store_true")
    asked = parser.parse_args()
    model: nn.Module = GPT(vocab=256, layers=4, heads=4, width=128).eval()
    if asked.llama:
        import transformers

        sizes = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 512}
        layers = {"num_hidden_layers": 4, "num_attention_heads": 4, "max_position_embeddings": 2048}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **layers)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
    prompt = [1 + place % 250 for place in range(asked.prompt)]
    words = {"tokens": asked.tokens, "context": asked.prompt + asked.tokens, "temperature": 0.8, "seed": 0}
    ratios = []
    for _ in range(asked.rounds):
        seconds, processor, texts = [], [], []
        for cached in (False, True):
            with torch.inference_mode(), kv_cache(model) if cached else nullcontext() as cache:
                began, before = time.perf_counter(), time.process_time()
                texts.append(complete(lambda tokens: answer(model(tokens)), prompt, cache=cache, **words))
                seconds.append(time.perf_counter() - began)
                processor.append(time.process_time() - before)
        assert texts[0] == texts[1]
        ratios.append(seconds[0] / seconds[1])
        print(
            f"without {seconds[0]:.2f} s, with {seconds[1]:.2f} s, {ratios[-1]:.1f} times faster; of the CPU "
            f"{processor[0]:.2f} and {processor[1]:.2f} s, {processor[0] / processor[1]:.1f} times"
        )
    print(f"median {statistics.median(ratios):.1f}")


if __name__ == "__main__":
    main()
