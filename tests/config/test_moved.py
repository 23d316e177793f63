"""Runs and recipes that were written when a target of dtrain had another name."""

from pathlib import Path

import pytest

from dtrain.compose import compose
from dtrain.config import files
from dtrain.config.moved import MOVED, current
from dtrain.launcher.run import described


@pytest.mark.parametrize("old", MOVED)
def test_every_new_name_is_that_of_a_word(old: str) -> None:
    targets = {files.node(group, word).get("_target_") for group, words in files.groups().items() for word in words}
    assert MOVED[old] in targets
    assert old not in targets


def test_a_recipe_may_hold_the_old_name(tmp_path: Path) -> None:
    recipe = tmp_path / "run.yaml"
    recipe.write_text("data:\n  _target_: dtrain.data.text.Text\n  path: a.txt\n")
    config = compose([f"recipe={recipe}"])
    assert config.data["_target_"] == "dtrain.data.text.build"


def test_a_plan_may_hold_the_old_name(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(
        "batch: {size: 8}\ndata: {_target_: dtrain.data.mixture.Mixture, of: {a: {_target_: dtrain.data.text.Text}}}\n"
    )
    there = described(str(tmp_path))
    assert there is not None
    assert there["data"]["of"]["a"]["_target_"] == "dtrain.data.text.build"


def test_what_is_no_target_stays() -> None:
    node = {"path": "dtrain.data.text.Text", "of": [{"_target_": "mine.Text"}]}
    assert current(node) == node
