"""Metrics of held-out data: those of sklearn and torchmetrics on the same outputs, on every mesh."""

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import pytest
import sklearn.metrics
import torch
import torchmetrics.classification
from small import PARTS, STRATEGIES, UNEVEN, on_mesh, on_resident_mesh

from dtrain.build import build, giving
from dtrain.config import files
from dtrain.data import Source
from dtrain.data.dataset import Dataset
from dtrain.data.stream import as_source
from dtrain.errors import WordsError
from dtrain.evaluation.heldout import evaluate
from dtrain.evaluation.metrics import Metrics
from dtrain.mesh import Mesh
from dtrain.model import construct
from dtrain.parallel.order import parallelize
from dtrain.planned import PipelineShape

OURS = {word: files.node("metric", word) for word in ("accuracy", "top5", "f1", "auroc")}
OF_TOKENS = {word: files.node("metric", word) for word in ("accuracy", "top5", "perplexity")}
THEIRS = {
    "theirs": {"_target_": "torchmetrics.classification.MulticlassF1Score", "num_classes": 7},
    "rows": {"_target_": "torchmetrics.classification.MulticlassAUROC", "num_classes": 7},
    "each": {"_target_": "torchmetrics.classification.MulticlassRecall", "num_classes": 7, "average": "none"},
}
MESHES: list[tuple[str, dict[str, int]]] = [
    ("single", {"dp_shard": 1}), ("ddp", {"dp_replicate": 2}), ("ddp", {"dp_replicate": 3}), ("fsdp", {"dp_shard": 2}),
    ("single", {"tp": 2}), ("single", {"pp": 2}),
]  # fmt: skip


class Labelled:
    """Some samples, of which every ninth does not count."""

    def __init__(self, classes: int, samples: int) -> None:
        self.classes = classes
        generator = torch.Generator().manual_seed(classes)
        self.rows = torch.randn(samples, 6, generator=generator)
        self.targets = torch.randint(classes, (samples,), generator=generator)
        self.targets[::9] = -100

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index], self.targets[index]


def labelled(classes: int = 7, samples: int = 41) -> dict[str, Any]:
    return {
        "samples": (classes, samples), "task": "classification",
        "model": {"_target_": "dtrain.model.mlp.MLP", "inputs": 6, "outputs": classes, "width": 16, "layers": 2},
        "objective": {"_target_": "dtrain.objective.classification.Classification"},
    }  # fmt: skip


TOKENS = {"task": "next_token", "model": PARTS["model"] | {"tied": False}, "objective": PARTS["objective"]}


def source_of(parts: Mapping[str, Any]) -> Source:
    if "samples" not in parts:
        return as_source(build(UNEVEN))
    return Dataset(Labelled(*parts["samples"]), holdout=0.0, outputs=parts["samples"][0])


def measured(mesh: Mesh, strategy: str, parts: Mapping[str, Any], metrics: Mapping[str, Any]) -> dict[str, float]:
    source = source_of(parts)
    objective, precision = build(parts["objective"]), build(PARTS["precision"])
    model = construct(parts["model"], facts=source.facts, seed=0)
    forward = parallelize(
        model, mesh, build({**PARTS, **STRATEGIES}["strategy" if strategy == "single" else strategy]),
        precision=precision, seed=0, pipeline=PipelineShape(),
    )  # fmt: skip
    made = Metrics(metrics, task=parts["task"], mesh=mesh)
    options = {"precision": precision, "samples": None, "microbatch": 4, "metrics": made}
    first = evaluate(forward, source, objective, mesh, **options)
    assert evaluate(forward, source, objective, mesh, **options) == pytest.approx(first, nan_ok=True), "it began anew"
    return first


def outputs(mesh: Mesh, parts: Mapping[str, Any]) -> tuple[Any, Any]:
    """Logits and targets of all samples, by hand."""
    source = source_of(parts)
    batch = source.take(np.arange(len(source)), np.zeros(len(source), np.int64))
    targets = batch["targets"]
    model = construct(parts["model"], facts=source.facts, seed=0)
    parallelize(model, mesh, build(PARTS["strategy"]), precision=build(PARTS["precision"]), seed=0)
    with torch.no_grad():
        scores = model(batch["inputs"])[targets != -100]
    return scores.double().tolist(), targets[targets != -100].tolist()


