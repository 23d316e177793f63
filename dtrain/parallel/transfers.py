"""Stages of torch.distributed.pipelining that hold what they receive and send while it is needed. Those of torch hold a
buffer for each neighbour and microbatch from the first step on, and its schedules of several stages per rank what was
sent until the end of the step.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage


class LeanStage(PipelineStage):
    """A PipelineStage that allocates a buffer when its transfer begins, and lets go of it when the forward or backward
    that reads it begins. With `sends` it also starts its sends itself, instead of the schedule, and lets go of what it
    sent when it sends again.
    """

    sends = False
    _sent: Sequence[dist.Work] = ()

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._started(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._started(super().get_bwd_send_ops(bwd_chunk_id))

    def arrived(self) -> None:
        """Wait until what was sent has arrived. A rank reaches the transfers of its schedule without those after them
        of its neighbours, so none waits for ever.
        """
        for work in self._sent:
            work.wait()
        self._sent = ()

    def _started(self, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        if not self.sends:
            return ops
        self.arrived()
        self._sent = [op.op(op.tensor, group=op.group, tag=op.tag, group_dst=op.group_peer) for op in ops]
        return []

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        with self._without_memory():
            super()._setup_forward_recv_info(num_microbatches, has_backward)

    def _create_grad_recv_info(self, act_send_info: dict[int, list[int]]) -> tuple[Any, ...]:
        with self._without_memory():
            return super()._create_grad_recv_info(act_send_info)

    def _get_recv_ops(self, recv_infos: tuple[Any, ...]) -> list[dist.P2POp]:
        for info in recv_infos:
            if info.buffer is not None:
                info.buffer = torch.empty_like(info.buffer, device=self.device)
        return super()._get_recv_ops(recv_infos)

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[Any, ...]:
        received: tuple[Any, ...] = super()._retrieve_recv_activations(fwd_chunk_id)
        _release(self.args_recv_info[fwd_chunk_id])
        return received

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[Any, ...]:
        infos = self.grad_recv_info[bwd_chunk_id]
        for info in infos:
            if info.buffer is not None and info.buffer.is_meta:  # the next stage, on this rank, has no gradient for it
                info.buffer = torch.zeros_like(info.buffer, device=self.device)
        received: tuple[Any, ...] = super()._retrieve_recv_grads(bwd_chunk_id)
        _release(infos)
        return received

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if loss is not None and full_backward:
            loss.detach_()  # the schedule keeps it to the end of the step, and its graph the input of the stage

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        outputs = self.backward_state[bwd_chunk_id][2] if bwd_chunk_id in self.backward_state else ()
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        if self.is_last:
            for loss in outputs:
                loss.detach_()

    @contextmanager
    def _without_memory(self) -> Iterator[None]:
        device, self.device = self.device, torch.device("meta")
        try:
            yield
        finally:
            self.device = device


def _release(infos: tuple[Any, ...]) -> None:
    for info in infos:
        if info.buffer is not None:
            info.buffer = torch.empty_like(info.buffer, device="meta")
