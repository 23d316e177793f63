"""A part of the plan becomes an object, or a sentence."""

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import RankFailed, ranks

from dtrain.build import build, locate, trusting
from dtrain.cluster import Cluster
from dtrain.compose import compose
from dtrain.errors import WordsError
from dtrain.model import construct
from dtrain.resolve import resolve
from dtrain.train import train


def test_nested_parts_are_built_first() -> None:
    built = build({"_target_": "torch.nn.Sequential", "_about_": {"takes": "features"}})
    assert len(built) == 0
    loader = build(
        {
            "_target_": "builtins.dict",
            "inner": [{"_target_": "torch.nn.Linear", "in_features": 2, "out_features": 3}],
            "plain": {"a": 1},
        }
    )
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
    [
        ("nowhere.Thing", "cannot be imported"),
        ("dtrain.model.gpt.Gtp", "dtrain.model.gpt has no Gtp"),
        ("os.path.nothing", "os.path has no nothing"),
        ("torch.nn.Linear.smal", "torch.nn.Linear has no smal"),
        ("torch.nn.functional.F", "torch.nn.functional has no F"),
    ],
)
def test_what_cannot_be_imported_is_named(name: str, why: str) -> None:
    with pytest.raises(WordsError, match=f"{name}: {why}"):
        locate(name)


@pytest.mark.parametrize(
    "name",
    [
        "dtrain.build.importlib.import_module",
        "dtrain.launcher.local.attached.os.system",
        "torch.os.system",
        "dtrain.launcher.local.attached.subprocess.Popen",
    ],
)
def test_a_name_cannot_lead_out_of_its_package(name: str) -> None:
    with pytest.raises(WordsError, match="leads out of"):
        locate(name)


def test_a_module_is_not_a_part() -> None:
    with pytest.raises(WordsError):
        locate("json.decoder")


@pytest.mark.parametrize(
    "name",
    [
        "torch.load",
        "torch.hub.load",
        "torch.nn.functional.relu",
        "torch.nn.utils.clip_grad_norm_",
        "torch.nn.Linear.forward",
        "torch.Tensor",
    ],
)
def test_of_torch_only_modules_optimizers_and_schedules_run(name: str) -> None:
    with pytest.raises(WordsError, match="only the classes of"):
        locate(name)
    with trusting(["torch"]):
        assert callable(locate(name))


