"""Models of the kinds that users bring, each a few lines of plain torch that know nothing of dtrain. The table is USERS.

model = USERS["weight_norm"].make()
words = words_of("weight_norm")      # its data and objective, and itself by name
"""

import functools
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from invariance import samples
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, rnn
from torch.utils.checkpoint import checkpoint

WIDTH, CLASSES, VOCAB, LENGTH = 16, 4, 23, 8


def features(index: int, g: torch.Generator) -> dict[str, Tensor]:
    x = torch.randn(WIDTH, generator=g)
    return {"x": x, "y": x[:CLASSES].argmax()}


def numbers(index: int, g: torch.Generator) -> dict[str, Tensor]:
    x = torch.randn(WIDTH, generator=g)
    return {"x": x, "y": x[:CLASSES].cumsum(0)}


def images(index: int, g: torch.Generator) -> dict[str, Tensor]:
    x = torch.randn(3, 8, 8, generator=g)
    return {"x": x, "y": x.mean((1, 2)).argmax()}


def tokens(index: int, g: torch.Generator) -> dict[str, Tensor]:
    row = torch.randint(1, VOCAB, (LENGTH + 1,), generator=g)
    return {"x": row[:-1], "y": torch.where(torch.arange(LENGTH) < index % 5, -100, row[1:])}


def ragged(index: int, g: torch.Generator) -> dict[str, Tensor]:
    """Tokens of several lengths, padded with 0, and one class."""
    length = 3 + index % (LENGTH - 2)
    row = torch.randint(1, VOCAB, (LENGTH,), generator=g) * (torch.arange(LENGTH) < length)
    return {"x": row, "y": row.sum() % CLASSES}


@dataclass(frozen=True)
class Task:
    words: str
    sample: Callable[[int, torch.Generator], dict[str, Tensor]]
    loss: Callable[[Any, Tensor], Tensor]
    """(the model's outputs, targets) -> mean of the loss over the targets that count"""


def entropy(outputs: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits_of(outputs).flatten(0, -2), targets.flatten())


def squares(outputs: Any, targets: Tensor) -> Tensor:
    return F.mse_loss(logits_of(outputs), targets)


def logits_of(outputs: Any) -> Tensor:
    if isinstance(outputs, Mapping):
        outputs = outputs["logits"]
    logits: Tensor = outputs[0] if isinstance(outputs, tuple) else getattr(outputs, "logits", outputs)
    return logits


CLASSIFY = f"objective=classification data.outputs={CLASSES}"
TASKS = {
    "features": Task(CLASSIFY, features, entropy),
    "images": Task(CLASSIFY, images, entropy),
    "ragged": Task(CLASSIFY, ragged, entropy),
    "numbers": Task("objective=regression", numbers, squares),
    "tokens": Task(f"objective=next_token data.outputs={VOCAB}", tokens, entropy),
    "own": Task("objective=own objective.over=samples objective.together=2", features, lambda outputs, _: outputs),
}


class Samples(samples.Samples):
    tasks = TASKS


