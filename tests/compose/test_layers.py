"""Of a mapping of patterns the first that fits counts, so the names of a later layer come first."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from dtrain.cluster import Cluster
from dtrain.compose import compose, provenance
from dtrain.errors import WordsError
from dtrain.resolve import resolve

BASE = "model: gpt\nsteps: 3\noptim: {lr_of: {embed: 1e-5, blocks.1: 3e-4}}\n"
WIDE = "recipe: base.yaml\noptim:\n  lr_of: {'blocks.*': 1e-4}\n"


@pytest.fixture
def wide(tmp_path: Path) -> str:
    (tmp_path / "base.yaml").write_text(BASE)
    (tmp_path / "wide.yaml").write_text(WIDE)
    return f"recipe={tmp_path}/wide.yaml"


@pytest.mark.parametrize(
    ("typed", "names"),
    [
        ((), {"blocks.*": 1e-4, "embed": 1e-5, "blocks.1": 3e-4}),
        (("optim.lr_of={blocks.0: 1e-2}",), {"blocks.0": 1e-2, "blocks.*": 1e-4, "embed": 1e-5, "blocks.1": 3e-4}),
        (("optim.lr_of.head=2",), {"head": 2, "blocks.*": 1e-4, "embed": 1e-5, "blocks.1": 3e-4}),
        (("optim.lr_of={blocks.1: 2, b: 1}",), {"blocks.1": 2, "b": 1, "blocks.*": 1e-4, "embed": 1e-5}),
        (("optim.lr_of={a: '${optim.lr}'}",), {"a": 1e-3, "blocks.*": 1e-4, "embed": 1e-5, "blocks.1": 3e-4}),
        (("optim.lr_of={'blocks.*': null}",), {"embed": 1e-5, "blocks.1": 3e-4}),
        (("optim.lr_of.embed=null",), {"blocks.*": 1e-4, "blocks.1": 3e-4}),
        (("optim.lr_of={'blocks.*': null, embed: null, blocks.1: null}",), None),
        (("optim.lr_of=null",), None),
    ],
)
def test_a_later_layer_comes_first(wide: str, typed: Sequence[str], names: Any, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    for more in ((), (f"hydra.searchpath=[{tmp_path}/own]",)):
        given = compose([wide, *typed, *more]).optim["lr_of"]
        assert given == names and list(given or ()) == list(names or ()), more
    ours, hydras = (compose([wide, *typed, *more]) for more in ((), (f"hydra.searchpath=[{tmp_path}/own]",)))
    assert repr(asdict(ours)) == repr(asdict(hydras))


def test_names_that_stand_in_parts_are_removed_too(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("optim: {lr_of: {embed: 1e-5, head: 3e-4}}\n")
    assert compose([f"recipe={tmp_path}/a.yaml", "optim.lr_of.embed=null"]).optim["lr_of"] == {"head": 3e-4}


def test_a_word_of_your_own_is_the_lowest_layer(tmp_path: Path) -> None:
    (tmp_path / "optim").mkdir()
    text = "_target_: dtrain.optim.sgd.SGD\nlr: 1\nlr_of: {head: 1, embed: 2}\n_about_: {allowed: {lr_of: mapping or null}}\n"
    (tmp_path / "optim/mine.yaml").write_text(text)
    words = [f"hydra.searchpath=[{tmp_path}]", "optim=mine"]
    given = compose([*words, "optim.lr_of={a.b: 3, embed: null}"]).optim["lr_of"]
    assert list(given.items()) == [("a.b", 3), ("head", 1)]


def test_init_names_keep_their_nulls(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("init: /x\ninit_names: {'*': 'model.*', lm_head.bias: null}\n")
    given = compose([f"recipe={tmp_path}/a.yaml", "init_names={'a.*': null}"]).init_names
    assert list(given.items()) == [("a.*", None), ("*", "model.*"), ("lm_head.bias", None)]


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("optim.lr_of.blocks.0=1e-2", r"blocks\.0 is one of them\. Type 'optim\.lr_of=\{blocks\.0:0\.01\}'"),
        ("init_names.a.b=c", r"Type 'init_names=\{a\.b:c\}'"),
        ("optim.lr_of={blocks.2: null}", r"blocks\.2 is null \(command line\).* Did you mean blocks\.1\?"),
    ],
)
def test_what_fits_no_pattern_is_told(wide: str, typed: str, message: str) -> None:
    with pytest.raises(WordsError, match=message):
        compose([wide, typed])


def test_each_entry_has_its_own_source(wide: str, tmp_path: Path) -> None:
    config = compose([wide, "optim.lr_of={blocks.0: 1e-2, embed: 2}"])
    rows = provenance.rows(config, resolve(config, Cluster(gpus=0, cpus=4)))
    told = {row.key: (row.source, row.overrode) for row in rows if row.key.startswith("optim.lr_of")}
    assert told == {
        "optim.lr_of.blocks.0": ("command line", ()),
        "optim.lr_of.embed": ("command line", (("1e-05", f"{tmp_path}/base.yaml:3"),)),
        "optim.lr_of.blocks.*": (f"{tmp_path}/wide.yaml:3", ()),
        "optim.lr_of.blocks.1": (f"{tmp_path}/base.yaml:3", ()),
    }
