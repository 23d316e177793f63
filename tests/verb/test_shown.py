"""What strangers wrote, through every verb: nothing of it steers the terminal, passes for a line of ours, or runs when what is suggested is typed."""

import ast
import json
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dtrain.__main__ import main
from dtrain.launcher import process
from dtrain.secrets import screen

FORGED = "\ndtrain: FORGED"
ESCAPES = (
    "\x1b[2J", "\x1b[31mred", "\x1b]0;title\x07", "\x1b]8;;http://evil\x1b\\", "\x1b[6n", "\x1b[?1049h", "\x1bc", "\x1b[1A\x1b[2K", "\x1bP$q\x1b\\", "\x1b_x\x1b\\",
    "\x9b2J", "\x9d0;t\x9c", "\x90x\x9c", "\x85x", "\x07", "\x08\x08\x08", "\x0b", "\x0c", "\x0e", "\x7f", "a\rdtrain: FORGED", "a\r\ndtrain: FORGED", f"a{FORGED}", f"a{FORGED}\x1b[8m",
    "a\n\ndtrain: FORGED", "a\nnote: FORGED", "a\nwarning: FORGED", "a\u2028dtrain: FORGED", "a\u2029dtrain: FORGED", "\u202edesrever", "\u2066x\u2069", "\u200fx", "\ufeffx", "a\tb", "\x01\x02",
)  # fmt: skip
COMMANDS = (
    ";touch PWNED", "$(touch PWNED)", "`touch PWNED`", "|touch PWNED", "&touch PWNED", "&&touch PWNED", "||touch PWNED", ">PWNED", "<(touch PWNED)", "'; touch PWNED; '", '"; touch PWNED; "',
    '"$(touch PWNED)"', "'$(touch PWNED)'", "a b;touch PWNED", "x\ntouch PWNED", "${IFS}touch", "$'\\ntouch PWNED'", "\\;touch PWNED", "!touch", "{touch,PWNED}", "~;touch PWNED",
    "#;touch PWNED", "a=b;touch PWNED", "--x;touch PWNED", "*;touch PWNED", "'\"'\"';touch PWNED;'",
)  # fmt: skip
ALL = (*ESCAPES, *COMMANDS)
SOME = [text if number % 4 == 0 else pytest.param(text, marks=pytest.mark.slow) for number, text in enumerate(ALL)]


def test_there_are_sixty_and_more() -> None:
    assert len(set(ALL)) == len(ALL) >= 60


