"""A split sequence: attention and its gradients are those of the whole one, and what a part cannot say is refused."""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small import on_mesh, on_resident_mesh, small_gpt, tokens
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as named_before
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from dtrain.errors import WordsError
from dtrain.mesh import Mesh
from dtrain.model import documents
from dtrain.parallel import context as module
from dtrain.parallel import ring
from dtrain.parallel.context import Context, check
from dtrain.parallel.huggingface import adapt

METHODS = ("ring", "ulysses")
GROUP: Any = None
"""What does not communicate needs no group."""


def context_of(mesh: Mesh, method: Any) -> Context:
    return Context(mesh.group("cp"), mesh.coordinate["cp"], mesh.shape.cp, method, mesh.device)


def alone(method: Any = "ring", *, rank: int = 0, size: int = 2) -> Context:
    return Context(GROUP, rank, size, method)


def far(here: Tensor, there: Tensor) -> float:
    """Largest difference, relative to the largest value."""
    return ((here - there).abs().max() / there.abs().max()).item()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_parts_are_the_whole_and_know_their_positions(method: str, size: int) -> None:
    whole = tokens(3, 16)
    contexts = [alone(method, rank=rank, size=size) for rank in range(size)]
    positions = [context.position_ids(16) for context in contexts]
    assert torch.cat(positions, 1).sort().values.tolist() == [list(range(16))]
    for context, where in zip(contexts, positions, strict=True):
        assert where.shape == (1, 16 // size) and where.dtype == torch.int64 and context.position_ids(16) is where
        part = context.split({"inputs": whole, "targets": -whole, "weight": torch.ones(3), "note": "kept"})
        assert part["inputs"].equal(whole[:, where[0]]) and part["targets"].equal(-part["inputs"])
        assert part["weight"].shape == (3,) and part["note"] == "kept"
        assert context.position_ids(8).shape == (1, 8 // size), "of a shorter batch"


def test_under_a_causal_mask_every_rank_of_a_ring_has_the_same_work() -> None:
    work = [sum(alone(rank=rank, size=4).position_ids(16)[0].tolist()) for rank in range(4)]
    assert len(set(work)) == 1


def test_inputs_by_name_are_split_together() -> None:
    inputs = {
        "input_ids": tokens(2, 8),
        "attention_mask": torch.ones(2, 8),
        "features": torch.ones(2, 8, 5),
        "sample": torch.ones(2, 3),
    }
    part = alone().split({"inputs": inputs, "targets": tokens(2, 8)})["inputs"]
    assert {name: list(x.shape) for name, x in part.items()} == {
        "input_ids": [2, 4], "attention_mask": [2, 4], "features": [2, 4, 5], "sample": [2, 3],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        (
            tokens(2, 10),
            "mesh.cp=2: a sequence of 10 tokens does not split into 4 chunks. Give the data rows of 8 or 12 tokens: by data.sequence where the data has it, or by data.pad and data.length.",
        ),
        (tokens(2, 3), "3 tokens does not split into 4 chunks. Give the data rows of 4 tokens: by"),
        (torch.ones(4), "no dim of tokens"),
        (
            {"input_ids": tokens(1, 4), "attention_mask": torch.tensor([[1, 1, 1, 0]])},
            "attention_mask of the data hides tokens",
        ),
        ({"input_ids": tokens(1, 4), "position_ids": torch.tensor([[0, 1, 3, 4]])}, "of one document after the other"),
        ({"input_ids": tokens(1, 4), "position_ids": torch.tensor([[1, 2, 3, 4]])}, "of one document after the other"),
    ],
)
def test_what_cannot_be_split_is_refused(inputs: Any, says: str) -> None:
    with pytest.raises(WordsError, match=says):
        alone().split({"inputs": inputs, "targets": torch.ones(4)})


def of_heads(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def worst(mesh: Mesh, method: str, cases: list[tuple[bool, int, int, torch.dtype, float | None]]) -> dict[str, float]:
    """Per case and tensor, how far output and gradients of this rank's part are from those of the whole sequence."""
    context, differences = context_of(mesh, method), {}
    for causal, H, K, dtype, scale in cases:
        B, c, D = 2, 3, 5
        T = 2 * mesh.shape.cp * c
        where = context.position_ids(T)[0]
        exact = torch.float64 if dtype == torch.float32 else dtype  # in fp32 two CPUs differ by the limit
        whole = [
            of_heads(B, heads, T, D, seed=heads + seed, dtype=dtype).to(exact).requires_grad_()
            for seed, heads in enumerate((H, K, K))
        ]
        weight = of_heads(B, H, T, D, seed=9, dtype=dtype).to(exact)
        out = F.scaled_dot_product_attention(*whole, is_causal=causal, scale=scale, enable_gqa=H != K)
        (out * weight).sum().backward()
        # as models give them: a transposed view
        local = [x.detach().to(dtype)[:, :, where].transpose(1, 2).contiguous().transpose(1, 2) for x in whole]
        parts = [x.requires_grad_() for x in local]
        mine = context.attention(*parts, is_causal=causal, scale=scale, enable_gqa=H != K)
        (mine * weight[:, :, where].to(dtype)).sum().backward()
        case = f"{causal=} {H=} {K=} {dtype}"
        differences[f"{case} out"] = far(mine, out[:, :, where])
        for name, part, x in zip("qkv", parts, whole, strict=True):
            assert part.grad is not None and x.grad is not None
            differences[f"{case} d{name}"] = far(part.grad, x.grad[:, :, where])
    return differences


def in_a_mode(mesh: Mesh, method: str) -> float:
    """How far attention is from that of the whole sequence under a mode that sees every function, as a default device is one."""
    context = context_of(mesh, method)
    whole = [of_heads(2, 4, 12, 5, seed=seed, dtype=torch.float32) for seed in range(3)]
    where = context.position_ids(12)[0]
    with context.active(), torch.device("cpu"):
        mine = F.scaled_dot_product_attention(*[x[:, :, where] for x in whole], is_causal=True)
    return far(mine, F.scaled_dot_product_attention(*whole, is_causal=True)[:, :, where])


@pytest.mark.parametrize("method", METHODS)
def test_a_mode_that_sees_every_function_changes_nothing(method: str) -> None:
    assert max(on_resident_mesh(partial(in_a_mode, method=method), cp=2)) < 1e-6


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("cp", [2, 3, 4])
def test_attention_and_gradients_are_those_of_the_whole_sequence(method: str, cp: int) -> None:
    heads = [(12, 12), (12, 6), (12, 1)]
    cases = [(causal, H, K, torch.float32, None) for causal, (H, K) in product((True, False), heads)]
    cases += [(True, 12, 6, torch.float64, 0.3), (True, 12, 6, torch.bfloat16, None)]
    for differences in on_resident_mesh(partial(worst, method=method, cases=cases), cp=cp):
        for case, distance in differences.items():
            bound = 1e-14 if "float64" in case else 2e-2 if "bfloat16" in case else 2e-6
            assert distance < bound, (case, distance)


def wide(mesh: Mesh) -> float:
    """How far the ring is from the whole sequence with values of another width than the keys, as DeepSeek's are."""
    context = context_of(mesh, "ring")
    whole = [of_heads(2, 4, 12, width, seed=width, dtype=torch.float32).requires_grad_() for width in (6, 6, 4)]
    where = context.position_ids(12)[0]
    parts = [x.detach()[:, :, where].requires_grad_() for x in whole]
    out, mine = F.scaled_dot_product_attention(*whole, is_causal=True), context.attention(*parts, is_causal=True)
    weight = of_heads(2, 4, 12, 4, seed=9, dtype=torch.float32)
    (out * weight).sum().backward()
    (mine * weight[:, :, where]).sum().backward()
    pairs = [(mine, out), *((part.grad, x.grad) for part, x in zip(parts, whole, strict=True))]
    return max(far(part, x[:, :, where]) for part, x in pairs if part is not None and x is not None)


def test_values_of_another_width_than_the_keys_are_attended_to() -> None:
    assert max(on_resident_mesh(wide, cp=2)) < 2e-6


ROWS = ([7, 1, 1, 12, 3], [24], [1] * 24, [9, 6, 9])
"""Lengths of the documents of packed rows: within a chunk, over all of them, of one token, at the edges of chunks."""


def packed(mesh: Mesh, method: str, T: int = 24) -> float:
    """How far packed rows are from the same rows with a mask: output and gradients of this rank's tokens."""
    context = context_of(mesh, method)
    positions = torch.stack([torch.cat([torch.arange(length) for length in lengths]) for lengths in ROWS])
    mask = documents.mask(positions, torch.float32)
    whole = [of_heads(4, heads, T, 5, seed=heads, dtype=torch.float32).requires_grad_() for heads in (12, 6, 6)]
    context.split({"inputs": {"input_ids": positions, "position_ids": positions}})
    where = context.position_ids(T)[0]
    parts = [x.detach()[:, :, where].requires_grad_() for x in whole]
    mine = context.attention(*parts, context.documents(positions[:, where]), enable_gqa=True)
    out = F.scaled_dot_product_attention(*whole, mask, enable_gqa=True)
    out.square().sum().backward()
    mine.square().sum().backward()
    pairs = [(mine, out), *((part.grad, x.grad) for part, x in zip(parts, whole, strict=True))]
    return max(far(part, x[:, :, where]) for part, x in pairs if part is not None and x is not None)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("cp", [2, 3, 4])
def test_packed_rows_are_attended_to_by_document(method: str, cp: int) -> None:
    assert max(on_resident_mesh(partial(packed, method=method), cp=cp)) < 2e-6


class Largest(TorchDispatchMode):
    """The most elements of a tensor that an operator gives."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        self.most = max(self.most, *(x.numel() for x in tree_leaves(out) if isinstance(x, Tensor)), 0)
        return out


def largest(mesh: Mesh, method: str, T: int) -> int:
    context, part = context_of(mesh, method), (2, 4, T // mesh.shape.cp, 4)
    positions = (torch.arange(T // 2).repeat(2)[None]).expand(2, -1)
    with Largest() as mode:
        for packed in (False, True):
            context.split({"inputs": {"input_ids": positions} | ({"position_ids": positions} if packed else {})})
            mask = context.documents(context.cut(positions)) if packed else None
            q, k, v = (torch.randn(part, requires_grad=True) for _ in range(3))
            context.attention(q, k, v, mask, is_causal=not packed).sum().backward()
    return mode.most


@pytest.mark.parametrize("method", METHODS)
def test_no_tensor_of_attention_is_larger_than_its_queries(method: str) -> None:
    """Memory grows with the sequence, not with the square of it, in packed rows too."""
    assert on_resident_mesh(partial(largest, method=method, T=2048), cp=2) == [2 * 4 * 1024 * 4] * 2


@pytest.mark.parametrize("size", [2, 3, 4])
def test_pieces_are_what_a_mask_shows_each_pair_of_tokens_once(size: int) -> None:
    contexts = [alone(rank=rank, size=size) for rank in range(size)]
    places = torch.cat([context.position_ids(24) for context in contexts])
    positions = torch.stack([torch.cat([torch.arange(length) for length in lengths]) for lengths in ROWS])
    starts = torch.stack([documents.starts(positions, torch.arange(24))[:, where] for where in places])
    whole = documents.sees(documents.starts(positions, torch.arange(24)))[:, 0].int()
    for rank, source in product(range(size), repeat=2):
        seen = torch.zeros(len(ROWS), 24 // size, 24 // size, dtype=torch.int32)
        for rows, queries, keys, causal in ring.pieces_of_documents(ring.Ring(GROUP, rank, size), starts)[source]:
            block = seen[rows, queries, keys]
            block += torch.ones_like(block).tril() if causal else 1
        assert seen.equal(whole[:, places[rank]][:, :, places[source]])


def partial_sums(mesh: Mesh, method: str, run: Callable[..., Any]) -> tuple[Tensor, list[Tensor]]:
    """Loss and gradients of a small GPT: every rank's part summed, for `run(model, tokens, position_ids)` -> logits."""
    context, model = context_of(mesh, method), small_gpt(heads=4, width=16, kv_heads=2)
    part = context.split({"inputs": tokens(2, 12), "targets": tokens(2, 12, seed=1)})
    with context.active():
        loss = F.cross_entropy(
            run(model, part["inputs"], context.position_ids(12)).flatten(0, 1),
            part["targets"].flatten(),
            reduction="sum",
        )
        loss.backward()
    return mesh.sum(loss.detach()), [mesh.sum(p.grad) for p in model.parameters() if p.grad is not None]


def plainly(model: nn.Module, inputs: Tensor, position_ids: Tensor) -> Any:
    return model(inputs, position_ids=position_ids)


def again(model: nn.Module, inputs: Tensor, position_ids: Tensor) -> Any:
    return checkpoint(model, inputs, position_ids, use_reentrant=False)


@pytest.mark.parametrize(
    ("method", "run"), [("ring", plainly), ("ring", again), ("ulysses", plainly), ("ulysses", again)]
)
def test_the_ranks_of_a_gpt_sum_to_one_process(method: str, run: Any) -> None:
    model = small_gpt(heads=4, width=16, kv_heads=2)
    expected = F.cross_entropy(model(tokens(2, 12)).flatten(0, 1), tokens(2, 12, seed=1).flatten(), reduction="sum")
    expected.backward()
    for loss, gradients in on_resident_mesh(partial(partial_sums, method=method, run=run), cp=2):
        assert far(loss, expected) < 1e-6
        for gradient, parameter in zip(gradients, model.parameters(), strict=True):
            assert parameter.grad is not None and far(gradient, parameter.grad) < 5e-6


def test_under_autocast_it_computes_in_the_lower_precision() -> None:
    def work(mesh: Mesh) -> tuple[str, float]:
        context = context_of(mesh, "ring")
        q, k, v = (of_heads(1, 2, 8, 4, seed=seed, dtype=torch.float32) for seed in range(3))
        where = context.position_ids(8)[0]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = context.attention(*(x[:, :, where].requires_grad_() for x in (q, k, v)), is_causal=True)
            whole = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out.sum().backward()
        return str(out.dtype), far(out.float(), whole.float()[:, :, where])

    for dtype, distance in on_mesh(work, cp=2):
        assert dtype == "torch.bfloat16" and distance < 1e-2


class Attends(nn.Module):
    """Attention of the input to itself, by the function `by` finds."""

    def __init__(self, by: Callable[[], Callable[..., Tensor]]) -> None:
        super().__init__()
        self.by = by

    def forward(self, x_BHTD: Tensor) -> Tensor:
        return self.by()(x_BHTD, x_BHTD, x_BHTD, is_causal=True)


class Composite(nn.Module):
    """torch's own module, which calls the function inside another of torch's functions."""

    def forward(self, x_BHTD: Tensor) -> Tensor:
        torch.manual_seed(0)
        attention = nn.MultiheadAttention(4, 2, batch_first=True)
        x = x_BHTD[:, 0]
        out: Tensor = attention(x, x, x, need_weights=False)[0]
        return out[:, None]


class Again(nn.Module):
    """`of`, computed a second time in the backward."""

    def __init__(self, of: nn.Module) -> None:
        super().__init__()
        self.of = of

    def forward(self, x_BHTD: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.of, x_BHTD, use_reentrant=False)
        return out


BY_NAME = Attends(lambda: named_before)


@pytest.mark.parametrize(
    "model", [Attends(lambda: F.scaled_dot_product_attention), BY_NAME, Again(BY_NAME), Composite()]
)
@pytest.mark.parametrize("method", METHODS)
def test_every_way_to_call_the_function_is_seen(method: str, model: nn.Module) -> None:
    def work(mesh: Mesh) -> float:
        context = context_of(mesh, method)
        where = context.position_ids(8)[0]
        whole = of_heads(2, 2, 8, 4, seed=0, dtype=torch.float32).requires_grad_()
        part = whole.detach()[:, :, where].requires_grad_()
        with context.active():
            output = model(part)
            output.square().sum().backward()
            with torch.inference_mode():
                again = model(part)
        expected = model(whole)
        expected.square().sum().backward()
        assert whole.grad is not None and part.grad is not None
        return max(
            far(output, expected[:, :, where]),
            far(again, expected[:, :, where]),
            far(part.grad, whole.grad[:, :, where]),
        )

    assert max(on_mesh(work, cp=2)) < 2e-6


def test_torchs_own_module_sees_the_whole_sequence_in_evaluation_too() -> None:
    """Where it calls a fused kernel without the function, if it may."""
    torch.manual_seed(0)
    module = nn.MultiheadAttention(4, 2, batch_first=True).eval()

    @torch.no_grad()
    def work(mesh: Mesh) -> float:
        context, x = context_of(mesh, "ring"), of_heads(1, 2, 8, 4, seed=0, dtype=torch.float32)[0]
        where = context.position_ids(8)[0]
        with context.active():
            output = module(x[:, where], x[:, where], x[:, where], need_weights=False)[0]
        return far(output, module(x, x, x, need_weights=False)[0][:, where])

    assert max(on_mesh(work, cp=2)) < 2e-6


def test_a_forward_without_the_function_is_an_error_and_a_mistake_inside_stays_its_own() -> None:
    context, before = alone(), F.scaled_dot_product_attention
    with (
        pytest.raises(
            WordsError, match=r"never called F.scaled_dot_product_attention, the only place where a rank sees beyond"
        ),
        context.active(),
    ):
        nn.Linear(2, 2)(torch.ones(2))
    with pytest.raises(ZeroDivisionError), context.active():
        raise ZeroDivisionError
    assert F.scaled_dot_product_attention is before and not module._open


@pytest.mark.campaign("8 ranks")
def test_what_is_compiled_has_to_call_it_by_its_name() -> None:
    context, x = alone(), torch.ones(1, 2, 4, 4)
    with pytest.raises(Exception, match="scaled_dot_product_attention"), context.active():
        torch.compile(BY_NAME, backend="eager")(x)

    @torch.no_grad()  # with gradients torch's compiler warns of itself
    def work(mesh: Mesh) -> float:
        context, model = context_of(mesh, "ring"), small_gpt()
        compiled, whole, where = torch.compile(model, backend="eager"), tokens(2, 8), context.position_ids(8)
        expected = compiled(whole)
        with context.active():
            output = compiled(context.split({"inputs": whole})["inputs"], position_ids=where)
        return far(output, expected[:, where[0]])

    assert max(on_mesh(work, cp=2)) < 2e-6


def test_contexts_open_inside_each_other() -> None:
    outer, inner, before = alone(size=1), alone("ulysses", size=1), F.scaled_dot_product_attention
    x = torch.ones(1, 1, 2, 3)

    def both() -> None:
        with outer.active():
            F.scaled_dot_product_attention(x, x, x)
            with inner.active():
                named_before(x, x, x)
            assert F.scaled_dot_product_attention is outer._replacement
            with outer.active():
                named_before(x, x, x)
        assert F.scaled_dot_product_attention is before

    on_mesh(lambda mesh: _with_group(mesh, (outer, inner), both))


def _with_group(mesh: Mesh, contexts: tuple[Context, ...], work: Callable[[], None]) -> None:
    for context in contexts:
        context.group = mesh.group("cp")
    work()


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"attn_mask": torch.ones(4, 4)}, "attn_mask"),
        ({"dropout_p": 0.1}, "dropout_p=0.1"),
        ({"key": torch.ones(1, 2, 6, 4), "value": torch.ones(1, 2, 6, 4)}, "Pass .B, H, T, D. of one sequence"),
        ({"query": torch.ones(4, 4)}, "Pass .B, H, T, D. of one sequence"),
        ({"query": torch.ones(1, 3, 4, 4), "enable_gqa": True}, "3 query heads and 2 key heads"),
        ({"query": torch.ones(1, 4, 4, 4)}, "enable_gqa=True"),
        ({name: torch.ones(1, 2, 3, 4) for name in ("query", "key", "value")}, "3 tokens"),
    ],
)
def test_a_call_that_cannot_be_split_is_refused(changed: dict[str, Any], says: str) -> None:
    tensors = {name: torch.ones(1, 2, 4, 4) for name in ("query", "key", "value")}
    with pytest.raises(WordsError, match=says):
        alone().attention(**tensors | changed)


