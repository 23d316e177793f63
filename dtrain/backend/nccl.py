"""Collectives between GPUs. Tensors on the CPU still go through gloo, so control messages never wait for a device."""

import os
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from dtrain.backend import process_group


@dataclass(frozen=True)
class Nccl:
    """`timeout` in seconds, of every collective. The rank's GPU is LOCAL_RANK."""

    timeout: float

    def open(self) -> AbstractContextManager[None]:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        return process_group("cpu:gloo,cuda:nccl", timeout=self.timeout)
