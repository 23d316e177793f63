"""Keep every activation."""

from dtrain.remat import Remat


def build() -> Remat:
    return lambda blocks: None