class Stack(nn.Module):
    """Two equal layers in a list and a head: what many models below share. They override `mix`, or what they add in `make`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.make()

    def make(self) -> None: ...

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = self.mix(torch.tanh(layer(x)))
        return self.head(x)

    def mix(self, x: Tensor) -> Tensor:
        return x


class Seq2Seq(nn.Module):
    """An encoder and a decoder with one embedding for both sides and the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.encoder, self.decoder = (nn.GRU(WIDTH, WIDTH, batch_first=True) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Any:
        _, state = self.encoder(self.embed(x.flip(1)))
        return self.head(self.decoder(self.embed(x), state)[0])


class WeightNorm(Stack):
    def make(self) -> None:
        parametrizations.weight_norm(self.layers[1])


class OldWeightNorm(Stack):
    """By a hook that writes the weight before each forward, as libraries of sound still do."""

    def make(self) -> None:
        with warnings.catch_warnings(action="ignore", category=FutureWarning):
            torch.nn.utils.weight_norm(self.layers[1])


class SpectralNorm(Stack):
    """Its buffers take a step of a power iteration in each forward."""

    def make(self) -> None:
        parametrizations.spectral_norm(self.layers[1])


class Orthogonal(Stack):
    def make(self) -> None:
        parametrizations.orthogonal(self.layers[1])


class Pruned(Stack):
    def make(self) -> None:
        prune.l1_unstructured(self.layers[1], "weight", amount=0.5)


class Packed(nn.Module):
    """An LSTM over rows that are packed by their lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cells = nn.Embedding(VOCAB, WIDTH, padding_idx=0), nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Any:
        rows = rnn.pack_padded_sequence(self.embed(x), (x > 0).sum(1).cpu(), batch_first=True, enforce_sorted=False)
        return self.head(self.cells(rows)[1][0][-1])


class BothWays(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cells = (
            nn.Embedding(VOCAB, WIDTH),
            nn.GRU(WIDTH, WIDTH, 2, batch_first=True, bidirectional=True),
        )
        self.head = nn.Linear(2 * WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.cells(self.embed(x))[0].mean(1))


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.EmbeddingBag(VOCAB, WIDTH, mode="mean", padding_idx=0), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.table(x))


class Graph(nn.Module):
    """Messages along the edges of a ring of 16 nodes, gathered and added up by index."""

    edges: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.message, self.head = nn.Linear(1, 8), nn.Linear(16, 8), nn.Linear(8, CLASSES)
        ring = torch.arange(WIDTH)
        self.register_buffer("edges", torch.stack([ring, ring.roll(1)]))

    def forward(self, x: Tensor) -> Any:
        nodes = self.first(x[..., None])
        source, target = self.edges
        messages = torch.tanh(self.message(torch.cat([nodes[:, source], nodes[:, target]], -1)))
        return self.head(torch.zeros_like(nodes).index_add(1, target, messages).amax(1))


class Denoiser(nn.Module):
    """A small U-Net with an embedding of the time, which each sample brings in its first pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8))
        self.down, self.mid = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 1, 1)
        self.up, self.norm, self.head = nn.ConvTranspose2d(8, 8, 4, 2, 1), nn.GroupNorm(2, 8), nn.Linear(11, CLASSES)

    def forward(self, x: Tensor) -> Any:
        angles = x[:, 0, 0, :1] * 2.0 ** torch.arange(4)
        h = self.down(x) + self.time(torch.cat([angles.sin(), angles.cos()], 1))[:, :, None, None]
        h = self.norm(self.up(F.silu(h + self.mid(h))))
        return self.head(torch.cat([h, x], 1).mean((2, 3)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCAB, WIDTH), nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)
        self.attend, self.norm = nn.MultiheadAttention(WIDTH, 2, batch_first=True), nn.LayerNorm((LENGTH, WIDTH))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, x: Tensor) -> Any:
        h, mask = self.embed(x) + self.place, nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.head(self.norm(h + self.attend(h, h, h, attn_mask=mask, need_weights=False)[0]))


class Autoencoder(Stack):
    """Draws in its forward, from numbers that its input decides."""

    def mix(self, x: Tensor) -> Tensor:
        mean, spread = x.chunk(2, 1)
        noise = torch.sin(x[:, :8].detach() * 10)
        return torch.cat([mean + noise * (0.5 * spread).exp(), spread], 1)


class Adapted(Stack):
    """A mixture of LoRA: a frozen layer, and gates that choose among small ones."""

    def make(self) -> None:
        self.layers.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(3, WIDTH, 2) * 0.1)
        self.up, self.gate = nn.Parameter(torch.zeros(3, 2, WIDTH)), nn.Linear(WIDTH, 3)

    def mix(self, x: Tensor) -> Tensor:
        small = torch.einsum("bi,kir,kro->bko", x, self.down, self.up)
        return x + (self.gate(x).softmax(1)[..., None] * small).sum(1)


class Capacity(Stack):
    """Two experts that take at most so many samples of a batch, and a loss that keeps them busy."""

    def make(self) -> None:
        self.route, self.experts = nn.Linear(WIDTH, 2), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        weight = self.route(x).softmax(1)
        taken = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mine = weight.argmax(1).eq(number).nonzero()[:, 0][:3]
            taken = taken.index_add(0, mine, expert(x[mine]) * weight[mine, number, None])
        busy = weight.mean(0).square().sum()
        return F.cross_entropy(super().forward(x + taken), labels) + 0.1 * busy


