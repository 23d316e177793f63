"""pipeline: each rank holds some layers; the numbers are those of one process, and beside it the data axes do as ddp does."""

from functools import partial
from typing import Any

import pytest
from pool import resident
from small import PARTS, UNEVEN, agree, few_steps, joined, on_resident_mesh

from dtrain.build import build
from dtrain.mesh import Mesh
from dtrain.model import construct
from dtrain.parallel.order import parallelize
from dtrain.planned import PipelineShape

PIPELINE = {"_target_": "dtrain.strategy.pipeline.Pipeline", "bucket_mb": 25}
UNTIED = PARTS | {"model": PARTS["model"] | {"tied": False}}
SHAPE = PipelineShape()


@pytest.mark.parametrize("data", [PARTS["data"], UNEVEN], ids=["dense", "uneven"])
def test_two_stages_are_one_process(data: dict[str, Any]) -> None:
    (reference,) = resident(1, partial(few_steps, UNTIED | {"data": data}, {}, microbatch=8))
    parts = UNTIED | {"data": data, "strategy": PIPELINE}
    for microbatch in (4, 2):
        runs = resident(2, partial(few_steps, parts, {"pp": 2}, microbatch=microbatch, pipeline=SHAPE))
        agree(joined(runs), reference)


def test_two_pipelines_share_the_batch() -> None:
    (reference,) = resident(1, partial(few_steps, UNTIED | {"data": UNEVEN}, {}, microbatch=8))
    parts = UNTIED | {"data": UNEVEN, "strategy": PIPELINE}
    runs = resident(4, partial(few_steps, parts, {"pp": 2, "dp_replicate": 2}, microbatch=2, pipeline=SHAPE))
    agree(joined([runs[0], runs[2]]), reference)
    assert [runs[0]["weights"], runs[2]["weights"]] == [runs[1]["weights"], runs[3]["weights"]], "copies stay equal"


def test_a_pipeline_of_one_rank_is_ddp() -> None:
    (reference,) = resident(1, few_steps, UNTIED, {})
    for run in resident(2, partial(few_steps, UNTIED | {"strategy": PIPELINE}, {"dp_replicate": 2}, pipeline=SHAPE)):
        agree(run, reference)


def held(mesh: Mesh) -> tuple[list[str], int]:
    model = construct(UNTIED["model"], facts={"vocab": 13}, seed=0)
    parallelize(model, mesh, build(PIPELINE), precision=build(PARTS["precision"]), seed=0, pipeline=SHAPE)
    return [name for name, _ in model.named_parameters()], sum(parameter.numel() for parameter in model.parameters())


def test_a_rank_holds_its_layers_alone_under_their_names() -> None:
    """A checkpoint of one mesh is read on another only because of the names."""
    whole = construct(UNTIED["model"], facts={"vocab": 13}, seed=0)
    names = [name for name, _ in whole.named_parameters()]
    (first, few), (last, rest) = on_resident_mesh(held, pp=2)
    assert first == [name for name in names if name.startswith(("embed", "blocks.0"))]
    assert last == [name for name in names if name.startswith(("blocks.1", "norm", "head"))]
    assert few + rest == sum(parameter.numel() for parameter in whole.parameters())