def test_ulysses_needs_heads_that_divide() -> None:
    x = torch.ones(1, 3, 4, 4)
    with pytest.raises(WordsError, match=r"mesh.cp=2: .* 3 heads do not divide by 2"):
        alone("ulysses").attention(x, x, x)


def hugging_face(kind: str, **changed: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 13, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4} | changed
    if kind != "GPT2":
        sizes |= {"intermediate_size": 24}
    if kind in ("Llama", "Mistral"):
        sizes |= {"num_key_value_heads": 2}
    head = "MaskedLM" if kind == "Bert" else "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
    made: nn.Module = getattr(transformers, f"{kind}{'For' if head == 'MaskedLM' else ''}{head}")(
        getattr(transformers, f"{kind}Config")(**sizes)
    )
    return made.eval()


def split_logits(mesh: Mesh, model: nn.Module, method: str, **words: Any) -> float:
    context, whole = context_of(mesh, method), tokens(2, 12)
    expected = model(whole, **words).logits
    adapt(model)
    assert far(model(whole, **words).logits, expected) == 0
    part = context.split({"inputs": whole})["inputs"]
    with context.active():
        logits = model(part, position_ids=context.position_ids(12), **words).logits
    return far(logits, expected[:, context.position_ids(12)[0]])


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("Llama", {"use_cache": False}),
        ("Llama", {}),
        ("GPT2", {"use_cache": False}),
        ("Bert", {}),
        ("Mistral", {"use_cache": False}),
    ],
)
def test_models_of_hugging_face_see_the_whole_sequence(kind: str, words: dict[str, Any]) -> None:
    model = hugging_face(kind, **({"sliding_window": 12} if kind == "Mistral" else {}))
    for method in METHODS:
        assert max(on_resident_mesh(partial(split_logits, model=model, method=method, **words), cp=2)) < 5e-6


