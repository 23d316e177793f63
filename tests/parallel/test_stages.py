"""A model cut into stages: who holds what, under which names, and which models cannot be cut."""

from collections.abc import Sequence
from itertools import combinations, pairwise
from typing import Any, ClassVar

import pytest
import torch
from small import small_gpt, tokens
from torch import Tensor, nn

from dtrain.errors import WordsError
from dtrain.model import PassThrough
from dtrain.model.cnn import CNN
from dtrain.model.mlp import MLP
from dtrain.parallel.stages import cut, keep, table_of, view


class Sized(nn.Module):
    """Blocks of different weight between an embedding and a head."""

    pipeline: Any = ("embed", "layers", "head")

    def __init__(self, *widths: int, vocab: int = 1000) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, 4)
        self.layers = nn.ModuleList([nn.Linear(4, width) for width in widths])
        self.head = nn.Linear(4, 4)


def blocks(groups: Sequence[Sequence[str]]) -> list[int]:
    return [sum(name.startswith("layers.") for name in group) for group in groups]


def test_what_runs_first_and_last_goes_with_the_first_and_the_last_block() -> None:
    assert cut(small_gpt(layers=3), 2, "blocks") == [["embed", "blocks.0", "blocks.1"], ["blocks.2", "norm", "head"]]


@pytest.mark.parametrize("stages", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("split", ["blocks", "cost"])
def test_every_module_is_on_one_stage_in_the_order_it_runs(stages: int, split: str) -> None:
    model = Sized(1, 9, 2, 8, 3, 7, 4)
    groups = cut(model, stages, split)
    assert len(groups) == stages and all(blocks(groups))
    assert [name for group in groups for name in group] == ["embed", *(f"layers.{index}" for index in range(7)), "head"]


@pytest.mark.parametrize(
    ("layers", "stages", "counts"), [(4, 2, [2, 2]), (5, 2, [3, 2]), (7, 3, [3, 2, 2]), (3, 3, [1, 1, 1])]
)
def test_blocks_are_shared_out_evenly(layers: int, stages: int, counts: list[int]) -> None:
    assert blocks(cut(Sized(*[4] * layers), stages, "blocks")) == counts


def test_a_list_says_how_many_blocks_each_stage_gets() -> None:
    assert blocks(cut(Sized(*[4] * 5), 2, [1, 4])) == [1, 4]
    assert blocks(cut(Sized(*[4] * 5), 3, (2, 1, 2))) == [2, 1, 2]


def heaviest(widths: Sequence[int], counts: Sequence[int]) -> int:
    """Elements of the heaviest stage; the head goes with the last, the embedding costs nothing."""
    costs = [5 * width for width in widths]
    costs[-1] += 20
    ends = [sum(counts[: index + 1]) for index in range(len(counts))]
    return max(sum(costs[end - count : end]) for end, count in zip(ends, counts, strict=True))


@pytest.mark.parametrize("widths", [(1, 1, 1, 9), (9, 1, 1, 1), (5, 1, 1, 5, 1), (3, 8, 2, 2, 6)])
@pytest.mark.parametrize("stages", [2, 3])
def test_by_cost_the_heaviest_stage_is_as_light_as_can_be(widths: tuple[int, ...], stages: int) -> None:
    """Against every way to cut."""
    parts = blocks(cut(Sized(*widths), stages, "cost"))
    ways = [(0, *inner, len(widths)) for inner in combinations(range(1, len(widths)), stages - 1)]
    best = min(heaviest(widths, [b - a for a, b in pairwise(way)]) for way in ways)
    assert heaviest(widths, parts) == best


def test_an_embedding_costs_nothing_but_a_head_does() -> None:
    assert blocks(cut(Sized(4, 4, 4, 4, vocab=10**6), 2, "cost")) == [2, 2] or blocks(
        cut(Sized(4, 4, 4, 4), 2, "cost")
    ) == [3, 1]
    gpt = small_gpt(layers=4, vocab=400)
    assert [sum(name.startswith("blocks") for name in group) for group in cut(gpt, 2, "cost")] == [3, 1], (
        "the head of 400 words weighs two blocks"
    )
    assert [sum(name.startswith("blocks") for name in group) for group in cut(gpt, 2, "blocks")] == [2, 2]


def test_the_models_of_the_house_can_be_cut() -> None:
    mlp, cnn = (
        MLP(inputs=4, outputs=2, width=3, layers=2),
        CNN(inputs=[1, 8, 8], outputs=2, width=4, stages=2, blocks=2),
    )
    assert cut(mlp, 2, "blocks") == [["layers.0"], ["layers.1", "head"]]
    assert cut(cnn, 2, "blocks") == [["stem", "blocks.0", "blocks.1"], ["blocks.2", "blocks.3", "head"]]


def test_a_sequential_needs_no_table() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    assert cut(model, 3, "blocks") == [["0"], ["1"], ["2"]]


class Foreign(nn.Module):
    """In the manner of Hugging Face: the table is a mapping, in any order, and the modules stand one level down."""

    _pp_plan: ClassVar = {
        "model.norm": (["x"], ["x"]),
        "model.layers": (["x"], ["x"]),
        "model.embed": (["ids"], ["x"]),
        "head": (["x"], ["x"]),
    }

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed = nn.Embedding(5, 4)
        self.model.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)])
        self.model.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 5)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.model.embed(ids)
        for layer in self.model.layers:
            x = layer(x)
        logits: Tensor = self.head(self.model.norm(x))
        return logits


