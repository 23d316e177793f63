"""The Plan: everything that was decided, and nothing that was not. Frozen, printable, hashable, saved as plan.yaml.

See one with `python -m dtrain plan strategy=fsdp nodes=2 devices=2`.
"""

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import yaml

from dtrain.config import files
from dtrain.config.facts import Part as Part
from dtrain.config.facts import about, fact
from dtrain.config.period import Period
from dtrain.config.structure import COUNT, MAPPING, Optional

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Mesh axes, outer to inner: outer ones cross nodes, inner ones stay inside a node. `ep` is no axis of its own but a
second view of the ranks that dp_replicate, dp_shard and cp make: its groups are neighbours among them.
"""

SHAPE = {
    "batch": {"size": COUNT}, "loggers?": MAPPING, "hooks?": MAPPING, "figures?": MAPPING,
    **{f"{name}?": Optional(MAPPING) for name in ("model", "adapter", "data", "objective", "optim", "schedule",
    "strategy", "precision", "checkpoint", "launcher")},
}  # fmt: skip
"""Of plan.yaml, as far as every version has it."""


@dataclass(frozen=True)
class MeshShape:
    """Degree of each axis; the product of the first five is the number of ranks, `ep` divides data x cp."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    @property
    def ranks(self) -> int:
        return self.pp * self.batch * self.tp

    @property
    def batch(self) -> int:
        """Ranks that see different samples, or different parts of them: gradients are averaged over these."""
        return self.data * self.cp

    @property
    def data(self) -> int:
        """Ranks that see different samples."""
        return self.dp_replicate * self.dp_shard


