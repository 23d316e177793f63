"""Code as users bring it: FAULTS, each with the causes that `dtrain verify` may name, and RIGHT, which it must pass without an alarm."""

import os
import random
import time
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from wrong_models import Net

from dtrain.objective import Loss

CALLS = {"forwards": 0}


class Rows:
    """Sample i: 64 features and 10 targets, by its index alone; a fault overrides `shift`."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row = torch.randn(64, generator=torch.Generator().manual_seed(index))
        return row + self.shift(index), row[:10]

    def shift(self, index: int) -> float:
        return 0.0


class OfRank(Rows):
    def shift(self, index: int) -> float:
        return 0.01 * int(os.environ.get("RANK", 0))


class OfProcess(Rows):
    def shift(self, index: int) -> float:
        return os.getpid() % 97 / 97


class OfHash(Rows):
    def shift(self, index: int) -> float:
        return hash(f"row {index}") % 97 / 97


class OfSet(Rows):
    """Classes in the order of a set."""

    def __init__(self) -> None:
        self.classes_of = list({f"class {number}" for number in range(20)})

    def shift(self, index: int) -> float:
        return self.classes_of.index(f"class {index % 20}") / 20


class OfClock(Rows):
    def shift(self, index: int) -> float:
        return time.perf_counter_ns() % 997 / 997


class OfBuilding(Rows):
    """A shuffle that is drawn when the dataset is built, by a generator that the system seeds."""

    def __init__(self) -> None:
        self.shifts = np.random.default_rng().random(64)

    def shift(self, index: int) -> float:
        return float(self.shifts[index])


class Remembering(Rows):
    """Leaks the sample before."""

    before = 0.0

    def shift(self, index: int) -> float:
        before, self.before = self.before, float(index)
        return before / 64


class FromSeventh(Net):
    """Another model from its seventh forward on."""

    forwards = 0

    def mix(self, x: Tensor) -> Tensor:
        self.forwards += 1
        return x * (1.0 if self.forwards < 7 else 0.5)


class FromFortieth(FromSeventh):
    def mix(self, x: Tensor) -> Tensor:
        self.forwards += 1
        return x * (1.0 if self.forwards < 40 else 0.5)


class InDict(Net):
    """Counts in a dict of its module's file."""

    def mix(self, x: Tensor) -> Tensor:
        CALLS["forwards"] += 1
        return x * (1.0 if CALLS["forwards"] % 10 else 0.9)


class InClosure(Net):
    def __init__(self) -> None:
        super().__init__()
        seen: list[int] = []

        def grows(x: Tensor) -> Tensor:
            seen.append(len(x))
            return x * min(1.0, len(seen) / 50)

        self.grows = grows

    def mix(self, x: Tensor) -> Tensor:
        return self.grows(x)


class HashedWidths(Net):
    """Scales by hash() of a name."""

    def mix(self, x: Tensor) -> Tensor:
        return x * (1 + hash("scale") % 97 / 97)


class SlowClock(Net):
    """Anneals by the wall clock."""

    def mix(self, x: Tensor) -> Tensor:
        return x * (1 + time.time() % 100 / 100)


class ProcessModel(Net):
    def mix(self, x: Tensor) -> Tensor:
        return x * (1 + os.getpid() % 97 / 97)


class RankNoise(Net):
    def mix(self, x: Tensor) -> Tensor:
        return x + 0.01 * torch.randn(48, generator=torch.Generator().manual_seed(int(os.environ.get("RANK", 0))))


class Median(Net):
    """Centres by the median of its batch."""

    def mix(self, x: Tensor) -> Tensor:
        return x - x.detach().median(0).values


class Attends(Net):
    """Attends over the batch where it meant the sequence."""

    def mix(self, x: Tensor) -> Tensor:
        return x + F.scaled_dot_product_attention(x[None], x[None], x[None])[0]


class KeptState(Net):
    """The hidden state of the last forward goes on."""

    state: Tensor | None = None

    def mix(self, x: Tensor) -> Tensor:
        last = 0.0 if self.state is None else self.state
        self.state = x.detach().mean(0)
        return x + 0.5 * last


