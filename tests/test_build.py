"""A part of the plan becomes an object, or a sentence."""

import pytest

from dtrain.build import build, locate
from dtrain.errors import WordsError


def test_nested_parts_are_built_first() -> None:
    built = build({"_target_": "torch.nn.Sequential", "_about_": {"takes": "features"}})
    assert len(built) == 0
    loader = build({"_target_": "builtins.dict", "inner": [{"_target_": "torch.nn.Linear", "in_features": 2, "out_features": 3}], "plain": {"a": 1}})
    assert loader["inner"][0].out_features == 3
    assert loader["plain"] == {"a": 1}


def test_what_is_given_comes_beside_the_arguments() -> None:
    schedule = build({"_target_": "dtrain.schedule.constant.Constant", "warmup": 4}, steps=10)
    assert schedule.factor(1) == 0.5


def test_an_argument_nobody_takes_is_named_with_those_that_are() -> None:
    with pytest.raises(WordsError, match=r"dtrain\.schedule\.constant\.Constant: .*'warm'.*It takes: steps, warmup"):
        build({"_target_": "dtrain.schedule.constant.Constant", "warmup": 4, "warm": 4}, steps=10)


def test_an_argument_that_is_missing_is_named() -> None:
    with pytest.raises(WordsError, match="warmup"):
        build({"_target_": "dtrain.schedule.constant.Constant"}, steps=10)


@pytest.mark.parametrize(
    ("name", "why"),
    [("nowhere.Thing", "cannot be imported"), ("dtrain.model.gpt.Gtp", "dtrain.model.gpt has no Gtp"), ("os.path.nothing", "os.path has no nothing")],
)
def test_what_cannot_be_imported_is_named(name: str, why: str) -> None:
    with pytest.raises(WordsError, match=f"{name}: {why}"):
        locate(name)


@pytest.mark.parametrize(
    "name", ["dtrain.build.importlib.import_module", "dtrain.launcher.local.os.system", "torch.os.system", "dtrain.launcher.local.subprocess.Popen"]
)
def test_a_name_cannot_lead_out_of_its_package(name: str) -> None:
    with pytest.raises(WordsError, match="leads out of"):
        locate(name)


def test_a_module_is_not_a_part() -> None:
    with pytest.raises(WordsError):
        locate("json.decoder")