@dataclass(frozen=True)
class PipelineShape:
    """`stages` per rank; `layout` says where they are: `loop`, rank r holds r, r + pp, ...; `v`, it holds r and 2 pp -
    1 - r.
    """

    schedule: str = "1f1b"
    stages: int = 1
    layout: str = "loop"
    split: str | tuple[int, ...] = "blocks"
    order: Part = field(default_factory=dict, hash=False)
    """The dtrain.parallel.schedule.Schedule behind the word; none: as the word's file has it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "order", self.order or files.node("pipeline", self.schedule))

    @property
    def waits(self) -> bool:
        """Whether the backward of a microbatch may follow forwards of others in the last stage, or run in two parts."""
        return self.stages > 1 or fact(self.order, "keeps") == "all" or bool(fact(self.order, "splits_backward"))

    def owners(self, pp: int) -> list[int]:
        """The rank of each stage, of `pp`."""
        if self.layout == "v":
            return [min(stage, 2 * pp - 1 - stage) for stage in range(pp * self.stages)]
        return [stage % pp for stage in range(pp * self.stages)]

    def sizes(self, costs: Sequence[int], stages: int) -> list[int]:
        """How many neighbouring blocks, which cost so much each, go into each of `stages`."""
        if self.split == "cost":
            return _evenly(costs, stages)
        if isinstance(self.split, str):
            return [len(costs) // stages + (index < len(costs) % stages) for index in range(stages)]
        return list(self.split)


def _evenly(costs: Sequence[int], parts: int) -> list[int]:
    """How many neighbours go into each part so that the heaviest part is as light as can be."""
    sums = [0, *itertools.accumulate(costs)]
    nothing: list[int] = []
    best: list[tuple[float, list[int]]] = [(0.0, nothing)] + [(float("inf"), nothing)] * len(costs)
    for _ in range(parts):
        row: list[tuple[float, list[int]]] = [(float("inf"), nothing)]
        for end in range(1, len(sums)):
            options = [(max(best[start][0], sums[end] - sums[start]), start) for start in range(end)]
            heaviest, start = min(options)
            row.append((heaviest, [*best[start][1], end - start]))
        best = row
    return best[-1][1]


@dataclass(frozen=True)
class BatchShape:
    """size = microbatch x data x accumulate, in samples per optimizer step over the whole world."""

    size: int
    microbatch: int
    data: int
    accumulate: int

    @property
    def local(self) -> int:
        """Samples per optimizer step on one data-parallel rank."""
        return self.microbatch * self.accumulate


@dataclass(frozen=True)
class Plan:
    """One run, decided. Ranks read this, never the command line, so they agree."""

    loop: str
    nodes: int
    devices: int
    device: str
    threads: int
    mesh: MeshShape
    pipeline: PipelineShape
    tensor: Mapping[str, str]
    context: Mapping[str, Any]
    batch: BatchShape
    steps: int
    stop_after: int | None
    time_limit: float | None
    grace: float
    seed: int
    clip: float | None
    ema: float | None
    on_spike: str
    spike: Mapping[str, Any]
    out: str
    resume: str
    init: str | None
    init_names: Any
    fork: str | None
    trust: tuple[str, ...]
    log_every: int
    evaluate_every: Period
    evaluate_samples: int | None
    evaluate_metrics: Mapping[str, Part]
    """Name of the figure, without eval_ -> a dtrain.metric.Metric, or one of torchmetrics."""
    stop: Mapping[str, Any]
    """Arguments of dtrain.evaluation.patience.Patience, which ends a run early; empty: nothing does."""
    evaluate_sets: Mapping[str, Part]
    """Name -> further held-out data."""
    tasks: Mapping[str, Any]
    """Those of lm_eval: names, path, tokenizer, shots, limit, context, batch."""
    generate: Mapping[str, Any]
    predict: Mapping[str, Any]
    launcher: Part
    backend: Part
    strategy: Part
    precision: Part
    remat: Part
    compile: Part
    model: Part
    adapter: Part
    data: Part
    objective: Part
    optim: Part
    schedule: Part
    checkpoint: Part
    loggers: Mapping[str, Part]
    hooks: Mapping[str, Part]
    cluster: Part
    """Of one node of the machine it is planned for: a dtrain.cluster.Machine."""
    why: Mapping[str, str]
    """For every choice made by `auto`: what was picked and the reason, printed by `plan`."""
    others: tuple["Plan", ...] = ()
    """The same run on fewer nodes, one plan for each number that was allowed beside `nodes`: decided before launch like
    this one.
    """

    @property
    def world(self) -> int:
        return self.nodes * self.devices

    @property
    def last_step(self) -> int:
        """The last step of this start."""
        return min(self.steps, self.stop_after or self.steps)

    @property
    def stop_seconds(self) -> float | None:
        """After so long, by the clock, the save begins."""
        return None if self.time_limit is None else self.time_limit - self.grace

    @property
    def allowed(self) -> list[int]:
        """Numbers of nodes that this run may have, ascending."""
        return sorted([self.nodes, *(other.nodes for other in self.others)])

    def on(self, nodes: int) -> "Plan":
        """The plan of the same run on `nodes` nodes."""
        return next(plan for plan in (self, *self.others) if plan.nodes == nodes)

    @property
    def tokens_step(self) -> int:
        """Prompts are filled up to a multiple of this many tokens: tp splits sequences evenly, and takes
        long over each new length.
        """
        sequence = self.data.get("sequence")
        if self.mesh.tp == 1:
            return 1
        return sequence if isinstance(sequence, int) else self.mesh.tp

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it; `from_dict` reads it back."""
        return dict(_plain(self))

    def decided(self) -> dict[str, Any]:
        """As plan.yaml has it: without the facts of words, but `figures` (figure -> lowest or highest, whichever is the
        best), which the objective and the hooks state.
        """
        parts = (self.objective, *self.hooks.values())
        figures = {name: which for part in parts for name, which in (about(part).get("figures") or {}).items()}
        others = [other.decided() for other in self.others]
        return {**_plain(self, facts=False), "figures": figures, "others": others}

    def document(self) -> str:
        """plan.yaml."""
        return yaml.dump(self.decided(), Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=120)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Plan":
        known = {field.name: data[field.name] for field in fields(cls)}
        known |= {
            "mesh": MeshShape(**data["mesh"]),
            "batch": BatchShape(**data["batch"]),
            "trust": tuple(data["trust"]),
        }
        split = data["pipeline"]["split"]
        known["pipeline"] = PipelineShape(
            **{**data["pipeline"], "split": split if isinstance(split, str) else tuple(split)}
        )
        return cls(**{**known, "others": tuple(map(cls.from_dict, data["others"]))})

    @property
    def digest(self) -> str:
        """First 12 hex digits of SHA-256 over the canonical JSON: equal plans, equal digests."""
        return hashlib.sha256(json.dumps(self.decided(), sort_keys=True).encode()).hexdigest()[:12]

    def with_loop(self, loop: str) -> "Plan":
        return replace(self, loop=loop, others=tuple(other.with_loop(loop) for other in self.others))


def _plain(node: Any, *, facts: bool = True) -> Any:
    """Mappings, lists and values alone; `facts`: with those of words."""
    if isinstance(node, str | int | float | None):  # most of them, and the other questions take longer
        return node
    if is_dataclass(node):
        node = {field.name: getattr(node, field.name) for field in fields(node)}
    if isinstance(node, Mapping):
        return {name: _plain(value, facts=facts) for name, value in node.items() if facts or name != "_about_"}
    return [_plain(value, facts=facts) for value in node] if isinstance(node, list | tuple) else node


def without_facts(value: Any) -> Any:
    """An argument of a part, of which nested parts keep their arguments alone."""
    return _plain(value, facts=False)


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Writes each value as it is, never as a reference to an equal one."""

    def ignore_aliases(self, data: Any) -> bool:
        return True
