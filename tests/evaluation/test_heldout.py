"""The held-out loss: the same samples whatever the mesh, nothing left changed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small import PARTS, STRATEGIES, UNEVEN, on_mesh, plan

from dtrain.build import build
from dtrain.data.stream import as_source
from dtrain.errors import WordsError
from dtrain.evaluation.heldout import chosen, each, evaluate
from dtrain.loop.assemble import assemble
from dtrain.mesh import Mesh
from dtrain.model import construct
from dtrain.parallel.order import parallelize


class Long:
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length


def test_samples_are_spread_over_the_whole_source() -> None:
    source: Any = Long(100)
    assert chosen(source, 4).tolist() == [0, 25, 50, 75]
    assert chosen(source, None).tolist() == list(range(100))
    assert chosen(source, 1000).tolist() == list(range(100))
    assert len(set(chosen(source, 37).tolist())) == 37


def measured(
    mesh: Mesh, strategy: dict[str, Any], samples: int | None, microbatch: int
) -> tuple[dict[str, float], bool]:
    source, objective, precision = as_source(build(UNEVEN)), build(PARTS["objective"]), build(PARTS["precision"])
    model = construct(PARTS["model"], facts=source.facts, seed=0)
    wrapped = parallelize(model, mesh, build(strategy), precision=precision, seed=0)
    figures = evaluate(wrapped, source, objective, mesh, precision=precision, samples=samples, microbatch=microbatch)
    return figures, wrapped.training and all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("samples", [1, 7, None])
def test_every_mesh_measures_the_same(samples: int | None) -> None:
    """50 samples with 0 to 9 targets that do not count, over two ranks and microbatches that do not divide them."""
    ((expected, _),) = on_mesh(lambda mesh: measured(mesh, PARTS["strategy"], samples, 64), dp_shard=1)
    for strategy, axis, microbatch in (("ddp", "dp_replicate", 3), ("fsdp", "dp_shard", 4)):
        for figures, untouched in on_mesh(
            lambda mesh, s=strategy, m=microbatch: measured(mesh, STRATEGIES[s], samples, m), **{axis: 2}
        ):
            assert figures == pytest.approx(expected, rel=1e-6)
            assert untouched, "the model goes on training, without gradients of the evaluation"


def test_it_is_the_mean_over_targets_that_count() -> None:
    def by_hand(mesh: Mesh) -> tuple[float, float]:
        source = as_source(build(UNEVEN))
        model = construct(PARTS["model"], facts=source.facts, seed=0)
        parallelize(model, mesh, build(PARTS["strategy"]), precision=build(PARTS["precision"]), seed=0)
        batch = source.take(np.arange(50), np.zeros(50, dtype=np.int64))
        expected = torch.nn.functional.cross_entropy(model(batch["inputs"]).flatten(0, 1), batch["targets"].flatten())
        return expected.item(), measured(mesh, PARTS["strategy"], None, 8)[0]["eval_loss"]

    ((expected, loss),) = on_mesh(by_hand, dp_shard=1)
    assert loss == pytest.approx(expected, rel=1e-5)


class Masked:
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(10, dtype=torch.int64), torch.full((10,), -100)


def test_where_nothing_counts_there_is_a_sentence() -> None:
    def loss(mesh: Mesh) -> None:
        model = construct(PARTS["model"], facts={"vocab": 13}, seed=0)
        parallelize(model, mesh, build(PARTS["strategy"]), precision=build(PARTS["precision"]), seed=0)
        source = as_source(Masked())
        objective, precision = build(PARTS["objective"]), build(PARTS["precision"])
        with pytest.raises(WordsError, match="no target of the held-out samples counts"):
            evaluate(model, source, objective, mesh, precision=precision, samples=None, microbatch=2)

    on_mesh(loss, dp_shard=1)


def accuracy(mesh: Mesh) -> dict[str, float]:
    data = build(PARTS["data"] | {"task": "classification"})
    model = construct(
        {"_target_": "dtrain.model.mlp.MLP", "inputs": "auto", "outputs": "auto", "width": 4, "layers": 0},
        facts=data.facts,
        seed=0,
    )
    parallelize(model, mesh, build(PARTS["strategy"]), precision=build(PARTS["precision"]), seed=0)
    with torch.no_grad():
        model.head.weight.copy_(torch.from_numpy(data._mapped(np.eye(4, dtype=np.float32)).T))
    objective = build({"_target_": "dtrain.objective.classification.Classification"})
    return evaluate(model, data, objective, mesh, precision=build(PARTS["precision"]), samples=None, microbatch=7)


def test_classes_of_a_set_that_the_model_lacks_are_said_before_the_first_step(tmp_path: Path) -> None:
    for name, classes in ("train", 3), ("unseen", 5):
        lines = [f"{number % 4},{number % 7},{number % classes}" for number in range(30)]
        (tmp_path / f"{name}.csv").write_text("a,b,y\n" + "\n".join(lines) + "\n")
    words = [
        "model=mlp", "data=csv", f"data.path={tmp_path}/train.csv", "data.targets=y", "objective=classification",
        f"data.cache={tmp_path}/cache", f"evaluate.sets={{un: {{path: {tmp_path}/unseen.csv}}}}", "out=memory://run",
    ]  # fmt: skip

    def work(mesh: Mesh, *more: str) -> list[str]:
        try:
            return [*assemble(plan(*words, *more), mesh).measured]
        except WordsError as error:
            return [str(error)]

    ((said,),) = on_mesh(work, dp_shard=1)
    assert said.startswith("evaluate.sets.un: its targets are of 5 classes, 0 to 4, and the model has 3. Type model.o")
    assert on_mesh(lambda mesh: work(mesh, "model.outputs=5"), dp_shard=1) == [["", "un"]]


def test_metrics_of_the_objective_are_means_too() -> None:
    (loss,) = on_mesh(accuracy, dp_shard=1)
    assert loss["eval_accuracy"] == 1.0, "the model is the map that made the targets"
    assert loss["eval_loss"] > 0


class Counting(torch.nn.Linear):
    """Counts what it has seen, in evaluation too."""

    def __init__(self) -> None:
        super().__init__(10, 13)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Any) -> Any:
        self.seen = self.seen + len(x)
        return super().forward(torch.nn.functional.one_hot(x % 10, 10).float())


def test_an_evaluation_leaves_buffers_as_they_were() -> None:
    def rank(mesh: Mesh) -> float:
        source, objective, precision = as_source(build(UNEVEN)), build(PARTS["objective"]), build(PARTS["precision"])
        model = Counting()
        assert evaluate(model, source, objective, mesh, precision=precision, samples=4, microbatch=2)
        return float(model.seen)

    assert on_mesh(rank, dp_replicate=1) == [0.0]


class Following(Counting):
    """Answers by a buffer that follows what it sees, in evaluation too."""

    def forward(self, x: Any) -> Any:
        return super().forward(x) * self.seen


def test_a_buffer_that_follows_an_evaluation_does_not_make_it_depend_on_the_mesh() -> None:
    def rank(mesh: Mesh) -> float:
        source, objective, precision = as_source(build(UNEVEN)), build(PARTS["objective"]), build(PARTS["precision"])
        torch.manual_seed(0)
        model = Following()
        model.seen += 1
        model.seen.div_(10)
        return evaluate(model, source, objective, mesh, precision=precision, samples=8, microbatch=2)["eval_loss"]

    (alone,), (here, there) = on_mesh(rank, dp_replicate=1), on_mesh(rank, dp_replicate=2)
    assert here == there == pytest.approx(alone, rel=1e-6)


class Forgetful(Counting):
    """Its dropout is never switched off."""

    def forward(self, x: Any) -> Any:
        return torch.nn.functional.dropout(super().forward(x), 0.5)


def test_a_model_that_draws_in_evaluation_is_told_and_gives_the_same_again() -> None:
    def rank(mesh: Mesh) -> tuple[list[str], list[float]]:
        source, objective, precision = as_source(build(UNEVEN)), build(PARTS["objective"]), build(PARTS["precision"])
        torch.manual_seed(0)
        model, messages = Forgetful(), list[str]()
        asked: dict[str, Any] = {"precision": precision, "samples": 8, "microbatch": 2, "tell": messages.append}
        return messages, [evaluate(model, source, objective, mesh, **asked)["eval_loss"] for _ in range(2)]

    ((messages, (first, second)),) = on_mesh(rank, dp_replicate=1)
    assert first == second
    assert len(messages) == 2 and messages[0].startswith(
        "the model still draws random numbers in evaluation (of torch)"
    )


def of_sets(mesh: Mesh, strategy: dict[str, Any]) -> tuple[dict[str, float], list[dict[str, float]]]:
    """Two sources together, and one after the other."""
    whole, objective, precision = as_source(build(UNEVEN)), build(PARTS["objective"]), build(PARTS["precision"])
    source = as_source(build({**UNEVEN, "holdout": 0.3}))
    model = construct(PARTS["model"], facts=whole.facts, seed=0)
    wrapped = parallelize(model, mesh, build(strategy), precision=precision, seed=0)
    options = {"precision": precision, "samples": None, "microbatch": 3}
    alone = [evaluate(wrapped, one, objective, mesh, **options) for one in (whole, source)]
    return each(wrapped, {"": whole, "dev": source}, objective, mesh, **options), alone


def test_several_sets_are_measured_one_by_one() -> None:
    (((figures, (first, second))),) = on_mesh(lambda mesh: of_sets(mesh, PARTS["strategy"]), dp_shard=1)
    assert figures == {
        "eval_loss": first["eval_loss"], "eval_perplexity": first["eval_perplexity"],
        "eval_dev_loss": second["eval_loss"], "eval_dev_perplexity": second["eval_perplexity"],
    }  # fmt: skip
    assert first["eval_loss"] != second["eval_loss"]
    for many, _ in on_mesh(lambda mesh: of_sets(mesh, STRATEGIES["fsdp"]), dp_shard=2):
        assert many == pytest.approx(figures, rel=1e-6)


def test_a_set_has_the_columns_and_types_that_the_run_was_trained_on(tmp_path: Path) -> None:
    """Whole numbers where training had fractions, and columns in another order."""
    lines = [f"{number % 4}.5,{number % 7},{number % 3}" for number in range(30)]
    (tmp_path / "train.csv").write_text("a,b,y\n" + "\n".join(lines) + "\n")
    (tmp_path / "set.csv").write_text("b,a,more,y\n1,2,9,0\n3,4,9,1\n")
    words = [
        "model._target_=torch.nn.Linear", "model.in_features=2", "model.out_features=3", "data=csv",
        f"data.path={tmp_path}/train.csv", "data.targets=y", "objective=classification", f"data.cache={tmp_path}/cache",
        f"evaluate.sets={{new: {{path: {tmp_path}/set.csv}}}}", "out=memory://run", "trust=[torch]",
    ]  # fmt: skip

    def work(mesh: Mesh) -> Any:
        parts = assemble(plan(*words), mesh)
        batch = parts.measured["new"].take(np.array([0, 1]), np.zeros(2, int))
        return [sorted(batch["inputs"].tolist()), str(batch["inputs"].dtype), parts.forward(batch["inputs"]).shape]

    assert on_mesh(work, dp_shard=1) == [[[[2, 1], [4, 3]], "torch.float32", (2, 3)]]
