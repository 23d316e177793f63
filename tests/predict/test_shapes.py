"""Stages of a pipeline by arithmetic: those the model is cut into."""

import pytest
from small import plan

from dtrain.errors import WordsError
from dtrain.model import construct
from dtrain.parallel.stages import cut
from dtrain.planned import Plan
from dtrain.predict import formulas
from dtrain.predict.shapes import Shapes, stages_of


def both(*words: str) -> tuple[Plan, Shapes]:
    decided = plan("data=synthetic", *words)
    shapes = formulas.shapes(decided)
    assert shapes
    return decided, shapes


@pytest.mark.parametrize(
    "words",
    [
        ("model.layers=5", "devices=2", "mesh.pp=2", "accumulate=4"),
        (
            "model.layers=6",
            "devices=2",
            "mesh.pp=2",
            "accumulate=4",
            "pipeline.split=cost",
            "data.vocab=4000",
            "objective=next_token",
        ),
        ("model.layers=6", "devices=2", "mesh.pp=2", "accumulate=4", "pipeline.schedule=interleaved_1f1b"),
        ("model.layers=4", "devices=2", "mesh.pp=2", "accumulate=4", "pipeline.split=[1,3]"),
        ("model=cnn", "model.blocks=2", "devices=2", "mesh.pp=2", "accumulate=4"),
        ("model=mlp", "model.layers=5", "devices=4", "mesh.pp=4", "accumulate=4", "batch=16"),
    ],
)
def test_a_stage_holds_the_weights_that_it_is_cut_into(words: tuple[str, ...]) -> None:
    decided, shapes = both("strategy=ddp", *words)
    facts = formulas.facts_of(decided.data)
    model = construct(decided.model, facts=facts, seed=0)
    groups = cut(model, decided.mesh.pp * decided.pipeline.stages, decided.pipeline.split)
    sizes = [
        sum(parameter.numel() for name in group for parameter in model.get_submodule(name).parameters())
        for group in groups
    ]
    assert [sum(block.parameters * block.count for block in stage) for stage in stages_of(decided, shapes)] == sizes


def test_without_a_pipeline_there_is_one_stage() -> None:
    decided, shapes = both()
    assert stages_of(decided, shapes) == [shapes.blocks]


def test_too_few_blocks_are_refused() -> None:
    decided, _ = both("model.layers=4", "strategy=ddp", "devices=2", "mesh.pp=2", "accumulate=4")
    _, shapes = both("model.layers=1")
    with pytest.raises(WordsError, match="fewer than the 2 stages"):
        stages_of(decided, shapes)
