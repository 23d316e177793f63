"""Models that are not dtrain's, of every kind that a user may bring: what is predicted of them is seen by running them once without memory."""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Rows:
    """Twelve tokens and as many targets; nothing says that they are twelve."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row = torch.randint(29, (13,), generator=torch.Generator().manual_seed(index))
        return row[:-1], row[1:]


def gpt2(*, vocab: int = 29) -> nn.Module:
    """Weights tied, matrices that are no Linear, dropout off."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=vocab, n_positions=32, n_embd=32, n_layer=3, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            bos_token_id=None, eos_token_id=None,
        )
    )  # fmt: skip


class Pictures(nn.Module):
    """Pixels -> classes with a BatchNorm in every block, which keeps what it has seen in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.body = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)) for _ in range(3)
        )
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.body:
            x = x + block(x)
        return self.head(x.mean((2, 3)))


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        q, k, v = (
            each(y).unflatten(-1, (-1, x.shape[-1] // self.heads)).transpose(1, 2) for each in (self.q, self.k, self.v)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Transformer(nn.Module):
    """Learned positions, biases, LayerNorms: with tables for tensor parallelism and pipelines. `frozen`: all but the last block and the head, of which
    the bias; `tied`: the head is the embedding."""

    pipeline = ("embed", "layers", "norm", "head")
    tp_plan: ClassVar[dict[str, str]] = {
        "layers.*.q": "colwise", "layers.*.k": "colwise", "layers.*.v": "colwise", "layers.*.out": "rowwise",
        "layers.*.up": "colwise", "layers.*.down": "rowwise", "head": "colwise_gather_output",
    }  # fmt: skip

    def __init__(
        self,
        *,
        vocab: int = 29,
        width: int = 32,
        layers: int = 4,
        heads: int = 4,
        frozen: bool = False,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.embed = Place(vocab, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=not tied)
        if tied:
            self.head.weight = self.embed.tokens.weight
        if frozen:
            for name, parameter in self.named_parameters():
                parameter.requires_grad = name.startswith((f"layers.{layers - 1}.", "head.weight")) or name.endswith(
                    "norm.weight"
                )

    def forward(self, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:
        x = self.embed(tokens, position_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Place(nn.Module):
    def __init__(self, vocab: int, width: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab, width), nn.Embedding(64, width)

    def forward(self, x: Tensor, position_ids: Tensor | None = None) -> Tensor:
        if x.is_floating_point():  # a later stage of a pipeline
            return x
        return self.tokens(x) + self.places(torch.arange(x.shape[1]) if position_ids is None else position_ids)


def frozen() -> nn.Module:
    return Transformer(frozen=True)


def tied() -> nn.Module:
    return Transformer(tied=True)


class Shared(nn.Module):
    """Five layers of three: two of them run twice, one of those twice in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 96), nn.SiLU(), nn.Linear(96, 64)) for _ in range(3)
        )
        self.out = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Any:
        for index in (0, 1, 1, 2, 0):
            x = x + self.inner[index](x)
        return self.out(x)


class Lent(nn.Module):
    """A weight of two layers of five, and one of a layer and of what comes behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Sequential(nn.Linear(64, 96), nn.SiLU(), nn.Linear(96, 64)) for _ in range(5))
        self.inner[3][0].weight = self.inner[1][0].weight
        self.side, self.out = nn.Linear(64, 96), nn.Linear(96, 10)
        self.side.weight = self.inner[2][0].weight

    def forward(self, x: Tensor) -> Any:
        for layer in self.inner:
            x = x + layer(x)
        return self.out(self.side(x))


class Scaled(nn.Module):
    """Numbers without dims, as CLIP's `logit_scale`: in a block, and beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Sequential(nn.Linear(64, 96), nn.PReLU(), nn.Linear(96, 64)) for _ in range(3))
        for layers in self.inner:
            layers[1].weight = nn.Parameter(torch.tensor(0.25))
        self.scale, self.out = nn.Parameter(torch.tensor(0.5)), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Any:
        for layers in self.inner:
            x = x + layers(x)
        return self.out(x) * self.scale.exp()


