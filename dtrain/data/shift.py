"""Inputs and targets of tokens side by side: targets that are the inputs, that are the next ones, and the step from one
to the other.
"""

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from dtrain.data import IGNORE, Batch
from dtrain.errors import WordsError

ENOUGH = 8
"""The number of targets above which agreement is no coincidence: a masked language model keeps one in ten of its
targets.
"""


def copies(batch: Batch) -> bool:
    """Whether all targets that count equal the inputs at their own position, and not also those at the next, as for a
    repeated token.
    """
    targets = batch["targets"]
    return any(
        _agree(targets, tokens) and not _agree(targets[:, :-1], tokens[:, 1:], least=0) for tokens in _tokens(batch)
    )


def leads(batch: Batch) -> bool:
    """Whether all targets that count equal the inputs at the next position, and not also those at their own."""
    targets = batch["targets"]
    return any(
        _agree(targets[:, :-1], tokens[:, 1:]) and not _agree(targets, tokens, least=0) for tokens in _tokens(batch)
    )


def next_targets(batch: Batch) -> Tensor:
    """Targets shifted one position to the left; the last of each sample does not count. Raises WordsError if they are
    no row of tokens, or were shifted before.
    """
    targets = batch["targets"]
    if not isinstance(targets, Tensor) or targets.ndim != 2 or targets.is_floating_point():
        raise WordsError(
            "data.shift=true: a target is not a row of tokens, of which each could be the next one's. Leave it out."
        )
    if leads(batch):
        raise WordsError("data.shift=true: the targets of these samples are the next tokens already. Leave it out.")
    return F.pad(targets[:, 1:], (0, 1), value=IGNORE)


def _tokens(batch: Batch) -> Iterator[Tensor]:
    """The inputs that may be tokens with a target each."""
    inputs, targets = batch["inputs"], batch["targets"]
    if isinstance(targets, Tensor) and targets.ndim == 2 and not targets.is_floating_point():
        for part in inputs.values() if isinstance(inputs, Mapping) else [inputs]:
            if isinstance(part, Tensor) and part.shape == targets.shape and not part.is_floating_point():
                yield part


def _agree(targets: Tensor, tokens: Tensor, least: int = ENOUGH) -> bool:
    counts = targets != IGNORE
    return int(counts.sum()) >= least and torch.equal(targets[counts], tokens[counts].to(targets.dtype))
