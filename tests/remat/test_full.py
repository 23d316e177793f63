"""full: every block runs twice and keeps only its inputs; the numbers are the same bit for bit, whatever wraps the block."""

from functools import partial

import torch
from invariance.zoo import llama
from pool import resident
from small import PARTS, STRATEGIES, few_steps, joined, one_backward, same_bits

from dtrain.model import blocks
from dtrain.planned import PipelineShape
from dtrain.remat.full import build

FULL = {"_target_": "dtrain.remat.full.build"}


def test_the_numbers_are_the_same_bit_for_bit() -> None:
    same_bits(one_backward(build()), one_backward(None))


def test_blocks_are_computed_again_instead_of_kept() -> None:
    run = one_backward(build())
    assert run["visits"] == [2, 2, 2, 2]
    a_block = one_backward(None, layers=4)["saved"] - one_backward(None, layers=3)["saved"]
    assert a_block > 10
    assert run["saved"] - one_backward(build(), layers=3)["saved"] <= 2, (
        "what goes into a block is kept, and no more of it"
    )


def test_a_model_of_transformers_keeps_no_keys_for_words_to_come() -> None:
    """A second forward of a block would add to them."""
    model, tokens = llama(), torch.zeros(1, 4, dtype=torch.int64)
    assert model(tokens).past_key_values.get_seq_length() == 4
    build()(list(blocks(model)))
    assert model(tokens).past_key_values.get_seq_length() == 0
    with torch.no_grad():
        assert model(tokens).past_key_values.get_seq_length() == 4


def test_names_stay() -> None:
    assert list(one_backward(build())["gradients"]) == list(one_backward(None)["gradients"])


class Dropping(torch.nn.Module):
    """Draws random numbers inside of its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Dropout(0.5)), torch.nn.Linear(16, 3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


def test_random_numbers_are_drawn_again_as_they_were() -> None:
    parts = PARTS | {"model": {"_target_": f"{__name__}.Dropping"}, "data": PARTS["data"] | {"task": "regression"}}
    parts |= {"objective": {"_target_": "dtrain.objective.regression.Regression"}}
    (reference,), (run,) = resident(1, few_steps, parts, {}), resident(1, few_steps, parts | {"remat": FULL}, {})
    assert run == reference
    (other,) = resident(1, partial(few_steps, parts, {}, seed=6))
    assert other["losses"] != reference["losses"]


def test_it_changes_nothing_on_shards_under_split_matrices_and_in_a_pipeline() -> None:
    """Hooks that gather parameters run outside of what is computed again."""
    untied = PARTS | {"model": PARTS["model"] | {"tied": False}}
    meshes = [
        (STRATEGIES["fsdp"], {"dp_shard": 2}, {}),
        (STRATEGIES["ddp"], {"dp_replicate": 2}, {}),
        (STRATEGIES["ddp"], {"tp": 2}, {"tensors": {"sequence": "split", "loss": "whole"}}),
        (STRATEGIES["ddp"], {"pp": 2}, {"pipeline": PipelineShape()}),
    ]
    for strategy, degrees, options in meshes:
        parts = untied | {"strategy": strategy}
        runs = [
            resident(2, partial(few_steps, p, degrees, steps=2, microbatch=2, **options))
            for p in (parts, parts | {"remat": FULL})
        ]
        if "pp" in degrees:
            assert joined(runs[0]) == joined(runs[1]), degrees
        assert runs[0] == runs[1], degrees
