"""What the working folder brings is found, said, and no more than a person allowed."""

import os
from pathlib import Path

import pytest

import dtrain
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
    assert main(["--help"]) == 0 and "adamw, lightning, mine, muon" in capsys.readouterr().out
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


def aliases(levels: int) -> str:
    return "a0: &a0 [1, 1]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, levels))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("lr: 1\nb: [\n", "conf/optim/bad.yaml:3: not YAML: "),
        ("- lr\n", "conf/optim/bad.yaml:1: a word is a mapping of its arguments."),
        (aliases(12), "conf/optim/bad.yaml:5: more than 10000 values, with those that aliases repeat."),
        ("folder", "conf/optim/bad.yaml: neither a file nor a link to one."),
        ("link", "conf/optim/bad.yaml: neither a file nor a link to one."),
    ],
)
def test_a_file_that_is_no_word_puts_that_word_alone_out_of_use(
    folder: Path, capsys: pytest.CaptureFixture[str], text: str, sentence: str
) -> None:
    bad = folder / "conf/optim/bad.yaml"
    if text == "folder":
        bad.mkdir()
    elif text == "link":
        bad.symlink_to("gone.yaml")
    else:
        bad.write_text(text)
    assert f"./conf: optim=mine; not used: {sentence.removesuffix('.')}" in here.look().note
    with pytest.raises(WordsError) as caught:
        compose(["optim=bad"])
    (problem,) = caught.value.problems
    assert problem.startswith(f"optim=bad (command line): {sentence}")
    assert compose(["optim=mine"]).choices["optim"] == "mine"
    assert main(["optim", "--help"]) == 0
    output = capsys.readouterr()
    assert "optim=mine  mine, with a head" in output.out and output.err.startswith(f"note: {sentence}")
    assert main(["completion", "words", "optim=b"]) == 0 and capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (
            'width: "${"',
            "model=net (command line): conf/model/net.yaml:2: width: ${ begins a reference, which cannot be ",
        ),
        ('width: [1, "${"]', "model=net (command line): conf/model/net.yaml:2: width: ${ begins a reference"),
        ("null: 4", "model=net (command line): conf/model/net.yaml:2: null: YAML reads it as null, and the name of "),
        ("3: 4", "model=net (command line): conf/model/net.yaml:2: 3: YAML reads it as int, and the name of an "),
        ("a: {null: 4}", "conf/model/net.yaml: cannot be composed: Incompatible key type 'NoneType'."),
        ("defaults: [nope]", "conf/model/net.yaml: cannot be composed: In 'model/net': Could not load 'model/nope'."),
        ("width: ${model.width}", "model.width='${model.width}' (conf/model/net.yaml:2): it refers to itself."),
        (
            "a: {b: '${nope}'}",
            "model.a.b='${nope}' (conf/model/net.yaml:2): there is no key nope to refer to. Type ${<a key of the run>}, or the value itself.",
        ),
    ],
)
def test_a_word_that_cannot_be_composed_has_its_file_and_the_reason(folder: Path, line: str, sentence: str) -> None:
    (folder / "conf/model").mkdir()
    (folder / "conf/model/net.yaml").write_text(f"_target_: mine.Net\n{line}\n")
    with pytest.raises(WordsError) as caught:
        compose(["model=net"])
    assert caught.value.problems[0].startswith(sentence)


@pytest.mark.parametrize(
    ("facts", "sentence"),
    [
        ("3", "_about_ states 3: facts are names with values"),
        ("[1]", "_about_ states [1]: facts are names with values"),
        ("{allowed: 3}", "_about_ states allowed=3: allowed is names with values."),
        ("{allowed: }", "_about_ states allowed=None: allowed is names with values."),
        ("{allowed: {width: []}}", "_about_ states allowed.width=[]: allowed values are written as in int >= 1, "),
        ("{allowed: {width: 3}}", "_about_ states allowed.width=3: allowed values are written as in "),
        ("{allowed: {width: int >= banana}}", "_about_ states allowed.width='int >= banana': allowed values "),
        ("{allowed: {width: int >= 1.2.3}}", "_about_ states allowed.width='int >= 1.2.3': allowed values "),
        ("{allowed: {width: list of 2 list of int}}", "_about_ states allowed.width='list of 2 list of int': "),
        ("{allowed: {nope: int}}", "_about_ states allowed.nope, and there is no argument nope. Allowed: width."),
        ("{calls: 3}", "_about_ states calls=3: calls is a list of text."),
        ("{needs: 3}", "_about_ states needs, which is no fact of model. Its facts are allowed, "),
        ("{multiples: {width: 3}}", "_about_ states multiples.width=3: each value of multiples is a list of text."),
    ],
)
def test_a_mistake_in_the_facts_of_a_word_has_its_file_and_line(folder: Path, facts: str, sentence: str) -> None:
    (folder / "conf/model").mkdir()
    (folder / "conf/model/net.yaml").write_text(f"_target_: mine.Net\nwidth: 3\n_about_: {facts}\n")
    with pytest.raises(WordsError) as caught:
        compose(["model=net"])
    (problem,) = caught.value.problems
    assert problem.startswith(f"model=net (command line): conf/model/net.yaml:3: {sentence}")


