"""Weights, gradients and optimizer in fp32, linear layers of the blocks in float8 with dynamic scales (arXiv
2209.05433), the rest in bfloat16.

The layers are those of torchao, on GPUs that multiply float8 (compute capability 8.9 and newer).
"""

import torch
from torch import nn

from dtrain.errors import PreflightError
from dtrain.model import blocks
from dtrain.precision import Precision


def build(*, recipe: str) -> Precision:
    """`recipe`: of torchao.float8: tensorwise, rowwise or rowwise_with_gw_hp. Raises PreflightError without torchao or
    such a GPU.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise PreflightError(
            f"precision=fp8 needs torchao: {error}. Type: pip install torchao, or precision=bf16."
        ) from error
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
        raise PreflightError("precision=fp8 needs a GPU of compute capability 8.9 or newer. Type precision=bf16.")

    def convert(model: nn.Module) -> None:
        inside = {id(module) for block in blocks(model) for module in block.modules()}
        config = Float8LinearConfig.from_recipe_name(recipe)
        convert_to_float8_training(
            model, config=config, module_filter_fn=lambda module, name: id(module) in inside and _fits(module)
        )

    return Precision(compute=torch.bfloat16, convert=convert)


def _fits(linear: nn.Module) -> bool:
    """float8 products need rows of a multiple of 16."""
    return isinstance(linear, nn.Linear) and not any(size % 16 for size in linear.weight.shape)