@cache
def by_hand(kind: str, classes: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    parts = TOKENS if kind == "tokens" else labelled(classes)
    (given,) = on_resident_mesh(Work(outputs, parts), dp_shard=1)
    return torch.tensor(given[0], dtype=torch.float64), torch.tensor(given[1])


class Work:
    """A function of a mesh, with arguments, that pickles."""

    def __init__(self, act: Any, *arguments: Any) -> None:
        self.act, self.arguments = act, arguments

    def __call__(self, mesh: Mesh) -> Any:
        return self.act(mesh, *self.arguments)


def on(strategy: str, degrees: dict[str, int], *arguments: Any) -> dict[str, float]:
    first, *others = on_resident_mesh(Work(measured, strategy, *arguments), **degrees)
    assert all(other == first for other in others), "every rank knows the same"
    return first  # type: ignore[no-any-return]


@pytest.mark.parametrize(("strategy", "degrees"), MESHES)
def test_metrics_of_classes_are_those_of_sklearn_and_torchmetrics(strategy: str, degrees: dict[str, int]) -> None:
    scores, targets = by_hand("labels")
    probabilities, predicted = scores.softmax(1).numpy(), scores.argmax(1).numpy()
    figures = on(strategy, degrees, labelled(), OURS | THEIRS)
    assert figures["eval_accuracy"] == pytest.approx(sklearn.metrics.accuracy_score(targets, predicted), abs=1e-6)
    top = sklearn.metrics.top_k_accuracy_score(targets, probabilities, k=5, labels=range(7))
    f1 = sklearn.metrics.f1_score(targets, predicted, average="macro")
    auroc = sklearn.metrics.roc_auc_score(targets, probabilities, multi_class="ovr", labels=range(7))
    assert [figures[f"eval_{name}"] for name in ("top5", "f1", "auroc")] == pytest.approx([top, f1, auroc], abs=1e-6)
    for name, part in THEIRS.items():
        arguments = {key: value for key, value in part.items() if key != "_target_"}
        theirs = getattr(torchmetrics.classification, str(part["_target_"]).rpartition(".")[2])(**arguments)
        expected = theirs(scores.float(), targets).reshape(-1).tolist()
        names = [f"eval_{name}"] if len(expected) == 1 else [f"eval_{name}_{number}" for number in range(7)]
        assert [figures[each] for each in names] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("strategy", "degrees"), MESHES)
def test_metrics_of_tokens_are_those_of_torchmetrics(strategy: str, degrees: dict[str, int]) -> None:
    from torchmetrics.text import Perplexity

    scores, targets = by_hand("tokens")
    theirs = {"multi": {"_target_": "torchmetrics.classification.MulticlassAccuracy", "num_classes": 13}}
    figures = on(strategy, degrees, TOKENS, OF_TOKENS | theirs)
    perplexity = float(Perplexity()(scores.float()[None], targets[None]))
    assert figures["eval_perplexity"] == pytest.approx(perplexity, rel=1e-6)
    assert figures["eval_perplexity"] == pytest.approx(math.exp(figures["eval_loss"]), rel=1e-6)
    top = sklearn.metrics.top_k_accuracy_score(targets, scores, k=5, labels=range(13))
    right = sklearn.metrics.accuracy_score(targets, scores.argmax(1))
    assert [figures["eval_top5"], figures["eval_accuracy"]] == pytest.approx([top, right], abs=1e-6)
    macro = torchmetrics.classification.MulticlassAccuracy(13)(scores, targets)
    assert figures["eval_multi"] == pytest.approx(float(macro), abs=1e-6)


@pytest.mark.parametrize("degrees", [{"dp_shard": 1}, {"dp_replicate": 3}])
def test_of_two_classes_it_is_class_1(degrees: dict[str, int]) -> None:
    scores, targets = by_hand("labels", 2)
    binary = {"binary": {"_target_": "torchmetrics.classification.BinaryAUROC"}}
    metrics = {"f1": OURS["f1"], "auroc": OURS["auroc"], **binary}
    figures = on("ddp" if "dp_replicate" in degrees else "single", degrees, labelled(2), metrics)
    auroc = sklearn.metrics.roc_auc_score(targets, scores.softmax(1)[:, 1])
    assert [figures["eval_auroc"], figures["eval_binary"]] == pytest.approx([auroc, auroc], abs=1e-6)
    assert figures["eval_f1"] == pytest.approx(sklearn.metrics.f1_score(targets, scores.argmax(1)), abs=1e-6)


def test_ranks_without_samples_add_nothing() -> None:
    """Two samples on three ranks, of which one has none, also where states are rows."""
    parts = labelled(7, 5)
    alone = on("single", {"dp_shard": 1}, parts, OURS | THEIRS)
    assert on("ddp", {"dp_replicate": 3}, parts, OURS | THEIRS) == pytest.approx(alone, abs=1e-6, nan_ok=True)


