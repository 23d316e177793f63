"""When gradients cross ranks: in every microbatch where that takes no longer, because it takes less memory."""

import pytest
from small import CPUS, composed

from dtrain.planned import Plan
from dtrain.predict.formulas import shapes
from dtrain.predict.prediction import Prediction, predict
from dtrain.resolve import resolve

MODEL = "data=synthetic data.vocab=32000 model.layers=32 model.width=4096 model.heads=32 remat=full cluster=h100x8 strategy=fsdp"


def planned(words: str) -> Plan:
    return resolve(composed(*words.split()), CPUS)


def predicted(words: str) -> Prediction:
    plan = planned(words)
    known = shapes(plan)
    assert known
    return predict(plan, known)


@pytest.mark.parametrize(
    ("words", "reduce"),
    [
        (f"{MODEL} data.sequence=4096 batch=64 microbatch=2", "every"),
        (f"{MODEL} data.sequence=4096 batch=64 microbatch=2 strategy.reduce=last", "last"),
        (f"{MODEL} data.sequence=4096 batch=16 microbatch=2", "last"),  # there is one microbatch
        (f"{MODEL} data.sequence=512 batch=64 microbatch=1", "last"),  # which is over before the gradients are sent
        (f"{MODEL} data.sequence=4096 nodes=16 batch=512 microbatch=2 cluster.inter_node=1e9", "last"),
        (f"{MODEL} data.sequence=4096 batch=64 mesh.pp=2", "last"),
        ("data=synthetic strategy=fsdp devices=2 batch=8 accumulate=2", "last"),
        ("data=synthetic strategy=zero2 devices=2 batch=8 accumulate=2", None),
    ],
)
def test_gradients_cross_in_every_microbatch_that_hides_it(words: str, reduce: str | None) -> None:
    assert planned(words).strategy.get("reduce") == reduce


def test_it_takes_less_memory_and_no_more_time() -> None:
    words = f"{MODEL} data.sequence=4096 batch=64 microbatch=2"
    every, last = predicted(words), predicted(f"{words} strategy.reduce=last")
    assert every.memory.peak < 0.75 * last.memory.peak
    assert every.time and last.time
    assert every.time.seconds < 1.02 * last.time.seconds
