"""Help shows what there is, with what it takes, and needs neither torch nor OmegaConf."""

import subprocess
import sys
from pathlib import Path

import pytest

from dtrain.__main__ import main
from dtrain.config import files, manual
from dtrain.config.schema import GROUPS
from dtrain.config.verbs import VERBS
from dtrain.hook import Hook
from dtrain.logger import Logger
from dtrain.objective import Objective
from dtrain.resolve.targets import PASSED
from dtrain.schedule import Schedule
from dtrain.verb.completion import BEHIND


def test_the_overview_has_verbs_groups_words_recipes_and_examples() -> None:
    page = manual.overview()
    for name in (*VERBS, *GROUPS, *files.recipes(), *(word for words in files.groups().values() for word in words)):
        assert name in page
    assert page.partition("examples")[2].count("dtrain") >= 5


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["strategy", "--help"], "strategy.reshard=forward"),
        (["optim=sgd", "-h"], "optim.momentum=0.9"),
        (["help", "mesh"], "mesh.tp=null"),
        (["plan", "--help", "steps"], "optimizer steps of the whole run"),
        (["help", "shakespeare"], "nanoGPT"),
        (["strategy=fsdp", "--help", "nodes=2"], "forward or never"),
        (["help", "optim.betas"], "optim.betas=[0.9,0.95]"),
        (["model._target_=mine.Net", "--help"], "yours: an nn.Module"),
        (["hook", "--help"], "hook.<name>._target_=<package.name> trust=[<package>]  yours: has an attribute every"),
        (["hook.mine._target_", "--help"], "info.forward(inputs)"),
        (["cnn", "--help"], "model.stages=3"),
        (["plan", "why", "--help"], "who set each value"),
        (["evaluate", "--help"], "evaluate.samples=256"),
        (["checkpoint", "--help"], "dtrain checkpoint export out=runs/a to=runs/hf"),
        (["checkpoint", "--help"], "checkpoint.keep=2"),
        (["nonsense=2", "--help"], "verbs"),
        (["--version"], "dtrain 0"),
    ],
)
def test_a_page_says_what_an_argument_may_be(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    assert text in capsys.readouterr().out


def test_the_page_of_a_verb_has_all_that_may_follow_it() -> None:
    for verb, words in BEHIND.items():
        page = manual.about([verb])
        assert [word for word in words if word not in page and word != f"{verb}="] == []


@pytest.mark.parametrize("group", manual.YOURS)
def test_what_a_part_of_ones_own_has_is_on_the_page(group: str) -> None:
    """The names that a loop reads of it, and those it is given."""
    protocols: dict[str, object] = {"objective": Objective, "schedule": Schedule, "logger": Logger, "hook": Hook}
    page = manual.about([f"{group}._target_"])
    names = [name for name in vars(protocols.get(group, object)) if name[0] != "_"] if group in protocols else []
    assert [name for name in (*names, *PASSED.get(group, ())) if name not in page] == []


@pytest.mark.parametrize(
    ("words", "near"), [(["help", "optm"], "Did you mean optim?"), (["optim=sgdd", "-h"], "Did you mean sgd?")]
)
def test_what_there_is_no_page_of_is_told(words: list[str], near: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    output = capsys.readouterr().err
    assert near in output and len(output.splitlines()) == 1


def test_no_page_of_another_word(capsys: pytest.CaptureFixture[str]) -> None:
    main(["optim=sgd", "--help"])
    assert "betas" not in capsys.readouterr().out


def test_help_needs_neither_torch_nor_omegaconf(tmp_path: Path) -> None:
    code = "import sys; from dtrain.__main__ import main; main(['--help']); sys.exit(bool({'torch', 'hydra', 'omegaconf'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=300, check=False).returncode == 0
