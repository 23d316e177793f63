"""strategy.reduce=auto: gradients cross ranks in every microbatch, after which a rank keeps its shard alone, where the
compute of a microbatch hides that; otherwise in the last one.
"""

from collections.abc import Mapping
from typing import Any

from dtrain.cluster import Cluster
from dtrain.config.facts import fact
from dtrain.config.schema import Config
from dtrain.predict.shapes import BYTES
from dtrain.predict.time import LINK


def reduced(config: Config, cluster: Cluster, draft: Mapping[str, Any]) -> Mapping[str, Any]:
    """Decide when gradients cross ranks."""
    part = draft["strategy"]
    if part.get("reduce") != "auto":
        return {}
    several = draft["batch"].accumulate > 1
    return {"strategy": {**part, "reduce": "every" if several and _hides(config, draft) else "last"}}


def _hides(config: Config, draft: Mapping[str, Any]) -> bool:
    """Whether the products of a microbatch take longer than to gather its weights twice and to reduce its gradients:
    both are proportional to the parameters, which cancel out.
    """
    machine, mesh, types = draft["cluster"], draft["mesh"], draft["precision"]
    tokens = config.data.get("sequence")
    if draft["device"] != "cuda" or mesh.pp > 1 or not machine or not isinstance(tokens, int):
        return False
    flops = machine["flops"].get(fact(types, "flops", fact(types, "compute")), machine["flops"]["fp32"])
    compute = 6 * tokens * draft["batch"].microbatch / mesh.cp / (flops * machine["efficiency"])
    nodes = mesh.dp_shard * mesh.cp * mesh.tp > draft["devices"]
    way = min(machine["intra_node"], draft["devices"] * machine["inter_node"]) if nodes else machine["intra_node"]
    moved = 2 * BYTES[fact(types, "compute")] + BYTES[fact(types, "reduce")]
    return bool(compute > moved / (way * LINK))
