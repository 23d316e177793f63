"""A decoder-only transformer whose feed-forwards are mixtures of experts: which experts a token goes to, and how their
loads are balanced.

Shapes: those of dtrain.model.gpt, and N tokens on this rank, E experts, K experts chosen by a token, R = N x K rows, F
hidden width of an expert. Experts are chosen and weighted as in DeepSeek-V3 (arXiv 2412.19437) and balanced without a
loss (arXiv 2408.15664). No token is ever dropped: rows are sorted by expert and multiplied group by group (MegaBlocks,
arXiv 2211.15841).
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtrain.mesh.sharding import local
from dtrain.model.gpt import GPT, Attention, Block, Decoder, FeedForward, Rotary, check_sizes, described

Compute = Callable[[Tensor, Tensor], Tensor]
"""(rows [R, C] sorted by expert, how many each expert gets [E]) -> [R, C]."""


class Exchange(Protocol):
    """Rows of this rank -> the ranks that hold their experts -> `compute` there -> back, in the order they came."""

    def __call__(self, x_RC: Tensor, load_E: Tensor, compute: Compute) -> Tensor:
        """`load_E` counts rows for all experts, `compute` expects rows and counts for the experts of its rank."""
        ...


class Experts(nn.Module):
    """E feed-forwards (SwiGLU) in three tensors, whose dim 0 is the expert. `exchange` is set where experts lie on
    several ranks.
    """

    def __init__(self, experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(experts, hidden, width) * width**-0.5)
        self.up = nn.Parameter(torch.randn(experts, hidden, width) * width**-0.5)
        self.down = nn.Parameter(torch.zeros(experts, width, hidden))
        self.exchange: Exchange | None = None

    def forward(self, x_RC: Tensor, load_E: Tensor) -> Tensor:
        """Rows sorted by expert, of which expert e gets `load_E[e]`; the result has the type in which matrices are
        multiplied.
        """
        device = x_RC.device.type
        x_RC = x_RC.to(torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else self.gate.dtype)
        return self.compute(x_RC, load_E) if self.exchange is None else self.exchange(x_RC, load_E, self.compute)

    def compute(self, x_RC: Tensor, load_E: Tensor) -> Tensor:
        """The same for the experts of this rank alone."""
        gate, up, down = (local(weight).to(x_RC.dtype) for weight in (self.gate, self.up, self.down))
        product = by_expert(x_RC, load_E, up)
        return product(F.silu(product(x_RC, gate)) * product(x_RC, up), down)


def experts_of(model: nn.Module) -> list[Experts]:
    return [module for module in model.modules() if isinstance(module, Experts)]


def by_expert(x_RC: Tensor, load_E: Tensor, weight_EFC: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """(rows, stacked weights) -> each row times the transposed weight of its expert, for rows and weights like
    these.
    """
    aligned = not any(dim * x_RC.element_size() % 16 for dim in weight_EFC.shape[1:])
    if x_RC.dtype == torch.bfloat16 and aligned and len(x_RC):
        ends = load_E.cumsum(0, dtype=torch.int32)
        return lambda x, weight: F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
    if torch.compiler.is_compiling():
        return lambda x, weight: one_by_one(x, load_E, weight)
    sizes = load_E.tolist()
    return lambda x, weight: _products(x, sizes, weight)


def _products(x_RC: Tensor, sizes: list[int], weight_EFC: Tensor) -> Tensor:
    return torch.cat([F.linear(rows, one) for rows, one in zip(x_RC.split(sizes), weight_EFC.unbind(), strict=True)])


@torch.library.custom_op("dtrain::one_by_one", mutates_args=())
def one_by_one(x_RC: Tensor, load_E: Tensor, weight_EFC: Tensor) -> Tensor:
    """Products whose sizes a graph need not know: where they became numbers of Python, torch would leave a recomputed
    block uncompiled.
    """
    return _products(x_RC, load_E.tolist(), weight_EFC)


@torch.library.custom_op("dtrain::one_by_one_backward", mutates_args=())
def one_by_one_backward(gradient_RF: Tensor, x_RC: Tensor, load_E: Tensor) -> Tensor:
    """The gradient of the weights."""
    sizes = load_E.tolist()
    pairs = zip(gradient_RF.split(sizes), x_RC.split(sizes), strict=True)
    return torch.stack([gradient.T @ rows for gradient, rows in pairs])


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, gradient_RF: Tensor) -> tuple[Tensor, None, Tensor]:
    x_RC, load_E, weight_EFC = ctx.saved_tensors
    gradient_RF = gradient_RF.contiguous()
    of_rows = one_by_one(gradient_RF, load_E, weight_EFC.transpose(1, 2))
    return of_rows, None, one_by_one_backward(gradient_RF, x_RC, load_E)


one_by_one.register_fake(lambda x, load, weight: x.new_empty(len(x), weight.shape[1]))
one_by_one_backward.register_fake(lambda gradient, x, load: x.new_empty(len(load), gradient.shape[1], x.shape[1]))
one_by_one.register_autograd(_gradients, setup_context=_keep)


class _Take(torch.autograd.Function):
    """Indexing whose gradient is indexing too: index_add would add in the order in which threads arrive."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, back: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(back)
        ctx.copies = copies
        return x[index]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (back,) = ctx.saved_tensors
        rows = gradient[back]
        return (rows.unflatten(0, (-1, ctx.copies)).sum(1) if ctx.copies > 1 else rows), None, None, None


