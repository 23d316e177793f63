"""Train the model itself."""

from dtrain.adapter import Adapter


def build() -> Adapter:
    return lambda model: None
