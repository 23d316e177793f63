"""A command that ends in a fraction of a second imports what its words need; another room, file or package is a line here."""

import json
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest


def of(room: str, *files: str) -> tuple[str, ...]:
    """A room, and these files of it."""
    return (f"dtrain.{room}", *(f"dtrain.{room}.{file}" for file in files))


YAML = ("yaml", "yaml.*", "_yaml", "cython_runtime", "_cython_*")
HELP = (
    "dtrain", "dtrain.__main__", "dtrain.errors", *of("config", "*"), *of("secrets", "*"), *of("lifecycle", "signals"),
    *of("verb", "own"), *YAML,
)  # fmt: skip
COMPLETION = (*HELP, *of("verb", "completion"))
REFUSAL = (
    *HELP, *of("verb", "plan", "shapes"), "dtrain.build", "dtrain.planned",
    *of("cluster", "allocation", "environments", "measured"), *of("compose", "*"), *of("recipe", "*"),
    *of("resolve", "*"), *of("predict", "*"), "dtrain.tracing",
    *of("storage", "clients", "disk", "errors", "hub", "options", "patience", "store", "web"),
)  # fmt: skip
PLAN = (*REFUSAL, "dtrain.result", *of("launcher", "local"))
TRAINING = (
    *PLAN, *of("launcher", "*"), *of("lifecycle", "*"), "dtrain.cluster.network", *of("verb", "decide", "train"),
    *of("storage", "attempts", "caching", "lease", "leftovers"), "_sysconfigdata_*",
)  # fmt: skip
"""A run imports its launcher before its words are read, as they are nearly always right."""
CASES = {
    "plan strategy=fsdp nodes=2 devices=2": (0, PLAN, 290),
    "--help": (0, HELP, 140),
    "optim --help": (0, HELP, 140),
    "plan strategy=fdsp optim.lrr=1": (2, REFUSAL, 280),
    "plan recipe=nosuch": (2, REFUSAL, 280),
    "strategy=fdsp optim.lrr=1": (2, TRAINING, 300),
    "completion words plan strat": (0, COMPLETION, 140),
    "completion words plan optim.lr=": (0, COMPLETION, 140),
}
"""Words -> exit code, what may be imported beside Python's own modules, and the most modules with these."""
CODE = """
import json, sys
before = set(sys.modules)
from dtrain.__main__ import main
code = main(sys.argv[2:])
with open(sys.argv[1], "w") as file:
    json.dump([code, sorted(set(sys.modules) - before)], file)
"""


@pytest.mark.parametrize("words", CASES)
def test_a_command_imports_what_its_words_need(words: str, tmp_path: Path) -> None:
    """In an interpreter of its own, in a folder that brings no words."""
    code, allowed, most = CASES[words]
    command = [sys.executable, "-c", CODE, "modules.json", *words.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    ended, names = json.loads((tmp_path / "modules.json").read_text())
    assert ended == code, done.stderr
    foreign = [name for name in names if name.partition(".")[0] not in sys.stdlib_module_names]
    assert not [name for name in foreign if not any(fnmatch(name, each) for each in allowed)]
    assert len(names) <= most, "Python's own modules cost time too"
