"""What depends on the mesh by its nature is said before the first step."""

from torch import nn

from dtrain.model import caveats


def test_batch_norm_and_dropout_are_told() -> None:
    told = caveats(nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.1)))
    assert len(told) == 2 and "BatchNorm1d" in told[0] and "dropout" in told[1]


def test_what_does_not_depend_on_the_mesh_is_not() -> None:
    assert caveats(nn.Sequential(nn.LayerNorm(3), nn.Dropout(0.0), nn.Linear(3, 3))) == []
