"""A digest of the weights that a model holds: the same on every mesh, and another if one bit is."""

from torch import Tensor, nn

from dtrain.checkpoint import sums
from dtrain.mesh import Mesh
from dtrain.mesh.sharding import local, offset
from dtrain.weights import Stored


def digest(model: nn.Module, mesh: Mesh) -> str:
    """Of name, type, shape and bits of each parameter and saved buffer, a tied one once; all ranks call it."""
    seen, tensors = set[int](), dict[str, Tensor]()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor) and id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor.detach()
    mine = sums.Sums()
    for name, tensor in tensors.items():
        mine.add(name, offset(tensor), local(tensor).cpu(), tensor.shape)
    facts = {name: [str(each.dtype).removeprefix("torch."), [*each.shape]] for name, each in tensors.items()}
    all_rows, stored = list[sums.Row](), dict[str, Stored]()
    for rows, described in mesh.gather((mine.rows, facts)):
        all_rows += rows
        stored |= {name: Stored(dtype, tuple(shape), ()) for name, (dtype, shape) in described.items()}
    return sums.digest(all_rows, stored)
