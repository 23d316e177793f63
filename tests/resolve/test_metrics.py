"""Metrics of an evaluation: which there are, what they fit, and which value is the best."""

from typing import Any

import pytest
from small import plan

from dtrain.errors import WordsError
from dtrain.launcher import preflight

DIGITS = ("model=mlp", "data=synthetic", "objective=classification")
F1 = "{_target_: torchmetrics.classification.MulticlassF1Score, num_classes: 10}"


def asked(metrics: str, *words: str) -> Any:
    return plan(*words, f"evaluate.metrics={metrics}")


def refused(metrics: str, *words: str) -> str:
    with pytest.raises(WordsError) as error:
        asked(metrics, *words)
    return str(error.value)


def test_figures_say_what_is_best() -> None:
    made = asked("[f1, auroc]", *DIGITS, "checkpoint.best=eval_f1")
    assert [*made.evaluate_metrics] == ["f1", "auroc"]
    assert made.checkpoint["best_is"] == "highest"
    figures = made.decided()["figures"]
    assert {"eval_loss": "lowest", "eval_f1": "highest", "eval_auroc": "highest"}.items() <= figures.items()


def test_what_the_objective_measures_is_measured_once() -> None:
    assert not asked("[accuracy]", *DIGITS).evaluate_metrics
    assert not asked("[perplexity]").evaluate_metrics
    assert [*asked("[accuracy, perplexity, top5]").evaluate_metrics] == ["accuracy", "top5"]


def test_a_class_of_torchmetrics_says_itself_what_is_best() -> None:
    made = asked(f"[{F1}]", *DIGITS, "trust=[torchmetrics]", "checkpoint.best=eval_multiclass_f1_score")
    assert made.evaluate_metrics["multiclass_f1_score"]["num_classes"] == 10
    assert made.checkpoint["best_is"] == "highest"
    error = "{_target_: torchmetrics.MeanSquaredError}"
    made = asked(f"[{error}]", "model=mlp", "data=synthetic", "objective=regression", "trust=[torchmetrics]")
    assert made.decided()["figures"]["eval_mean_squared_error"] == "lowest"


@pytest.mark.parametrize(
    ("metrics", "words", "said"),
    [
        ("[acuracy]", DIGITS, "there is no metric acuracy. Did you mean evaluate.metrics=[accuracy]?"),
        ("[3]", DIGITS, "there is no metric 3. Allowed: accuracy, auroc, f1, per_class, perplexity, top5."),
        ("[confusion_matrix]", DIGITS, "Others are classes of torchmetrics, such as"),
        ("[bleu]", (), "bleu compares generated text"),
        ("[top5]", (*DIGITS, "data.outputs=3"), "top5 says nothing about 3 classes. Leave top5 out."),
        ("[f1]", ("model=mlp", "data=synthetic", "objective=regression"), "f1 is a metric of classification, and this"),
        ("[f1]", (), "f1 is a metric of classification, and this is a run of next_token. Leave f1 out."),
        (f"[{F1}]", DIGITS, "torchmetrics is not trusted to run code. Type trust=[torchmetrics]"),
        (f"[{F1}, {F1}]", (*DIGITS, "trust=[torchmetrics]"), "eval_multiclass_f1_score is there twice"),
        (
            "[{_target_: torchmetrics.classification.MulticlassF1Score}]", (*DIGITS, "trust=[torchmetrics]"),
            "needs num_classes. Type num_classes:<value> in item 1 of evaluate.metrics=[...].",
        ),
        (
            "[{_target_: torchmetrics.classification.MulticlassF2Score}]", (*DIGITS, "trust=[torchmetrics]"),
            "has no MulticlassF2Score. Did you mean MulticlassF1Score?",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(metrics: str, words: tuple[str, ...], said: str) -> None:
    assert said in refused(metrics, *words)


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    made = asked(f"[{F1}]", *DIGITS, "trust=[torchmetrics]")
    assert not [problem for problem in preflight.missing(made) if "torchmetrics" in problem]
    monkeypatch.setattr(preflight.importlib.util, "find_spec", lambda name: None)
    said = [problem for problem in preflight.missing(made) if "torchmetrics" in problem]
    assert said == ["evaluate.metrics needs the torchmetrics package. Type: pip install 'dtrain[metrics]'"]
