"""Models, objectives, data and optimizers of users with faults that a run does not tell: what `dtrain verify` must catch. The table is WRONG."""

import os
import random
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtrain.data import Batch
from dtrain.objective import Loss, logits_of


class Net(nn.Module):
    """Features [B, 64] -> [B, 10]; a fault overrides `mix`, which sees what flows between the two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 48), nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Any:
        out: Tensor = self.down(self.mix(self.up(x).tanh()))
        return out

    def mix(self, x: Tensor) -> Tensor:
        return x


class NormalisesByBatch(Net):
    def mix(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) / (x.std(0) + 1.0)


class BatchNorm(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(48)

    def mix(self, x: Tensor) -> Tensor:
        normed: Tensor = self.norm(x)
        return normed


class FunctionalDropout(Net):
    def mix(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.2)


class ModuleDropout(Net):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.2)

    def mix(self, x: Tensor) -> Tensor:
        dropped: Tensor = self.drop(x)
        return dropped


class AttentionDropout(Net):
    def mix(self, x: Tensor) -> Tensor:
        heads = x.view(len(x), 2, 4, 6)
        return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.2).flatten(1)


class NumpyNoise(Net):
    def mix(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.from_numpy(np.random.standard_normal(x.shape)).float()


class PythonChoice(Net):
    """Lets a part of each sample through."""

    def mix(self, x: Tensor) -> Tensor:
        return x * torch.tensor([random.random() for _ in x])[:, None]


class OwnGenerator(Net):
    def __init__(self) -> None:
        super().__init__()
        self.noise = torch.Generator().manual_seed(7)

    def mix(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn(48, generator=self.noise)


class CountsCalls(Net):
    """A warm-up of its own."""

    calls = 0

    def mix(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * min(1.0, self.calls / 10)


class PlainAverage(Net):
    """A running mean in a plain attribute."""

    mean: Tensor | float = 0.0

    def mix(self, x: Tensor) -> Tensor:
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean()
        return x - self.mean


class ForgottenBuffer(Net):
    """A running norm in a buffer that is not saved."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()), persistent=False)

    def mix(self, x: Tensor) -> Tensor:
        self.scale.mul_(0.9)
        return x * (1 + self.scale)


class Extra(Net):
    """What torch calls an extra state."""

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 1}

    def set_extra_state(self, state: object) -> None:
        pass


class Late(Net):
    """A parameter that is made by the second forward."""

    forwards = 0

    def mix(self, x: Tensor) -> Tensor:
        Late.forwards += 1
        if Late.forwards == 2:
            self.late = nn.Parameter(torch.ones(()))
        return x


class Replaces(Net):
    """A parameter that the third forward replaces."""

    forwards = 0

    def mix(self, x: Tensor) -> Tensor:
        Replaces.forwards += 1
        if Replaces.forwards == 3:
            self.down.weight = nn.Parameter(self.down.weight.detach().clone())
        return x


class Detached(Net):
    """Outputs without a gradient."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x).detach()


class Lazy(Net):
    """A buffer that is made by the first forward."""

    def mix(self, x: Tensor) -> Tensor:
        if not hasattr(self, "scale"):
            self.register_buffer("scale", torch.ones(()))
        return x


class Cached(Net):
    """Two buffers that are not saved and need not be: one filled by the first forward, one made again by every forward."""

    table: Tensor
    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", None, persistent=False)
        self.register_buffer("mask", torch.zeros(48), persistent=False)

    def mix(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.ones(48)
        self.mask = torch.ones(48)
        return x * self.table * self.mask


class Urandom(Net):
    def mix(self, x: Tensor) -> Tensor:
        return x * (1 + os.urandom(1)[0] / 2560)


class KnowsItsRank(Net):
    def mix(self, x: Tensor) -> Tensor:
        return x * (1 + 0.01 * int(os.environ.get("RANK", 0)))


class HooksByBatch(Net):
    """Its gradients, once they are there, are divided by the samples of a forward."""

    def mix(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient / len(gradient))
        return x


class KeepsTheFirst(Net):
    """Centres everything by the first batch it ever sees."""

    centre: Tensor | None = None

    def mix(self, x: Tensor) -> Tensor:
        if self.centre is None:
            self.centre = x.detach().mean(0)
        return x - self.centre


class Spectral(Net):
    """A power iteration for every forward, however many forwards a step has."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.utils.parametrizations.spectral_norm(self.up)


