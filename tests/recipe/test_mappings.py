"""A mapping whose names are patterns or have dots is one value: typed, written, read and imported."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from dtrain import recipe
from dtrain.compose import compose
from dtrain.config.grammar import read
from dtrain.config.schema import Config
from dtrain.config.word import spelling
from dtrain.errors import WordsError

MAPPINGS: dict[str, tuple[tuple[str, ...], Any]] = {
    "optim.lr_of": ((), {"*.bias": 0.01, "blocks.0": 0.001, "blocks.[12]": 0.0, "embed": 0.5}),
    "init_names": (("init=/x",), {"transformer.*": "model.*", "lm_head.bias": None, "1e3": "true"}),
    "launcher.conf": (("launcher=spark",), {"spark.executor.memory": "4g", "plain": "1"}),
    "launcher.labels": (("launcher=kubernetes",), {"example.com/queue": "fast", "team": "a"}),
    "model.config": (("model=hf", "model.name=x"), {"rope": {"scaling.factor": 2.0}, "layers": 2}),
    "evaluate.sets.dev.columns": (("evaluate.sets.dev.path=/x",), {"prompt.text": "a: b"}),
}


def value_of(config: Config, key: str) -> Any:
    top, *rest = key.split(".")
    value = getattr(config, top)
    for name in rest:
        value = value[name] if isinstance(value, dict) else getattr(value, name)
    return value


@pytest.mark.parametrize("key", MAPPINGS)
def test_a_mapping_comes_back_from_words_config_and_recipe(key: str, tmp_path: Path) -> None:
    words, mapping = MAPPINGS[key]
    config = compose([*words, f"{key}={spelling(mapping)}"])
    assert value_of(config, key) == mapping
    written = recipe.write(config)
    tree: Any = yaml.safe_load(written)
    for name in key.split("."):
        tree = tree[name]
    assert tree == mapping
    (tmp_path / "again.yaml").write_text(written)
    again = compose([f"recipe={tmp_path}/again.yaml"])
    assert value_of(again, key) == mapping
    assert _plain(recipe.write(again)) == _plain(written)


def test_a_mapping_keeps_its_references(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUEUE", "fast")
    config = compose(["launcher=kubernetes", "launcher.labels={example.com/queue: ${oc.env:QUEUE}}"])
    assert config.launcher["labels"] == {"example.com/queue": "fast"}
    assert yaml.safe_load(recipe.write(config))["launcher"]["labels"] == {"example.com/queue": "${oc.env:QUEUE}"}


def _plain(written: str) -> list[str]:
    """The lines of a recipe without the sources of its values."""
    return [line.partition("  # ")[0] for line in written.splitlines()]


def test_an_import_writes_a_mapping_that_is_read(tmp_path: Path) -> None:
    mapping = {"*.bias": 0.01, "blocks.0": 0.001}
    (tmp_path / "a.yaml").write_text(f"optim: {{lr_of: {yaml.safe_dump(mapping, default_flow_style=True)}}}\n")
    assert compose([f"recipe={tmp_path}/a.yaml"]).optim["lr_of"] == mapping


@pytest.mark.parametrize("typed", ["{\"*.bias\": 1e-2, 'a b': 2}", "{*.bias: 1e-2, a b: 2}"])
def test_names_may_be_quoted(typed: str) -> None:
    assert read(typed) == [{"*.bias": 0.01, "a b": 2}]


@pytest.mark.parametrize("name", ["embed", "blocks.*"])
@pytest.mark.parametrize("typed", ["optim.lr_of.head=3", "optim.lr_of={head:3}"])
def test_names_of_a_recipe_and_of_the_command_line_add_up(name: str, typed: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(f"optim: {{lr_of: {{'{name}': 2}}}}\n")
    assert compose([f"recipe={tmp_path}/a.yaml", typed]).optim["lr_of"] == {name: 2, "head": 3}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: {'*.width': 3}", "'model.*.width' is not a key"),
        ("evaluate: {sets: {'a*': {path: x}}}", "is not a key"),
        ("'a*': 3", "'a*' is not a key"),
        ('optim: {lr_of: {"a\'b": 3}}', "is not a key"),
        ("optim: {lr_of: {'${x}': 3}}", "is not a key"),
    ],
)
def test_a_pattern_is_no_key_elsewhere(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(WordsError) as caught:
        compose([f"recipe={tmp_path}/a.yaml"])
    assert message in str(caught.value)
