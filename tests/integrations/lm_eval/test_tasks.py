"""Tasks of lm_eval are looked at before ranks start; each mistake is a sentence."""

import json
import subprocess
from pathlib import Path
from typing import Any

import commands
import pytest
from integrations.lm_eval.items import write

from dtrain.errors import PreflightError
from dtrain.integrations.lm_eval import tasks


def asked(*names: str, path: Path | None) -> dict[str, Any]:
    return {"names": list(names), "path": path and str(path), "shots": None, "limit": None}


def test_what_the_look_says_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    for said, sentence in ((f'{tasks.MARK}["no such task"]', "no such task"), ("", "evaluate.tasks: it broke")):
        done = subprocess.CompletedProcess([], 1, stdout=f"noise\n{said}\n", stderr="it broke")
        monkeypatch.setattr(subprocess, "run", lambda *_, done=done, **__: done)
        with pytest.raises(PreflightError, match=sentence):
            tasks.check(asked("a", path=None))
    good = subprocess.CompletedProcess([], 0, stdout=f"{tasks.MARK}[]\n", stderr="")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: good)
    tasks.check(asked("a", path=None))


def test_a_hub_that_does_not_answer_is_told_from_a_broken_task() -> None:
    error = ConnectionError("Couldn't reach 'cais/mmlu' on the Hub")
    assert "which does not answer" in tasks._sentence(None, "mmlu", error)
    assert "needs a dataset of the hub" in tasks._sentence(None, "mmlu", error)
    assert tasks._sentence(None, "mine", KeyError("text")) == "evaluate.tasks: mine cannot be loaded: KeyError: 'text'."


@pytest.mark.campaign("network")
def test_tasks_that_cannot_be_loaded_are_sentences(tmp_path: Path) -> None:
    write(tmp_path / "tasks")
    (tmp_path / "tasks" / "gone.jsonl").unlink()
    code = (
        "import sys, json; from dtrain.integrations.lm_eval import tasks; [tasks.look(each) for each in sys.argv[1:]]"
    )
    cases = [asked(name, path=tmp_path / "tasks") for name in ("my_choice", "my_gone")]
    cases.append(asked("my_choice", path=tmp_path / "nowhere"))
    ran = commands.python("-c", code, *map(json.dumps, cases))
    assert ran.returncode == 0, ran.stderr
    said = [json.loads(line.removeprefix(tasks.MARK)) for line in ran.stdout.splitlines() if tasks.MARK in line]
    assert said[0] == []
    assert said[1][0].startswith("evaluate.tasks: my_gone cannot be loaded: FileNotFoundError")
    assert "is no folder of this machine" in said[2][0]


def test_files_that_are_no_yaml_and_files_without_items_are_sentences(tmp_path: Path) -> None:
    (tmp_path / "good.yaml").write_text("task: good\ndoc_to_text: !function mine.text\n")
    assert tasks._broken(str(tmp_path)) == tasks._broken(None) == []
    (tmp_path / "bad.yaml").write_text("task: bad\n  dataset_path: json\n")
    assert tasks._broken(str(tmp_path)) == [
        f"evaluate.tasks_path={tmp_path}/bad.yaml: line 2: this is not YAML: mapping values are not allowed here."
    ]
    said = "evaluate.tasks: mine has no items: the files of its dataset_kwargs are empty."
    assert tasks._sentence(None, "mine", StopIteration()) == said


@pytest.mark.slow
def test_a_name_that_lm_eval_has_not_is_told_with_the_nearest() -> None:
    """It reads 14,000 files to know."""
    code = "import sys; from dtrain.integrations.lm_eval import tasks; tasks.look(sys.argv[1])"
    ran = commands.python("-c", code, json.dumps(asked("helaswag", path=None)))
    assert "lm_eval has no helaswag. Did you mean hellaswag?" in ran.stdout
