"""The mesh as predictions see it: the groups of every axis, and the blocks, weights and types of one rank per pipeline
stage.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from dtrain.config.facts import fact
from dtrain.planned import Plan
from dtrain.predict.shapes import Block, Shapes, Types, Weight, types_of
from dtrain.predict.state_bytes import Holding, flowing, holding_of


@dataclass(frozen=True)
class Group:
    """The ranks of an axis: `size` of them, `stride` apart."""

    size: int
    stride: int


def groups(plan: Plan) -> Mapping[str, Group]:
    """The groups of every axis used by collectives. dp_shard includes cp, because parameters are sharded over both;
    batch: all ranks that average gradients.
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
    """The first rank with pipeline rank `rank` (0 without a pipeline), and its stages. `every`: the blocks of every
    pipeline stage.
    """

    plan: Plan
    shapes: Shapes
    rank: int
    every: list[tuple[Block, ...]]

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
    def stages(self) -> dict[int, tuple[Block, ...]]:
        """The blocks of each stage of this rank."""
        owners = self.plan.pipeline.owners(self.plan.mesh.pp) if self.plan.mesh.pp > 1 else [0]
        return {index: self.every[index] for index, owner in enumerate(owners) if owner == self.rank}

    @cached_property
    def blocks(self) -> list[tuple[Block, int]]:
        """The blocks of this rank, each with the number of its modules that the backward recomputes."""
        pairs, index, keeps = list[tuple[Block, int]](), 0, fact(self.plan.remat, "keeps")
        share = 1.0 if keeps == "all" else float(fact(self.plan.remat, "share", 0.0))
        for block in (block for stage in self.stages.values() for block in stage):
            places = range(index, index + block.count) if block.listed else range(0)
            again = sum(int((place + 1) * share) == int(place * share) for place in places)
            pairs.append((block, block.grad_out * again))
            index += len(places)
        return pairs

    @cached_property
    def weights(self) -> list[Weight]:
        """Trained weights of this rank in the order of the model, one entry per module."""
        modules = (block for block, _ in self.blocks for _ in range(block.count))
        return [weight for block in modules for weight in block.weights if weight.trained]

    @property
    def stream(self) -> int:
        """Bytes per element of activations between blocks."""
        return flowing(self.plan).param

    @property
    def rows(self) -> float:
        """Samples per forward, scaled by the part of their tokens on this rank."""
        return self.plan.batch.microbatch / self.plan.mesh.cp

    @property
    def reduces(self) -> int:
        """Number of gradient reductions over the data axes per step."""
        return self.plan.batch.accumulate if self.holding.every and self.plan.mesh.pp == 1 else 1


def kinds(plan: Plan, every: Sequence[tuple[Block, ...]]) -> list[Hashable]:
    """A key for each pipeline rank, equal for those that hold the same blocks between neighbours that hand on as much.
    `every`: the blocks of every pipeline stage.
    """
    if plan.mesh.pp == 1:
        return [()]
    owners, keys = plan.pipeline.owners(plan.mesh.pp), [list[Hashable]() for _ in range(plan.mesh.pp)]
    for stage, owner in enumerate(owners):
        near = [other for other in (stage - 1, stage + 1) if 0 <= other < len(owners)]
        sides = tuple((other - stage, owners[other] != owner, every[other][-1].passes) for other in near)
        keys[owner].append((id(every[stage]), sides))
    return [tuple(key) for key in keys]
