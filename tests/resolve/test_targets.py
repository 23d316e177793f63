"""Arguments of targets are judged before anything is imported."""

from pathlib import Path

import pytest
from small import plan

from dtrain.errors import WordsError

MINE = ("data=dataset", "data.dataset._target_=minepkg.Faces", "trust=[minepkg]")


@pytest.fixture(autouse=True)
def _mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "minepkg.py").write_text(
        "import sys\nsys.exit(1)\nclass Faces:\n    def __init__(self, root, crop=None): ...\nclass Net:\n    def __init__(self, width): ...\n"
        "def together(samples): ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            MINE,
            "data.dataset._target_=minepkg.Faces needs root. Type data.dataset.root=<value>, or data.dataset.root._target_=",
        ),
        ((*MINE, "data.dataset.rot=/x", "data.dataset.root=/x"), "Did you mean data.dataset.root?"),
        (
            (*MINE, "data.dataset.root=/x", "data.dataset.crop=[{_target_:torch.nn.Linear,in_features:1}]"),
            "torch.nn.Linear needs out_features. Type out_features:<value> in item 1 of data.dataset.crop=[...].",
        ),
        (
            (*MINE, "data.dataset.root=/x", "data.dataset.crop={_target_:torch.nn.Linear,in_features:1}"),
            "data.dataset.crop._target_=torch.nn.Linear needs out_features.",
        ),
        (("model._target_=minepkg.Nett", "trust=[minepkg]"), "minepkg has no Nett. Did you mean Net?"),
        (
            ("model._target_=torch.nn.Linear", "model.in_feature=1", "model.out_features=1", "data=synthetic"),
            "Did you mean model.in_features?",
        ),
        (
            ("optim._target_=torch.optim.SGD", "optim.lr=1"),
            "torch.optim.SGD takes no model, which the run passes to it. Name a function of yours that does, such as def "
            "optimizer(model, lr=1e-3): return torch.optim.SGD(model.parameters(), lr), by "
            "optim._target_=<package>.optimizer trust=[<package>], or a word: optim=adafactor, optim=adamw, ",
        ),
        (
            ("schedule._target_=torch.optim.lr_scheduler.StepLR",),
            "StepLR takes no steps, which the run passes to it. Name a class of yours that does, with factor(step)",
        ),
        (
            (*MINE, "data.dataset.root=/x", "data.dataset.crop={_target_:torch.nn.Linear,_partial_:true}"),
            "crop._partial_=True: of Hydra's own",
        ),
        (
            ("model._target_=minepkg", "trust=[minepkg]"),
            "model._target_=minepkg: a class or function has a dotted name",
        ),
    ],
)
def test_what_a_target_does_not_take_is_told(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(WordsError) as caught:
        plan(*words)
    assert message in str(caught.value)
    assert "optim.params" not in str(caught.value)


@pytest.mark.parametrize("typed", ["nan", "1e3", "1000", "1.50"])
def test_a_number_for_a_text_of_a_class_of_your_own_stays_as_it_was_typed(typed: str, tmp_path: Path) -> None:
    source = "class Faces:\n    def __init__(self, root: str): ...\nclass Net:\n    def __init__(self, name: str | None = None): ...\n"
    (tmp_path / "minepkg.py").write_text(source)
    decided = plan(*MINE, f"data.dataset.root={typed}", "model._target_=minepkg.Net", f"model.name={typed}")
    assert (decided.data["dataset"]["root"], decided.model["name"]) == (typed, typed)
    with pytest.raises(WordsError) as caught:
        plan(*MINE, "data.dataset.root=true")
    assert "data.dataset.root is text. Type \"data.dataset.root='true'\"." in str(caught.value)


def test_what_it_takes_is_taken() -> None:
    plan(
        *MINE,
        "data.dataset.root=/x",
        "model._target_=minepkg.Net",
        "model.width=3",
        "trust=[minepkg]",
        "objective=classification",
    )


def test_a_function_that_is_called_while_the_run_goes_on_needs_no_argument_now() -> None:
    assert plan(
        *MINE,
        "data.dataset.root=/x",
        "data.outputs=2",
        "data.collate._target_=minepkg.together",
        "model=mlp",
        "model.inputs=4",
    ).data["collate"]
    with pytest.raises(WordsError, match="takes no rows"):
        plan(
            *MINE,
            "data.dataset.root=/x",
            "data.outputs=2",
            "data.collate._target_=minepkg.together",
            "data.collate.rows=1",
        )
