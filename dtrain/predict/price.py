"""The price of a run: its hours x its GPUs, or its nodes where they have none, x `cluster.price`, in that currency.

dtrain plan cluster=h100x8 cluster.price=2.5 nodes=2
"""

from collections.abc import Mapping
from typing import Any

from dtrain.planned import Plan
from dtrain.predict.prediction import Prediction


def cost(seconds: float, cluster: Mapping[str, Any], *, world: int, nodes: int) -> float | None:
    """Price of `world` ranks for some seconds; None if the price of the cluster is not known."""
    price = cluster.get("price")
    return None if price is None else float(seconds * (world if cluster["gpus"] else nodes) * price / 3600)


def price_of(plan: Plan, seconds: float) -> float | None:
    """Price of `seconds` of a run; None if `cluster.price` is not known."""
    return cost(seconds, plan.cluster, world=plan.world, nodes=plan.nodes)


def predicted(plan: Plan, prediction: Prediction) -> float | None:
    """Price of all steps; None if `cluster.price` or the time of a step is not known."""
    return price_of(plan, prediction.time.seconds * plan.steps) if prediction.time else None


def stated(plan: Plan, prediction: Prediction) -> dict[str, float]:
    """The predicted price for tools; empty if it is not known."""
    price = predicted(plan, prediction)
    return {} if price is None else {"price": price}


def amount(price: float) -> str:
    """1,234 or 0.0123"""
    return f"{price:,.0f}" if price >= 100 else f"{price:.3g}"


def clause(plan: Plan, seconds: float) -> str:
    """Price of `seconds` of a run as a clause after its time; empty if it is not known."""
    price = price_of(plan, seconds)
    return "" if price is None else f", at a price of {amount(price)} (cluster.price={plan.cluster['price']:g})"