def test_a_metric_that_does_not_take_the_scores_is_named() -> None:
    def refused(mesh: Mesh) -> str:
        part = {"_target_": "torchmetrics.classification.BinaryF1Score"}
        metrics = Metrics({"m": part}, task="classification", mesh=mesh)
        with pytest.raises(WordsError) as error:
            metrics.begin()
            metrics.add(torch.randn(4, 7), {"targets": torch.zeros(4, dtype=torch.int64)}, counts=True)
        return str(error.value)

    (said,) = on_mesh(refused, dp_shard=1)
    assert "BinaryF1Score does not take scores [4, 7]" in said


class Own:
    """A metric of the user's own, which returns what it is given."""

    def __init__(self, part: Any, value: Any, *, rows: bool = False) -> None:
        self.rows, self._part, self._value = rows, part, value

    def part(self, scores: torch.Tensor, targets: torch.Tensor) -> Any:
        return self._part(targets)

    def value(self, whole: torch.Tensor) -> Any:
        return self._value(whole)


def own_metrics(own: Own, mesh: Mesh) -> Metrics:
    with giving({"own": own}):
        part = {"_target_": "dtrain.build.given", "of": "own"}
        return Metrics({"own": part}, task="classification", mesh=mesh)


@pytest.mark.parametrize(
    ("name", "figures"),
    [
        ("MulticlassConfusionMatrix", {"m_cat_cat": 1, "m_cat_dog": 1, "m_dog_cat": 0, "m_dog_dog": 2}),
        ("MulticlassPrecision", {"m_cat": 1.0, "m_dog": pytest.approx(2 / 3)}),
    ],
)
def test_a_figure_of_each_class_has_its_name(name: str, figures: dict[str, float]) -> None:
    def tried(mesh: Mesh) -> None:
        part = {"_target_": f"torchmetrics.classification.{name}", "num_classes": 2}
        part |= {"average": "none"} if name == "MulticlassPrecision" else {}
        metrics = Metrics({"m": part}, task="classification", mesh=mesh, names=["cat", "dog"])
        metrics.begin()
        scores = torch.eye(2)[[0, 1, 1, 1]]
        metrics.add(scores, {"inputs": scores, "targets": torch.tensor([0, 0, 1, 1])}, counts=True)
        assert metrics.figures() == figures

    on_mesh(tried, dp_shard=1)


OF_ANOTHER_KIND = {
    "the part of own is a list, '[1.0]'. Let `part` return a tensor": Own(lambda targets: [1.0], float),
    "the part of own is a NoneType": Own(lambda targets: None, float),
    "the value of own is a str, '0.5'. Let it return one number.": Own(lambda targets: torch.ones(2), lambda whole: "0.5"),
    "the value of own is a NoneType, 'None'": Own(lambda targets: torch.ones(2), lambda whole: None),
    "the value of own is a list, '[1.0, 2.0]'": Own(lambda targets: torch.ones(2), lambda whole: [1.0, 2.0]),
    "the value of own is a Tensor of the shape [2]": Own(lambda targets: torch.ones(2), lambda whole: whole),
    "the part of own is one number, and its rows": Own(lambda targets: torch.ones(()), float, rows=True),
}  # fmt: skip


@pytest.mark.parametrize("said", OF_ANOTHER_KIND)
def test_what_is_no_number_is_said_before_the_first_step(said: str) -> None:
    def tried(mesh: Mesh) -> None:
        metrics = own_metrics(OF_ANOTHER_KIND[said], mesh)
        with pytest.raises(WordsError) as raised:
            metrics.try_out(3)
        assert str(raised.value).startswith(f"evaluate.metrics: {said}")

    on_mesh(tried, dp_shard=1)


def test_parts_of_several_shapes_are_said() -> None:
    def tried(mesh: Mesh) -> None:
        own = Own(lambda targets: targets.double(), lambda whole: 0.0)
        metrics = own_metrics(own, mesh)
        metrics.try_out(3)
        metrics.begin()
        metrics.add(torch.randn(4, 3), {"inputs": torch.zeros(4), "targets": torch.zeros(4)}, counts=True)
        with pytest.raises(WordsError, match=r"the parts of own have the shapes \[4\] and \[3\]"):
            metrics.add(torch.randn(3, 3), {"inputs": torch.zeros(3), "targets": torch.zeros(3)}, counts=True)

    on_mesh(tried, dp_shard=1)


def test_what_a_metric_raises_on_made_up_samples_is_not_judged() -> None:
    def tried(mesh: Mesh) -> None:
        own = Own(lambda targets: torch.ones(1), lambda whole: 1 / 0)
        own_metrics(own, mesh).try_out(3)

    on_mesh(tried, dp_shard=1)
