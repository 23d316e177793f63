"""patterns: what a pattern selects; frozen parameters have no gradient and no optimizer state on any mesh; learning rates by pattern."""

from functools import partial
from typing import Any

import pytest
import torch
from pool import resident
from small import PARTS, STRATEGIES, agree, few_steps, joined, mesh_of, plan, small_gpt
from torch import nn

from dtrain.build import build
from dtrain.config.patterns import fits, select
from dtrain.errors import WordsError
from dtrain.loop.assemble import assemble, prepare
from dtrain.model import construct
from dtrain.model.patterns import check_rates, freeze
from dtrain.predict import formulas
from dtrain.predict.shapes import trained_names
from dtrain.tracing import shapes_of

FROZEN = ["embed", "blocks.0", "attention.k.weight", "*norm"]
MODEL = PARTS["model"] | {"tied": False, "freeze": FROZEN}


@pytest.mark.parametrize(
    ("name", "pattern", "is_fit"),
    [
        ("blocks.0.attention.q", "q", True), ("blocks.0.attention.q", "attention.q", True),
        ("blocks.0.attention.q.weight", "blocks.*.q", True), ("blocks.10.norm", "blocks.1", False),
        ("blocks.0.attention.q", "attention", True), ("blocks.0.attention.qq", "q", False),
        ("embed.weight", "embed", True), ("embed.weight", "*", True), ("embed.weight", "bed", False),
    ],
)  # fmt: skip
def test_a_pattern_selects_a_name_its_end_and_what_is_inside(name: str, pattern: str, is_fit: bool) -> None:
    assert fits(name, pattern) is is_fit


def test_the_first_pattern_that_fits_counts() -> None:
    assert select(["a.x", "a.y", "b.x"], ["x", "a"], "key", "module") == {"a.x": "x", "a.y": "a", "b.x": "x"}


def test_a_pattern_without_a_parameter_is_refused_with_the_nearest() -> None:
    with pytest.raises(WordsError, match=r"model.freeze: no parameter of the model fits embedd. Did you mean embed\?"):
        freeze(small_gpt(), ["norm", "embedd"])
    with pytest.raises(
        WordsError, match=r"fits zzzzz. They are embed.weight, blocks.\*.attention_norm.weight, .* and "
    ):
        freeze(small_gpt(), ["zzzzz"])
    with pytest.raises(WordsError, match=r"model.freeze=\[\*\]: no parameter is left to train"):
        freeze(small_gpt(), ["*"])


def test_a_model_of_the_users_own_is_frozen_too_unless_it_takes_the_word_itself() -> None:
    model = construct(
        {"_target_": "torch.nn.Linear", "in_features": 2, "out_features": 2, "freeze": ["bias"]}, facts={}, seed=0
    )
    assert [name for name, each in model.named_parameters() if each.requires_grad] == ["weight"]
    own = construct({"_target_": "model.test_patterns.Own", "freeze": ["fine"]}, facts={}, seed=0)
    assert own.kept == ["fine"]
    words = (
        "model._target_=torch.nn.Linear",
        "model.in_features=2",
        "model.out_features=2",
        "data=synthetic",
        "model.freeze=[bias]",
    )
    assert plan(*words).model["freeze"] == ["bias"]
    with pytest.raises(WordsError, match=r"model.freeze=3 .*a list of text"):
        plan(*words[:-1], "model.freeze=3")


class Own(nn.Linear):
    def __init__(self, freeze: list[str]) -> None:
        super().__init__(2, 2)
        self.kept = freeze


@pytest.mark.parametrize(
    ("strategy", "degrees"),
    [
        ({"_target_": "dtrain.strategy.ddp.DDP", "bucket_mb": 25}, {"dp_replicate": 2}),
        *(({"_target_": f"dtrain.strategy.{zero}.build", "offload": "none"}, {"dp_shard": 2}) for zero in ("zero1", "zero2", "zero3")),
        (STRATEGIES["fsdp"], {"dp_shard": 2}), (PARTS["strategy"], {"tp": 2}), (PARTS["strategy"], {"pp": 2}),
    ],
    ids=["ddp", "zero1", "zero2", "zero3", "fsdp", "tp", "pp"],
)  # fmt: skip
def test_what_is_frozen_has_no_gradient_and_does_not_move_on_any_mesh(strategy: Any, degrees: dict[str, int]) -> None:
    parts = PARTS | {"model": MODEL}
    one = few_steps(parts, {})
    assert {name.split(".")[0] for name in one["gradients"]} == {"blocks", "head"}
    assert not [name for name in one["gradients"] if "norm" in name or ".k." in name or name.startswith("blocks.0")]
    runs = resident(2, partial(few_steps, parts | {"strategy": strategy}, degrees))
    here = joined(runs) if "pp" in degrees else runs[0]
    agree(here, one)
    assert here["gradients"].keys() == one["gradients"].keys()
    begun = construct(MODEL, facts={"vocab": 13}, seed=0)
    frozen = [name for name, each in begun.named_parameters() if not each.requires_grad]
    fresh = few_steps(parts, {}, steps=0)["weights"]
    assert all(here["weights"][name] == fresh[name] for name in frozen)


