"""Tokens of a chunk of the loss, of which `objective.chunk=auto` leaves the choice to the memory of a rank."""

from dataclasses import replace

from dtrain.build import build
from dtrain.cluster import Cluster
from dtrain.config import files
from dtrain.config.facts import Part
from dtrain.planned import Plan
from dtrain.predict import formulas
from dtrain.predict.budget import budget_of
from dtrain.predict.chunks import rows_of
from dtrain.predict.memory import memory
from dtrain.predict.shapes import Chunk, Shapes

STAND_IN = "h100x8"
"""The cluster that a GPU is taken to be of that no word describes, but for its memory."""


def machine_of(part: Part, cluster: Cluster) -> Part:
    """The machine of a plan, or a stand-in for a GPU that is not listed."""
    return part or {**files.node("cluster", STAND_IN), "gpus": cluster.gpus, "memory": cluster.memory}


def decided(plan: Plan, cluster: Cluster) -> Plan:
    """The plan with a number of tokens, where arithmetic knows the shapes of its model; else each loss decides by
    itself.
    """
    if plan.objective.get("chunk") != "auto" or (shapes := formulas.shapes(plan)) is None:
        return plan
    made = sized(plan, shapes, budget_of(plan, build(machine_of(plan.cluster, cluster))))
    rows, micro = made.objective["chunk"], plan.batch.microbatch * shapes.tokens // plan.mesh.cp
    why = {"objective.chunk": f"{rows} (auto: of {micro:,} tokens of a microbatch)"} if rows else {}
    return replace(made, why={**made.why, **why})


def sized(plan: Plan, shapes: Shapes, budget: float) -> Plan:
    """The same. `budget`: bytes that a rank may use, of which logits get half of what is left without them."""
    chunk = next((block.chunk for block in shapes.blocks if block.chunk), None)
    if plan.objective.get("chunk") != "auto":
        return plan
    if chunk is None:
        return _with(plan, 0)
    rows = rows_of(plan, chunk, headroom=float("inf"))
    if plan.device == "cuda" and _bytes(plan, chunk, rows) > (budget - memory(_with(plan, rows), shapes).peak) / 2:
        rows = rows_of(plan, chunk, budget - memory(_with(plan, 1), shapes).peak)
    return _with(plan, rows)


def _with(plan: Plan, rows: int) -> Plan:
    return replace(plan, objective={**plan.objective, "chunk": rows})


def _bytes(plan: Plan, chunk: Chunk, rows: int) -> float:
    """Of the logits of a chunk on a rank."""
    return rows * chunk.vocabulary * chunk.bytes / (plan.mesh.tp if chunk.split else 1)
