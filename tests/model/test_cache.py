"""A model that keeps keys and values says what it says without, for sequences of any lengths."""

from itertools import pairwise
from typing import Any

import pytest
import torch
import transformers
from small import PARTS, STRATEGIES, on_mesh
from torch import nn

from dtrain.build import build
from dtrain.evaluation.session import watch
from dtrain.mesh import Mesh
from dtrain.model.cache import ROOM, kv_cache
from dtrain.model.gpt import GPT
from dtrain.model.moe import MoE
from dtrain.model.sampling import answers, complete
from dtrain.objective import answer
from dtrain.parallel.order import parallelize

SIZES = {"vocab": 32, "layers": 2, "heads": 4, "width": 32}
MODELS = {
    "gpt": lambda: GPT(**SIZES), "grouped": lambda: GPT(**SIZES, kv_heads=2),
    "moe": lambda: MoE(**SIZES, experts=4, active=2),
}  # fmt: skip


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> nn.Module:
    made = MODELS[request.param]().eval()
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.2, generator=draw)
    return made


@torch.no_grad()
@pytest.mark.parametrize("tokens", [ROOM + 40])
def test_logits_are_those_of_the_whole_sequence(model: nn.Module, tokens: int) -> None:
    """Of two sequences whose parts are of different lengths, and padded."""
    text = torch.randint(32, (2, tokens), generator=torch.Generator().manual_seed(1))
    whole = model(text)
    cuts = [[0, 7, 8, 9, tokens // 2, tokens], [0, 3, 8, 20, tokens - 5, tokens]]
    with kv_cache(model) as cache:
        assert cache
        cache.begin(2)
        for (first, second), (third, fourth) in zip(*map(pairwise, cuts), strict=True):
            parts = [text[0, first:second], text[1, third:fourth]]
            logits = model(nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=5))
            cache.advance(torch.tensor([len(part) for part in parts]))
            for row, begin in enumerate((first, third)):
                torch.testing.assert_close(logits[row, : len(parts[row])], whole[row, begin : begin + len(parts[row])])
    torch.testing.assert_close(model(text), whole, rtol=0, atol=0)


@torch.no_grad()
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_text_is_the_same_beyond_the_context_too(model: nn.Module, temperature: float) -> None:
    words = {"tokens": 40, "context": 24, "temperature": temperature, "seed": 3, "top_p": 0.9}
    seen = list[int]()

    def watching(tokens: torch.Tensor) -> torch.Tensor:
        seen.append(tokens.shape[1])
        return model(tokens)  # type: ignore[no-any-return]

    alone = complete(model, [1, 2, 3], **words)  # type: ignore[arg-type]
    with kv_cache(model) as cache:
        assert complete(watching, [1, 2, 3], cache=cache, **words) == alone  # type: ignore[arg-type]
    assert seen == [3, *[1] * 21, *[24] * 18]


def test_another_model_keeps_nothing() -> None:
    with kv_cache(nn.Linear(2, 2)) as cache:
        assert cache is None


HF: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {"num_key_value_heads": 2}),
    "gemma3": ("Gemma3ForCausalLM", {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 6}),
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}),
}


def of_transformers(kind: str) -> nn.Module:
    name, more = HF[kind]
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    made: Any = getattr(transformers, name)
    model: nn.Module = made(made.config_class(**({"vocab_size": 64} if kind == "gpt2" else sizes), **more))
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.2, generator=draw)
    return model.eval()


def texts(mesh: Mesh, kind: str) -> tuple[list[int], list[int], list[int]]:
    """The text without a cache and with one, on a mesh; and the lengths of what the model was called with."""
    model = of_transformers(kind)
    strategy = build(STRATEGIES["fsdp"] if mesh.shape.dp_shard > 1 else PARTS["strategy"])
    precision = build(PARTS["precision"])
    parallelize(model, mesh, strategy, precision=precision, seed=0)
    whole, single = (
        watch(model, mesh, precision, step=step) for step in (8 if mesh.shape.tp > 1 else 1, mesh.shape.tp)
    )
    seen = list[int]()

    def forward(tokens: torch.Tensor) -> torch.Tensor:
        seen.append(tokens.shape[1])
        return answer((single if tokens.shape[1] == 1 else whole)(tokens))

    words: dict[str, Any] = {"tokens": 30, "context": 24, "temperature": 1.0, "seed": 3}
    alone = complete(forward, [1, 2, 3], **words)
    seen.clear()
    with kv_cache(model, padded=mesh.shape.tp > 1) as cache:
        return alone, complete(forward, [1, 2, 3], cache=cache, **words), seen


@pytest.mark.often("{}-gemma3", "{'dp_shard': 2}-llama", "{'tp': 2}-gpt2")
@pytest.mark.parametrize("kind", HF)
@pytest.mark.parametrize("degrees", [{}, {"dp_shard": 2}, {"tp": 2}], ids=str)
def test_models_of_transformers_keep_them_in_their_own_cache(kind: str, degrees: dict[str, int]) -> None:
    if kind == "gpt2" and "tp" in degrees:
        pytest.skip("it has no plan for tp")
    (one, *_) = on_mesh(lambda mesh: texts(mesh, kind))
    for alone, kept, seen in on_mesh(lambda mesh: texts(mesh, kind), **degrees):
        assert alone == kept == one[0]
        assert seen == [3, *[1] * 21, *[24] * 8]


def test_models_that_do_not_decode_keep_nothing() -> None:
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "vocab_size": 9,
    }
    for model in (
        transformers.BertForMaskedLM(transformers.BertConfig(**sizes)),
        transformers.LlamaModel(transformers.LlamaConfig(**sizes)),
    ):
        with kv_cache(model) as cache:
            assert cache is None
    recurrent = transformers.MambaConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, state_size=2)
    with kv_cache(transformers.MambaForCausalLM(recurrent), padded=True) as cache:
        assert cache is None
    with kv_cache(of_transformers("llama")) as cache, pytest.raises(ValueError, match="of one sequence"):
        assert cache
        cache.begin(2)


@torch.no_grad()
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_prompts_of_a_batch_are_answered_as_each_alone(model: nn.Module, temperature: float) -> None:
    """With a cache and without, beyond the context too, and with answers that end early."""
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 1, 2, 3], [1, 2]]
    words = {"tokens": 24, "context": 20, "temperature": temperature, "seed": 3, "ends": {11, 12, 13, 14}}
    alone = [answers(model, [prompt], first=number, **words)[0] for number, prompt in enumerate(prompts)]  # type: ignore[arg-type]
    assert answers(model, prompts, **words) == alone  # type: ignore[arg-type]
    with kv_cache(model) as cache:
        assert answers(model, prompts, cache=cache, **words) == alone  # type: ignore[arg-type]
