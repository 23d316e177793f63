"""Run blocks as they are written."""

from dtrain.compile import Compile


def build() -> Compile:
    return lambda model: None
