"""Keep the activations of a share of the blocks, spread evenly; of the others only their inputs."""

from collections.abc import Sequence

from torch import nn

from dtrain.errors import WordsError
from dtrain.remat import Remat, recompute_all


def build(*, share: float) -> Remat:
    """`share`: fraction of the blocks that keep all, 0 to 1. Raises WordsError outside of that."""
    if not 0 <= share <= 1:
        raise WordsError(f"remat.share={share}: a share is between 0 (as remat=full) and 1 (as remat=none).")

    def wrap(blocks: Sequence[nn.Module]) -> None:
        recompute_all([each for i, each in enumerate(blocks) if int((i + 1) * share) == int(i * share)])

    return wrap
