"""What must survive a restart: all of it, by name, once."""

from typing import Any

import pytest
import torch
from small import PARTS, small_gpt

from dtrain.build import build
from dtrain.checkpoint.state import TrainState
from dtrain.precision import LossScale

ADAMW = {"_target_": "dtrain.optim.adamw.build", "lr": 0.01, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
MUON = {**ADAMW, "_target_": "dtrain.optim.muon.build", "momentum": 0.95, "adamw_lr": None}
ADAFACTOR = {"_target_": "dtrain.optim.adafactor.build", "lr": 0.01, "beta2_decay": -0.8, "d": 1.0, "weight_decay": 0.1}
OPTIMIZERS: dict[str, Any] = {"sgd": PARTS["optim"], "adamw": ADAMW, "muon": MUON, "adafactor": ADAFACTOR}


def state(optim: Any = ADAMW, steps: int = 0, **changed: Any) -> TrainState:
    model = small_gpt(**changed)
    made = TrainState(model, build(optim, model=model))
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = parameter.detach() + 0.1
        made.optimizer.step()  # type: ignore[union-attr]
    return made


def test_every_parameter_and_every_moment_has_a_name() -> None:
    made = state(steps=1)
    names = set(made.tensors())
    for name, _ in made.model.named_parameters():
        assert {f"model.{name}", f"optim.{name}.exp_avg", f"optim.{name}.exp_avg_sq", f"optim.{name}.step"} <= names


def test_a_tied_weight_is_kept_once() -> None:
    names = state(tied=True).tensors()
    assert "model.embed.weight" in names
    assert "model.head.weight" not in names
    assert "model.head.weight" in state(tied=False).tensors()


def test_buffers_are_kept_unless_the_model_says_otherwise() -> None:
    model = torch.nn.BatchNorm1d(3)
    model.register_buffer("scratch", torch.zeros(2), persistent=False)
    names = set(TrainState(model).tensors())
    assert names == {
        "model.weight",
        "model.bias",
        "model.running_mean",
        "model.running_var",
        "model.num_batches_tracked",
    }


@pytest.mark.parametrize("word", OPTIMIZERS)
def test_making_room_changes_no_weight_and_makes_every_entry(word: str) -> None:
    fresh, used = state(OPTIMIZERS[word]), state(OPTIMIZERS[word], steps=2)
    before = {name: tensor.clone() for name, tensor in fresh.tensors().items()}
    rates = [group["lr"] for group in fresh.optimizer.param_groups]  # type: ignore[union-attr]
    fresh.make_room([*used.tensors(), *used.facts()["optim"]])
    after = fresh.tensors()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert {name: tensor.shape for name, tensor in after.items()} == {
        name: tensor.shape for name, tensor in used.tensors().items()
    }
    assert all(parameter.grad is None for parameter in fresh.model.parameters())
    assert [group["lr"] for group in fresh.optimizer.param_groups] == rates  # type: ignore[union-attr]


@pytest.mark.parametrize("word", OPTIMIZERS)
def test_what_was_made_room_for_is_used(word: str) -> None:
    """Copying a state into the room and going on is the same as never having stopped."""
    used, fresh = state(OPTIMIZERS[word], steps=2), state(OPTIMIZERS[word])
    fresh.make_room([*used.tensors(), *used.facts()["optim"]])
    with torch.no_grad():
        for name, tensor in fresh.tensors().items():
            tensor.copy_(used.tensors()[name])
    fresh.load_facts(used.facts())
    for made in (used, fresh):
        for parameter in made.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        made.optimizer.step()  # type: ignore[union-attr]
    assert all(torch.equal(tensor, fresh.tensors()[name]) for name, tensor in used.tensors().items())


def test_facts_are_json_and_come_back() -> None:
    import json

    made, other = state(), state()
    made.step, made.first, made.scale, other.scale = 7, 3, LossScale(8.0, growth=2), LossScale(1.0, growth=2)
    other.load_facts(json.loads(json.dumps(made.facts())))
    assert (other.step, other.first, other.scale.value) == (7, 3, 8.0)


def test_weights_alone_are_a_state_too() -> None:
    made = TrainState(small_gpt())
    made.make_room(made.tensors())
    assert all(name.startswith("model.") for name in made.tensors())


@pytest.mark.parametrize("word", OPTIMIZERS)
def test_a_parameter_that_no_step_reached_has_no_room(word: str) -> None:
    used, fresh = state(OPTIMIZERS[word]), state(OPTIMIZERS[word])
    for name, parameter in used.model.named_parameters():
        parameter.grad = None if name.startswith("blocks.0.") else torch.ones_like(parameter)
    used.optimizer.step()  # type: ignore[union-attr]
    fresh.make_room([*used.tensors(), *used.facts()["optim"]])
    assert fresh.tensors().keys() == used.tensors().keys()
