"""Muon for hidden matrices (https://kellerjordan.github.io/posts/muon), AdamW for embeddings, norms, biases and the
head.

Not torch.optim.Muon: that one orthogonalises in bfloat16, which turns the last bit of a gradient into 4e-5 of the loss
within ten steps, so no two meshes would agree; and it takes matrices one by one. Here matrices of one shape go through
the iteration together, in fp32 unless a GPU computes in bfloat16 anyway, and sharded ones are gathered for it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.errors import WordsError
from dtrain.mesh.sharding import local, region, whole
from dtrain.model import PassThrough
from dtrain.model.patterns import rates
from dtrain.optim import ByGroup, Optimizer, OptimizerGroup, by_rate, elementwise, groups
from dtrain.optim.decay import decayed

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic whose iteration pushes singular values towards 1 (the post above)."""
ITERATIONS = 5
PRODUCTS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def build(
    *,
    model: nn.Module,
    lr: float,
    momentum: float,
    weight_decay: float,
    adamw_lr: float | None,
    betas: Sequence[float],
    eps: float,
    products: str = "fp32",
    lr_of: Mapping[str, float] | None = None,
) -> OptimizerGroup:
    """`products`: the type in which the iteration multiplies, fp32 or bf16; `lr_of`: pattern of names -> lr. Raises
    WordsError when the model has no hidden matrix; a stage of a pipeline may have none.
    """
    matrices = hidden_matrices(model)
    if not matrices and not any(isinstance(module, PassThrough) for module in model.modules()):
        raise WordsError("optim=muon: the model has no hidden matrix. Type optim=adamw.")
    own = rates(model, lr_of or {})
    parts: list[Optimizer] = []
    if matrices:
        both = by_rate([{"params": matrices}], own)
        parts.append(Muon(both, lr=lr, momentum=momentum, weight_decay=weight_decay, products=PRODUCTS[products]))
    others = groups(model, weight_decay=weight_decay, rates=own, without=matrices)
    if others[0]["params"] or not matrices:
        options = {"lr": lr if adamw_lr is None else adamw_lr, "betas": tuple(map(float, betas)), "eps": eps}
        parts.append(elementwise(torch.optim.AdamW, others, **options))
    return OptimizerGroup(*parts)


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Decaying weights of two dims that are neither an embedding nor the last linear layer, which may stand on another
    stage of a pipeline.
    """
    modules = list(model.modules())
    last = next((module for module in reversed(modules) if isinstance(module, nn.Linear | PassThrough)), None)
    ends = {id(getattr(each, "weight", None)) for each in modules if isinstance(each, nn.Embedding) or each is last}
    real = (parameter for parameter in decayed(model) if parameter.is_floating_point() and parameter.requires_grad)
    return [parameter for parameter in real if parameter.ndim == 2 and id(parameter) not in ends]


class Muon(ByGroup):
    """Nesterov momentum, orthogonalised: weight -= lr x sqrt(max(1, rows / columns)) x U V^T, where U S V^T is the
    momentum.
    """

    def __init__(self, parameters: Iterable[dict[str, Any]], *, products: torch.dtype, **options: float) -> None:
        """`options`: lr, momentum and weight_decay of every group."""
        self._products = products
        super().__init__(parameters, options)

    def update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        for parameter in parameters:
            if "momentum_buffer" not in self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        weights = [local(parameter) for parameter in parameters]
        momenta = [local(self.state[parameter]["momentum_buffer"]) for parameter in parameters]
        gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        directions = torch._foreach_lerp(gradients, momenta, group["momentum"])
        if group["weight_decay"]:
            torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        shapes: dict[torch.Size, list[int]] = {}
        for index, parameter in enumerate(parameters):
            shapes.setdefault(parameter.shape, []).append(index)

        def move(members: list[int], scale: float) -> None:  # in which a stack ends before the next begins
            stacked = torch.stack([whole(directions[index], parameters[index]) for index in members])
            updates = orthogonalize(stacked.float(), self._products)
            for index, update in zip(members, updates, strict=True):
                weights[index].add_(update[region(parameters[index])], alpha=-scale)

        for (rows, columns), members in shapes.items():
            move(members, group["lr"] * max(1.0, rows / columns) ** 0.5)


def orthogonalize(matrices: Tensor, products: torch.dtype) -> Tensor:
    """[N, rows, columns] -> each matrix with its singular values pushed towards 1, by matrix products in this type."""
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = (x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)).to(products)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
