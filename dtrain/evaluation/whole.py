"""The whole weights and the whole model of a run that shards or splits them, as copies for hooks."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtrain.build import makes_one, received
from dtrain.checkpoint.shards import mine
from dtrain.checkpoint.state import TrainState
from dtrain.errors import WordsError
from dtrain.loop.assemble import Parts
from dtrain.mesh import Mesh
from dtrain.model import construct
from dtrain.model.adapted import lacks_memory
from dtrain.model.seeds import kept
from dtrain.parallel.order import materialize


def weights(parts: Parts) -> dict[str, Tensor]:
    """Name -> whole parameter or persistent buffer, copied to the CPU. All ranks call it, and each gets all of them; a
    tied weight has its first name alone.
    """
    state, mesh = TrainState(parts.model), parts.mesh
    tensors = {name.removeprefix("model."): tensor for name, tensor in state.weights().items()}
    with torch.no_grad():
        if mesh.world == 1:
            return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        return _gathered(tensors, mesh)


def _gathered(tensors: dict[str, Tensor], mesh: Mesh) -> dict[str, Tensor]:
    """One tensor at a time: each rank puts the piece that it would save into zeros, and all of them are added up."""
    pieces = {(name, place): piece for name, piece, place in mine(tensors, mesh.replica_coords)}
    described = [(name, list(one.shape), str(one.dtype).removeprefix("torch.")) for name, one in tensors.items()]
    answers = mesh.gather([described, [[name, list(place)] for name, place in pieces]])
    shapes = {name: (shape, getattr(torch, dtype)) for here, _ in answers for name, shape, dtype in here}
    owners = dict[tuple[str, tuple[int, ...]], int]()
    for rank, (_, here) in enumerate(answers):
        for name, place in here:
            owners.setdefault((name, tuple(place)), rank)
    answer = dict[str, Tensor]()
    for name, (shape, dtype) in shapes.items():
        flag = dtype == torch.bool
        whole = torch.zeros(shape, dtype=torch.uint8 if flag else dtype, device=mesh.device)
        for (of, place), piece in pieces.items():
            if of == name and owners[of, place] == mesh.rank:
                whole[tuple(slice(a, a + n) for a, n in zip(place, piece.shape, strict=True))] = piece
        dist.all_reduce(whole)
        answer[name] = whole.to("cpu", torch.bool if flag else dtype, copy=True)
    return answer


def model(parts: Parts) -> nn.Module:
    """A copy of the model as one process has it: on the CPU, in evaluation mode, without gradients. All ranks call it.
    Raises WordsError for a model that was passed as an object, of which there is no second one.
    """
    plan, given = parts.plan, received(parts.plan.model)
    if given is not None and not makes_one(given):
        raise WordsError(
            "info.model(): the model was passed to dtrain.run as an object. Pass its class, or use info.weights()."
        )
    whole = weights(parts)
    with kept():
        copy = construct(plan.model, facts=parts.source.facts, seed=plan.seed, adapter=plan.adapter)
    if lacks_memory(copy):
        materialize(copy, torch.device("cpu"))
    with torch.no_grad():
        for name, tensor in TrainState(copy).weights().items():
            tensor.copy_(whole[name.removeprefix("model.")])
    return copy.eval().requires_grad_(requires_grad=False)