def harmless(printed: str, folder: Path, *, commands: bool = True) -> None:
    """Nothing is obeyed by a terminal, no line is forged, and each command that is suggested runs nothing but itself."""
    assert not screen.CONTROL.search(printed), repr(printed)
    assert "FORGED" not in [re.sub(r"^(dtrain|note|warning): ", "", line)[:6] for line in printed.splitlines()], printed
    assert not any(re.match(r"(dtrain|note|warning): FORGED", line) for line in printed.splitlines()), printed
    for command in (
        re.findall(
            r"(?:(?<![.\w])[Tt]ype (?!=)|\bWrite |^next  )(.*?)(?:\.(?= [A-Z]|$)| if you| to start| for |, or|$)",
            printed,
            re.MULTILINE,
        )
        if commands
        else ()
    ):
        subprocess.run(
            ["bash", "-c", f"true {re.sub('<[^<>]*>', 'x', command)}"],
            cwd=folder,
            capture_output=True,
            timeout=30,
            check=False,
        )
        assert not (folder / "PWNED").exists(), command


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def output(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    main(words)
    return "".join(capsys.readouterr())


def rotated(text: str, *places: Any) -> Sequence[Any]:
    """A third of the places where a text may stand, other ones for the next text."""
    return places[ALL.index(text) % 3 :: 3]


@pytest.mark.parametrize("text", SOME, ids=repr)
def test_what_a_recipe_says(text: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quoted = json.dumps(text)
    for line in rotated(text, f"model: {quoted}", f"{quoted}: 1", f"model.{quoted[1:-1]}: 1", f"seed: {quoted}", f"data: {{path: {quoted}}}", f"recipe: {quoted}", f"model: {{_target_: {quoted}}}", f"trust: {quoted}",
                 f"logger: {quoted}", f"hook: [{quoted}]", f"requires: {{versions: [{quoted}]}}", f"defaults: [{quoted}]", f"optim: {{lr: {quoted}}}"):  # fmt: skip
        (here / "mine.yaml").write_text(f"# {text!r}\n{line}\n")
        harmless(output(["plan", "recipe=mine.yaml"], capsys), here)
    (here / "mine.yaml").write_text(
        f"generate: {{prompt: {quoted}}}\nmodel: {{_target_: torch.nn.Linear, in_features: {quoted}, out_features: 1}}\n"
    )
    for verb in rotated(text, "plan", "train", "verify", "doctor", "diff", "evaluate", "generate"):
        harmless(output([verb, "recipe=mine.yaml", "seed=x"], capsys), here)
    harmless(output(["plan", "why", "recipe=mine.yaml"], capsys), here)


@pytest.mark.parametrize("text", SOME, ids=repr)
def test_what_is_typed(text: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A person pastes what a stranger wrote."""
    for verb in rotated(
        text,
        "plan",
        "train",
        "diff",
        "doctor",
        "verify",
        "evaluate",
        "generate",
        "recipes",
        "import",
        "checkpoint",
        "completion",
        "help",
    ):
        for word in (
            text,
            f"seed={text}",
            f"recipe={text}",
            f"model={text}",
            f"{text}=1",
            f"--seed={text}",
            f"out={text.replace('/', '')}x/y",
        ):
            if not (verb in ("train", "doctor", "verify") and word.startswith("out=")):  # which would begin
                harmless(output([verb, word], capsys), here)


@pytest.mark.parametrize("text", [text for text in ALL if "\0" not in text], ids=repr)
def test_what_names_a_file(text: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = text.replace("/", "")
    folder = here / f"d{name}"
    (folder / "checkpoints" / f"step-{name}").mkdir(parents=True)
    (folder / f"{name}.yaml").write_text(f"# {text!r}\nseed: x\n")
    (folder / "config.yaml").write_text(f"seed: 1\ngenerate: {{prompt: {json.dumps(text)}}}\n")
    (folder / "result.json").write_text(json.dumps({"status": text, "step": 1, "metrics": {text: 1.0}}))
    (folder / "ds.json").write_text(
        json.dumps(
            {
                text: 1,
                "zero_optimization": {"stage": 2, text: text},
                "optimizer": {"type": text, "params": {"lr": text}},
            }
        )
    )
    (folder / "axo.yaml").write_text(
        f"base_model: {json.dumps(text)}\nadapter: lora\nsequence_len: 8\n{json.dumps(text)}: 1\n"
    )
    path = str(folder)
    for words in rotated(text, ["recipes", path], ["plan", f"recipe={path}/{name}.yaml"], ["plan", f"recipe={path}"], ["import", f"{path}/ds.json"], ["import", f"{path}/axo.yaml", "as=axolotl"],
                  ["import", f"{path}/ds.json", f"to={path}/to.yaml"], ["checkpoint", "ls", f"out={path}"], ["checkpoint", "verify", f"out={path}"], ["evaluate", f"out={path}"],
                  ["diff", path, path], ["runs", path], ["plan", f"hydra.searchpath=[{path}]"], ["completion", "words", "plan", f"recipe={here}/d"], ["plan", f"data.path={path}/nothing", "data=tokens"]):  # fmt: skip
        printed = output(words, capsys)
        harmless(printed, here, commands=words[0] != "completion")
        if words[0] == "completion" and text in COMMANDS:
            assert "PWNED" not in printed and "touch" not in printed, "what is offered is typed for the person"


@pytest.mark.parametrize("text", COMMANDS, ids=repr)
def test_what_a_killed_run_left(text: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dtrain.doctor import host

    folder = here / f"dtrain-{os.getuid()}-{text.replace('/', '')}"
    folder.mkdir()
    (folder / "lock").write_text(str(here / "scratch"))
    monkeypatch.setattr(process, "_everywhere", lambda: here)
    (finding,) = [each for each in host.left(None) if "in memory" in each.text]  # type: ignore[arg-type]
    harmless(finding.text, here)
    subprocess.run(
        ["bash", "-c", "true " + finding.advice.split(" or ", 1)[1]],
        cwd=here,
        capture_output=True,
        timeout=30,
        check=False,
    )
    assert not (here / "PWNED").exists()


def test_what_another_user_left_is_not_looked_at(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = here / f"dtrain-{os.getuid()}-x"
    folder.mkdir()
    (folder / "lock").write_text("")
    monkeypatch.setattr(process, "_everywhere", lambda: here)
    assert process.stale() == [folder]
    real = Path.lstat

    def lstat(path: Path) -> Any:
        status = real(path)
        return os.stat_result((*status[:4], status.st_uid + 1, *status[5:])) if path == folder else status

    monkeypatch.setattr(Path, "lstat", lstat)
    assert process.stale() == []


def test_a_word_is_quoted_only_where_it_must_be() -> None:
    assert [
        screen.typed(word) for word in ("seed=1", "data.path=<URL>", "logger=[a,b]", "a='b, c'", "a b", "$x", "")
    ] == [
        "seed=1",
        "data.path=<URL>",
        "logger=[a,b]",
        "\"a='b, c'\"",
        "'a b'",
        "'$x'",
        "''",
    ]


def test_all_verbs_say_it_through_one_function() -> None:
    """A bare print shows what it is given."""
    root = Path(screen.__file__).parents[1]
    calls = {
        path.name
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    }
    assert calls <= {"screen.py", "__init__.py"}
    assert "print(" not in (root / "verb" / "__init__.py").read_text()
