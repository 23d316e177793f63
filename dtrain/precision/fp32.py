"""Everything in 32-bit floats."""

from dtrain.precision import Precision


def build() -> Precision:
    return Precision()
