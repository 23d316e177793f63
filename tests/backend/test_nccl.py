"""Collectives between GPUs, beside those on the CPU."""

import pytest
import torch
import torch.distributed as dist

from dtrain.backend.nccl import Nccl


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensors_of_both_devices_travel() -> None:
    with Nccl(timeout=60).open():
        for device in ("cpu", "cuda"):
            value = torch.ones(3, device=device)
            dist.all_reduce(value)
            assert value.tolist() == [1.0] * dist.get_world_size()
        assert torch.cuda.current_device() == 0
    assert not dist.is_initialized()
