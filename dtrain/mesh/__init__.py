"""The live mesh of one run: who this rank is, and the process groups of its axes.

The ranks of one pipeline stage are seen in several ways, each a torch DeviceMesh over the same ranks in the same order.
A view is made when it is first asked for; all ranks ask for the same views in the same order.

    stored     pp, dp_replicate, dp_shard x cp, tp      where parameters lie: cp holds shards like dp_shard
    experts    pp, data x cp / ep, ep, tp               where the parameters of experts lie
    computed   pp, data, cp, tp                         who works on which samples, and on which part of their sequence
    batch      pp, data x cp, tp                        over whom losses, counts and the gradients of copies are summed
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dtrain.errors import StoreError
from dtrain.planned import AXES, MeshShape


class Mesh:
    """`data_rank` of `data_ranks`: this rank's slice of every batch; `batch_ranks`: the ranks that share the gradients
    of one copy of the model.
    """

    def __init__(self, shape: MeshShape, *, device: str) -> None:
        self.shape = shape
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()
        index = None if device == "cpu" else torch.accelerator.current_device_index()
        self.device = torch.device(device) if index is None else torch.device(device, index)
        coordinates = np.unravel_index(self.rank, [getattr(shape, axis) for axis in AXES])
        self.coordinate = dict(zip(AXES, map(int, coordinates), strict=True))
        """axis -> the coordinate of this rank"""
        self.data_ranks, self.batch_ranks, self.stage_ranks = shape.data, shape.batch, shape.batch * shape.tp
        self.batch_rank = self.rank // shape.tp % shape.batch
        self.data_rank = self.coordinate["dp_replicate"] * shape.dp_shard + self.coordinate["dp_shard"]
        shards = shape.dp_shard * shape.cp
        self._views = {
            "stored": {"pp": shape.pp, "dp_replicate": shape.dp_replicate, "dp_shard": shards, "tp": shape.tp},
            "experts": {"pp": shape.pp, "expert_shard": shape.batch // shape.ep, "ep": shape.ep, "tp": shape.tp},
            "computed": {"pp": shape.pp, "data": shape.data, "cp": shape.cp, "tp": shape.tp},
            "batch": {"pp": shape.pp, "batch": shape.batch, "tp": shape.tp},
        }
        self._made: dict[str, DeviceMesh] = {}

    @property
    def replica_coords(self) -> Mapping[str, int]:
        """The number of this rank's copy of a tensor that is split over other axes: among the ranks of the batch, of
        tp, and of those with the same experts.
        """
        return {"batch": self.batch_rank, "tp": self.coordinate["tp"], "expert_copy": self.batch_rank // self.shape.ep}

    def axis(self, *names: str, view: str = "stored") -> DeviceMesh:
        """The DeviceMesh of one or several axes of a view, outer first."""
        if view not in self._made:
            names_of_axes, sizes = tuple(self._views[view]), tuple(self._views[view].values())
            self._made[view] = init_device_mesh(self.device.type, sizes, mesh_dim_names=names_of_axes)
        return self._made[view][names if len(names) > 1 else names[0]]

    def group(self, axis: str) -> dist.ProcessGroup:
        """The group of the ranks that differ from this one on `axis` alone: pp, cp, tp, or `batch` for data x cp."""
        view = next(name for name in ("computed", "batch") if axis in self._views[name])
        return self.axis(axis, view=view).get_group()

    def sum(self, values: Tensor) -> Tensor:
        """`values` summed in place over the ranks of the batch; a CPU tensor travels by gloo and waits for no
        device.
        """
        if self.batch_ranks == self.world > 1:
            dist.all_reduce(values)
        elif self.batch_ranks > 1:
            dist.all_reduce(values, group=self.group("batch"))
        return values

    def sum_stages(self, values: Tensor) -> Tensor:
        """`values` summed in place over the stages of the pipeline."""
        if self.shape.pp > 1:
            dist.all_reduce(values, group=self.group("pp"))
        return values

    def max(self, values: Tensor) -> Tensor:
        """Elementwise maximum over all ranks, in place."""
        if self.world > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values

    def gather(self, value: Any) -> list[Any]:
        """A JSON value from every rank, on every rank, in rank order. It crosses as text: torch's collectives of
        objects unpickle their input.
        """
        text = bytearray(json.dumps(value).encode())
        if self.world == 1:
            return [json.loads(text)]
        sizes = torch.zeros(self.world, dtype=torch.int64)
        sizes[self.rank] = len(text)
        dist.all_reduce(sizes)
        mine = torch.frombuffer(text.ljust(int(sizes.max())), dtype=torch.uint8)
        texts = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(texts, mine)
        return [json.loads(each.numpy().tobytes()) for each in texts]  # behind the shorter ones are blanks

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier()

    def on_all(self, what: str, act: Callable[[], Any]) -> list[Any]:
        """Run `act` on each rank. An error of any rank is raised on all, as text, so that they stop together. Raises
        StoreError.
        """
        error, answer = None, None
        try:
            answer = act()
        except (StoreError, OSError) as failure:
            error = str(failure)
        answers = self.gather((error, answer))
        for rank, (failed, _) in enumerate(answers):
            if failed:
                raise StoreError(f"cannot {what}: rank {rank}: {failed}" if self.world > 1 else failed)
        return [answer for _, answer in answers]

    def on_rank_0(self, what: str, act: Callable[[], Any]) -> Any:
        """The result of `act` on rank 0, on every rank."""
        return self.on_all(what, act if self.rank == 0 else lambda: None)[0]

    # letters: what threads tell each other while the ranks compute, because collectives are the loop's

    def kv_set(self, key: str, value: str) -> None:
        """Set a key for the other ranks. Raises torch's DistError, a RuntimeError, when the rendezvous store is
        gone.
        """
        self._letters.set(key, value)

    def kv_get(self, keys: Sequence[str]) -> list[str] | None:
        """The values of these keys, or None while one is missing, without waiting. Raises as `kv_set`."""
        if not self._letters.check(list(keys)):
            return None
        return [value.decode() for value in self._letters.multi_get(list(keys))]

    def kv_delete(self, *keys: str) -> None:
        """Delete keys that all ranks have read."""
        for key in keys:
            self._letters.delete_key(key)

    @property
    def timeout(self) -> float:
        """Seconds after which a rank that does not answer is lost."""
        return float(self._letters.timeout.total_seconds())

    @cached_property
    def _letters(self) -> Any:
        """Another connection to the rendezvous store: a wait on the main one locks it."""
        group: Any = dist.group.WORLD
        return group.get_group_store().clone()
