"""The shapes of dtrain's models by arithmetic: those of the models themselves, built and run."""

from collections import Counter

import pytest
from small import plan

from dtrain.predict import formulas
from dtrain.predict.shapes import LayoutBytes, Shapes
from dtrain.tracing.tracer import trace

GPT = (
    "data=synthetic",
    "objective=next_token",
    "data.vocab=96",
    "data.sequence=24",
    "model.layers=3",
    "model.width=32",
    "model.hidden=56",
)
OTHER = ("data=synthetic",)
CASES = [
    (*GPT,), (*GPT, "precision=bf16"), (*GPT, "precision=bf16_true", "model.kv_heads=2"), (*GPT, "model.tied=true", "precision=bf16"),
    (*GPT, "devices=2", "strategy=fsdp", "precision=bf16"), (*GPT, "cluster=h100x8", "strategy=fsdp", "precision=bf16", "compile=none"), (*GPT, "model=moe"), (*GPT, "model=moe", "model.shared=1", "model.active=3"),
    (*OTHER, "model=mlp"), (*OTHER, "model=mlp", "precision=bf16", "model.layers=1"), (*OTHER, "model=mlp", "precision=bf16_true"),
    (*OTHER, "model=cnn"), (*OTHER, "model=cnn", "precision=bf16", "model.blocks=2"), (*OTHER, "model=cnn", "objective=regression", "model.stages=1"),
]  # fmt: skip


def bytes_of(shapes: Shapes, way: str, *, listed: bool = False) -> float:
    kept = [block.saved[way] for block in shapes.blocks for _ in range(block.count) if block.listed or not listed]
    return sum(each.whole + each.stream + each.inside + each.logits for each in kept)


@pytest.mark.often(
    "*model.tied=true*",
    "*cluster=h100x8*",
    "*devices=2 strategy=fsdp*",
    "*model.shared=1*",
    "*model=mlp precision=bf16 *",
    "*model.blocks=2",
)
@pytest.mark.parametrize("words", CASES, ids=" ".join)
def test_arithmetic_and_a_run_without_memory_agree(words: tuple[str, ...]) -> None:
    decided = plan(*words)
    computed, seen = formulas.shapes(decided), trace(decided, real="model=moe" in words)[0]
    assert computed and not seen.unknown
    experts = "model=moe" in words  # whose router multiplies in fp32, which a weight alone does not show
    weights = [
        Counter(
            (w.shape, w.tp, w.experts, w.product and not experts, w.hidden, w.embedding)
            for block in shapes.blocks
            for w in block.weights
            for _ in range(block.count)
        )
        for shapes in (computed, seen)
    ]
    assert weights[0] == weights[1]
    assert (computed.buffers - computed.saved, computed.saved, computed.sample) == (
        seen.buffers - seen.saved + (computed.buffers - seen.buffers),
        seen.saved,
        seen.sample,
    )
    assert bytes_of(computed, "all") == pytest.approx(bytes_of(seen, "all"), rel=0.01)
    assert bytes_of(computed, "inputs") == bytes_of(seen, "inputs")
    assert bytes_of(computed, "products", listed=True) == pytest.approx(
        bytes_of(seen, "products", listed=True), rel=0.03
    )
    for figure in ("work", "backward_work", "attention_work", "recompute_work"):
        both = [sum(getattr(block, figure) * block.count for block in shapes.blocks) for shapes in (computed, seen)]
        assert both[0] == both[1], figure


def test_how_tensor_parallelism_holds_them_agrees_too() -> None:
    computed, seen = formulas.shapes(plan(*GPT)), trace(plan(*GPT))[0]
    assert computed
    for way in ("all", "products", "inputs"):
        theirs = [next(block.saved[way] for block in shapes.blocks if block.listed) for shapes in (computed, seen)]
        for layout in vars(LayoutBytes()):
            assert getattr(theirs[0], layout) == pytest.approx(getattr(theirs[1], layout), rel=0.01), (way, layout)


@pytest.mark.parametrize(
    ("words", "parameters"),
    [
        (
            ("model.layers=32", "model.width=4096", "model.heads=32", "model.kv_heads=8", "model.hidden=14336"),
            8_030_261_248,
        ),
        (
            ("model.layers=80", "model.width=8192", "model.heads=64", "model.kv_heads=8", "model.hidden=28672"),
            70_553_706_496,
        ),
        (
            ("model.layers=126", "model.width=16384", "model.heads=128", "model.kv_heads=8", "model.hidden=53248"),
            405_853_388_800,
        ),
    ],
)
def test_parameters_are_those_published(words: tuple[str, ...], parameters: int) -> None:
    """Llama 3.1 8B, 70B and 405B, as their model cards count (https://huggingface.co/meta-llama)."""
    shapes = formulas.shapes(plan("data=synthetic", "objective=next_token", "data.vocab=128256", "batch=1", *words))
    assert shapes and shapes.parameters == parameters


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("model._target_=mine.Model", "trust=[mine]"), "for a model that is not one of dtrain's"),
        (("data=text", "data.tokenizer=somewhere.json"), "before the data is read, which gives model.vocab"),
        (("data=synthetic", "model.freeze=[embedding]"), "for frozen parameters"),
        (("data=synthetic",), ""),
    ],
)
def test_what_is_not_known_here_has_no_shapes(words: tuple[str, ...], why: str) -> None:
    assert (formulas.shapes(plan(*words)) is None) == bool(why)
    assert formulas.unknown(plan(*words)) == why
