"""A model that computes something else from a part of its heads or of its width is named before its first step; right ones go through."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pool import RankFailed
from small import on_mesh, on_resident_mesh, tokens
from torch import Tensor, nn

from dtrain.errors import WordsError
from dtrain.loop.step import check
from dtrain.mesh import Mesh
from dtrain.objective.next_token import NextToken
from dtrain.parallel import tensor_check
from dtrain.parallel.order import parallelize
from dtrain.planned import PipelineShape
from dtrain.precision import bf16, bf16_true, fp32
from dtrain.remat import full
from dtrain.strategy.ddp import DDP
from dtrain.strategy.fsdp import FSDP

C, D = 16, 4
QKVO = {"q": "colwise", "k": "colwise", "v": "colwise", "out": "rowwise"}
UP_DOWN = {"up": "colwise", "down": "rowwise"}


class Inner(nn.Module):
    """What stands in a block: its linear layers, and `run(self, x [B, T, C])`."""

    plan: Mapping[str, str]

    def __init__(self, run: Callable[[Any, Tensor], Tensor], plan: Mapping[str, str], **layers: nn.Module) -> None:
        super().__init__()
        self.run, self.plan = run, plan
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


class Net(nn.Module):
    """Embedding, two blocks, norm and head."""

    pipeline = ("embed", "blocks", "norm", "head")

    def __init__(self, inner: Callable[[], Any], **plan: str) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(13, C), nn.LayerNorm(C), nn.Linear(C, 13)
        self.blocks = nn.ModuleList([Block(inner()), Block(inner())])
        self.tp_plan = {f"blocks.*.inner.{name}": style for name, style in self.blocks[0].inner.plan.items()} | plan

    def forward(self, x_BT: Tensor) -> Tensor:
        x = self.embed(x_BT)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


class Block(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(C), inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.inner(self.norm(x))
        return out


def attended(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
    """[B, T, H, D] -> [B, T, H D]"""
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, **how).transpose(1, 2).flatten(2)


def heads(*sizes: int) -> Callable[[Any, Tensor], Tensor]:
    def run(self: Any, x: Tensor) -> Tensor:
        out: Tensor = self.out(attended(*(layer(x).unflatten(-1, sizes) for layer in (self.q, self.k, self.v))))
        return out

    return run


by_width = heads(-1, D)


def attention(run: Callable[[Any, Tensor], Tensor] = by_width, plan: Mapping[str, str] = QKVO, kv: int = C, **more: Callable[[], nn.Module]) -> Callable[[], Inner]:  # fmt: skip
    return lambda: Inner(
        run,
        plan,
        q=nn.Linear(C, C),
        k=nn.Linear(C, kv),
        v=nn.Linear(C, kv),
        out=nn.Linear(C, C),
        **{name: make() for name, make in more.items()},
    )


def wide(run: Callable[[Any, Tensor], Tensor], plan: Mapping[str, str] = UP_DOWN, up: int = 24, down: int = 24, **more: Callable[[], nn.Module]) -> Callable[[], Inner]:  # fmt: skip
    return lambda: Inner(
        run, plan, up=nn.Linear(C, up), down=nn.Linear(down, C), **{name: make() for name, make in more.items()}
    )


def normed(self: Any, x: Tensor) -> Tensor:
    """A norm inside of the heads."""
    q, k, v = (layer(x).unflatten(-1, (-1, D)) for layer in (self.q, self.k, self.v))
    out: Tensor = self.out(attended(self.norm(q), self.norm(k), v))
    return out


def shared_key(self: Any, x: Tensor) -> Tensor:
    """One head of keys and values, whole on every rank."""
    q = self.q(x).unflatten(-1, (-1, D))
    k, v = (layer(x).unflatten(-1, (1, D)).expand_as(q) for layer in (self.k, self.v))
    out: Tensor = self.out(attended(q, k, v))
    return out


def scores_by_width(self: Any, x: Tensor) -> Tensor:
    """1 / sqrt of the width that this rank has."""
    q, k, v = self.q(x), self.k(x), self.v(x)
    how = {"scale": q.shape[-1] ** -0.5}
    out: Tensor = self.out(attended(*(each.unflatten(-1, (-1, D)) for each in (q, k, v)), **how))
    return out


def routed(self: Any, x: Tensor) -> Tensor:
    """The largest numbers of the width alone."""
    h = self.up(x)
    out: Tensor = self.down(h.where(h >= h.topk(3, -1).values[..., -1:], 0.0))
    return out


def fused(self: Any, x: Tensor) -> Tensor:
    q, k, v = (part.unflatten(-1, (-1, D)) for part in self.up(x).chunk(3, -1))
    out: Tensor = self.down(attended(q, k, v))
    return out


def fused_by_head(self: Any, x: Tensor) -> Tensor:
    q, k, v = self.up(x).unflatten(-1, (-1, 3, D)).unbind(-2)
    out: Tensor = self.down(attended(q, k, v))
    return out


def gate(self: Any, x: Tensor) -> Tensor:
    a, b = self.up(x).chunk(2, -1)
    out: Tensor = self.down(a.sigmoid() * b)
    return out


def masked(self: Any, x: Tensor) -> Tensor:
    """A buffer of the full width, of which each rank takes the first entries."""
    h = self.up(x)
    out: Tensor = self.down(h * torch.linspace(0.1, 2, 24)[: h.shape[-1]])
    return out


ONLY_Q = {"q": "colwise", "out": "rowwise"}
KEYS: dict[str, Any] = {"kv": D}
WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "a fixed number of heads": (attention(heads(4, -1)), "blocks.0.inner (Inner) computes other values from this rank's part than from the whole"),
    "a scale by the width": (attention(scores_by_width), "blocks.0.inner (Inner) computes other values"),
    "chunks of a fused projection": (wide(fused, up=3 * C, down=C), "blocks.0.inner (Inner) computes other values"),
    "a gate in one projection": (wide(gate, up=48), "blocks.0.inner (Inner) computes other values"),
    "a norm over the width": (wide(lambda m, x: m.down(F.normalize(m.up(x), dim=-1))), "blocks.0.inner (Inner) computes other values"),
    "a softmax over the width": (wide(lambda m, x: m.down(m.up(x).softmax(-1))), "blocks.0.inner (Inner) computes other values"),
    "a mean over the width": (wide(lambda m, x: m.down(m.up(x) - m.up(x).mean(-1, keepdim=True))), "blocks.0.inner (Inner) computes other values"),
    "a router over the width": (wide(routed), "blocks.0.inner (Inner) computes other values"),
    "a buffer of the full width": (wide(masked), "blocks.0.inner (Inner) computes other values"),
    "a bias before the sum": (wide(lambda m, x: m.down(m.up(x)) + m.up(x).sum(-1, keepdim=True)), "blocks.0.inner (Inner) computes other values"),
    "a colwise without its rowwise": (wide(lambda m, x: m.down(m.up(x)), {"up": "colwise"}), "blocks.0.inner (Inner) fails on this rank's part of up: "),
    "a rowwise without its colwise": (wide(lambda m, x: m.down(m.up(x)), {"down": "rowwise"}), "blocks.0.inner (Inner) fails on this rank's part of down: "),
    "a table that splits q alone": (attention(plan=ONLY_Q), "blocks.0.inner (Inner) fails on this rank's part of q, out: "),
    "a gradient of keys that all heads share": (attention(shared_key, ONLY_Q, kv=D), "uses the whole blocks.0.inner.k.weight with this rank's part of q, out, so the gradient"),
    "a gradient of a norm inside of heads": (attention(normed, norm=lambda: nn.LayerNorm(D)), "uses the whole blocks.0.inner.norm.weight with this rank's part of q, k, v, out"),
    "a gradient of the input": (wide(lambda m, x: m.down(m.up(x) * x.mean(-1, keepdim=True))), "blocks.0.inner (Inner) uses its input beside up, down"),
}  # fmt: skip


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5)


def in_place(self: Any, x: Tensor) -> Tensor:
    out: Tensor = self.down(self.up(x.mul_(0.5)).relu())
    return out


def plain(self: Any, x: Tensor) -> Tensor:
    out: Tensor = self.down(self.up(x).relu())
    return out


def noisy(self: Any, x: Tensor) -> Tensor:
    out: Tensor = self.down(F.dropout(self.up(x), 0.5))
    return out


def statistics(self: Any, x: Tensor) -> Tensor:
    """Of a part, and nobody reads them."""
    h = self.up(x)
    self.mean = h.detach().mean()
    out: Tensor = self.down(h)
    return out


def cached(self: Any, x: Tensor) -> Tensor:
    """Slopes of its heads, made when they are first needed."""
    q, k, v = (layer(x).unflatten(-1, (-1, D)) for layer in (self.q, self.k, self.v))
    if not hasattr(self, "ones"):
        self.ones = torch.ones(q.shape[2], 1)
    out: Tensor = self.out(attended(q * self.ones, k, v))
    return out


RIGHT: dict[str, Callable[[], Any]] = {
    "heads of one width": attention(),
    "grouped heads": lambda: Inner(
        lambda m, x: m.out(attended(*(layer(x).unflatten(-1, (-1, D)) for layer in (m.q, m.k, m.v)), enable_gqa=True)),
        QKVO, q=nn.Linear(C, C), k=nn.Linear(C, 2 * D), v=nn.Linear(C, 2 * D), out=nn.Linear(C, C),
    ),
    "a norm inside of heads": attention(normed, QKVO | {"norm": "replicated_with_grad_allreduce"}, norm=lambda: nn.RMSNorm(D)),
    "a bias of keys, whose gradient is zero": attention(),
    "fused by head": wide(fused_by_head, up=3 * C, down=C),
    "in place": wide(in_place),
    "without bias": lambda: Inner(plain, UP_DOWN, up=nn.Linear(C, 24, bias=False), down=nn.Linear(24, C, bias=False)),
    "dropout": wide(lambda m, x: m.down(m.drop(m.up(x))), drop=lambda: nn.Dropout(0.5)),
    "noise": wide(noisy),
    "noise after": wide(lambda m, x: m.noise(plain(m, x)), noise=Noise),
    "statistics": wide(statistics),
    "cached": attention(cached),
    "twice": wide(lambda m, x: plain(m, plain(m, x))),
    "gathered": wide(plain, {"up": "colwise_gather_output", "down": "rowwise_split_input"}),
    "a mean of what is gathered": wide(lambda m, x: m.down(m.up(x).softmax(-1)), {"up": "colwise_gather_output", "down": "rowwise_split_input"}),
    "in modules of their own": lambda: Inner(
        lambda m, x: m.second(m.first(x)), {"first.up": "colwise", "second.down": "rowwise"},
        first=Inner(lambda m, x: m.up(x).relu(), {}, up=nn.Linear(C, 24)), second=Inner(lambda m, x: m.down(x), {}, down=nn.Linear(24, C)),
    ),
    "an output of zeros": lambda: zeroed(attention()()),
}  # fmt: skip


def zeroed(inner: Any) -> Any:
    nn.init.zeros_(inner.out.weight)
    return inner


def said(mesh: Mesh, model: nn.Module, *, precision: str = "fp32", T: int = 20, strategy: str = "ddp", remat: Any = None, tensors: Any = None, pipeline: Any = None) -> str:  # fmt: skip
    """The sentence, or nothing."""
    numbers = {"fp32": fp32, "bf16": bf16, "bf16_true": bf16_true}[precision].build()
    how = DDP(bucket_mb=25) if strategy == "ddp" else FSDP(reshard="forward", offload="none")
    split = parallelize(model, mesh, how, precision=numbers, seed=0, remat=remat, tensors=tensors, pipeline=pipeline)
    modes = [(module.training, len(module._forward_hooks)) for module in split.modules()]
    attributes = [set(vars(module)) for module in split.modules()]
    state = {name: value.clone() for name, value in split.state_dict().items()}
    batch = {"inputs": tokens(3, T), "targets": tokens(3, T)}
    try:
        check(split, NextToken(), batch, None, mesh, numbers)
    except WordsError as error:
        return str(error)
    assert modes == [(module.training, len(module._forward_hooks)) for module in split.modules()]
    assert all(
        vars(module).keys() - names <= {"mean", "ones"}
        for module, names in zip(split.modules(), attributes, strict=True)
    )
    assert all(torch.equal(local(value), local(state[name])) for name, value in split.state_dict().items())
    return ""


def local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def every(mesh: Mesh, models: dict[str, Callable[[], nn.Module]], **options: Any) -> dict[str, str]:
    def answers() -> Iterator[tuple[str, str]]:
        for name, make in models.items():
            torch.manual_seed(0)
            yield name, said(mesh, make(), **options)

    return dict(answers())


SOME = (
    "a fixed number of heads",
    "a norm over the width",
    "a colwise without its rowwise",
    "a gradient of a norm inside of heads",
    "a gradient of the input",
)
FINE = ("heads of one width", "a norm inside of heads", "noise", "in modules of their own", "an output of zeros")
ALL = pytest.mark.campaign("commands")


def wrong(mesh: Mesh, names: Sequence[str]) -> dict[str, str]:
    return every(mesh, {name: partial(Net, WRONG[name][0]) for name in names})


def named(sentences: dict[str, str], names: Sequence[str]) -> None:
    for name in names:
        assert WRONG[name][1].removeprefix("blocks.0.") in sentences[name], (name, sentences[name])
        assert sentences[name].endswith("Or leave out mesh.tp.")


@pytest.mark.parametrize("names", [SOME, pytest.param(tuple(WRONG), marks=ALL)], ids=["some", "all"])
def test_what_takes_a_part_for_the_whole_is_named(names: Sequence[str]) -> None:
    for sentences in on_resident_mesh(partial(wrong, names=names), tp=2):
        named(sentences, names)
        assert all(sentence.startswith("mesh.tp=2: ") and "blocks.0." in sentence for sentence in sentences.values())


def alone(self: Any, x: Tensor) -> Tensor:
    h = self.up(x)
    if dist.get_rank() == 1:
        raise MemoryError("of this rank alone")
    out: Tensor = self.down(h)
    return out


def test_a_rank_that_fails_alone_says_why_and_keeps_nobody_waiting() -> None:
    with pytest.raises(RankFailed, match="MemoryError: of this rank alone"):
        on_mesh(impatient, tp=2)


def impatient(mesh: Mesh) -> str:
    with patch.object(tensor_check, "PATIENCE", 0.1):
        return said(mesh, Net(wide(alone)))


def beside(mesh: Mesh) -> dict[str, str]:
    return both(mesh, names=("a gradient of the input",), right=(), sequence="split")[0]


def test_what_reads_the_output_of_a_split_norm_beside_its_matrices_is_told_with_the_key() -> None:
    for sentences in on_resident_mesh(beside, tp=2):
        assert "tensor.sequence=split: Net uses the output of a sequence_parallel module outside of" in str(sentences)


def right(mesh: Mesh, names: Sequence[str]) -> tuple[dict[str, str], dict[str, int]]:
    """The sentences, and how many gradients of a model were compared."""
    compared, here = Counter[str](), ""
    of_gradients = tensor_check._Watch._compare_gradients

    def counted(self: Any, frame: Any, whole: dict[str, Tensor], part: Any, tolerance: float) -> None:
        compared[here] += len(whole)
        of_gradients(self, frame, whole, part, tolerance)

    sentences = dict[str, str]()
    with patch.object(tensor_check._Watch, "_compare_gradients", counted):
        for here in names:
            sentences |= every(mesh, {here: partial(Net, RIGHT[here])})
    return sentences, dict(compared)


@pytest.mark.parametrize("names", [FINE, pytest.param(tuple(RIGHT), marks=ALL)], ids=["some", "all"])
def test_what_is_right_goes_through(names: Sequence[str]) -> None:
    for sentences, compared in on_resident_mesh(partial(right, names=names), tp=2):
        assert not {name: sentence for name, sentence in sentences.items() if sentence}
        few = {name: compared.get(name, 0) for name in names if compared.get(name, 0) < 6}
        assert few.keys() <= {"noise", "noise after", "gathered", "a mean of what is gathered"}, few


def both(mesh: Mesh, *, names: Sequence[str] = SOME, right: Collection[str] = RIGHT, remat: str = "", sequence: str = "", **how: Any) -> tuple[dict[str, str], dict[str, str]]:  # fmt: skip
    """The sentences of some wrong models, and of right ones."""
    if remat:
        how["remat"] = full.build()
    if mesh.shape.pp > 1:
        how["pipeline"] = PipelineShape("gpipe")
    more: dict[str, str] = {}
    if sequence:
        how["tensors"] = {"sequence": sequence, "loss": "split"}
        more = {
            "head": "colwise_gather_output",
            "embed": "embedding_rowwise",
            "blocks.*.norm": "sequence_parallel",
            "norm": "sequence_parallel",
        }
    bad = {name: partial(Net, WRONG[name][0], **more) for name in names}
    good = {name: partial(Net, RIGHT[name], **more) for name in right if not (sequence and "gathered" in name)}
    return every(mesh, bad, **how), every(mesh, good, **how)


@ALL
@pytest.mark.parametrize(
    ("degrees", "how"),
    [
        ({"tp": 2}, {"precision": "bf16"}), ({"tp": 2}, {"precision": "bf16_true"}), ({"tp": 2}, {"remat": "full"}), ({"tp": 2}, {"sequence": "whole"}),
        ({"tp": 2}, {"sequence": "split"}), ({"dp_shard": 2, "tp": 2}, {"strategy": "fsdp"}), ({"pp": 2, "tp": 2}, {}), ({"tp": 4}, {}),
    ],
    ids=str,
)  # fmt: skip
def test_on_other_meshes_and_in_other_precisions(degrees: dict[str, int], how: dict[str, str]) -> None:
    """A pipeline whose stage fails says so itself, and so do mixtures of split and whole tensors."""
    unseen = [
        ("pp" in degrees, "a colwise without its rowwise"),
        (how.get("sequence") == "split", "a gradient of the input"),
    ]
    names = [name for name in SOME if (True, name) not in unseen]
    # on the CPU torch's norm of a split weight takes no input of another precision; what goes twice through `up` has a
    # part of the sequence there the second time; two heads are not split over four ranks
    refused = {"bf16": "a norm inside of heads", "split": "twice"}.get(next(iter(how.values()), ""), "")
    refused = "grouped heads" if degrees == {"tp": 4} else refused
    for bad, good in on_resident_mesh(partial(both, names=names, **how), **degrees):
        named(bad, names)
        assert {name for name, sentence in good.items() if sentence} - {refused} == set(), good