class Adapter(nn.Module):
    """A frozen block with a small trained one beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(Beside(64) for _ in range(3))
        self.out = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.inner:
            x = x + layer(x)
        return self.out(x)


class Beside(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.whole, self.down, self.up = (
            nn.Linear(width, width),
            nn.Linear(width, 4, bias=False),
            nn.Linear(4, width, bias=False),
        )
        self.whole.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.whole(x) + self.up(self.down(x))


TOKENS = "objective=next_token trust=[predict,invariance] data.vocab=29 data.sequence=16 data=synthetic"
FEATURES = "objective=regression trust=[predict,invariance] data=synthetic"
MODELS = {
    "gpt2": f"model._target_=predict.foreign.gpt2 {TOKENS}",
    "pictures": "model._target_=predict.foreign.Pictures trust=[predict] objective=classification data=synthetic data.inputs=[3,8,8] data.outputs=10",
    "transformer": f"model._target_=predict.foreign.Transformer {TOKENS}",
    "lengthless": "model._target_=predict.foreign.Transformer objective=next_token trust=[predict] data=dataset data.dataset._target_=predict.foreign.Rows "
    "data.outputs=29",
    "shared": f"model._target_=predict.foreign.Shared {FEATURES}",
    "lent": f"model._target_=predict.foreign.Lent {FEATURES}",
    "scaled": f"model._target_=predict.foreign.Scaled {FEATURES}",
    "frozen": f"model._target_=predict.foreign.frozen {TOKENS}",
    "knotted": f"model._target_=predict.foreign.tied {TOKENS}",
    "adapter": f"model._target_=predict.foreign.Adapter {FEATURES}",
}
"""All with a batch of 8."""

DATA = (
    "strategy=ddp devices=2", "strategy=ddp devices=2 accumulate=2", "strategy=zero1 devices=2 accumulate=2", "strategy=zero2 devices=2 accumulate=2",
    "strategy=zero3 devices=2", "strategy=fsdp devices=2 accumulate=4", "strategy=hsdp devices=4", "strategy=fsdp devices=2 remat=full",
    "strategy=fsdp devices=2 optim=adafactor", "strategy=fsdp devices=2 precision=bf16",
)  # fmt: skip
TENSOR = (
    "strategy=ddp devices=2 mesh.tp=2", "strategy=fsdp devices=4 mesh.tp=2 precision=bf16", "strategy=ddp devices=2 mesh.tp=2 tensor.loss=split",
    "strategy=ddp devices=2 mesh.tp=2 remat=full",
)  # fmt: skip
CONTEXT = (
    "strategy=ddp devices=2 mesh.cp=2", "strategy=fsdp devices=2 mesh.cp=2 precision=bf16", "strategy=ddp devices=2 mesh.cp=2 context.attention=ulysses",
    "strategy=fsdp devices=2 mesh.cp=2 remat=full",
)  # fmt: skip
STAGES = (
    "strategy=pipeline devices=2",
    "strategy=pipeline devices=2 pipeline.schedule=zbv",
    "strategy=fsdp devices=4 mesh.pp=2 precision=bf16",
)
LAYOUTS = {
    "llama": (*DATA, *TENSOR, *CONTEXT, *STAGES), "gpt2": (*DATA, *CONTEXT), "pictures": DATA[:-1], "sequential": (*DATA, *STAGES),
    "transformer": (*DATA, *TENSOR, *CONTEXT, *STAGES, "strategy=ddp devices=4 mesh.tp=2 mesh.cp=2", "strategy=ddp devices=4 mesh.tp=2 mesh.pp=2"),
    "lengthless": (DATA[0], *TENSOR, *CONTEXT, *STAGES), "shared": DATA[:-1], "lent": DATA[:-1], "scaled": DATA[:-1], "plain": DATA[:-1], "frozen": (*DATA, *TENSOR), "knotted": DATA, "adapter": DATA,
}  # fmt: skip
"""Model -> the layouts that it is held against."""