def test_the_plan_of_a_hugging_face_model_is_a_table_too() -> None:
    assert cut(Foreign(), 2, "blocks") == [["model.embed", "model.layers.0"], ["model.layers.1", "model.norm", "head"]]


@pytest.mark.parametrize("make", [lambda: small_gpt(layers=4), Foreign], ids=["gpt", "foreign"])
def test_stages_run_one_after_the_other_are_the_whole_model(make: Any) -> None:
    whole, parts = make(), make()
    parts.load_state_dict(whole.state_dict())
    expected, names = whole(tokens(2, 6, vocab=5)), [name for name, _ in parts.named_parameters()]
    table, _ = table_of(parts)
    stages = [view(parts, table) for _ in range(2)]
    for stage, mine in zip(stages, cut(parts, 2, "blocks"), strict=True):
        keep(stage, mine, table)
    x = tokens(2, 6, vocab=5)
    for stage in stages:
        x = stage(x)
    assert torch.equal(x, expected)
    assert [name for stage in stages for name, _ in stage.named_parameters()] == names, "names stay whole"
    assert [name for name, _ in parts.named_parameters()] == names, "a view can be cut without cutting the model"
    assert {id(p) for stage in stages for p in stage.parameters()} == {id(p) for p in parts.parameters()}, (
        "weights are shared, not copied"
    )


def test_what_is_kept_stays_and_the_rest_passes_its_first_input_on() -> None:
    model = small_gpt(layers=2)
    table, _ = table_of(model)
    keep(model, ["blocks.0"], table)
    assert [name for name, _ in model.named_parameters() if not name.startswith("blocks.0.")] == []
    assert isinstance(model.head, PassThrough)
    x = torch.ones(2)
    assert model.head(x, 3, mask=4) is x


class Scaled(Sized):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.scale = nn.Parameter(torch.ones(1))


class Around(nn.Module):
    """A model of a user's own, or an adapter, that holds nothing but another's."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)


class Tied(nn.Module):
    pipeline = ("embed", "blocks", "head")

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(4, 2), nn.Linear(2, 4)
        self.blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.head.weight = self.embed.weight


class Blockless(Bare):
    pipeline = ("linear",)


@pytest.mark.parametrize(
    ("model", "stages", "split", "said"),
    [
        (small_gpt(tied=True), 2, "blocks", "embed.weight and head.weight are one weight, and may be on two stages. Build the model untied (model.tied=false)"),
        (Tied(), 2, "blocks", "embed.weight and head.weight are one weight, and may be on two stages. Build the model untied (two parameters in its __init__)"),
        (Scaled(), 2, "blocks", "scale is in no module of the table `pipeline` of Scaled"),
        (small_gpt(layers=2), 3, "blocks", "GPT has 2 blocks, fewer than the 3 stages"),
        (Bare(), 2, "blocks", "Bare does not say where it may be cut. Give the class a table such as pipeline ="),
        (Around(Bare()), 2, "blocks", "Bare does not say where it may be cut"),
        (Blockless(), 2, "blocks", "the table of Blockless (linear) names no list of blocks to divide among 2 stages"),
        (small_gpt(layers=3), 2, (1, 1), "pipeline.split=[1, 1]: 2 numbers are needed whose sum is 3 blocks. Type pipeline.split=[2, 1]."),
        (small_gpt(layers=3), 2, (3, 0), "pipeline.split=[3, 0]"),
        (small_gpt(layers=3), 2, (1, 1, 1), "pipeline.split=[1, 1, 1]: 2 numbers"),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_cut_is_refused_by_name(model: nn.Module, stages: int, split: Any, said: str) -> None:
    names = list(model.state_dict())
    with pytest.raises(WordsError) as caught:
        cut(model, stages, split)
    assert said in str(caught.value)
    assert list(model.state_dict()) == names, "nothing was changed"
