"""Keep the results of matrix products and attention; recompute the cheap rest: norms, activations, rotations (arXiv
2205.05198).
"""

from functools import partial

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from dtrain.model.moe import one_by_one
from dtrain.remat import Remat, recompute_all

PRODUCTS = ("mm", "addmm", "bmm", "convolution", "_grouped_mm", "_scaled_mm", "_scaled_mm_v2", "_scaled_grouped_mm")
ATTENTION = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
NAMES = (*PRODUCTS, *(f"_scaled_dot_product_{name}" for name in ATTENTION))
KEPT = [one_by_one._opoverload]
KEPT += [getattr(torch.ops.aten, name).default for name in NAMES if hasattr(torch.ops.aten, name)]


def build() -> Remat:
    return partial(recompute_all, context_fn=partial(create_selective_checkpoint_contexts, KEPT))
