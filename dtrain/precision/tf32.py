"""Everything in 32-bit floats, matrix products and convolutions in TensorFloat-32.

Tensor cores read 10 of the 23 bits of each fraction and add up in fp32
(https://docs.pytorch.org/docs/stable/notes/cuda.html).
"""

from dtrain.precision import Precision


def build() -> Precision:
    return Precision(tf32=True)