def test_a_word_with_the_name_of_one_of_dtrain_is_not_used_and_that_is_noted(folder: Path) -> None:
    (folder / "conf/optim/adamw.yaml").write_text(MINE)
    assert here.look().note.endswith(
        "./conf: optim=mine; not used: conf/optim/adamw.yaml: dtrain's own optim=adamw is used. Rename the file to use yours"
    )
    assert compose(["optim=adamw"]).optim["_target_"] == "dtrain.optim.adamw.build"


def test_many_words_with_names_of_dtrain_are_one_note(folder: Path) -> None:
    for word in ("sgd", "adamw", "muon"):
        (folder / f"conf/optim/{word}.yaml").write_text(MINE)
    (folder / "conf/optim/broken.yaml").write_text("[")
    note = here.look().note
    assert note.count("Rename the file") == 1 and "conf/optim/broken.yaml:2" in note
    assert note.endswith("yours. 2 other file(s) have the name of a word of dtrain too")


@pytest.mark.parametrize(
    ("path", "mistake"),
    [
        ("https://host/words", "words come from a folder of this machine or from a package. Type hydra.searchpath=[<folder>]."),
        ("memory://own", "words come from a folder of this machine or from a package. Type hydra.searchpath=[<folder>]."),
        ("file:///gone", "there is no such folder."),
        ("file://host/words", "host is another host, whose files are not here. Type file:///<path> for a file of this machine."),
        ("gone", "there is no such folder."),
        ("dtrain.yaml", "a file, not a folder."),
        ("pkg://no_such_package.conf", "there is no such package."),
    ],
)  # fmt: skip
def test_a_folder_of_words_that_cannot_be_read_is_one_mistake(
    folder: Path, capsys: pytest.CaptureFixture[str], path: str, mistake: str
) -> None:
    word = f"hydra.searchpath=[{path}]"
    with pytest.raises(WordsError) as caught:
        compose(["optim=mine", "steps=no", word])
    assert caught.value.problems[0] == f"{word}: {mistake}" and len(caught.value.problems) == 2
    assert main(["optim", word, "--help"]) == WordsError.exit_code
    assert f"dtrain: {word}: {mistake}" in capsys.readouterr().err


@pytest.mark.parametrize("path", ["more", "file://{folder}/more", "file:{folder}/m%6fre", "~/more"])
def test_a_folder_of_words_is_a_path_or_a_file_url(folder: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setenv("HOME", str(folder))
    (folder / "conf").rename(folder / "more")
    searchpath = f"hydra.searchpath=['{path.format(folder=folder)}']"
    assert compose(["optim=mine", "trust=[mypkg]", searchpath]).choices["optim"] == "mine"
    assert main(["optim=mine", searchpath, "--help"]) == 0


def test_a_recipe_or_run_of_another_project_names_the_folder_of_its_words(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "runs/a").mkdir(parents=True)
    (folder / "runs/a/config.yaml").write_text("optim: mine\n")
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    hint = f"there is no optim mine. Its file is in {folder}/conf. Type hydra.searchpath=[{folder}/conf] too."
    for wrong in (lambda: compose(["recipe=../runs/a/config.yaml"]), lambda: dtrain.load("../runs/a")):
        with pytest.raises(WordsError) as caught:
            wrong()
        assert hint in str(caught.value)
    with pytest.raises(WordsError, match=r"there is no optim mine\. Allowed:"):
        compose(["optim=mine"])
    words = ["recipe=../runs/a/config.yaml", f"hydra.searchpath=[{folder}/conf]", "trust=[mypkg]"]
    assert compose(words).choices["optim"] == "mine"
