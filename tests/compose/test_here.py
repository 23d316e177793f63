"""What the working folder brings is found, said, and no more than a person allowed."""

import os
from pathlib import Path

import pytest

from dtrain.__main__ import main
from dtrain.cluster import Cluster
from dtrain.compose import compose, here
from dtrain.errors import WordsError
from dtrain.resolve import resolve
from dtrain.sweep import jobs

MINE = "# mine, with a head\n_target_: mypkg.build\nlr: 0.5 # of the body\nhead_lr: ${optim.lr} # of the head\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project: a word of its own, and trust."""
    (tmp_path / "conf/optim").mkdir(parents=True)
    (tmp_path / "conf/optim/mine.yaml").write_text(MINE)
    (tmp_path / "dtrain.yaml").write_text("trust: [mypkg]\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_words_and_trust_of_the_folder_are_those_of_a_run(folder: Path) -> None:
    config = compose(["optim=mine", "optim.lr=0.25"])
    assert (config.optim["head_lr"], config.trust, config.sources["trust"]) == (0.25, ["mypkg"], "dtrain.yaml:1")
    assert compose(["optim=mine", "trust=[]"]).trust == [], "what is typed comes after it"
    judged = jobs.judged(jobs.read(["optim=mine,adamw", "steps=5", "out=x"]), Cluster(0, 2), resolve)
    assert [job.values for job in judged.jobs] == [{"optim": "mine"}, {"optim": "adamw"}]


def test_what_was_found_is_said_once_and_goes_to_no_tool(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["plan", "trust=[]"], ["plan", "json"]):
        main(words)
        output = capsys.readouterr()
        assert output.err.splitlines()[0] == "note: of this folder: dtrain.yaml: trust=[mypkg]; ./conf: optim=mine"
        assert output.err.count("of this folder") == 1 and "of this folder" not in output.out


def test_more_folders_of_words_are_named_in_the_file(folder: Path) -> None:
    (folder / "conf").rename(folder / "more")
    (folder / "dtrain.yaml").write_text("searchpath: [more]\n")
    assert compose(["optim=mine", "trust=[mypkg]"]).choices["optim"] == "mine"
    (folder / "dtrain.yaml").write_text("searchpath: [gone]\n")
    with pytest.raises(WordsError, match=r"hydra.searchpath=\[gone\]: there is no such folder"):
        compose([])


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("seed: 3\n", "dtrain.yaml:1: seed: only trust and searchpath stand here"),
        ("trust: mypkg\n", r"dtrain.yaml:1: trust: it is a list of names. Write trust: \[mypkg\]"),
        ("trust: [\n", "dtrain.yaml:2: "),
        ("trust: [a]\ntrust: [b]\n", "dtrain.yaml:2: "),
    ],
)
def test_a_file_that_says_something_else_is_refused(folder: Path, document: str, message: str) -> None:
    (folder / "dtrain.yaml").write_text(document)
    with pytest.raises(WordsError, match=message):
        compose([])


def test_a_file_that_another_user_may_write_is_not_read(folder: Path) -> None:
    (folder / "dtrain.yaml").chmod(0o666)
    defaults = here.look()
    assert [word.key for word in defaults.words] == ["hydra.searchpath"]
    assert "dtrain.yaml is not read: another user owns it, or may write it" in defaults.note
    if os.getuid() == 0:
        (folder / "dtrain.yaml").chmod(0o644)
        os.chown(folder / "dtrain.yaml", 4711, 4711)
        assert compose([]).trust == []


def test_a_file_of_words_trusts_nobody(folder: Path) -> None:
    (folder / "conf/optim/sly.yaml").write_text(
        "# @package _global_\ntrust: [os]\noptim: {_target_: os.system, model: x}\n"
    )
    (folder / "dtrain.yaml").unlink()
    assert compose(["optim=sly"]).trust == []


@pytest.mark.parametrize(
    ("group", "text", "sentence"),
    [
        ("hook", "_target_: mine.Pulse\n", "hook=bare: its file has to begin with this line: # @package hook.bare"),
        ("data", "dataset: {_target_: mine.Faces}\n", "data=bare: its file says no class"),
    ],
)
def test_a_word_whose_file_lacks_something_says_what(folder: Path, group: str, text: str, sentence: str) -> None:
    (folder / "conf" / group).mkdir(exist_ok=True)
    (folder / "conf" / group / "bare.yaml").write_text(text)
    with pytest.raises(WordsError, match=sentence):
        compose([f"{group}=bare"])


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "conf/nginx").mkdir(parents=True)
    (tmp_path / "conf/nginx/site.yaml").write_text("a: 1\n")
    monkeypatch.chdir(tmp_path)
    assert (*here.look().words, here.look().note) == ("",)
    monkeypatch.chdir(Path(__file__).parents[2])
    assert here.look().note == "", "conf/ of a checkout is dtrain's own"


def test_help_and_completion_know_them(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["optim=mine", "--help"]) == 0
    output = capsys.readouterr().out
    assert (
        "optim=mine  mine, with a head" in output
        and "optim.lr=0.5" in output
        and "of the body" in output
        and "optim.head_lr=" in output
    )
    assert main(["--help"]) == 0 and "adamw, mine, muon" in capsys.readouterr().out
    assert main(["completion", "words", "optim=m"]) == 0 and capsys.readouterr().out.split() == [
        "optim=mine",
        "optim=muon",
    ]
    assert main(["completion", "words", "optim=mine", "optim.h"]) == 0 and capsys.readouterr().out.split() == [
        "optim.head_lr="
    ]
    (folder / "conf").rename(folder / "more")
    assert main(["optim=mine", "hydra.searchpath=[more]", "--help"]) == 0 and "of the body" in capsys.readouterr().out
    assert main(
        ["completion", "words", "hydra.searchpath=[more]", "optim=mi"]
    ) == 0 and capsys.readouterr().out.split() == ["optim=mine"]
    assert main(["optim=mine", "--help"]) == WordsError.exit_code, "nothing stays of what was looked at before"


def test_a_word_that_is_no_yaml_is_one_sentence_in_help(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "conf/optim/mine.yaml").write_text("lr: [\n")
    assert main(["optim=mine", "--help"]) == WordsError.exit_code
    assert "mine.yaml: a word is a mapping of its arguments in YAML" in capsys.readouterr().err
