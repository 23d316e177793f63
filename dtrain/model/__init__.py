"""Models: any `nn.Module` can be trained. A model states further facts about itself in tables, not by a base class."""

import contextlib
import inspect
import json
import math
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from dtrain.build import build, locate
from dtrain.config.facts import about
from dtrain.errors import WordsError
from dtrain.mesh.sharding import split_like
from dtrain.model import documents, head, labels
from dtrain.model.adapted import adapter_of
from dtrain.model.patterns import freeze
from dtrain.planned import Part

GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


@runtime_checkable
class InitByName(Protocol):
    """A model that can initialise any of its parameters by name: it is built without memory and filled shard by shard.
    Another model is built whole on every rank from the same seed, which needs memory for a full copy.
    """

    def init_weight(self, name: str, weight: Tensor, generator: torch.Generator) -> None:
        """Initialise `weight` (any shape, on the CPU) in place, with random numbers from `generator` alone."""
        ...


@runtime_checkable
class Balanced(Protocol):
    """A module that adjusts itself after each step, without a gradient, by counts of all ranks."""

    load: Tensor
    """Counts of this rank since the last `balance`."""

    def balance(self, total: Tensor) -> None:
        """`total`: the loads of all ranks with other tokens of the step. The load is reset."""
        ...


def balanced(model: nn.Module) -> list[Balanced]:
    return [module for module in model.modules() if isinstance(module, Balanced)]


def balance(modules: Sequence[Balanced], sum_over_batch: Callable[[Tensor], Tensor]) -> None:
    """After a step, on every rank; `sum_over_batch` is called once for all modules."""
    if modules:
        loads = [module.load for module in modules]
        total = sum_over_batch(torch.cat([load.flatten() for load in loads]))
        for module, part in zip(modules, split_like(total, loads), strict=True):
            module.balance(part)