def states(words: tuple[str, ...], degrees: dict[str, int]) -> list[str]:
    """Names of the parameters that have optimizer state after a step."""
    decided = plan(*words)
    with mesh_of(**degrees) as mesh:
        parts = assemble(decided, mesh)
        training = prepare(parts)
        training.step(training.stream, 0)
        training.optimizer.step()
        training.stream.close()
        return [name for name, each in parts.model.named_parameters() if training.optimizer.state.get(each)]


@pytest.mark.parametrize("optim", ["adamw", "sgd", "muon", "adafactor"])
def test_it_has_no_optimizer_state_even_where_a_stage_trains_nothing(optim: str) -> None:
    words = (
        "data.sequence=16",
        "data=synthetic",
        "data.task=next_token",
        "objective=next_token",
        "batch=4",
        "model.layers=2",
        "model.heads=2",
    )
    words = (
        *words,
        "model.width=16",
        "model.vocab=256",
        f"optim={optim}",
        "model.freeze=[embed,blocks.0]",
        "devices=2",
        "mesh.pp=2",
    )
    first, last = resident(2, states, (*words, "strategy=pipeline"), {"pp": 2})
    assert first == []
    assert {name.split(".")[0] for name in last} == {"blocks", "norm", "head"}


def test_memory_is_predicted_without_their_gradients_and_states() -> None:
    words = (
        "data=synthetic",
        "data.task=next_token",
        "objective=next_token",
        "data.sequence=16",
        "model.layers=2",
        "model.width=32",
    )
    shapes = shapes_of(plan(*words, "model.freeze=[blocks]"))
    trained = {weight.name.split(".")[0] for block in shapes.blocks for weight in block.weights if weight.trained}
    assert trained == {"embed", "norm", "head"}


@pytest.mark.parametrize("optim", ["adamw", "sgd", "muon", "adafactor"])
def test_learning_rates_by_pattern(optim: str) -> None:
    model = small_gpt()
    part = dict(plan(f"optim={optim}", "optim.lr_of={embed:1e-5,*norm:0,attention.q:2}").optim)
    optimizer = build(part, model=model)
    rates = {id(each): group["lr"] for group in optimizer.param_groups for each in group["params"]}
    named = dict(model.named_parameters())
    assert rates.keys() == set(map(id, named.values()))
    for name, each in named.items():
        own = {"embed.weight": 1e-5, "blocks.0.attention.q.weight": 2, "blocks.1.attention.q.weight": 2}.get(
            name, 0 if "norm" in name else None
        )
        assert rates[id(each)] == (part["lr"] if own is None else own), name


def test_a_rate_of_nothing_is_refused() -> None:
    with pytest.raises(
        WordsError, match=r"optim.lr_of: no trained parameter of the model fits embedd. Did you mean embed\?"
    ):
        check_rates(small_gpt(), {"embedd": 1e-4})
    with pytest.raises(WordsError, match=r"optim.lr_of: the lr of embed is fast, not a number >= 0"):
        plan("optim.lr_of={embed:fast}")


def test_a_plan_refuses_what_fits_no_parameter_where_the_shapes_are_known() -> None:
    plan("optim.lr_of={blocks.0: 1e-2, 'blocks.*': 1e-3, out.weight: 1}")
    for pattern, near in (
        ("blockz.*", r"mean blocks\.\*"),
        ("blocks.40", "mean blocks"),
        ("atention", "mean attention"),
    ):
        with pytest.raises(WordsError, match=rf"optim\.lr_of: no trained parameter of the model fits .*{near}"):
            plan(f"optim.lr_of={{'{pattern}': 1e-4}}")


def test_the_names_of_shapes_are_the_names_of_the_model() -> None:
    shapes = formulas.shapes(plan("model.layers=3", "data=synthetic"))
    assert shapes and {name for name in trained_names(shapes) if "blocks.2" in name} == {
        f"blocks.2.{name}" for name, _ in small_gpt().blocks[0].named_parameters()
    }


def test_a_frozen_parameter_has_no_rate() -> None:
    model = small_gpt()
    freeze(model, ["embed"])
    with pytest.raises(WordsError, match=r"no trained parameter of the model fits embed\."):
        check_rates(model, {"embed": 1e-4})
    assert torch.is_tensor(model.embed.weight)
