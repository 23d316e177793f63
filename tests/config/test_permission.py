"""Which keys a recipe from elsewhere may set: each of the schema, and each argument of a word, is decided."""

from dataclasses import fields
from typing import Any

import pytest

from dtrain.config import files
from dtrain.config.permission import is_choice_of_ours, is_default, is_open, is_passed_on, is_plain
from dtrain.config.schema import GROUPS, LISTED, NAMED, ROWS, Schema

SCOPES = {name: row.metadata["scope"] for name, row in ROWS.items()} | {
    top.name: top.metadata["scope"] for top in fields(Schema) if top.name in GROUPS
}


def arguments(node: dict[str, Any]) -> set[str]:
    return {name for name in node if name not in ("_target_", "_about_")}


@pytest.mark.parametrize("key", SCOPES)
def test_every_key_of_the_schema_is_open_closed_or_typed(key: str) -> None:
    assert len({"open", "closed", "typed"} & set(SCOPES[key].split())) == 1, "decide, in the scope of the key"
    assert is_open(key) == ("open" in SCOPES[key].split())


@pytest.mark.parametrize("group", [*GROUPS, *NAMED.values(), *LISTED.values()])
def test_every_argument_of_a_word_is_open_or_closed(group: str) -> None:
    for word in files.own(group):
        node = files.node(group, word)
        facts = node.get("_about_") or {}
        opened, closed = set(facts.get("open") or ()), set(facts.get("closed") or ())
        if group not in GROUPS:
            assert not arguments(node), "the words of this group take no arguments yet: decide who may set them"
        elif "closed" in SCOPES[group].split():
            assert not opened, f"{group} is closed as a whole"
        else:
            assert not opened & closed and opened | closed == arguments(node), f"decide, in conf/{group}/{word}.yaml"


@pytest.mark.parametrize("group", GROUPS)
def test_an_argument_means_the_same_to_strangers_in_all_words_of_a_group(group: str) -> None:
    facts = [files.node(group, word).get("_about_") or {} for word in files.own(group)]
    opened, closed = ({name for each in facts for name in each.get(column) or ()} for column in ("open", "closed"))
    assert not opened & closed


@pytest.mark.parametrize(
    ("key", "opened"),
    [
        ("optim.lr", True), ("data.path", True), ("data.path.0", True), ("data.cache", False), ("data.dataset.root", True), ("data.dataset.cache", False),
        ("data.of.web.path", True), ("data.of.web.cache", False), ("data.of.a.of.b.cache", False), ("evaluate.sets.dev.path", True), ("evaluate.sets.dev.cache", False),
        ("evaluate.sets.dev.data.cache", False), ("predict.data.cache", False), ("predict.data.path", True), ("predict.to", False), ("launcher.options", False),
        ("launcher.patch.spec.x", False), ("launcher._target_", False), ("logger.console._target_", True), ("logger.mine.url", False), ("hook.sample.every", True),
        ("hook.mine", True), ("hook.mine.every", False), ("strategy.mine", False), ("model.mine", True), ("cluster.gpu", False), ("mesh.tp", True), ("mesh", False),
        ("nothing.at.all", False), ("sweep.space", True), ("sweep.workers", False),
    ],
)  # fmt: skip
def test_what_is_open(key: str, opened: bool) -> None:
    assert is_open(key) == opened


def test_a_closed_key_may_say_what_is_so_anyway() -> None:
    assert is_default("launcher", "auto") and is_default("launcher.options", "") and is_default("predict.to", None)
    assert not is_default("launcher", "ssh") and not is_default("launcher.options", "-v")
    assert not is_default("launcher._target_", "dtrain.launcher.ssh.Ssh"), "it chooses a word"
    assert not is_default("nothing.at.all", None)


def test_words_of_ones_own_are_chosen_for_what_is_trained_alone() -> None:
    assert is_choice_of_ours("model", "mine") and is_choice_of_ours("logger", ["console"])
    assert not is_choice_of_ours("logger", ["console", "wandb"]), "it sends what a run writes to others"
    assert not is_choice_of_ours("logger", ["console", "mine"]) and not is_choice_of_ours("strategy", "mine")


def test_code_that_dtrain_does_not_know_gets_plain_names() -> None:
    unknown = ("model.repo", "model.config.kernel", "data.dataset.root", "data.collate.x", "data.of.a.dataset.root")
    assert [*map(is_passed_on, unknown)] == [True] * 5
    known = ("model.name", "data.path.0", "data.columns.x", "optim.lr_of.embed", "data.dataset._target_", "mesh.tp")
    assert [*map(is_passed_on, known)] == [False] * 6
    assert is_plain("resnet-50 v1.5") and not any(map(is_plain, ("a/b", "~a", "a\\b", "x::y", "https://a")))