def test_a_window_or_padding_of_hugging_face_is_refused_in_a_part_and_kept_in_the_whole() -> None:
    model, inputs = hugging_face("Mistral", sliding_window=10), tokens(2, 6)
    adapt(model)
    with pytest.raises(WordsError, match="more than causal"), alone().active():
        model(inputs, position_ids=alone().position_ids(12))
    model, padded = hugging_face("Llama"), torch.tensor([[0, 0, 1, 1, 1, 1]] * 2)
    expected = model(inputs, attention_mask=padded).logits
    adapt(model)
    assert far(model(inputs, attention_mask=padded).logits, expected) == 0
    with pytest.raises(WordsError, match="more than causal"), alone().active():
        model(inputs, attention_mask=padded)


def test_what_has_one_answer_for_a_whole_sequence_is_refused() -> None:
    context = Context(None, 0, 2, "ring")  # type: ignore[arg-type]
    with pytest.raises(
        WordsError, match=r"dim 1 of the inputs is read as 8 tokens, but the targets \[3\] are not one per token"
    ):
        context.split({"inputs": torch.zeros(3, 8, dtype=torch.int64), "targets": torch.zeros(3, dtype=torch.int64)})


def test_a_model_that_cannot_be_told_positions_is_refused() -> None:
    with pytest.raises(WordsError, match="takes no position_ids"):
        check(torch.nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("shape", "why"),
    [((2, 3, 8, 8), r"\[2, 3, 8, 8\] look like images, which have no sequence"), ((2, 64), "no dim of tokens")],
)
def test_channels_and_features_are_no_sequence(shape: tuple[int, ...], why: str) -> None:
    context = Context(GROUP, 0, 2, "ring")
    with pytest.raises(WordsError, match=why):
        context.split({"inputs": torch.zeros(shape), "targets": torch.zeros(2)})


def twice(mesh: Mesh) -> bool:
    x = torch.randn(1, 2, 4, 4, requires_grad=True)
    out = context_of(mesh, "ulysses").attention(x, x, x).sum()
    first, second = (torch.autograd.grad(out, x, retain_graph=True)[0] for _ in range(2))
    return torch.equal(first, second)


def test_a_graph_may_go_backward_twice() -> None:
    assert on_mesh(twice, cp=2) == [True, True]