def take(x: Tensor, index: Tensor, back: Tensor, *, copies: int = 1) -> Tensor:
    """x[index], where row i of `x` is taken `copies` times, and lands on the rows back[copies x i : copies x (i +
    1)].
    """
    taken: Tensor = _Take.apply(x, index, back, copies)  # type: ignore[no-untyped-call]
    return taken


def order(key: Tensor) -> tuple[Tensor, Tensor]:
    """The stable permutation that sorts `key`, and its inverse."""
    forth = key.argsort(stable=True)
    back = torch.empty_like(forth)
    back[forth] = torch.arange(len(forth), device=key.device)
    return forth, back


class Mixture(nn.Module):
    """[..., C] -> [..., C]: each token goes to the `active` experts of the highest score + bias, `shared` experts see
    all tokens.

    Scores are sigmoids in fp32 whatever the autocast; what the chosen experts say is weighted by score / sum of the
    chosen scores. `bias` [E] is in the checkpoint. It has values even when the model is built on the meta device, where
    no values are.
    """

    def __init__(self, width: int, hidden: int, *, experts: int, active: int, shared: int, rate: float) -> None:
        super().__init__()
        self.active, self.rate = active, rate
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = Experts(experts, width, hidden)
        self.shared = FeedForward(width, shared * hidden) if shared else None
        self.bias: Tensor
        self.register_buffer("bias", torch.zeros(experts, device="cpu"))
        self.load: Tensor
        """[E]: rows each expert got on this rank in training forwards since the last `balance`. Every rank counts its
        own, and no checkpoint holds it.

        Written in place: a graph that is computed twice may set no attribute.
        """
        self.register_buffer("load", torch.zeros(experts, dtype=torch.int64, device="cpu"), persistent=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        x_NC = x_BTC.flatten(0, -2)
        weight_NK, chosen_NK = self.route(x_NC)
        load_E = torch.zeros_like(self.load).scatter_add_(0, chosen_NK.flatten(), torch.ones_like(chosen_NK.flatten()))
        if self.training:
            self.load.add_(load_E)
        forth, back = order(chosen_NK.flatten())
        y_RC = self.experts(take(x_NC, forth // self.active, back, copies=self.active), load_E)
        y_NKC = take(y_RC, back, forth).unflatten(0, (-1, self.active))
        out_BTC = (y_NKC * weight_NK[..., None]).sum(1).to(y_NKC.dtype).view_as(x_BTC)
        return out_BTC if self.shared is None else out_BTC + self.shared(x_BTC)

    def route(self, x_NC: Tensor) -> tuple[Tensor, Tensor]:
        """Weights [N, K] in fp32 that sum to one, and the experts [N, K] they belong to."""
        with torch.autocast(x_NC.device.type, enabled=False):
            scores_NE = F.linear(x_NC.float(), self.router.weight.float()).sigmoid()
        chosen_NK = (scores_NE.detach() + self.bias).topk(self.active, dim=-1).indices
        weight_NK = scores_NE.gather(1, chosen_NK)
        return weight_NK / weight_NK.sum(-1, keepdim=True).clamp(min=1e-20), chosen_NK

    @torch.no_grad()
    def balance(self, total: Tensor) -> None:
        """Once per optimizer step on every rank: bias += rate x sign(mean load - load), and the load begins at zero
        again.

        `total` is the load over all ranks that saw other tokens. Only ratios matter: counting all tokens twice (because
        activations are computed twice) changes nothing. In integers, so that no order of adding shows.
        """
        self.bias += self.rate * (total.sum() - len(total) * total).sign()
        self.load.zero_()


class MoE(Decoder):
    """Tokens [B, T] -> logits [B, T, V]: the GPT, with a mixture of experts in every block.

    `hidden` is the width of one expert; None: 8/3 of the width / (active + shared), rounded up to a multiple of 64, so
    that a token costs as much as in a GPT. `shared` experts in one matrix see every token. `balance` is the rate of
    `Mixture.balance`; 0: never moved. The rest is as in GPT. Under tensor parallelism the experts to choose from, and
    their router, stay whole.

    Raises ValueError when heads do not divide, or `active` is not between 1 and `experts`.
    """

    def __init__(
        self,
        *,
        vocab: int,
        layers: int,
        heads: int,
        width: int,
        experts: int,
        active: int,
        kv_heads: int | None = None,
        hidden: int | None = None,
        shared: int = 0,
        balance: float = 0.001,
        tied: bool = False,
        rope_base: float = 10000.0,
    ) -> None:
        kv_heads = kv_heads or heads
        check_sizes(vocab=vocab, layers=layers, heads=heads, width=width, kv_heads=kv_heads)
        if not 1 <= active <= experts:
            raise ValueError(f"model.active={active} must be between 1 and model.experts={experts}")
        if shared < 0:
            raise ValueError(f"model.shared={shared} must be at least 0")
        hidden = hidden or 64 * math.ceil(width * 8 / 3 / (active + shared) / 64)
        rotary = Rotary(width // heads, rope_base)
        mixture = {"experts": experts, "active": active, "shared": shared}
        blocks = (
            Block(width, Attention(width, heads, kv_heads, rotary), Mixture(width, hidden, **mixture, rate=balance))
            for _ in range(layers)
        )
        super().__init__(vocab, width, blocks, tied=tied)
        self.shared = shared
        self.as_transformers = described(
            "glm4_moe", "Glm4MoeForCausalLM", vocab=vocab, layers=layers, heads=heads, width=width,
            kv_heads=kv_heads, rope_base=rope_base,
        ) | {
            "intermediate_size": hidden, "moe_intermediate_size": hidden, "num_local_experts": experts,
            "n_routed_experts": experts, "num_experts_per_tok": active, "n_shared_experts": max(shared, 1),
            "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "norm_topk_prob": True,
            "routed_scaling_factor": 1.0, "use_qk_norm": True, "partial_rotary_factor": 1.0,
        }  # fmt: skip

    @property
    def tp_plan(self) -> Mapping[str, str]:
        """That of GPT, whose feed-forward is the shared experts here. Nothing is split along the sequence: routers see
        whole ones.
        """
        theirs, mine = "blocks.*.feed_forward.", "blocks.*.feed_forward.shared."
        plan = {
            name.replace(theirs, mine): style for name, style in GPT.tp_plan.items() if style != "sequence_parallel"
        }
        return plan if self.shared else {name: style for name, style in plan.items() if not name.startswith(mine)}

    def init_weight(self, name: str, weight: Tensor, generator: torch.Generator) -> None:
        """Norms one, output projections zero, everything else 1 / sqrt(fan in), embedding and head a quarter of it, as
        in GPT.
        """
        if name.endswith("norm.weight"):
            weight.fill_(1.0)
        elif name.endswith(("attention.out.weight", "experts.down", "shared.down.weight")):
            weight.zero_()
        else:
            quarter = 0.25 if name.startswith(("embed.", "head.")) else 1.0
            weight.normal_(std=quarter * weight.shape[-1] ** -0.5, generator=generator)
