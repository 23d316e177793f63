"""The schedule of a pipeline: how many stages a rank holds and where, or what is wrong with the wish."""

from pathlib import Path

import pytest
from small import plan

from dtrain.config import files
from dtrain.errors import WordsError
from dtrain.planned import PipelineShape
from dtrain.resolve.pipeline import check_microbatches

TWO = ("data=synthetic", "mesh.pp=2", "devices=2", "batch=8")


def pipeline(*words: str) -> PipelineShape:
    return plan(*TWO, "strategy=ddp", *words).pipeline


@pytest.mark.parametrize(
    ("words", "shape"),
    [
        ((), PipelineShape("1f1b", 1, "loop", "blocks")),
        (("pipeline.schedule=gpipe", "pipeline.split=cost"), PipelineShape("gpipe", 1, "loop", "cost")),
        (("pipeline.schedule=interleaved_1f1b",), PipelineShape("interleaved_1f1b", 2, "loop", "blocks")),
        (("pipeline.schedule=looped_bfs", "pipeline.stages=1"), PipelineShape("looped_bfs", 1, "loop", "blocks")),
        (("pipeline.schedule=zbv",), PipelineShape("zbv", 2, "v", "blocks")),
        (("pipeline.schedule=dualpipev", "pipeline.split=[1,1,1,1]"), PipelineShape("dualpipev", 2, "v", (1, 1, 1, 1))),
        (("pipeline.split=[1,3]",), PipelineShape("1f1b", 1, "loop", (1, 3))),
    ],
)
def test_a_schedule_brings_its_stages_and_their_layout(words: tuple[str, ...], shape: PipelineShape) -> None:
    assert pipeline(*words) == shape


def test_the_layout_says_who_holds_a_stage() -> None:
    assert PipelineShape(stages=2).owners(3) == [0, 1, 2, 0, 1, 2]
    assert PipelineShape(stages=2, layout="v").owners(3) == [0, 1, 2, 2, 1, 0]
    assert PipelineShape().owners(2) == [0, 1]


def test_numbers_of_blocks_of_a_recipe_say_nothing_about_one_stage(tmp_path: Path) -> None:
    """As `dtrain evaluate` and `dtrain.load` have of a run over several."""
    recipe = tmp_path / "three.yaml"
    recipe.write_text("data: synthetic\nmesh: {pp: 3}\npipeline: {split: [1, 2, 1]}\n")
    assert plan(f"recipe={recipe}", "mesh.pp=1").pipeline == PipelineShape()
    with pytest.raises(WordsError, match=r"2 numbers are needed\. Type pipeline.split=blocks"):
        plan(f"recipe={recipe}", "mesh.pp=2", "devices=2")
    with pytest.raises(WordsError, match=r"pipeline\.split: the mesh has one stage"):
        plan("data=synthetic", "pipeline.split=[4]")


def test_a_list_of_blocks_survives_the_saved_plan() -> None:
    decided = plan(*TWO, "pipeline.split=[1,3]")
    assert type(decided).from_dict(decided.to_dict()) == decided


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("pipeline.schedule=1fb1",), "Type pipeline.schedule=1f1b."),
        (("pipeline.stages=2",), "pipeline.stages=2: 1f1b has 1 stage(s) on each rank. Leave it out."),
        (("pipeline.schedule=zbv", "pipeline.stages=3"), "pipeline.stages=3: zbv has 2 stage(s) on each rank"),
        (("pipeline.schedule=looped_bfs", "pipeline.stages=0"), "pipeline.stages=0"),
        (("pipeline.schedule=looped_bfs", "pipeline.stages=-1"), "pipeline.stages=-1"),
        (("pipeline.split=heavy",), "pipeline.split is blocks, cost or a list"),
        (("pipeline.split=[4]",), "pipeline.split=[4]: 2 rank(s) x 1 stage(s) = 2 numbers are needed"),
        (("pipeline.split=[0,4]",), "a list of integers, each >= 1"),
        (("pipeline.schedule=zbv", "pipeline.split=[2,2]"), "2 rank(s) x 2 stage(s) = 4 numbers are needed"),
    ],
)
def test_a_wish_that_cannot_be_is_refused_by_its_key(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(WordsError) as caught:
        pipeline(*words)
    assert message in str(caught.value)


@pytest.mark.parametrize("word", ["pipeline.schedule=gpipe", "pipeline.split=cost", "pipeline.stages=1"])
def test_a_wish_without_a_pipeline_is_refused(word: str) -> None:
    with pytest.raises(WordsError) as caught:
        plan("data=synthetic", word)
    key = word.split("=")[0]
    assert f"{key}: the mesh has one stage, mesh.pp=1. Type mesh.pp=2, or leave {key} out." in str(caught.value)


@pytest.mark.parametrize("word", files.groups()["pipeline"])
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_the_number_that_is_advised_is_accepted(word: str, pp: int) -> None:
    for count in range(1, 20):
        wrong = check_microbatches(PipelineShape(word), count, pp)
        if wrong:
            advised = int(wrong.removesuffix(".").rpartition("accumulate=")[2])
            assert check_microbatches(PipelineShape(word), advised, pp) is None, wrong
