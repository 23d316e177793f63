"""What depends on the mesh by its nature is said before the first step."""

import torch
from torch import nn

from dtrain.model import caveats, construct


def test_batch_norm_and_dropout_are_told() -> None:
    told = caveats(nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.1)))
    assert len(told) == 2 and "BatchNorm1d" in told[0] and "dropout" in told[1]


def test_what_does_not_depend_on_the_mesh_is_not() -> None:
    assert caveats(nn.Sequential(nn.LayerNorm(3), nn.Dropout(0.0), nn.Linear(3, 3))) == []


def test_a_model_of_transformers_keeps_no_keys_where_it_learns() -> None:
    """A second forward of a block would add to them."""
    model = construct({"_target_": "invariance.zoo.llama"}, facts={}, seed=0)
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    assert model(tokens).past_key_values is None
    with torch.no_grad():
        assert model(tokens).past_key_values.get_seq_length() == 4
