"""The order of wrapping, in one place: split the parameters, give them memory and values, then wrap for synchronisation."""

import torch
from torch import nn

from dtrain.mesh import Mesh
from dtrain.precision import Precision
from dtrain.seeds import fill
from dtrain.strategy import Strategy


def parallelize(model: nn.Module, mesh: Mesh, strategy: Strategy, *, precision: Precision, seed: int) -> nn.Module:
    """The module to call. `model` itself is changed in place and keeps the names of its parameters."""
    meta = any(parameter.is_meta for parameter in model.parameters())
    strategy.shard(model, mesh, precision)
    if meta:
        materialize(model, mesh.device)
        fill(model, seed)
    else:
        model.to(mesh.device)
    return strategy.wrap(model, mesh)


def materialize(model: nn.Module, device: torch.device) -> None:
    """Give meta parameters memory on `device`; tied ones stay tied, which `Module.to_empty` does not keep."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in made:
                made[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
            setattr(module, name, made[id(parameter)])
