"""Compares targets with inputs that are tokens: whether they are the inputs or the next tokens; shifts the former."""

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from dtrain.data import IGNORE, Batch
from dtrain.errors import WordsError

ENOUGH = 8
"""The number of targets from which agreement is not a coincidence: a masked language model keeps one in ten of its
targets.
"""


def copies(batch: Batch) -> bool:
    """Whether all targets that count equal the input at their own position. False if they also equal the next input, as
    with a repeated token.
    """
    targets = batch["targets"]
    return any(
        _agree(targets, tokens) and not _agree(targets[:, :-1], tokens[:, 1:], least=0) for tokens in _tokens(batch)
    )


def leads(batch: Batch) -> bool:
    """Whether all targets that count equal the next input. False if they also equal the input at their own position."""
    targets = batch["targets"]
    return any(
        _agree(targets[:, :-1], tokens[:, 1:]) and not _agree(targets, tokens, least=0) for tokens in _tokens(batch)
    )


def next_targets(batch: Batch) -> Tensor:
    """Targets shifted one position to the left; the last of each sample does not count. Raises WordsError if they are
    not rows of tokens, or are shifted already.
    """
    targets = batch["targets"]
    if not isinstance(targets, Tensor) or targets.ndim != 2 or targets.is_floating_point():
        raise WordsError("data.shift=true: the targets must be rows of tokens. Leave it out.")
    if leads(batch):
        raise WordsError("data.shift=true: the targets of these samples are the next tokens already. Leave it out.")
    return F.pad(targets[:, 1:], (0, 1), value=IGNORE)


def _tokens(batch: Batch) -> Iterator[Tensor]:
    """The inputs that may be tokens, with one target per token."""
    inputs, targets = batch["inputs"], batch["targets"]
    if isinstance(targets, Tensor) and targets.ndim == 2 and not targets.is_floating_point():
        for part in inputs.values() if isinstance(inputs, Mapping) else [inputs]:
            if isinstance(part, Tensor) and part.shape == targets.shape and not part.is_floating_point():
                yield part


def _agree(targets: Tensor, tokens: Tensor, least: int = ENOUGH) -> bool:
    counts = targets != IGNORE
    return int(counts.sum()) >= least and torch.equal(targets[counts], tokens[counts].to(targets.dtype))
