"""Everything in bfloat16, also weights and optimizer: half the memory; updates smaller than 1/256 of a weight are
lost.
"""

import torch

from dtrain.precision import Precision


def build() -> Precision:
    return Precision(param=torch.bfloat16, compute=torch.bfloat16)
