"""The live mesh of one run: who this rank is, and the process groups of the axes, each built once when first asked for."""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dtrain.plan import AXES, MeshShape


class Mesh:
    """`axis("dp_shard")` is the DeviceMesh of one axis, `axis("dp_replicate", "dp_shard")` of two, outer first.

    `data_rank` of `data_ranks` says which slice of every batch is this rank's.
    """

    def __init__(self, shape: MeshShape, *, device: str) -> None:
        self.shape = shape
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()
        self.data_ranks = shape.data
        self.data_rank = self.rank  # data axes are all there is: pp, cp and tp are refused by resolve
        self.local_rank = int(os.environ.get("LOCAL_RANK", 0))
        self.device = torch.device("cuda", self.local_rank) if device == "cuda" else torch.device("cpu")
        self._mesh: DeviceMesh | None = None

    def axis(self, *names: str) -> DeviceMesh:
        if self._mesh is None:
            degrees = {axis: getattr(self.shape, axis) for axis in AXES}
            used = [axis for axis in AXES if degrees[axis] > 1 or axis in ("dp_replicate", "dp_shard")]
            self._mesh = init_device_mesh(self.device.type, tuple(degrees[axis] for axis in used), mesh_dim_names=tuple(used))
        return self._mesh[names if len(names) > 1 else names[0]]

    def sum(self, values: Tensor) -> Tensor:
        """`values` summed over the data-parallel ranks, in place; a CPU tensor travels by gloo and waits for no device."""
        if self.data_ranks > 1:
            dist.all_reduce(values)
        return values

    def max(self, values: Tensor) -> Tensor:
        """Elementwise largest over all ranks, in place."""
        if self.world > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values

    def gather(self, value: Any) -> list[Any]:
        """One JSON-like value from every rank, on every rank, in rank order."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier()