class DropsByCapacity(Net):
    """Experts take so many samples of a batch; those that come late are left out."""

    def mix(self, x: Tensor) -> Tensor:
        kept = torch.ones(len(x))
        for expert in range(2):
            mine = (x.detach().argmax(1) % 2 == expert).nonzero()[:, 0]
            kept[mine[max(1, len(x) // 3) :]] = 0
        return x * kept[:, None]


class LongestOfBatch(Net):
    """Divides by the largest of the batch, as padding to the longest does."""

    def mix(self, x: Tensor) -> Tensor:
        return x / x.detach().abs().sum(1).max()


class Codebook(Net):
    """A buffer that follows the samples of each forward, saved and all."""

    codes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.zeros(48))

    def mix(self, x: Tensor) -> Tensor:
        self.codes.mul_(0.5).add_(0.5 * x.detach().mean(0))
        return x - self.codes


class HalfNorm(nn.Module):
    """A norm between matrices that tp_plan splits: each rank divides by that of its half. Only in training, which no check sees."""

    tp_plan: ClassVar = {"up": "colwise", "down": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 48), nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x).tanh()
        out: Tensor = self.down(h / h.square().mean(-1, keepdim=True).sqrt() if self.training else h)
        return out


class Huge(Net):
    """Right, and its forward takes more memory than there is for more than four samples."""

    def mix(self, x: Tensor) -> Tensor:
        torch.empty(2**60 if len(x) > 4 else 1, dtype=torch.uint8)
        return x


class Ragged:
    """Rows of 1 to 8 tokens, and a class for each."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        row = [(3 * index + place) % 29 for place in range(1 + index * 5 % 8)]
        return row, sum(row) % 3


class ReadsPadding(nn.Module):
    """A mean over all tokens of a row, padding among them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.EmbeddingBag(29, 3)

    def forward(self, tokens: Tensor) -> Any:
        return self.embed(tokens)


class MeanOfMeans:
    """Users' objectives: the mean of each microbatch, whatever counts in it."""

    unit = "tokens"

    def count(self, batch: Batch) -> int:
        return 1

    def inputs(self, batch: Batch) -> Any:
        return batch["inputs"]

    def loss(self, outputs: Any, batch: Batch) -> Loss:
        logits = logits_of(outputs)
        return Loss(F.cross_entropy(logits.flatten(0, -2), batch["targets"].flatten(), ignore_index=-100))


class MeanForSum(MeanOfMeans):
    def count(self, batch: Batch) -> int:
        return len(batch["targets"])

    def loss(self, outputs: Any, batch: Batch) -> Loss:
        return Loss(F.mse_loss(logits_of(outputs), batch["targets"].view_as(outputs)))


class InBatchNegatives(MeanForSum):
    """Every sample against all others of its forward."""

    def loss(self, outputs: Any, batch: Batch) -> Loss:
        scores = F.normalize(outputs) @ F.normalize(batch["targets"].flatten(1)).T
        return Loss(F.cross_entropy(scores, torch.arange(len(scores)), reduction="sum"))


class WeighsByThePast(MeanForSum):
    """A loss divided by its own running mean."""

    past = 1.0

    def loss(self, outputs: Any, batch: Batch) -> Loss:
        loss = F.mse_loss(outputs, batch["targets"].view_as(outputs), reduction="sum")
        self.past = 0.9 * self.past + 0.1 * float(loss.detach())
        return Loss(loss / self.past)


class Drifting:
    """Data: every reading of a sample is another one."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row = torch.randn(64, generator=torch.Generator().manual_seed(index))
        return row + self.noise(), row[:10]

    def noise(self) -> float:
        return os.urandom(1)[0] / 256


class Sequence(Drifting):
    """Augmented from a generator that goes on from sample to sample."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(0)

    def noise(self) -> float:
        return float(self.random.random())


class Asked(Drifting):
    """Warms up by the number of samples that it has given."""

    asked = 0

    def noise(self) -> float:
        self.asked += 1
        return min(1.0, self.asked / 100)


class RandomUpdate(torch.optim.SGD):
    """Draws random numbers in its step, as stochastic rounding does: no fault."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), 0.01)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        torch.rand(1)
        super().step()


class LocalTrust(torch.optim.Optimizer):
    """Moves each tensor as far as the norm of what this rank holds of it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__([parameter for parameter in model.parameters() if parameter.requires_grad], {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter, gradient in self._pairs():
            parameter.sub_(gradient * (0.1 * parameter.norm() / gradient.norm().clamp(min=1e-12)))

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                yield tuple(getattr(each, "to_local", lambda each=each: each)() for each in (parameter, parameter.grad))  # type: ignore[misc]


def net(name: str, words: str = "") -> str:
    return f"model._target_=wrong_models.{name} data=synthetic objective=regression {words}"


DDP = "strategy=ddp devices=2"
SOME = f"{DDP} microbatch=2"
UNEVEN = "model=gpt model.layers=1 model.width=16 data=dataset data.dataset._target_=invariance.zoo.Uneven data.outputs=29 data.holdout=0"
DATA = "model._target_=wrong_models.Net objective=regression data=dataset data.holdout=0 data.dataset._target_=wrong_models."
WRONG: dict[str, tuple[str, str, str]] = {
    "a mean over the tokens of a microbatch": (f"{UNEVEN} objective._target_=wrong_models.MeanOfMeans {DDP}", "microbatch", "loss at step 1"),
    "a loss that is a mean": (net("Net", f"objective._target_=wrong_models.MeanForSum {SOME}"), "microbatch", "loss at step 1"),
    "negatives of the same batch": (net("Net", f"objective._target_=wrong_models.InBatchNegatives {DDP}"), "microbatch", "loss at step 1"),
    "a forward that normalises by its batch": (net("NormalisesByBatch", DDP), "microbatch", "loss at step 1"),
    "padding that is read": (f"model._target_=wrong_models.ReadsPadding objective=classification data=dataset data.dataset._target_=wrong_models.Ragged data.outputs=3 data.holdout=0 data.pad=0 {DDP}", "microbatch", "loss at step 1"),
    "batch norm": (net("BatchNorm", DDP), "microbatch", "loss at step 1"),
    "batch norm, accumulated": (net("BatchNorm", "microbatch=2"), "microbatch", "loss at step 1"),
    "divided by the longest of a batch": (net("LongestOfBatch", SOME), "microbatch", "loss at step 1"),
    "experts with a capacity": (net("DropsByCapacity", DDP), "microbatch", "loss at step 1"),
    "gradients divided by a batch": (net("HooksByBatch", DDP), "microbatch", "norm at step 1"),
    "spectral norm, accumulated": (net("Spectral", "microbatch=2"), "microbatch", "loss at step 1"),
    "a codebook that follows the batch": (net("Codebook", "microbatch=2"), "microbatch", "loss at step 1"),
    "functional dropout": (net("FunctionalDropout", DDP), "random", "loss at step 1"),
    "a dropout module": (net("ModuleDropout", SOME), "random", "loss at step 1"),
    "dropout of attention": (net("AttentionDropout", DDP), "random", "loss at step 1"),
    "noise of numpy": (net("NumpyNoise", DDP), "random", "loss at step 1"),
    "choices of python": (net("PythonChoice", DDP), "random", "loss at step 1"),
    "a generator of its own": (net("OwnGenerator", DDP), "resume", "loss at step 3"),
    "a count of calls": (net("CountsCalls", DDP), "resume", "loss at step 3"),
    "a running mean in an attribute": (net("PlainAverage", DDP), "resume", "loss at step 1"),
    "a buffer that is not saved": (net("ForgottenBuffer", DDP), "resume", "loss at step 3"),
    "a centre kept from the first batch": (net("KeepsTheFirst", "devices=1"), "resume", "loss at step 3"),
    "a loss weighed by the past": (net("Net", "objective._target_=wrong_models.WeighsByThePast devices=1"), "resume", "loss at step 3"),
    "data from a generator that goes on": (
        f"{DATA}Sequence devices=1",
        "resume",
        "loss at step 3",
    ),
    "data that counts what it was asked for": (f"{DATA}Asked {DDP}", "data", "loss at step 1"),
    "random bytes of the system": (net("Urandom", DDP), "deterministic", ""),
    "data that is another at every reading": (
        f"{DATA}Drifting {DDP}",
        "deterministic",
        "",
    ),
    "a forward that looks at its rank": (net("KnowsItsRank", DDP), "mesh", "loss at step 1"),
    "an optimizer that knows a shard alone": (net("Net", "optim._target_=wrong_models.LocalTrust strategy=fsdp devices=2"), "mesh", "update of "),
    "a norm over what tp splits": (net("HalfNorm", "mesh.tp=2 devices=2"), "mesh", "loss at step 1"),
    "a missing all-reduce": (f"model=mlp data=synthetic loop=planted.alone {DDP}", "mesh", "norm at step 1"),
    "a wrong loss scale": (f"model=gpt model.layers=1 model.width=16 data=synthetic data.sequence=8 loop=planted.louder {DDP}", "mesh", "loss at step 1"),
    "a stage skipped": (
        "model=gpt model.layers=2 model.width=16 data=synthetic data.sequence=8 loop=planted.skipping strategy=pipeline devices=2", "mesh", "norm at step 1",
    ),
}  # fmt: skip
"""What is wrong -> words, the kind that verify names, what differs first. `planted` are loops, in which dtrain itself is wrong."""
