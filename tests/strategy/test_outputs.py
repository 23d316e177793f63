"""Models may answer with an object of any class: under every wrapper its gradients cross ranks, and it comes out as it was."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from pool import resident
from small import PARTS, STRATEGIES, agree, few_steps


class Plain:
    """Not a dataclass, and unknown to torch."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits


@dataclass(frozen=True)
class Frozen:
    logits: torch.Tensor
    hidden: torch.Tensor | None = None


class Keyed(dict[str, torch.Tensor]):
    """In the manner of Hugging Face."""

    def update(self, *_: Any, **__: Any) -> None:
        raise TypeError("not on an output")

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__(logits=logits)

    @property
    def logits(self) -> torch.Tensor:
        return self["logits"]


KINDS = {"plain": Plain, "dataclass": Frozen, "dict": Keyed}


class Answering(torch.nn.Module):
    """Has no list of blocks, whose outputs would be seen."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = torch.nn.Linear(4, 3), KINDS[kind]

    def forward(self, x: torch.Tensor) -> Any:
        return self.kind(self.linear(x))


WRAPPERS = {
    "fsdp": (STRATEGIES["fsdp"], {"dp_shard": 2}),
    "ddp": (STRATEGIES["ddp"], {"dp_replicate": 2}),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_numbers_are_those_of_one_process(kind: str, wrapper: str) -> None:
    parts = PARTS | {"model": {"_target_": f"{__name__}.Answering", "kind": kind}}
    parts |= {
        "data": PARTS["data"] | {"task": "classification"},
        "objective": {"_target_": "dtrain.objective.classification.Classification"},
    }
    strategy, mesh = WRAPPERS[wrapper]
    (reference,) = resident(1, few_steps, parts, {})
    agree(resident(2, few_steps, parts | {"strategy": strategy}, mesh)[0], reference)