def test_a_partial_is_where_what_it_calls_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "import os\nfrom functools import partial\ndef make(a, b): return a + b\npreset = partial(partial(make, b=2))\nbad = partial(os.getenv, 'HOME')\nnumber = 3\n"
    (tmp_path / "presets.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert build({"_target_": "presets.preset", "a": 1}) == 3
    with pytest.raises(WordsError, match="leads out of presets, to os"):
        locate("presets.bad")
    with pytest.raises(WordsError, match=r"presets\.number is an int, not a class or a function"):
        locate("presets.number")


def test_an_alias_of_a_class_is_the_class() -> None:
    assert locate("torch.nn.modules.linear.Linear") is locate("torch.nn.Linear")


def test_while_a_plan_runs_only_trusted_packages_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "import os\nfrom textwrap import dedent\nfrom borrowing_more import act\nclass Net: pass\n"
    (tmp_path / "borrowing.py").write_text(lines)
    (tmp_path / "borrowing_more.py").write_text("def act(): pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with trusting(["borrowing"]):
        assert locate("borrowing.Net").__name__ == "Net"
        for name in ("borrowing.os.system", "borrowing.dedent", "borrowing.act", "borrowing.Net.__subclasses__"):
            with pytest.raises(WordsError, match="leads out of borrowing"):
                locate(name)
        with pytest.raises(WordsError, match="subprocess is not trusted to run code"):
            locate("subprocess.Popen")
    with trusting(["borrowing", "textwrap"]):
        assert locate("borrowing.dedent")("  a") == "a"


def takes_more(*, width: int, **others: int) -> dict[str, int]:
    return {"width": width, **others}


takes_more.__signature__ = inspect.Signature([inspect.Parameter("width", inspect.Parameter.KEYWORD_ONLY)])  # type: ignore[attr-defined]


def test_a_signature_that_does_not_tell_all_is_asked_by_calling() -> None:
    """As configs of transformers do: num_labels is no field of theirs, and taken."""
    assert build({"_target_": f"{__name__}.takes_more", "width": 1, "num_labels": 6}) == {"width": 1, "num_labels": 6}
    config = build({"_target_": "transformers.LlamaConfig", "num_labels": 6})
    assert config.num_labels == 6


class Calls:
    def __init__(self, *, function: Any) -> None:
        self.function = function


def test_a_function_that_is_called_later_is_left_as_it_is() -> None:
    """Of arguments that the word says it calls."""
    part = {"_target_": f"{__name__}.Calls", "_about_": {"calls": ["function"]}}
    assert build(part | {"function": {"_target_": f"{__name__}.takes_more"}}).function is takes_more
    assert build(part | {"function": {"_target_": f"{__name__}.takes_more", "width": 3}}).function(height=2) == {
        "width": 3,
        "height": 2,
    }
    assert isinstance(build(part | {"function": {"_target_": "torch.nn.ReLU"}}).function, torch.nn.ReLU)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (
            "objective._target_=wrong_parts.Unfinished data.task=regression",
            "returned an Unfinished without unit, count, inputs. A part of objective needs unit, count, inputs, loss",
        ),
        (
            "objective._target_=wrong_parts.BareTensor data.task=regression",
            "objective BareTensor: its loss returned a Tensor. Let it return dtrain.objective.Loss",
        ),
        (
            "objective._target_=wrong_parts.BareFigure data.task=regression",
            "objective BareFigure: its figures returned a float. Let it return a dict",
        ),
        (
            "schedule._target_=wrong_parts.factors",
            "wrong_parts.factors returned a function without factor. A part of schedule needs factor. Type dtrain schedule --help.",
        ),
        ("optim._target_=wrong_parts.weights", "wrong_parts.weights returned a list without"),
        (
            "logger.mine._target_=wrong_parts.Mute",
            "returned a Mute without begin, back, text, end. A part of logger needs begin, back, scalars, text, end",
        ),
        (
            "hook.mine._target_=wrong_parts.Timeless",
            "returned a Timeless without every. A part of hook needs every, __call__",
        ),
    ],
)
def test_a_part_of_ones_own_that_lacks_what_a_run_asks_of_it_is_named(words: str, why: str, tmp_path: Path) -> None:
    said = (
        "data=synthetic",
        "model=mlp",
        "objective=regression",
        "logger=[]",
        "hook=[]",
        "steps=1",
        "trust=[wrong_parts]",
        f"out={tmp_path / 'run'}",
    )
    plan = resolve(compose([*said, *words.split()]), Cluster(gpus=0, cpus=1))
    with pytest.raises((WordsError, RankFailed), match=re.escape(why)):
        ranks(1, train, plan)


def test_a_module_that_runs_as_a_script_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flat_script.py").write_text("import sys\n\nclass Net: ...\n\nsys.exit(2)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(WordsError, match=r"importing flat_script ran the script.*SystemExit: 2.*__main__"):
        locate("flat_script.Net")


def test_a_text_in_the_place_of_a_module_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hollow.py").write_text(
        "from torch import nn\n\nclass Holder(nn.Module):\n    def __init__(self, encoder):\n"
        "        super().__init__()\n        self.encoder = encoder\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    part = {"_target_": "hollow.Holder", "encoder": "ae.encoder"}
    with pytest.raises(WordsError, match=r"model\.encoder=ae\.encoder is a text: .*type model\.encoder\._target_="):
        construct(part, facts={}, seed=0)
