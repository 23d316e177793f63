"""Mean squared error over all outputs."""

from pathlib import Path

import pytest
import torch
from data.files import write
from small import on_mesh, plan

from dtrain.errors import WordsError
from dtrain.loop.assemble import assemble
from dtrain.mesh import Mesh
from dtrain.objective.regression import Regression


def test_the_mean_is_over_all_outputs() -> None:
    predicted, targets = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[0.0, 2.0], [3.0, 1.0]])
    batch = {"inputs": None, "targets": targets}
    assert Regression().loss(predicted, batch).sum.item() == 1 + 9
    assert Regression().count(batch) == 4


def test_one_output_fits_targets_without_a_dim() -> None:
    batch = {"inputs": None, "targets": torch.tensor([1.0, 2.0, 3.0])}
    assert Regression().loss(torch.tensor([[1.0], [2.0], [5.0]]), batch).sum.item() == 4, (
        "and is not spread over a square"
    )


def test_shapes_that_differ_are_refused() -> None:
    with pytest.raises(WordsError, match=r"the model returns \[3, 2\], but the targets are \[3\]"):
        Regression().loss(torch.zeros(3, 2), {"inputs": None, "targets": torch.zeros(3)})
    with pytest.raises(WordsError, match=r"the model returns \[4, 2, 3\], but the targets are \[4, 3, 2\]"):
        Regression().loss(torch.zeros(4, 2, 3), {"inputs": None, "targets": torch.zeros(4, 3, 2)})


@pytest.mark.parametrize(("width", "largest"), [(1, 2**40), (2, 9)])
def test_outputs_are_as_many_as_a_target_has_numbers_though_these_are_whole(
    width: int, largest: int, tmp_path: Path
) -> None:
    """They are no classes."""
    rows = [{"x": [i / 2, 1.5], "y": [i, largest][:width] if width > 1 else largest * (i % 2)} for i in range(8)]
    path = write(tmp_path / "a.jsonl", rows)
    words = ("model=mlp", "data=jsonl", f"data.path={path}", "data.inputs=x", "data.targets=y", "out=memory://run")

    def outputs(mesh: Mesh, objective: str) -> int | str:
        try:
            return assemble(
                plan(*words, f"data.cache={tmp_path}/cache", f"objective={objective}"), mesh
            ).model.head.out_features
        except WordsError as error:
            return str(error)

    assert on_mesh(lambda mesh: outputs(mesh, "regression"), dp_shard=1) == [width]
    (said,) = on_mesh(lambda mesh: outputs(mesh, "classification"), dp_shard=1)
    assert width > 1 or f"column y has {largest}, so there would be {largest + 1} classes" in str(said)
