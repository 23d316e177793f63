"""Undoes steps: by one step that was not applied, or back to the newest checkpoint."""

import torch
from torch import nn

from dtrain.checkpoint import Checkpoint
from dtrain.checkpoint.state import TrainState
from dtrain.errors import LeaseError, StoreError
from dtrain.loop.spike import Spike
from dtrain.model import balanced, reshard
from dtrain.optim import forget


def go_back(state: TrainState, spike: Spike) -> None:
    """Undo the step of `spike`: the position is the one before it."""
    assert state.stream is not None
    state.step = spike.step - 1
    state.stream.skip((), seen=spike.first)
    for experts in balanced(state.model):
        experts.balance(torch.zeros_like(experts.load))  # forget what the step counted, and move nothing


def rewind(state: TrainState, spike: Spike, checkpoint: Checkpoint, forward: nn.Module) -> None:
    """Load the newest checkpoint, and skip the samples of `spike` when they come again; all ranks call it.

    Raises StoreError if no checkpoint can be read.
    """
    assert state.stream is not None
    try:
        checkpoint.wait()
    except LeaseError:
        raise
    except StoreError:  # the newest save failed: an older one stands
        pass
    go_back(state, spike)
    if state.optimizer:
        forget(state.optimizer)
    reshard(forward)
    if checkpoint.restore(state) is None:
        raise StoreError("on_spike=rewind: no checkpoint can be read. Type on_spike=skip and the same words again.")
    state.stream.skip([spike.first], seen=state.stream.seen)
