"""The blocks of a traced model: what was noted of each part, with its weights and the gradients of those."""

from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from dtrain.model import head_of, untied_blocks
from dtrain.model.adapted import added, packed
from dtrain.model.moe import Experts
from dtrain.optim.decay import decayed
from dtrain.optim.muon import hidden_matrices
from dtrain.parallel.tensor import matches, plan_of
from dtrain.predict.activations import STYLES
from dtrain.predict.shapes import Block, LayoutBytes, Weight
from dtrain.tracing.notes import Moment, Part, Watch


def style_of(model: nn.Module, name: str) -> str:
    return next((style for pattern, style in plan_of(model).items() if matches(name, pattern)), "")


def blocks_of(model: nn.Module, listed: list[nn.Module], watch: Watch, *, known: bool, size: int) -> list[Block]:
    """The part before the first block, the blocks in the order they ran, the part after them. `size`: bytes of a number
    of a gradient.
    """
    names = {id(module): name for name, module in model.named_modules()}
    alone = untied_blocks(model)  # others are gathered with the root
    mine = {name: _weights(model, each, name) if each in alone else [] for each in listed for name in [names[id(each)]]}
    inside = {weight.name for weights in mine.values() for weight in weights}
    root = [weight for weight in _weights(model, model, "") if weight.name not in inside]
    first = {name for name, place in watch.reached.items() if place == 1} if known else {""}
    before = [weight for weight in root if (weight.name.rpartition(".")[0] in first if known else weight.embedding)]
    parts = {part.name: part for part in watch.parts if part.listed}
    order = [name for name in parts if name in mine] + [name for name in mine if name not in parts]
    start, *rest = (part for part in watch.parts if not part.listed)
    end = Part("behind", False)
    for part in rest:
        _join(end, part)
    apart = head_of(model)
    head = [weight for weight in root if apart is not None and weight.name.rpartition(".")[0] == names[id(apart)]]
    behind = [weight for weight in root if weight not in before and weight not in head]
    ends = [_block(end, "behind", behind)]
    if head:  # it has all activations, as its backward runs first
        ends = [
            _block(Part("behind", False, splits=end.splits), "behind", behind),
            replace(_block(end, "head", head), splits=(), head=True),
        ]
    ends[-1] = replace(ends[-1], chunk=watch.chunk)
    made = [_block(parts.get(name, Part(name, True, grad_out=True)), name, mine[name]) for name in order]
    last = names[id(listed[-1])] if listed else ""
    blocks = [
        _block(start, "before", before),
        *(replace(block, stays=block.name == last != order[-1]) for block in made),
        *ends,
    ]
    ran = [start, *(parts.get(name) for name in order)]
    moments = list[list[Moment]]([] for _ in blocks)
    for moment in watch.moments:
        moments[ran.index(moment.part) if moment.part in ran else -1].append(moment)
    return list(_with_moments(blocks, moments, size))


def _with_moments(blocks: list[Block], moments: list[list[Moment]], size: int) -> Iterator[Block]:
    """The blocks with what is alive in their backwards, relative to what those before them saved and to the gradients
    of those behind them.
    """
    before, behind = 0.0, sum(block.trained for block in blocks)
    for block, some in zip(blocks, moments, strict=True):
        behind -= block.trained
        relative = [(each.live - before, each.made / size - behind, each.coming / size) for each in some]
        saved = block.saved["all"]
        everything = sum(vars(saved).values())
        more = max((live for live, _, _ in relative), default=0.0) - everything
        before += everything
        yield replace(block, peak_live=replace(saved, inside=saved.inside + max(0.0, more)), moments=_highest(relative))


def _highest(moments: list[tuple[float, float, float]]) -> tuple[tuple[float, float, float], ...]:
    """The moments than which no other is higher in everything."""
    kept = list[tuple[float, float, float]]()
    for live, made, coming in sorted(moments, reverse=True):
        if not any(more >= made and most >= coming for _, more, most in kept):
            kept.append((live, made, coming))
    return tuple(kept)


def _join(end: Part, part: Part) -> None:
    for way, sizes in part.saved.items():
        for layout, size in sizes.items():
            end.saved[way][layout] += size
    end.widened += part.widened
    end.work += part.work
    end.backward_work += part.backward_work
    end.attention_work += part.attention_work
    end.splits += part.splits
    end.attention += part.attention


def _block(part: Part, name: str, weights: list[Weight]) -> Block:
    saved = {way: LayoutBytes(**sizes) for way, sizes in part.saved.items()}
    again = part.work + part.attention_work - part.spared - part.tail
    return Block(
        name=name,
        count=1,
        listed=part.listed,
        weights=tuple(weights),
        saved=saved,
        peak_live=saved["all"],
        work=part.work,
        backward_work=part.backward_work,
        attention_work=part.attention_work,
        recompute_work=again,
        passes=part.passes,
        splits=tuple(part.splits),
        attention=tuple(part.attention),
        uses=max(1, part.uses),
        grad_out=part.grad_out or not part.listed,
        widened=part.widened,
    )


def _weights(model: nn.Module, module: nn.Module, prefix: str) -> list[Weight]:
    """The weights of a module, each once, in the order of `parameters`."""
    owners: dict[int, list[nn.Module]] = {}
    for each in model.modules():
        for parameter in each.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(each)
    deferred_wgrad, weights = {id(parameter) for parameter in hidden_matrices(model)}, []
    others, narrow, matrices = added(model), packed(model), {id(parameter) for parameter in decayed(model)}
    for name, parameter in module.named_parameters():
        whole = f"{prefix}.{name}" if prefix else name
        kinds = [isinstance(each, nn.Embedding) for each in owners[id(parameter)]]
        products = [isinstance(each, nn.Linear | nn.modules.conv._ConvNd) for each in owners[id(parameter)]]
        _, dim = STYLES.get(style_of(model, whole.rpartition(".")[0]), ("", None))
        split = dim if parameter.ndim > 1 or dim == 0 else None
        if dim == 1 and whole in others:  # torch's rowwise style splits `weight` alone
            split = None
        weights.append(
            Weight(
                name=whole,
                shape=tuple(parameter.shape),
                tp=split,
                experts=isinstance(owners[id(parameter)][0], Experts),
                product=(parameter.ndim > 1 or any(products)) and not all(kinds),
                hidden=id(parameter) in deferred_wgrad,
                embedding=any(kinds),
                trained=parameter.requires_grad,
                bits=narrow[whole].bits if whole in narrow else None,
                decays=id(parameter) in matrices,
            )
        )
    return weights
