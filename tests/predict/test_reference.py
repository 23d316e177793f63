"""The reference of an objective in a plan: the bytes that a rank holds of it, and a sentence."""

from pathlib import Path
from typing import Any

import pytest
import small
import taught
from pool import resident
from small import mesh_of

from dtrain.loop.assemble import assemble
from dtrain.mesh.sharding import local
from dtrain.planned import Plan
from dtrain.predict import report
from dtrain.predict.memory import memory
from dtrain.predict.prediction import predict
from dtrain.tracing import shapes_of

WORDS = (
    "objective=dpo", "data=dataset", "data.dataset._target_=paired.Pairs", "data.outputs=13", "trust=[paired]", "model.layers=2", "model.width=32",
    "model.heads=2", "hook=[]", "logger=[]",
)  # fmt: skip


def held(plan: Plan) -> int:
    """Bytes of the parameters of the second model here."""
    with mesh_of(**vars(plan.mesh)) as mesh:
        reference = assemble(plan, mesh).reference
        assert reference
        return sum(local(each).nbytes for each in reference.model.parameters())


@pytest.mark.parametrize("mesh", [(), ("strategy=fsdp", "devices=2"), ("mesh.tp=2", "devices=2")])
def test_the_bytes_of_a_frozen_copy_are_those_of_its_parameters(mesh: tuple[str, ...]) -> None:
    decided = small.plan(*WORDS, *mesh)
    assert memory(decided, shapes_of(decided)).moment["reference"] == max(resident(decided.world, held, decided))


def sentence(*words: str) -> Any:
    decided = small.plan(*WORDS, *words)
    return dict(report.rows(decided, predict(decided, shapes_of(decided)))).get("reference")


def test_an_adapter_needs_no_copy() -> None:
    assert "a frozen copy of the model" in sentence()
    assert "the model without its adapter: no second copy" in sentence("adapter=lora", "init=runs/base")
    decided = small.plan(*WORDS, "adapter=lora", "init=runs/base")
    assert "reference" not in memory(decided, shapes_of(decided)).moment


def test_a_pair_has_the_tokens_of_both_rows() -> None:
    assert shapes_of(small.plan(*WORDS)).tokens == 20


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return taught.teach(tmp_path_factory.mktemp("teacher") / "run")


@pytest.mark.often("mesh1")
@pytest.mark.parametrize("mesh", [("strategy=fsdp", "devices=2"), ("mesh.tp=2", "devices=2")])
def test_the_bytes_of_a_teacher_are_those_of_its_own_shapes(mesh: tuple[str, ...], teacher: Path) -> None:
    decided = small.plan(*taught.STUDENT, f"objective.teacher={teacher}", *mesh)
    moment = memory(decided, shapes_of(decided)).moment
    assert moment["reference"] == max(resident(decided.world, held, decided)) > moment["parameters"]
    assert moment["reference's logits"] == decided.batch.microbatch * 10 * 13 * 4
    said = dict(report.rows(decided, predict(decided, shapes_of(decided))))["reference"]
    assert said.startswith(f"the teacher {teacher}: its memory is in the peak") and "a third" not in said
