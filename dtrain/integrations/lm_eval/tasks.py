"""The tasks of lm_eval, EleutherAI's lm-evaluation-harness, by name. Holds no torch, so that a command can look at them
before any rank starts.
"""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from dtrain.errors import PreflightError, first_line, nearest

INSTALL = "evaluate as=lm_eval: the package lm_eval is not installed. Type pip install 'dtrain[lm_eval]'."
MARK = "dtrain-tasks:"
"""Before what `look` prints."""
OF_SEVERAL = ("GROUP", "TAG")
"""Kinds of entries that name others."""


def check(asked: Mapping[str, Any]) -> None:
    """Load the tasks in a process of its own, which also brings what the hub has to this machine. Raises PreflightError
    with what is wrong.
    """
    code = "import sys; from dtrain.integrations.lm_eval import tasks; tasks.look(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(dict(asked))], capture_output=True, encoding="utf-8", errors="replace",
        check=False,
    )  # fmt: skip
    said = next((line for line in done.stdout.splitlines() if line.startswith(MARK)), None)
    problems = json.loads(said.removeprefix(MARK)) if said else [f"evaluate.tasks: {done.stderr.strip()[-400:]}"]
    if problems:
        raise PreflightError(*problems)


def look(asked: str) -> None:
    """Print what is wrong with tasks, as JSON."""
    try:
        loaded(json.loads(asked))
        problems = []
    except PreflightError as error:
        problems = [*error.problems]
    sys.stdout.write(f"\n{MARK}{json.dumps(problems)}\n")


def loaded(asked: Mapping[str, Any]) -> Any:
    """lm_eval's TaskManager, which has loaded the tasks once. Raises PreflightError."""
    quiet()
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise PreflightError(INSTALL) from error
    names, path = asked["names"], asked["path"]
    if path is not None and not Path(path).is_dir():
        raise PreflightError(f"evaluate.tasks_path={path} is no folder of this machine. Give one with YAML of lm_eval.")
    manager = TaskManager(include_path=path, include_defaults=False) if path else None
    if manager is None or any(_elsewhere(manager, name) for name in names):
        manager = TaskManager(include_path=path)  # reads 14,000 files
    if unknown := [name for name in names if name not in manager.task_index]:
        if broken := _broken(path):
            raise PreflightError(*broken)
        raise PreflightError(
            *(f"evaluate.tasks: lm_eval has no {name}.{_near(name, manager.all_tasks)}" for name in unknown)
        )
    problems = [problem for name in names if (problem := _problem(manager, name))]
    if problems:
        raise PreflightError(*problems)
    return manager


def _broken(path: str | None) -> list[str]:
    """A sentence for each file of the folder that is not YAML: lm_eval passes over these."""
    sentences = list[str]()
    for file in sorted(Path(path).glob("**/*.yaml")) if path else ():
        try:
            yaml.compose(file.read_text("utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
            mark = getattr(error, "problem_mark", None)
            line = f"line {mark.line + 1}: " if mark else ""
            said = getattr(error, "problem", None) or first_line(error)
            sentences.append(f"evaluate.tasks_path={file}: {line}this is not YAML: {said}.")
    return sentences


def quiet() -> None:
    """Let lm_eval, datasets and the hub say nothing of their own; before they are imported."""
    for name in ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS"):
        os.environ.setdefault(name, "1")
    for name in ("lm_eval", "datasets", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _elsewhere(manager: Any, name: str) -> bool:
    """Whether a name, or what it may stand for, needs the tasks of lm_eval itself."""
    entry = manager.task_index.get(name)
    return entry is None or entry.kind.name in OF_SEVERAL


def _near(name: str, names: Sequence[str]) -> str:
    hint = nearest(name, names)
    return hint if "Did you mean" in hint else " Type lm_eval ls tasks for all names."


def _problem(manager: Any, name: str) -> str:
    """A sentence about why a task cannot run; empty if it can."""
    try:
        for each, task in manager.load([name])["tasks"].items():
            if getattr(task, "UNSAFE_CODE", False):
                return (
                    f"evaluate.tasks: {each} runs the code that a model writes. Export the run, and type lm_eval run "
                    f"--tasks {each} --confirm_run_unsafe_code where that does no harm."
                )
            if getattr(task, "MULTIMODAL", False):
                return f"evaluate.tasks: {each} has images, and this model takes text. Leave it out."
    except Exception as error:  # of any class: of datasets, of the hub, of a function of the task
        return _sentence(manager, name, error)
    return ""


def _sentence(manager: Any, name: str, error: Exception) -> str:
    text, place = f"{type(error).__name__}: {first_line(error)}", _dataset(manager, name)
    if isinstance(error, StopIteration):  # of datasets, which looks for a first row
        return f"evaluate.tasks: {name} has no items: the files of its dataset_kwargs are empty."
    if isinstance(error, ConnectionError) or "Offline" in type(error).__name__ or "on the Hub" in str(error):
        return (
            f"evaluate.tasks: {name} needs {place or 'a dataset'} of the hub, which does not answer ({text}). Load it "
            "once where there is a network, with the same HF_HOME, or name tasks with files of your own "
            "(evaluate.tasks_path)."
        )
    return f"evaluate.tasks: {name} cannot be loaded: {text}."


def _dataset(manager: Any, name: str) -> str:
    """The dataset of a task, if its entry says it."""
    with suppress(AttributeError, TypeError):
        place = manager.task_index[name].cfg.get("dataset_path")
        return f"the dataset {place}" if place else ""
    return ""
