"""The complete prediction of a plan: `python -m dtrain plan <words>`, or `python -m dtrain plan json <words>` for
tools.
"""

import itertools
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dtrain.build import build
from dtrain.cluster import Machine
from dtrain.planned import Plan
from dtrain.predict.budget import budget_of, kept
from dtrain.predict.collectives import Call, of_pipeline_ranks
from dtrain.predict.memory import Memory, memory
from dtrain.predict.schedule import bubble, first_rounds, in_flight
from dtrain.predict.shapes import Shapes
from dtrain.predict.state_bytes import saved
from dtrain.predict.time import Time, time
from dtrain.predict.work import Work, recomputed, work


@dataclass(frozen=True)
class Prediction:
    """`budget`: bytes that a rank may use; `kept`: those that others keep on its device (budget.py). `calls` are the
    collectives of pipeline rank `rank`; `bubble`: fraction of a step that a pipeline rank is idle; `in_flight`:
    microbatches in flight per stage. `machine` and `time` are None if too little is known.
    """

    shapes: Shapes
    memory: Memory
    budget: float
    kept: Mapping[str, float]
    work: Work
    checkpoint: int
    rank: int
    calls: tuple[Call, ...]
    bubble: float
    in_flight: tuple[int, ...]
    machine: Machine | None
    time: Time | None

    @property
    def fits(self) -> bool:
        return self.memory.peak <= self.budget

    def to_dict(self) -> dict[str, Any]:
        """The prediction as a JSON object."""
        figures = {name: getattr(self, name) for name in ("checkpoint", "rank", "bubble")}
        return {
            "parameters": self.shapes.parameters,
            "unknown": self.shapes.unknown,
            "memory": asdict(self.memory),
            "work": asdict(self.work),
            "time": asdict(self.time) if self.time else None,
            "machine": asdict(self.machine) if self.machine else None,
            "budget": None if self.budget == float("inf") else self.budget,
            "kept": dict(self.kept),
            **figures,
            "in_flight": list(self.in_flight),
            "fits": self.fits,
            "calls": [asdict(call) for call in self.calls],
        }


def predict(plan: Plan, shapes: Shapes) -> Prediction:
    """Predict a plan; a pure function whose cost does not depend on the number of ranks."""
    machine: Machine | None = build(plan.cluster) if plan.cluster else None
    if not shapes.blocks:
        nothing = Memory(
            parameters=0,
            gradients=0,
            optimizer=0,
            activations=0,
            buffers=0,
            peak=0,
            when="",
            stage="",
            moment={},
            host=0,
            copies=0,
            known=False,
        )
        keeps = kept(plan, machine)
        return Prediction(
            shapes=shapes,
            memory=nothing,
            budget=budget_of(plan, machine),
            kept=keeps,
            work=Work(0, 0, 0),
            checkpoint=0,
            rank=0,
            calls=(),
            bubble=0.0,
            in_flight=(),
            machine=machine,
            time=None,
        )
    predicted = memory(plan, shapes)
    calls = of_pipeline_ranks(plan, shapes)
    rank = max(range(plan.mesh.pp), key=lambda rank: sum(call.bytes for call in calls[rank]))
    pp, count, every = plan.mesh.pp, plan.batch.accumulate, tuple(itertools.chain(*calls))
    return Prediction(
        shapes=shapes,
        memory=predicted,
        budget=budget_of(plan, machine, every),
        kept=kept(plan, machine, every),
        work=work(plan, shapes),
        checkpoint=saved(plan, shapes),
        rank=rank,
        calls=calls[rank],
        bubble=bubble(plan.pipeline, pp, count, recomputed(plan, shapes)),
        in_flight=in_flight(plan.pipeline, pp, first_rounds(plan.pipeline, count, pp)) if pp > 1 else (),
        machine=machine,
        time=time(plan, shapes, predicted, machine, calls) if machine else None,
    )
