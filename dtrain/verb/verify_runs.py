"""The runs that `dtrain verify` compares, each under its name in <out>/verify.

asked   the words, stopped half way and resumed       one     one process, all samples of a step in one forward
again   `one` in an interpreter of its own            parts   one process, the batch in parts: effect of rounding
calls   up to 64 forwards of one batch
straight, split   only if `asked` differs: without the stop; one process with the microbatch of `asked`
same    only if `again` differs: `one` in a fork, which has the same hash() of text
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dtrain.build import build
from dtrain.config.facts import about
from dtrain.config.schema import Config
from dtrain.errors import DtrainError, WordsError
from dtrain.planned import BatchShape, MeshShape, PipelineShape, Plan
from dtrain.secrets import screen
from dtrain.storage import store

PLAIN: Mapping[str, Any] = {
    "strategy": {"_target_": "dtrain.strategy.single.Single"},
    "remat": {"_target_": "dtrain.remat.none.build"},
    "compile": {"_target_": "dtrain.compile.none.build"},
    "launcher": {
        "_target_": "dtrain.launcher.local.Local",
        "restarts": 0,
        "silence": 15,
        "wait": 60,
        "address": None,
        "here": None,
    },
}
"""Config of the run in one process: nothing is split, recomputed or compiled."""


FRESH = True
"""Whether `again` runs in an interpreter of its own, which takes as long as torch takes to load."""
MEMORY = re.compile(r"out of memory|can.t allocate memory|MemoryError|SIGKILL", re.IGNORECASE)
"""Messages of a rank that ran out of memory or was killed for it."""


class Failed(Exception):
    """A run of the comparison failed. `name` describes the run, `cause` is its error."""

    def __init__(self, name: str, cause: DtrainError) -> None:
        super().__init__(name)
        self.name, self.cause = name, cause


class Refused(Exception):
    """The requested run took its first steps, and refuses to go on after the stop, for the reason `cause`."""

    def __init__(self, cause: WordsError) -> None:
        super().__init__(str(cause))
        self.cause = cause


class Runs:
    """The runs of one comparison, each under its name in <out>/verify."""

    def __init__(self, plan: Plan, config: Config) -> None:
        self._plan, self.steps = plan, min(config.verify.steps, plan.steps)
        self.stop = self.steps // 2
        """The step after which the requested run is stopped and resumed; 0 if it has too few steps."""
        self.micro = plan.batch.microbatch
        self.parts: str | None = None
        self.whole = plan.objective.get("together") or plan.batch.size
        """Samples per forward in one process: the whole batch, unless the objective says how many belong together."""

    def where(self, name: str) -> str:
        return store.join(self._plan.out, "verify", name)

    def asked(self, name: str, *, stops: bool) -> None:
        plan = self._short(self._plan, name)
        if stops:
            self._launch(replace(plan, stop_after=self.stop), "the asked run")
        try:
            self._launch(plan, f"the asked run, resumed after step {self.stop}," if stops else "the asked run")
        except WordsError as error:
            if not stops:
                raise
            raise Refused(error) from error

    def one(self) -> None:
        """Run twice in one process, with the largest part of the batch that fits in memory."""
        sizes = [size for size in range(self.whole, 0, -1) if self.whole % size == 0]
        for size in sizes:
            plan = self._short(_on_one(self._plan, size), "one")
            part = max((each for each in range(1, size) if size % each == 0), default=None)
            others: dict[str, dict[str, Any]] = {
                self.where("again"): {"microbatch": size, "fresh": FRESH},
                self.where("calls"): {"microbatch": size, "calls": True},
            }
            others |= {self.where("parts"): {"microbatch": part}} if part else {}
            self.parts = self.where("parts") if part else None
            checkpoint = {**plan.checkpoint, "loop": plan.loop, "others": others}
            try:
                self.whole = size
                self._launch(
                    replace(plan, loop="dtrain.launcher.repeat.repeat", checkpoint=checkpoint), "the run on one process"
                )
                break
            except Failed as failed:
                if size == sizes[-1] or not MEMORY.search(str(failed.cause)):
                    raise
                screen.say(f"verify     {size} samples at once do not fit in the memory of one process")
                for name in ("one", "again", "calls", "parts"):
                    store.remove(self.where(name))

    def same(self) -> None:
        self._launch(self._short(_on_one(self._plan, self.whole), "same"), "the run on one process, again")

    def split(self) -> None:
        self._launch(
            self._short(_on_one(self._plan, self.micro), "split"), "the run on one process with the asked microbatch"
        )

    def differ(self, here: str, there: str, compute: str, *, weights: bool = True) -> bool:
        from dtrain.evaluation import parity

        return (
            parity.first_difference(parity.compare(here, there, compute, parts=self.parts, weights=weights)) is not None
        )

    def order(self) -> str:
        """Advice for GPUs, whose fast kernels may add in a different order each time."""
        fast = self._plan.backend.get("kernels") == "fast"
        return (
            " Fast GPU kernels may not be either: type backend=nccl backend.kernels=deterministic, and verify again."
            if fast
            else ""
        )

    def _short(self, plan: Plan, name: str) -> Plan:
        """The same run, stopped after a few steps; its ranks record the first step."""
        plan = quiet(plan, self.where(name))
        recording = {
            **plan.checkpoint,
            "_target_": "dtrain.evaluation.record.recorded",
            "kind": plan.checkpoint["_target_"],
            "seed": plan.seed,
        }
        # a loss that is no sum over samples would be refused: here it shows in the numbers
        objective = {**plan.objective, "_about_": {"whole": False, **about(plan.objective)}}
        return replace(plan, stop_after=self.steps, log_every=1, checkpoint=recording, objective=objective)

    def _launch(self, plan: Plan, name: str) -> None:
        try:
            launch(plan)
        except WordsError:
            raise
        except DtrainError as error:
            raise Failed(name, error) from error


def quiet(plan: Plan, out: str) -> Plan:
    """The same run under `out`, without output; its only checkpoint is the last. A fork takes the weights alone."""
    checkpoint = {**plan.checkpoint, "every": 0}
    return replace(
        plan, out=out, resume="auto", init=plan.init or plan.fork, fork=None, evaluate_every=0, evaluate_samples=1,
        checkpoint=checkpoint, loggers={}, hooks={},
    )  # fmt: skip


def _on_one(plan: Plan, micro: int) -> Plan:
    """The same plan on one rank with `micro` samples per forward and every part that could change numbers off."""
    return replace(
        plan,
        nodes=1,
        devices=1,
        mesh=MeshShape(),
        pipeline=PipelineShape(),
        tensor=dict.fromkeys(plan.tensor, "whole"),
        batch=BatchShape(plan.batch.size, micro, 1, plan.batch.size // micro),
        **PLAIN,
    )


def launch(plan: Plan) -> None:
    store.write(store.join(plan.out, "plan.yaml"), plan.document().encode())
    build(plan.launcher).launch(plan)