class Squared:
    """An objective that is right: a sum of squares over the samples."""

    unit = "samples"

    def count(self, batch: Any) -> int:
        return len(batch["targets"])

    def inputs(self, batch: Any) -> Any:
        return batch["inputs"]

    def loss(self, outputs: Any, batch: Any) -> Loss:
        return Loss((outputs - batch["targets"].view_as(outputs)).square().sum() / 10)


class Annealed(Squared):
    """Weighs its loss by the number of times that it was asked."""

    asked = 0

    def loss(self, outputs: Any, batch: Any) -> Loss:
        self.asked += 1
        return Loss(super().loss(outputs, batch).sum * (1 + self.asked / 10))


class Hardest(Squared):
    """Only the hardest half of the samples of a forward."""

    def loss(self, outputs: Any, batch: Any) -> Loss:
        each = (outputs - batch["targets"].view_as(outputs)).square().mean(1)
        return Loss(2 * each.topk(max(1, len(each) // 2)).values.sum())


class CountedBuffer(Net):
    """A warm-up by a saved buffer, once a step."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def mix(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
        return x * (self.steps / 10).clamp(max=1)


class Cache(Net):
    """A table that the first forward fills and all others read."""

    table: Tensor | None = None

    def mix(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.linspace(0, 1, 48)
        return x * self.table


class Logs(Net):
    """Counts and remembers, and computes with none of it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.history, self.began = 0, list[float](), time.time()

    def mix(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.history.append(float(x.detach().mean()))
        return x


class SortedSet(Net):
    """Layers by name, from a set that is sorted."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({name: nn.Linear(48, 48) for name in sorted({"red", "green", "blue"})})

    def mix(self, x: Tensor) -> Tensor:
        return sum((head(x) for head in self.heads.values()), x)


class InPlace(Net):
    """Writes into its input."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x.mul_(0.5))


class Dropless(Net):
    """Dropout of nothing, and attention within a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.0)

    def mix(self, x: Tensor) -> Tensor:
        heads = self.drop(x).view(len(x), 2, 4, 6)
        return x + F.scaled_dot_product_attention(heads, heads, heads).flatten(1)


class LastOfSequence(nn.Module):
    """A GRU over eight slices of the features; an object with attributes comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRU(8, 16, batch_first=True), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Any:
        return Answer(self.head(self.cell(x.view(len(x), 8, 8))[0][:, -1]))


class Answer:
    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


class AutogradFunction(Net):
    def mix(self, x: Tensor) -> Tensor:
        out: Tensor = Swish.apply(x)
        return out


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        return gradients[0] * (s + x * s * (1 - s))


class Checkpointed(Net):
    def mix(self, x: Tensor) -> Tensor:
        out: Tensor = torch.utils.checkpoint.checkpoint(torch.tanh, x, use_reentrant=False)
        return out


class Routed(Net):
    """Each sample to one of two experts."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(48, 48) for _ in range(2))

    def mix(self, x: Tensor) -> Tensor:
        first = x[:, :1] > 0
        return torch.where(first, self.experts[0](x), self.experts[1](x))


class Shared(Net):
    """One layer used three times, and a weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Linear(48, 48)
        self.alias = self.middle

    def mix(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.alias(self.middle(x).tanh()).tanh()
        return x


class SkipsForFew(Net):
    """A parameter that only some samples reach."""

    def __init__(self) -> None:
        super().__init__()
        self.rare = nn.Linear(48, 48)

    def mix(self, x: Tensor) -> Tensor:
        rare = x[:, 0] > 0.9
        return x.index_add(0, rare.nonzero()[:, 0], self.rare(x[rare])) if rare.any() else x


class Seeded(Net):
    """A fixed random projection from a generator of its own, drawn when it is built."""

    projection: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("projection", torch.randn(48, 48, generator=torch.Generator().manual_seed(3)) / 7)

    def mix(self, x: Tensor) -> Tensor:
        return x @ self.projection


class Augmented(Rows):
    """Draws from the generators that dtrain seeds by sample and pass."""

    def shift(self, index: int) -> float:
        return random.random() + float(np.random.rand()) + float(torch.rand(()))


class Sorted(Rows):
    def __init__(self) -> None:
        self.classes_of = sorted({f"class {number}" for number in range(20)})

    def shift(self, index: int) -> float:
        return self.classes_of.index(f"class {index % 20}") / 20


class Counting(Rows):
    """Counts what it gives, for a log."""

    given: ClassVar[dict[int, int]] = {}

    def shift(self, index: int) -> float:
        self.given[index] = self.given.get(index, 0) + 1
        return 0.0


class Scaled(torch.optim.SGD):
    """An optimizer of one's own with a schedule in its state."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), 0.01, momentum=0.9)


class OwnClock(Scaled):
    """Learns less with each call, which no state says."""

    calls = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        super().step()
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.mul_(1 - 0.01 * self.calls)


DDP, FSDP, SOME = "strategy=ddp devices=2", "strategy=fsdp devices=2", "strategy=ddp devices=2 microbatch=2"


def model(name: str, words: str = DDP) -> str:
    return f"model._target_=brought.{name} data=synthetic objective=regression {words}"


def data(name: str, words: str = DDP) -> str:
    return f"model._target_=wrong_models.Net objective=regression data=dataset data.holdout=0 data.dataset._target_=brought.{name} {words}"


FAULTS: dict[str, tuple[str, str]] = {
    "data that reads its rank": (data("OfRank"), "data"),
    "data that reads its process": (data("OfProcess"), "data"),
    "data that reads its process, on one rank": (data("OfProcess", "devices=1"), "data"),
    "data by hash()": (data("OfHash"), "data"),
    "data in the order of a set": (data("OfSet"), "data"),
    "data by the clock": (data("OfClock"), "deterministic"),
    "data shuffled when it is built": (data("OfBuilding"), "data"),
    "data that remembers the sample before": (data("Remembering"), "data"),
    "another model from its seventh forward on": (model("FromSeventh"), "calls"),
    "another model from its fortieth forward on": (model("FromFortieth", "devices=1"), "calls"),
    "a count in a dict": (model("InDict"), "calls"),
    "a count in a closure": (model("InClosure"), "resume"),
    "a scale by hash()": (model("HashedWidths"), "hash"),
    "a scale by the clock": (model("SlowClock"), "deterministic"),
    "a scale by its process": (model("ProcessModel"), "deterministic"),
    "noise by its rank": (model("RankNoise"), "mesh"),
    "the median of its batch": (model("Median"), "microbatch"),
    "attention over the batch": (model("Attends", SOME), "microbatch"),
    "the state of the last forward": (model("KeptState", "devices=1"), "resume"),
    "a loss by the number of calls": (f"{model('Logs')} objective._target_=brought.Annealed".replace("objective=regression ", ""), "resume"),
    "the hardest half of a batch": (f"{model('Logs', SOME)} objective._target_=brought.Hardest".replace("objective=regression ", ""), "microbatch"),
    "an optimizer that counts in an attribute": (f"{model('Logs')} optim._target_=brought.OwnClock", "resume"),
}  # fmt: skip
"""What is wrong -> words, the kind of cause."""
RIGHT: dict[str, str] = {
    "a count in a saved buffer": model("CountedBuffer"),
    "a cache that is filled once": model("Cache", SOME),
    "logs in attributes": model("Logs", FSDP),
    "layers of a sorted set": model("SortedSet", FSDP),
    "an input that is written": model("InPlace"),
    "dropout of nothing": model("Dropless", SOME),
    "an object with attributes": model("LastOfSequence", DDP),
    "an autograd function": model("AutogradFunction", FSDP),
    "a checkpointed part": model("Checkpointed"),
    "experts by sample": model("Routed", SOME),
    "a layer used three times": model("Shared", FSDP),
    "a parameter that few samples reach": model("SkipsForFew", "strategy=ddp devices=2 microbatch=1"),
    "a fixed projection": model("Seeded", "strategy=zero1 devices=2"),
    "augmentation by the seeded generators": data("Augmented", SOME),
    "classes of a sorted set": data("Sorted", FSDP),
    "data that counts for a log": data("Counting"),
    "an own objective": f"{model('Logs', SOME)} objective._target_=brought.Squared".replace("objective=regression ", ""),
    "an own optimizer": f"{model('Logs')} optim._target_=brought.Scaled",
    "one process": model("Logs", "devices=1 microbatch=2"),
    "workers that read": data("Augmented", f"{DDP} data.workers=1"),
    "bf16": model("Routed", f"{DDP} precision=bf16"),
}  # fmt: skip
"""What it is -> words."""