def saved_buffers(model: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """(module, name, buffer) of every saved buffer, except those of modules that balance themselves."""
    return [
        (module, name, buffer)
        for module in model.modules()
        if not isinstance(module, Balanced)
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    ]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[Callable[[], None]]:
    """A context of evaluation mode without gradients; afterwards the modes of all modules and the saved buffers are as
    before. Modes are set by the model's own `eval` and `train`, which may do more. Yields a function that restores
    these buffers, for a second forward that must not depend on the first.
    """
    modes = [(module, module.training) for module in model.modules()]
    kept = [(module, name, buffer, buffer.detach().clone()) for module, name, buffer in saved_buffers(model)]

    @torch.no_grad()
    def put_back() -> None:
        for module, name, buffer, value in kept:
            module._buffers[name] = buffer.copy_(value)

    model.eval()
    try:
        with torch.no_grad():
            yield put_back
    finally:
        if modes[0][1]:
            model.train()
        for module, mode in modes:
            if module.training != mode:
                module.training = mode
        put_back()


def reshard(model: nn.Module) -> None:
    """Free gathered parameters, which the next forward would use although the shards have changed."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


class PassThrough(nn.Module):
    """Stands for a module of another stage: returns its first input."""

    def forward(self, x: Any, *_: Any, **__: Any) -> Any:
        return x


def construct(part: Part, *, facts: Mapping[str, Any], seed: int, adapter: Part | None = None) -> nn.Module:
    """The model of the plan; arguments with the value `auto` are taken from the `facts` of the data. On the meta device
    if it can be filled by name, else on the CPU, seeded. Parameters that its `freeze` selects are not trained,
    and those of an `adapter` are added. It is in the mode that its own `train` sets.
    """
    unknown = [name for name, value in part.items() if value == "auto" and name not in facts]
    if unknown:
        why = facts.get("unknown") or (
            "the data does not say (targets that are whole and >= 0 are classes). Type "
            f"model.{unknown[0]}=<value>, or data.outputs=<number> for data=dataset."
        )
        raise WordsError(f"model.{unknown[0]}=auto: {why}")
    part = {name: facts[name] if value == "auto" else value for name, value in part.items()}
    _check_sizes(part, facts)
    target = locate(str(part["_target_"]))
    patterns: Sequence[str] = () if takes_freeze(target) else part.pop("freeze", None) or ()
    model = _constructed(part, target, facts=facts, seed=seed)
    if facts.get("documents"):
        documents.check(model)
    freeze(model, patterns)
    if adapter:
        build(adapter)(model)
        if head.is_new(model) and adapter_of(model) is not None:
            raise WordsError(
                "model.head=new: beside an adapter the head stays as it is, so a new one learns nothing. Type "
                "adapter=none, or give the weights a head first."
            )
    model.train()
    return model


def takes_freeze(target: Any) -> bool:
    """Whether a model has an argument `freeze` of its own."""
    try:
        return "freeze" in inspect.signature(target).parameters
    except (TypeError, ValueError):
        return False


def _constructed(part: Part, target: Any, *, facts: Mapping[str, Any], seed: int) -> nn.Module:
    if inspect.isclass(target) and issubclass(target, InitByName):
        with torch.device("meta"):
            model = _module(build(part), part)
        if not any(buffer.is_meta for buffer in model.buffers()):  # whose values only their own constructor knows
            return model
    torch.manual_seed(seed)
    model = _module(build(part), part)
    _check_words(model, facts)
    labels.fit(model, facts)
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            module.sparse = False  # the same numbers: a gradient that is clipped, averaged and sharded is dense
    for parameter in model.parameters():
        if any(stride == 0 < size - 1 for stride, size in zip(parameter.stride(), parameter.shape, strict=True)):
            parameter.data = parameter.data.contiguous()  # an expanded one, whose numbers share memory
    return model


def configuration(model: nn.Module) -> dict[str, Any] | None:
    """config.json of a transformers model, with which other libraries load its weights; None for others."""
    if "transformers" not in sys.modules or not isinstance(model, sys.modules["transformers"].PreTrainedModel):
        return None
    config: dict[str, Any] = json.loads(json.dumps(model.config.to_dict(), default=str))
    config = {key: value for key, value in config.items() if not key.startswith("_")}
    return config | {"architectures": [own_class(model).__name__]}


def own_class(module: Any) -> type:
    """The class of a module, which FSDP2 replaces by a subclass of its own."""
    return next(base for base in type(module).__mro__ if not issubclass(base, FSDPModule))


def caveats(model: nn.Module) -> list[str]:
    """Caveats about training a model on several ranks or microbatches."""
    modules = list(model.modules())
    norms = [each for each in modules if isinstance(each, nn.modules.batchnorm._BatchNorm) and each.training]
    drops = any(isinstance(each, nn.modules.dropout._DropoutNd) and each.p > 0 and each.training for each in modules)
    sentences = [
        f"{name} sees one microbatch of one rank: its losses depend on the mesh. GroupNorm or LayerNorm do not."
        for name in sorted({own_class(module).__name__ for module in norms})
    ]
    if drops or (adapter_of(model) or {}).get("dropout"):
        sentences.append(
            "dropout draws other masks on another mesh: losses differ there; a restart on the same mesh draws the same."
        )
    weights = model.named_parameters()
    hooked = next((name for name, p in weights if p._backward_hooks or p._post_accumulate_grad_hooks), None)
    if hooked:
        sentences.append(
            f"the hook of {hooked} sees the gradient of one microbatch of one rank: unless it is linear, losses depend "
            "on the mesh."
        )
    states = list[str]()
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, GENERATORS):
                sentences.append(
                    f"{path}.{name} is a generator of the model's own: no checkpoint holds its state, so a resumed run "
                    "draws other numbers.".removeprefix(".")
                )
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            states.append(
                f"{path or own_class(module).__name__} has an extra state (get_extra_state), which no checkpoint "
                "holds: a resumed run begins with the first one again. Keep it in buffers."
            )
    return [*sentences, *states, *labels.notes(unwrapped(model))]


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside of wrappers that hold nothing else, such as an adapter of peft: its class is in the tables."""
    children = list(model.children())
    if len(children) == 1 and not type(children[0]).__module__.startswith("torch.") and not model._parameters:
        return unwrapped(children[0])
    return model


def tables(model: nn.Module, *names: str) -> Iterator[tuple[str, Any]]:
    """(prefix, table) of the outermost modules with a table under one of these names: the model, or the model that it
    wraps, such as an adapter of peft.
    """
    owners = list[str]()
    for name, module in model.named_modules():
        # not what getattr finds: wrappers answer for what they wrap, whose table has other names than theirs
        own = (getattr(module, each) for each in names if each in vars(module) or hasattr(type(module), each))
        table = next((each for each in own if each), None)
        if table and not any(name.startswith(owner) for owner in owners):
            prefix = f"{name}." if name else ""
            owners.append(prefix)
            yield prefix, table
        if not name and owners:
            return  # all others are inside


def blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost elements of every ModuleList and Sequential that have parameters and can be called: the units of
    sharding, remat and compile.
    """
    for child in module.children():
        called = not isinstance(child, nn.ModuleList | nn.ModuleDict)
        if isinstance(module, nn.ModuleList | nn.Sequential) and called and any(True for _ in child.parameters()):
            yield child
        else:
            yield from blocks(child)


def untied_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks that share no weight with another block, nor with a module outside of them: units of sharding. Others
    are gathered with the root.
    """
    listed = dict.fromkeys(blocks(model))
    owners = Counter(parameter for block in listed for parameter in block.parameters())
    beside = (module for _, module in model.named_modules(memo=set(listed)))
    owners.update(parameter for module in beside for parameter in module.parameters(recurse=False))
    return [block for block in listed if all(owners[parameter] == 1 for parameter in block.parameters())]


def head_of(model: nn.Module) -> nn.Linear | None:
    """The linear layer that runs last by the model's table, if it shares no weight and there are other weights outside
    of the blocks.
    """
    prefix, table = next(tables(model, "pipeline", "_pp_plan"), ("", ()))
    named = {f"{prefix}{name}" for name in table}
    last = next((module for name, module in reversed(list(model.named_modules())) if name in named), None)
    listed = {parameter for block in blocks(model) for parameter in block.parameters()}
    owners = Counter(parameter for module in model.modules() for parameter in module.parameters(recurse=False))
    if not isinstance(last, nn.Linear):
        return None
    own = set(last.parameters())
    shared = any(owners[parameter] > 1 or parameter in listed for parameter in own)
    return None if shared or not set(owners) - listed - own else last


def _module(model: Any, part: Part) -> nn.Module:
    """`model`, as it was built from `part`. Raises WordsError for a model that cannot be trained."""
    if not isinstance(model, nn.Module):
        raise WordsError(f"model: {type(model).__name__} is not a torch.nn.Module.")
    parameters = dict(model.named_parameters())
    lazy = next((name for name, each in parameters.items() if isinstance(each, nn.UninitializedParameter)), None)
    if lazy:
        raise WordsError(
            f"model: {lazy} of {type(model).__name__} has no shape yet, it belongs to a lazy module. "
            "Call the module once with a sample at the end of __init__, or give it its size."
        )
    wide = next((name for name, parameter in parameters.items() if parameter.dtype == torch.complex128), None)
    if wide:
        raise WordsError(
            f"model: {wide} of {type(model).__name__} is complex128, for which the safetensors of a checkpoint have "
            "no name. Use complex64."
        )
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise WordsError(
            f"model: {type(model).__name__} has {'parameters, but none' if parameters else 'no parameter'} that is "
            f"trained (requires_grad).{_as_texts(part)}"
        )
    return model


def _as_texts(part: Part) -> str:
    """A sentence for each argument that is a text with the form of a class's name, and may be meant as its object."""
    named = {name: value for name, value in part.items() if name[0] != "_" and isinstance(value, str)}
    return "".join(
        f" model.{name}={value} is a text: for an object of a class type model.{name}._target_={value} in its place."
        for name, value in named.items()
        if "." in value and all(each.isidentifier() for each in value.split("."))
    )


def _check_sizes(part: Part, facts: Mapping[str, Any]) -> None:
    """Compare a word's arguments with the data. Raises WordsError."""
    takes, kind = about(part).get("takes"), facts.get("kind", "")
    numbers = ("float", "int64") if takes == "features" else ("float",)
    if takes in ("image", "features") and kind and not kind.startswith(numbers):
        raise WordsError(
            f"data: the inputs are {kind}, and the model takes fractions. In files write 1.0 for 1; from a dataset "
            "return float32, such as image / 255 of bytes."
        )
    if takes == "tokens" and kind and not kind.startswith(("int", "uint")):
        raise WordsError(f"data.dataset: the inputs are {kind}, and the model takes tokens. Return whole numbers.")
    inputs, have = part.get("inputs"), facts.get("inputs")
    if takes in ("image", "features") and have is not None and inputs is not None:
        sizes = list(inputs) if isinstance(inputs, list | tuple) else [inputs]
        if sizes != have if takes == "image" else math.prod(sizes) != math.prod(have):
            raise WordsError(
                f"model.inputs={inputs}: a sample of the data has the shape {have}. Type model.inputs=auto."
            )
    for name in ("outputs", "vocab"):
        if takes and isinstance(part.get(name), int) and part[name] < facts.get(name, 0):
            raise WordsError(f"model.{name}={part[name]}: the data has {facts[name]}. Type model.{name}=auto.")


def _check_words(model: nn.Module, facts: Mapping[str, Any]) -> None:
    """Raises WordsError for a model of transformers that has fewer embeddings than the data has tokens."""
    with contextlib.suppress(AttributeError, NotImplementedError):
        rows = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
        if "outputs" not in facts and facts.get("vocab", 0) > rows:
            raise WordsError(
                f"model: the embedding of {type(model).__name__} has {rows} rows, the data has tokens up to "
                f"{facts['vocab'] - 1}. "
                f"Give the model vocab_size={facts['vocab']}, or type data.vocab={rows} if no token of it is above."
            )
