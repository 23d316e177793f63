"""dtrain: say a training run in words, get the same losses on every mesh."""

__version__ = "0.1.0"
