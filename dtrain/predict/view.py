"""The mesh as predictions see it: who is on which axis, and how one rank of each pipeline stage
holds and computes its part.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from dtrain.config.facts import fact
from dtrain.planned import Plan
from dtrain.predict.shapes import Block, Shapes, Types, Weight, stages_of, types_of
from dtrain.predict.state_bytes import Holding, holding_of


@dataclass(frozen=True)
class Group:
    """The ranks of an axis: `size` of them, `stride` apart."""

    size: int
    stride: int


def groups(plan: Plan) -> Mapping[str, Group]:
    """Of every axis that collectives go over. dp_shard holds cp, because parameters are sharded over both; batch is all
    that shares gradients.
    """
    mesh = plan.mesh
    shards = mesh.dp_shard * mesh.cp
    return {
        "tp": Group(mesh.tp, 1),
        "cp": Group(mesh.cp, mesh.tp),
        "ep": Group(mesh.ep, mesh.tp),
        "expert_shard": Group(mesh.batch // mesh.ep, mesh.tp * mesh.ep),
        "dp_shard": Group(shards, mesh.tp),
        "dp_replicate": Group(mesh.dp_replicate, mesh.tp * shards),
        "batch": Group(mesh.batch, mesh.tp),
        "pp": Group(mesh.pp, mesh.tp * mesh.batch),
        "world": Group(mesh.ranks, 1),
    }


@dataclass(frozen=True)
class View:
    """Of the first rank of the stages that `rank` of the pipeline holds; 0 where there is no pipeline."""

    plan: Plan
    shapes: Shapes
    rank: int

    @cached_property
    def groups(self) -> Mapping[str, Group]:
        return groups(self.plan)

    @cached_property
    def holding(self) -> Holding:
        return holding_of(self.plan)

    @cached_property
    def types(self) -> Types:
        return types_of(self.plan)

    @cached_property
    def every(self) -> list[tuple[Block, ...]]:
        """The blocks of every stage of the pipeline."""
        return stages_of(self.plan, self.shapes)

    @cached_property
    def stages(self) -> dict[int, tuple[Block, ...]]:
        """The blocks of each stage of this rank."""
        owners = self.plan.pipeline.owners(self.plan.mesh.pp) if self.plan.mesh.pp > 1 else [0]
        return {index: self.every[index] for index, owner in enumerate(owners) if owner == self.rank}

    @cached_property
    def blocks(self) -> list[tuple[Block, int]]:
        """Each with how many of it the backward computes again."""
        found, index, keeps = list[tuple[Block, int]](), 0, fact(self.plan.remat, "keeps")
        share = 1.0 if keeps == "all" else float(fact(self.plan.remat, "share", 0.0))
        for block in (block for stage in self.stages.values() for block in stage):
            places = range(index, index + block.count) if block.listed else range(0)
            found.append(
                (block, block.grad_out * sum(int((place + 1) * share) == int(place * share) for place in places))
            )
            index += len(places)
        return found

    @cached_property
    def weights(self) -> list[Weight]:
        """Trained ones, in the order of the model; equal ones as often as they are."""
        return [
            weight for block, _ in self.blocks for _ in range(block.count) for weight in block.weights if weight.trained
        ]

    @property
    def stream(self) -> int:
        """Bytes of a number of a gathered weight, of its gradient before it is reduced, and of what flows from block to
        block.

        FSDP2 casts weights when it gathers them; autocast alone leaves what flows in the type of the weights.
        """
        return self.types.compute if self.holding.shards else self.types.param

    @property
    def rows(self) -> float:
        """Samples of a forward, as far as this rank holds their tokens."""
        return self.plan.batch.microbatch / self.plan.mesh.cp

    @property
    def reduces(self) -> int:
        """How often gradients cross the data axes in a step."""
        return self.plan.batch.accumulate if self.holding.every and self.plan.mesh.pp == 1 else 1