class Clip(Stack):
    """Pairs of halves of a sample that should find each other within the batch."""

    def make(self) -> None:
        self.left, self.right = nn.Linear(WIDTH // 2, 8), nn.Linear(WIDTH // 2, 8)
        self.temperature = nn.Parameter(torch.tensor(math.log(10.0)))
        del self.layers, self.head

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        left, right = (
            F.normalize(side(half), dim=1) for side, half in zip((self.left, self.right), x.chunk(2, 1), strict=True)
        )
        near, here = left @ right.T * self.temperature.exp(), torch.arange(len(x))
        return (F.cross_entropy(near, here) + F.cross_entropy(near.T, here)) / 2


class Triplet(Stack):
    def forward(self, x: Tensor, labels: Tensor) -> Any:
        out = super().forward(x)
        return F.triplet_margin_loss(out, out.roll(1, 0).detach(), out.roll(2, 0)) + F.cross_entropy(out, labels)


class Double(torch.autograd.Function):
    """An autograd Function of one's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return 2 * x * grads[0]


class HalfInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(0.5)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * 0.5


class OwnFunction(Stack):
    def mix(self, x: Tensor) -> Tensor:
        squared: Tensor = Double.apply(x)
        return squared


class InPlaceFunction(Stack):
    def mix(self, x: Tensor) -> Tensor:
        halved: Tensor = HalfInPlace.apply(x * 1)
        return halved


class Lazy(Stack):
    def make(self) -> None:
        self.lazy = nn.LazyLinear(WIDTH)

    def mix(self, x: Tensor) -> Tensor:
        out: Tensor = self.lazy(x)
        return out


class Quantised(Stack):
    """Fake quantisation of a weight, whose range an observer keeps."""

    high: Tensor

    def make(self) -> None:
        self.register_buffer("high", torch.zeros(()))

    def mix(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.high.copy_(torch.maximum(self.high, self.layers[1].weight.abs().max()))
        step = self.high / 127
        return x + ((x / step).round() * step - x).detach()


class FrozenNorm(Stack):
    """Its train() keeps batch norm in evaluation mode, as detectors do."""

    def make(self) -> None:
        self.norm = nn.BatchNorm1d(WIDTH)
        self.norm.running_mean.fill_(0.1)  # type: ignore[union-attr]

    def train(self, mode: bool = True) -> "FrozenNorm":
        super().train(mode)
        self.norm.eval()
        return self

    def mix(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x)
        return out


class FrozenBackbone(Stack):
    """A frozen backbone with dropout that its train() keeps in evaluation mode."""

    def make(self) -> None:
        self.backbone = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)).requires_grad_(False)

    def train(self, mode: bool = True) -> "FrozenBackbone":
        super().train(mode)
        self.backbone.eval()
        return self

    def mix(self, x: Tensor) -> Tensor:
        return x + self.backbone(x)


class UnderNoGrad(Stack):
    """A backbone that could be trained, called under no_grad."""

    def make(self) -> None:
        self.backbone = nn.Linear(WIDTH, WIDTH)

    def mix(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            fixed = self.backbone(x)
        return x + fixed


class GradientPenalty(Stack):
    """A double backward in the forward, as in WGAN-GP."""

    def forward(self, x: Tensor) -> Any:
        x = x.requires_grad_(True)
        y = super().forward(x)
        (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y + (grad.norm(dim=1, keepdim=True) - 1) ** 2


class Maml(Stack):
    """One inner step on weights that torch.func calls the head with."""

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        weights = dict(self.head.named_parameters())
        inner = torch.func.functional_call(self.head, weights, (x,)).square().mean()
        grads = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        moved = {name: weight - 0.1 * grad for (name, weight), grad in zip(weights.items(), grads, strict=True)}
        return torch.func.functional_call(self.head, moved, (x,))


class Sparse(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCAB, WIDTH, **options), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.table(x).mean(1))


class Spectrum(Stack):
    """A complex weight, as Fourier neural operators have."""

    def make(self) -> None:
        self.filter = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex64))

    def mix(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=WIDTH)


class CountsInBuffer(Stack):
    count: Tensor

    def make(self) -> None:
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Any:
        self.count += 1
        return super().forward(x) / (1 + 0.1 * self.count)


class CountsInAttribute(Stack):
    def make(self) -> None:
        self.count = 0

    def forward(self, x: Tensor) -> Any:
        self.count += 1
        return super().forward(x) / (1 + 0.1 * self.count)


class CountsInDict(Stack):
    def make(self) -> None:
        self.facts = {"count": 0}

    def forward(self, x: Tensor) -> Any:
        self.facts["count"] += 1
        return super().forward(x) / (1 + 0.1 * self.facts["count"])


class StochasticDepth(Stack):
    """Drops layers by a generator of its own."""

    def make(self) -> None:
        self.draw = torch.Generator().manual_seed(7)

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            if torch.rand((), generator=self.draw) < 0.5:
                x = x + torch.tanh(layer(x))
        return self.head(x)


class Uncertain(Stack):
    """Learned variances of two losses."""

    def make(self) -> None:
        self.log_variance = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        out = super().forward(x)
        losses = torch.stack([F.cross_entropy(out, labels), out.square().mean()])
        return (losses * (-self.log_variance).exp() + self.log_variance).sum()


class ArcFace(Stack):
    def forward(self, x: Tensor, labels: Tensor) -> Any:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        near = F.linear(F.normalize(x), F.normalize(self.head.weight)).clamp(-0.99, 0.99)
        wide = torch.where(F.one_hot(labels, CLASSES).bool(), torch.cos(near.acos() + 0.3), near)
        return F.cross_entropy(8 * wide, labels)


class Ctc(Stack):
    def forward(self, x: Tensor, labels: Tensor) -> Any:
        logits = torch.stack([super(Ctc, self).forward(x.roll(k, 1)) for k in range(3)]).log_softmax(-1)
        size = torch.full((len(x),), 3), torch.full((len(x),), 1)
        losses = F.ctc_loss(logits, 1 + labels[:, None] % (CLASSES - 1), *size, reduction="none")
        return losses.mean()


class Smoothed(Stack):
    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return F.cross_entropy(super().forward(x), labels, label_smoothing=0.1)


class TeacherInBuffers(Stack):
    """A moving average of a layer, in buffers (BYOL)."""

    teacher: Tensor

    def make(self) -> None:
        self.register_buffer("teacher", self.head.weight.detach().clone())

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            self.teacher.lerp_(self.head.weight, 0.1)
        return super().forward(x) + F.linear(x, self.teacher)


class TeacherInParameters(Stack):
    """A moving average of a layer, in frozen parameters (DINO)."""

    def make(self) -> None:
        self.teacher = nn.Linear(WIDTH, CLASSES).requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            for mine, theirs in zip(self.teacher.parameters(), self.head.parameters(), strict=True):
                mine.lerp_(theirs, 0.1)
        return super().forward(x) + self.teacher(x)


@dataclass
class Output:
    logits: Tensor
    hidden: Tensor | None = None


class ReturnsDataclass(Stack):
    def forward(self, x: Tensor) -> Any:
        return Output(super().forward(x), x)


class ReturnsDict(Stack):
    def forward(self, x: Tensor) -> Any:
        return {"logits": super().forward(x), "hidden": x}


class ReturnsTuple(Stack):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x


class Scripted(Stack):
    def make(self) -> None:
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            self.part = torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))

    def mix(self, x: Tensor) -> Tensor:
        out: Tensor = self.part(x)
        return out


class CompiledPart(Stack):
    def make(self) -> None:
        warnings.filterwarnings("ignore", message="The .grad attribute")  # torch's own, while it traces
        self.part = torch.compile(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), backend="aot_eager")

    def mix(self, x: Tensor) -> Tensor:
        out: Tensor = self.part(x)
        return out


class ChannelsLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 8, 3, padding=1, groups=8))
        self.head = nn.Linear(8, CLASSES)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Any:
        return self.head(self.body(x.to(memory_format=torch.channels_last)).mean((2, 3)))


class Checkpointed(Stack):
    reentrant = False

    def forward(self, x: Tensor) -> Any:
        x = x.requires_grad_(True)
        for layer in self.layers:
            x = checkpoint(lambda x, layer=layer: torch.tanh(layer(x)), x, use_reentrant=self.reentrant)
        return self.head(x)


class Reentrant(Checkpointed):
    reentrant = True


class ModuleHooks(Stack):
    """Hooks on modules, before the forward and of the backward."""

    def make(self) -> None:
        self.layers[0].register_forward_pre_hook(lambda module, given: (given[0] * 0.5,))
        self.layers[1].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.5,))
        self.head.register_forward_hook(lambda module, given, out: out * 2)


class GradientHook(Stack):
    def make(self) -> None:
        self.layers[1].weight.register_hook(lambda grad: grad * 0.5)


class AfterGradient(Stack):
    """Clamps a gradient once it is there."""

    def make(self) -> None:
        self.layers[1].weight.register_post_accumulate_grad_hook(bounded)


def bounded(weight: Tensor) -> None:
    assert weight.grad is not None
    weight.grad.clamp_(-0.01, 0.01)


class HalfPrecision(Stack):
    """A layer in bf16 beside fp32."""

    def make(self) -> None:
        self.layers[1].to(torch.bfloat16)

    def forward(self, x: Tensor) -> Any:
        x = torch.tanh(self.layers[0](x))
        return self.head(torch.tanh(self.layers[1](x.bfloat16())).float())


class Named(Stack):
    """Takes a batch by name."""

    def forward(self, **batch: Tensor) -> Any:
        return super().forward(batch["x"])


class Branches(Stack):
    """One of its layers is called for some batches alone."""

    def make(self) -> None:
        self.rare = nn.Linear(WIDTH, WIDTH)

    def mix(self, x: Tensor) -> Tensor:
        some = x[:, 0] > 0.5
        return torch.where(some[:, None], self.rare(x), x) if bool(some.any()) else x


class BuiltInEval(Stack):
    """As from_pretrained returns it."""

    def make(self) -> None:
        self.norm = nn.BatchNorm1d(WIDTH, momentum=0.0)
        self.eval()

    def mix(self, x: Tensor) -> Tensor:
        return x if self.training else x * 3


class Attribute(Stack):
    """`slow_first` reads an attribute of its parameter."""

    def make(self) -> None:
        self.layers[0].weight.slow = True


def slow_first(*, model: nn.Module, lr: float = 1e-3, eps: float = 1e-5) -> torch.optim.AdamW:
    """A tenth of the rate for what is `slow`."""
    slow = [p for p in model.parameters() if getattr(p, "slow", False)]
    rest = [p for p in model.parameters() if not getattr(p, "slow", False)]
    groups = [{"params": slow, "lr": lr * 0.1}] * bool(slow) + [{"params": rest}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=eps, weight_decay=0.0)


class Clamped(Stack):
    """Its weights are clamped in the forward, as in WGAN."""

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            self.layers[0].weight.clamp_(-0.1, 0.1)
        return super().forward(x)


class Listed(Stack):
    """Keeps a second reference to its weight in a list."""

    def make(self) -> None:
        self.kept = [self.layers[0].weight]

    def mix(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.kept[0].T)


class Closure(Stack):
    """Keeps a second reference to its weight in a function."""

    def make(self) -> None:
        self.again = functools.partial(F.linear, weight=self.layers[0].weight)

    def mix(self, x: Tensor) -> Tensor:
        return torch.tanh(self.again(x))


class Replaced(Stack):
    """Its parameters are replaced after construction, and one of them is tied."""

    def make(self) -> None:
        self.head.weight = nn.Parameter(torch.randn(CLASSES, WIDTH) * 0.1)
        self.layers[1].weight = self.layers[0].weight


class Collected(Stack):
    """Parameters in a ParameterList and a ParameterDict, one of them without dims."""

    def make(self) -> None:
        self.several = nn.ParameterList([torch.randn(WIDTH) for _ in range(2)])
        self.named = nn.ParameterDict({"slope": torch.ones(()), "gate": torch.ones(1, 1)})

    def mix(self, x: Tensor) -> Tensor:
        return x * self.several[0].sigmoid() * self.named["slope"] * self.named["gate"] + self.several[1]


class Subclass(nn.Parameter):
    """A class of parameters of its own."""

    kind = "special"


class OwnParameter(Stack):
    def make(self) -> None:
        self.scale = Subclass(torch.ones(WIDTH))

    def mix(self, x: Tensor) -> Tensor:
        return x * self.scale


class Toggled(Stack):
    """Freezes a layer in the forward, while it warms up."""

    def make(self) -> None:
        self.steps = 0

    def forward(self, x: Tensor) -> Any:
        self.steps += 1
        self.layers[0].requires_grad_(self.steps > 2)
        return super().forward(x)


class Unused(Stack):
    """A layer that no forward calls."""

    def make(self) -> None:
        self.spare = nn.Linear(WIDTH, WIDTH)


class Twice(Stack):
    """Calls one layer several times."""

    def mix(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layers[0](torch.tanh(self.layers[0](x))))


class Bilinear(Stack):
    def make(self) -> None:
        self.pair = nn.Bilinear(WIDTH, WIDTH, WIDTH)

    def mix(self, x: Tensor) -> Tensor:
        out: Tensor = self.pair(x, x)
        return out


class Depthwise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 6, 3, groups=3), nn.InstanceNorm2d(6, affine=True), nn.PReLU(6), nn.AdaptiveAvgPool2d(1)
        )
        self.head = nn.Conv2d(6, CLASSES, 1)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.body(x)).flatten(1)


class Recurrence(Stack):
    """A cell that is unrolled by hand."""

    def make(self) -> None:
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def mix(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x)
        for k in range(3):
            state = self.cell(x.roll(k, 1), state)
        return state


class Hyper(Stack):
    """One network gives the weights of another."""

    def make(self) -> None:
        self.weights = nn.Linear(WIDTH, WIDTH * WIDTH)

    def mix(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.einsum("bi,bio->bo", x, self.weights(x).view(-1, WIDTH, WIDTH)))


class NodeHook(Stack):
    """A hook on the node that adds up a gradient, as libraries did before there were hooks on tensors."""

    def make(self) -> None:
        weight = self.layers[0].weight
        assert isinstance(weight, Tensor)
        self.nodes = [weight.expand_as(weight).grad_fn.next_functions[0][0]]  # type: ignore[union-attr]
        self.nodes[0].register_prehook(lambda grads: (grads[0] * 0.5,))  # type: ignore[union-attr]


class Mask(Stack):
    """A tensor as an attribute of a weight."""

    def make(self) -> None:
        self.layers[0].weight.mask = torch.ones(WIDTH, WIDTH)  # type: ignore[union-attr]


class Lambda(Stack):
    """Keeps a second reference to its weight in a closure."""

    def make(self) -> None:
        weight = self.layers[0].weight
        self.again = lambda x: x @ weight.T  # type: ignore[operator]

    def mix(self, x: Tensor) -> Tensor:
        return torch.tanh(self.again(x))


class ClampedData(Stack):
    """Clamps what no version counts."""

    def forward(self, x: Tensor) -> Any:
        for parameter in self.layers[0].parameters():
            parameter.data.clamp_(-0.1, 0.1)
        return super().forward(x)


class ByBatch(Stack):
    """Writes what its rank's samples say."""

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            self.layers[0].bias.copy_(x.mean(0))  # type: ignore[union-attr,operator]
        return super().forward(x)


class ReplacedInForward(Stack):
    def forward(self, x: Tensor) -> Any:
        self.head.weight = nn.Parameter(self.head.weight.detach() * 2)
        return super().forward(x)


class Merging(Stack):
    """Its `train` does more than set modes: in evaluation a product of two matrices is part of a third."""

    def make(self) -> None:
        self.down, self.up = nn.Parameter(torch.ones(2, WIDTH) * 0.1), nn.Parameter(torch.ones(WIDTH, 2) * 0.1)
        self.is_merged = False

    def train(self, mode: bool = True) -> "Merging":
        super().train(mode)
        if mode == self.is_merged:
            with torch.no_grad():
                self.layers[0].weight.add_(self.up @ self.down, alpha=-1 if mode else 1)  # type: ignore[union-attr,operator]
            self.is_merged = not mode
        return self

    def forward(self, x: Tensor) -> Any:
        return super().forward(x if self.is_merged else x + x @ self.down.T @ self.up.T)


class Adversary(Stack):
    """A gradient of the first order, of samples (arXiv 1412.6572)."""

    def forward(self, x: Tensor) -> Any:
        given = x.detach().requires_grad_(True)
        (grad,) = torch.autograd.grad(super().forward(given).sum(), given)
        return super().forward(x + 0.1 * grad.sign())


class Inner(nn.Module):
    """A step of the whole model within the step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Stack()

    def forward(self, x: Tensor) -> Any:
        weights = dict(self.net.named_parameters())
        loss = torch.func.functional_call(self.net, weights, (torch.ones(1, WIDTH),)).pow(2).sum()
        grads = torch.autograd.grad(loss, list(weights.values()))
        moved = {name: weight - 0.01 * grad for (name, weight), grad in zip(weights.items(), grads, strict=True)}
        return torch.func.functional_call(self.net, moved, (x,))


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Stack()

    def forward(self, x: Tensor) -> Any:
        weights = {name: weight * 1.1 for name, weight in self.net.named_parameters()}
        return torch.func.functional_call(self.net, weights, (x,))


class FrozenForOneUse(Stack):
    def forward(self, x: Tensor) -> Any:
        self.head.requires_grad_(False)
        once = super().forward(x)
        self.head.requires_grad_(True)
        return once + super().forward(x * 0.5)


class TiedByData(Stack):
    """Two parameters in one memory, as autoencoders tie them."""

    def make(self) -> None:
        self.layers[1].weight.data = self.layers[0].weight.data.T  # type: ignore[union-attr,assignment]


class BufferOfWeight(Stack):
    """A buffer in the memory of a weight."""

    def make(self) -> None:
        self.register_buffer("view", self.layers[0].weight.detach())  # type: ignore[operator]

    def mix(self, x: Tensor) -> Tensor:
        return x + x @ self.view.T  # type: ignore[operator,union-attr]


class Unfrozen(Stack):
    """Frozen when it is built, and unfrozen in the forward."""

    def make(self) -> None:
        self.layers[0].requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        self.layers[0].requires_grad_(True)
        return super().forward(x)


class ClampedLater(Stack):
    """Clamps the weights of its head from the third forward on."""

    def make(self) -> None:
        self.count = 0

    def forward(self, x: Tensor) -> Any:
        self.count += 1
        if self.count > 2:
            self.head.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


class ScaledOnce(Stack):
    """Scales its head in the third forward alone."""

    def make(self) -> None:
        self.count = 0

    def forward(self, x: Tensor) -> Any:
        self.count += 1
        if self.count == 3:
            with torch.no_grad():
                self.head.weight.mul_(0.1)
        return super().forward(x)


class UnfrozenLater(Stack):
    """Unfreezes layer after layer, as for gradual unfreezing (arXiv 1801.06146)."""

    def make(self) -> None:
        self.count = 0
        self.layers.requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        self.count += 1
        if self.count > 2:
            self.layers[1].requires_grad_(True)
        return super().forward(x)


class UnfrozenByMode(Stack):
    """Its `train` unfreezes a layer when it is called again, as after an evaluation."""

    def make(self) -> None:
        self.count = 0
        self.head.requires_grad_(False)

    def train(self, mode: bool = True) -> "UnfrozenByMode":
        self.count += mode
        self.head.requires_grad_(self.count > 1)
        return super().train(mode)


class FrozenLater(Stack):
    """Freezes its head from the third forward on."""

    def make(self) -> None:
        self.count = 0

    def forward(self, x: Tensor) -> Any:
        self.count += 1
        self.head.requires_grad_(self.count < 3)
        return super().forward(x)


class WritesByBatchLater(Stack):
    """Writes what its rank's samples say, from the third forward on."""

    def make(self) -> None:
        self.count = 0

    def forward(self, x: Tensor) -> Any:
        self.count += 1
        if self.count > 2:
            with torch.no_grad():
                self.layers[0].bias.copy_(x.mean(0))  # type: ignore[union-attr,operator]
        return super().forward(x)


class ListsSome(Stack):
    """Its `named_parameters` leaves out what is not to be trained."""

    def named_parameters(self, *args: Any, **options: Any) -> Any:
        return ((name, each) for name, each in super().named_parameters(*args, **options) if "layers.0" not in name)


class ListsWithoutArguments(Stack):
    def parameters(self) -> Any:  # type: ignore[override]
        return [*self.layers.parameters(), *self.head.parameters()]


class ListsOnce(Stack):
    """Lists its parameters once, and keeps the list."""

    def make(self) -> None:
        self.kept = dict[bool, Any]()

    def parameters(self, recurse: bool = True) -> Any:
        if recurse not in self.kept:
            self.kept[recurse] = [*super().parameters(recurse)]
        return self.kept[recurse]


class Unsaved(Stack):
    """Its state_dict leaves out a layer that is trained."""

    def state_dict(self, *args: Any, **options: Any) -> Any:
        state = super().state_dict(*args, **options)
        return {name: value for name, value in state.items() if "layers.1" not in name}


@dataclass(frozen=True)
class User:
    make: Callable[[], nn.Module]
    task: str = "features"
    refused: Mapping[str, str] = field(default_factory=dict)
    """layout, or "" for every one -> what its refusal says"""
    words: str = "optim.weight_decay=0"
    unused: bool = False
    """Some forwards leave parameters without a gradient."""
    same: float = 2e-6
    """How far losses may be relative to themselves, and gradients to a tensor's largest number."""
    weights: float = 1e-5
    """How far weights may be, relative to the way they could have gone: AdamW makes steps of rounding errors."""


def sharded(said: str) -> dict[str, str]:
    """What the refusal of every strategy that shards says."""
    return dict.fromkeys(("fsdp", "zero1", "zero2"), said)


USERS: dict[str, User] = {
    "one_embedding_for_three": User(Seq2Seq, "tokens"),
    "weight_norm": User(WeightNorm),
    "weight_norm_by_a_hook": User(OldWeightNorm),
    "spectral_norm": User(SpectralNorm),
    "orthogonal": User(Orthogonal),
    "pruned": User(Pruned),
    "lstm_over_packed_rows": User(Packed, "ragged"),
    "gru_both_ways": User(BothWays, "ragged"),
    "bag_of_words": User(Bag, "ragged"),
    "graph": User(Graph),
    "denoiser": User(Denoiser, "images"),
    "attention": User(Attention, "tokens", weights=1e-4),
    "autoencoder": User(Autoencoder),
    "mixture_of_lora": User(Adapted),
    "experts_with_capacity": User(Capacity, "own"),
    "contrastive": User(Clip, "own"),
    "triplets": User(Triplet, "own"),
    "autograd_function": User(OwnFunction),
    "autograd_function_in_place": User(InPlaceFunction),
    "lazy": User(Lazy, refused={"": "has no shape yet"}),
    "fake_quantisation": User(Quantised),
    "frozen_batch_norm": User(FrozenNorm),
    "frozen_backbone": User(FrozenBackbone),
    "backbone_under_no_grad": User(UnderNoGrad, unused=True),
    "gradient_penalty": User(
        GradientPenalty, refused=sharded("a gradient is computed before the backward of the loss")
    ),
    "maml": User(Maml),
    "sparse_embedding": User(lambda: Sparse(sparse=True), "ragged"),
    "embedding_with_max_norm": User(
        lambda: Sparse(max_norm=1.0),
        "ragged",
        sharded("table.weight has max_norm") | {"ddp": "every rank looks up other rows"},
    ),
    "complex_weight": User(
        Spectrum, refused=sharded("holds complex numbers, which cannot be sharded. Type strategy=ddp")
    ),
    "count_in_a_buffer": User(CountsInBuffer),
    "count_in_an_attribute": User(CountsInAttribute),
    "count_in_a_dict": User(CountsInDict),
    "stochastic_depth": User(StochasticDepth, unused=True, refused=sharded("all ranks must call the same elements")),
    "learned_variances": User(Uncertain, "own"),
    "arcface": User(ArcFace, "own", unused=True),
    "ctc": User(Ctc, "own"),
    "label_smoothing": User(Smoothed, "own"),
    "teacher_in_buffers": User(TeacherInBuffers),
    "teacher_in_parameters": User(TeacherInParameters, refused=sharded("the forward writes teacher.weight")),
    "dataclass": User(ReturnsDataclass),
    "dict": User(ReturnsDict),
    "tuple": User(ReturnsTuple, refused={"": "it returns a tuple"}),
    "scripted_part": User(Scripted, refused=sharded("part is made by torch.jit")),
    "compiled_part": User(CompiledPart),
    "channels_last": User(ChannelsLast, "images"),
    "checkpointed": User(Checkpointed),
    "checkpointed_reentrant": User(Reentrant),
    "hooks_on_modules": User(ModuleHooks),
    "hook_on_a_gradient": User(GradientHook, refused=sharded("layers.1.weight has a hook")),
    "hook_after_a_gradient": User(AfterGradient, refused=sharded("layers.1.weight has a hook")),
    "a_layer_in_bf16": User(HalfPrecision, same=2**-7, weights=2**-7),
    "batch_by_name": User(Named, words="optim.weight_decay=0 data.inputs=[x]"),
    "branches": User(Branches, unused=True),
    "built_in_eval": User(BuiltInEval, unused=True),
    "attribute_of_a_parameter": User(Attribute, words="optim._target_=invariance.users.slow_first"),
    "clamped": User(Clamped, refused=sharded("the forward writes layers.0.weight")),
    "weight_in_a_list": User(Listed, refused=sharded("layers.0.weight is also in a list")),
    "weight_in_a_function": User(Closure, refused=sharded("layers.0.weight is also in a dict")),
    "replaced_parameters": User(Replaced),
    "parameters_in_lists": User(Collected),
    "class_of_parameters": User(OwnParameter, refused=sharded("scale is a Subclass")),
    "frozen_at_first": User(Toggled, unused=True, refused=sharded("requires_grad of layers.0.weight was changed")),
    "unused_layer": User(Unused, unused=True),
    "layer_called_twice": User(Twice),
    "bilinear": User(Bilinear),
    "depthwise": User(Depthwise, "images"),
    "cell_by_hand": User(Recurrence),
    "hypernetwork": User(Hyper, "numbers"),
    "hook_on_a_node": User(NodeHook, refused=sharded("layers.0.weight is also in a list of yours")),
    "mask_of_a_weight": User(Mask, refused=sharded("layers.0.weight has the tensor mask as an attribute")),
    "weight_in_a_closure": User(Lambda, refused=sharded("layers.0.weight is also in a closure of yours")),
    "data_clamped": User(ClampedData, refused=sharded("the forward writes layers.0.weight")),
    "bias_of_a_batch": User(
        ByBatch,
        unused=True,
        refused=sharded("the forward writes layers.0.bias")
        | {"ddp": "the forward writes layers.0.bias with other values on every rank"},
    ),
    "replaced_in_forward": User(
        ReplacedInForward,
        refused=sharded("the forward writes head.weight")
        | dict.fromkeys(("single", "microbatches", "ddp"), "another parameter in the place of head.weight"),
    ),
    "merging": User(Merging),
    "adversary": User(Adversary, refused=sharded("a gradient is computed before the backward of the loss")),
    "step_within_a_step": User(Inner, refused=sharded("a gradient is computed before the backward of the loss")),
    "functional_call": User(Functional),
    "frozen_for_one_use": User(FrozenForOneUse),
    "tied_by_data": User(TiedByData, refused=sharded("layers.0.weight shares memory with layers.1.weight")),
    "buffer_of_a_weight": User(BufferOfWeight, refused=sharded("layers.0.weight shares memory with view")),
    "unfrozen_in_forward": User(Unfrozen, refused={"": "layers.0.weight was frozen when the model was built"}),
    "unfrozen_later": User(UnfrozenLater, refused={"": "layers.1.weight was frozen when the model was built"}),
    "frozen_later": User(FrozenLater, unused=True, refused=sharded("requires_grad of head.weight was changed")),
    "bias_of_a_batch_later": User(
        WritesByBatchLater,
        unused=True,
        refused=sharded("reads or writes weights outside of the layer that owns them, and did not in the first step")
        | {"ddp": "the forward writes layers.0.bias with other values on every rank"},
    ),
    "lists_some_parameters": User(
        ListsSome, refused={"": "ListsSome overrides parameters or named_parameters, which lists other"}
    ),
    "lists_without_arguments": User(
        ListsWithoutArguments, refused={"": "ListsWithoutArguments overrides parameters or named_parameters, which"}
    ),
    "lists_once": User(ListsOnce, refused=sharded("ListsOnce overrides parameters") | {"ddp": "ListsOnce overrides"}),
    "clamped_later": User(ClampedLater, refused=sharded("the forward writes head.weight")),
    "scaled_once": User(ScaledOnce, refused=sharded("the forward writes head.weight")),
    "unsaved_layer": User(
        Unsaved, refused={"": "its state_dict leaves out parameters that are trained: layers.1.weight"}
    ),
}


def build(*, name: str) -> nn.Module:
    return USERS[name].make()


def words_of(name: str) -> str:
    user = USERS[name]
    task = TASKS[user.task]
    data = f"data=dataset data.dataset._target_=invariance.users.Samples data.dataset.task={user.task} data.holdout=0 data.inputs=x data.targets=y"
    return (
        f"model._target_=invariance.users.build model.name={name} trust=[invariance] {data} {task.words} {user.words}"
    )
