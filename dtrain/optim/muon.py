"""Muon for hidden matrices (https://kellerjordan.github.io/posts/muon), AdamW for embeddings, norms, biases and the head."""

from collections.abc import Sequence

import torch
from torch import nn

from dtrain.errors import WordsError
from dtrain.optim import Together, groups, kernel


def build(
    *,
    model: nn.Module,
    lr: float,
    momentum: float,
    weight_decay: float,
    adamw_lr: float | None,
    betas: Sequence[float],
    eps: float,
) -> Together:
    """Raises WordsError when the model has no hidden matrix."""
    matrices = hidden_matrices(model)
    if not matrices:
        raise WordsError("optim=muon: the model has no hidden matrix. Type optim=adamw.")
    chosen = set(map(id, matrices))
    rest = [parameter for parameter in model.parameters() if id(parameter) not in chosen]
    muon = torch.optim.Muon(matrices, lr=lr, momentum=momentum, weight_decay=weight_decay, adjust_lr_fn="original")
    if not any(parameter.requires_grad for parameter in rest):
        return Together(muon)
    adamw = torch.optim.AdamW(
        groups(rest, weight_decay=weight_decay), lr=adamw_lr or lr, betas=(betas[0], betas[1]), eps=eps, **kernel(rest)
    )
    return Together(muon, adamw)


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Weights of two dims that are neither an embedding nor the last linear layer."""
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    ends = {id(module.weight) for module in [*linear[-1:], *(module for module in model.modules() if isinstance(module, nn.Embedding))]}
    return [parameter for parameter in model.parameters() if parameter.ndim == 2 and parameter.requires_grad and id(parameter) not in ends]
