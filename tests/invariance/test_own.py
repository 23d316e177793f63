"""Models that are more than modules and weights: one process against a loop of plain torch, and every strategy equal to it or refused with a true reason.

Those that are refused are so before the first step, or, if the forward alone shows it, in it, before anything is updated.
"""

import re
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from invariance import own
from invariance.run import COMMON, run
from pool import RankFailed
from small import plan

import dtrain.build
from dtrain.data.order import samples
from dtrain.model import seeds

STEPS, TOLERANCE = 4, 2e-6
LAYOUTS = {
    "single": "devices=1",
    "ddp": "devices=2 strategy=ddp",
    "fsdp": "devices=2 strategy=fsdp",
    "zero1": "devices=2 strategy=zero1",
}
SHARDS = ("fsdp", "zero1")
HOOK = dict.fromkeys(SHARDS, "layers.0.weight has a hook, and sharding replaces the parameter. Type strategy=ddp.")
WRITES = dict.fromkeys(SHARDS, "the forward writes layers.0.weight, but the weights are sharded")
BACKWARD = dict.fromkeys(SHARDS, "a gradient is computed before the backward of the loss")
OWN: dict[type[torch.nn.Module], dict[str, str]] = {
    own.Hook: HOOK,
    own.LateHook: HOOK,
    own.NodeHook: dict.fromkeys(SHARDS, "layers.0.weight is also in a list of yours"),
    own.Attribute: {},
    own.Mask: dict.fromkeys(SHARDS, "layers.0.weight has the tensor mask as an attribute"),
    own.Subclass: dict.fromkeys(SHARDS, "layers.0.weight is a Kind"),
    own.Listed: dict.fromkeys(SHARDS, "layers.0.weight is also in a list of yours"),
    own.Closure: dict.fromkeys(SHARDS, "layers.0.weight is also in a closure of yours"),
    own.Normed: {},
    own.Clamped: WRITES,
    own.ClampedData: WRITES,
    own.Teacher: dict.fromkeys(SHARDS, "the forward writes teacher.weight"),
    own.ByBatch: {"ddp": "the forward writes layers.0.bias with other values on every rank"}
    | dict.fromkeys(SHARDS, "the forward writes layers.0.bias"),
    own.Replaced: dict.fromkeys(("single", "ddp"), "another parameter in the place of head.weight")
    | dict.fromkeys(SHARDS, "the forward writes head.weight"),
    own.MaxNorm: dict.fromkeys(("ddp", *SHARDS), "table.weight has max_norm"),
    own.BuiltInEval: {},
    own.FrozenNorm: {},
    own.Merging: {},
    own.Penalty: BACKWARD,
    own.Adversary: BACKWARD,
    own.Inner: BACKWARD,
    own.Functional: {},
    own.Scripted: dict.fromkeys(SHARDS, "part is made by torch.jit"),
    own.Toggles: dict.fromkeys(SHARDS, "the forward changes requires_grad of layers.0.weight"),
    own.FrozenForOneUse: {},
}
"""Model -> layout -> what the refusal says."""
DRAWS = {own.BuiltInEval}
"""Models with dropout, which draws other masks on another mesh."""


def words(model: type[torch.nn.Module]) -> str:
    data = "data=dataset data.dataset._target_=invariance.own.Rows data.holdout=0 objective=classification"
    return f"model._target_=invariance.own.{model.__name__} trust=[invariance] {data} precision=fp32"


def by_hand(kind: type[torch.nn.Module]) -> dict[str, Any]:
    """As anybody would write it, on the samples that dtrain takes."""
    asked, rows = plan(*words(kind).split(), *COMMON.split(), "devices=1"), own.Rows()
    torch.manual_seed(seeds.derive(asked.seed, "model"))
    model = kind()
    model.train()
    decayed = {
        True: [p for p in model.parameters() if p.ndim > 1],
        False: [p for p in model.parameters() if p.ndim < 2],
    }
    groups = [{"params": some, "weight_decay": 0.1 * is_matrix} for is_matrix, some in decayed.items()]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-5)
    source, losses = dtrain.build.build(asked.data), list[float]()
    for step in range(STEPS):
        index, _ = samples(np.arange(8 * step, 8 * step + 8), n=len(source), seed=seeds.derive(asked.seed, "data"))
        inputs, targets = zip(*(rows[int(i)] for i in source.original(index)), strict=True)
        seeds.reseed(asked.seed, step, 0)
        loss = F.cross_entropy(model(torch.stack(inputs)), torch.tensor(targets))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "weights": {name: p.tolist() for name, p in model.named_parameters()}}


@pytest.mark.parametrize("kind", OWN, ids=lambda kind: kind.__name__)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*", "ignore:.*torch.jit.*")
def test_every_strategy_is_equal_to_a_loop_by_hand_or_refused(kind: type[torch.nn.Module]) -> None:
    expected = by_hand(kind) if "single" not in OWN[kind] else {}
    for layout, how in LAYOUTS.items():
        refusal = OWN[kind].get(layout)
        if refusal:
            with pytest.raises(RankFailed, match=f"dtrain.errors.WordsError: .*{re.escape(refusal)}"):
                run(words(kind), how, steps=1)
        elif layout == "single" or kind not in DRAWS:
            here = run(words(kind), how, steps=STEPS)
            assert here["losses"] == pytest.approx(expected["losses"], rel=TOLERANCE), layout
            for name, weight in expected["weights"].items():
                assert (torch.tensor(here["weights"][name]) - torch.tensor(weight)).abs().max() <= TOLERANCE, name
