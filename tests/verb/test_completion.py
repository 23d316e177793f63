"""The shell completes verbs, words, arguments, recipes and choices; in a real bash, zsh and fish where there are any."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dtrain.verb.completion import SCRIPTS, found

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("typed", "some", "none"),
    [
        ((), {"plan", "strategy=", "steps=", "recipe="}, {"strategy.reshard"}),
        (("pl",), {"plan"}, {"train"}),
        (("plan", "str"), {"strategy="}, {"plan"}),
        (("strategy=f",), {"strategy=fsdp"}, {"strategy=ddp"}),
        (("strategy=fsdp", "strategy."), {"strategy.reshard=", "strategy.offload="}, {"strategy.bucket_mb="}),
        (("strategy=fsdp", "strategy.reshard="), {"strategy.reshard=forward", "strategy.reshard=never"}, set()),
        (("recipe=",), {"recipe=shakespeare"}, set()),
        (("resume=",), {"resume=auto", "resume=must"}, set()),
        (("model.tied=",), {"model.tied=true"}, set()),
        (("logger=[console,te",), {"logger=[console,tensorboard"}, {"logger=[console,console"}),
        (("optim=sgd", "optim."), {"optim.momentum="}, {"optim.betas="}),
        (("logger=[",), {"logger=[console"}, {"logger=console"}),
        (("--h",), {"--help"}, set()),
        (("checkpoint", ""), {"ls", "export", "out="}, {"plan"}),
        (("checkpoint", "ls", ""), {"out=", "step="}, {"export", "strategy="}),
        (("runs", "best", ""), {"figure=", "best_is="}, {"rm"}),
        (("objective._",), {"objective._target_="}, set()),
        (("completion", ""), {"bash", "zsh", "fish"}, {"steps="}),
        (("runs", ""), {"best", "rm", "sort="}, {"steps="}),
        (("import", "as=t"), {"as=torchtune", "as=torchtitan"}, {"as=ray"}),
        (("recipe=/usr/bi",), {"recipe=/usr/bin/"}, set()),
        (("diff", "/usr/bi"), {"/usr/bin/"}, set()),
        (("out=s3://b/",), set(), {"out=s3://b/"}),
        (("nonsense=",), set(), {"nonsense="}),
    ],
)
def test_what_may_follow(typed: tuple[str, ...], some: set[str], none: set[str]) -> None:
    offered = set(found(typed))
    assert some <= offered and not none & offered


@pytest.fixture
def command(tmp_path: Path) -> dict[str, str]:
    """An environment in which `dtrain` is this checkout."""
    (tmp_path / "dtrain").write_text(f'#!/bin/sh\nexec {sys.executable} -m dtrain "$@"\n')
    (tmp_path / "dtrain").chmod(0o755)
    return {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}


ASKED = {
    "bash": "source script; COMP_LINE='dtrain plan strategy=fsdp {0}'; COMP_POINT=${{#COMP_LINE}}; _dtrain; printf '%s\\n' \"${{COMPREPLY[@]}}\"",
    "zsh": "compdef() {{}}; compadd() {{ shift 4; print -l -- $@ }}; source script; words=(dtrain plan strategy=fsdp {0}); CURRENT=4; _dtrain",
    "fish": "source script; complete -C 'dtrain plan strategy=fsdp {0}'",
}


@pytest.mark.parametrize("shell", SCRIPTS)
def test_a_real_shell_completes(shell: str, command: dict[str, str], tmp_path: Path) -> None:
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not here")
    (tmp_path / "script").write_text(SCRIPTS[shell])
    suggestions = []
    for typed in ("strategy.resh", "strategy.reshard=n"):
        done = subprocess.run(
            [shell, "-c", ASKED[shell].format(typed)],
            capture_output=True,
            text=True,
            timeout=300,
            cwd=tmp_path,
            env=command,
            check=False,
        )
        suggestions.append(done.stdout.split())
        assert done.stderr == ""
    whole = (
        "never" if shell == "bash" else "strategy.reshard=never"
    )  # bash takes what stands behind = for a word of its own
    assert suggestions == [["strategy.reshard="], [whole]]


def test_where_nothing_follows_nothing_is_said(command: dict[str, str]) -> None:
    done = subprocess.run(
        ["dtrain", "completion", "words", "seed=x"], capture_output=True, timeout=300, env=command, check=False
    )
    assert (done.returncode, done.stdout) == (0, b""), "an empty line would take away what was typed"


def test_it_answers_without_torch_and_hydra() -> None:
    code = "import sys; from dtrain.__main__ import main; main(['completion', 'words', 'str']); sys.exit(bool({'torch', 'hydra', 'omegaconf'} & set(sys.modules)))"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=ROOT, timeout=300, check=False).returncode
        == 0
    )
