"""A terminal that closes is a wish to stop, and Ctrl-C; what was started under nohup, or by `&` in a script, does not hear of it."""

import contextlib
import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from commands import COMMAND
from killing import nothing_left
from launching import WORDS, steps_of, wait_for_step

pytestmark = pytest.mark.campaign("signals")

SLOW = ["model._target_=launching.Slow", "model.rank=0", "batch=8", "steps=4000", "logger=[console]"]
HANG_UP = signal.SIGHUP
STARTED = (
    "import os, signal, sys; signal.signal(int(sys.argv[1]), signal.SIG_IGN); os.execv(sys.executable, sys.argv[2:])"
)


def environment(out: Path) -> dict[str, str]:
    scratch = out.with_name(f"{out.name}-scratch")
    scratch.mkdir()
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "TMPDIR": str(scratch)}


def own_terminal() -> None:
    signal.signal(HANG_UP, signal.SIG_DFL)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.mark.often("local")
@pytest.mark.parametrize("words", [[], ["devices=2"]], ids=["inline", "local"])
def test_a_closed_terminal_stops_the_run_with_a_checkpoint(words: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, *WORDS, *SLOW, *words, f"out={out}"],
        stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, env=environment(out),
        preexec_fn=own_terminal,
    )  # fmt: skip
    os.close(theirs)
    os.set_blocking(ours, False)
    wait_for_step(out, 5)
    with contextlib.suppress(BlockingIOError):
        while os.read(ours, 1 << 16):
            pass
    os.close(ours)
    assert process.wait(300) == 75
    result = json.loads((out / "result.json").read_text())
    assert result["status"] == "preempted"
    assert result["step"] == steps_of(out)[-1]
    assert list(out.glob(f"checkpoints/step-{result['step']:08d}/*/COMMIT.json"))
    assert nothing_left(out)


@pytest.mark.often("nohup-local", "in a script-inline")
@pytest.mark.parametrize("words", [[], ["devices=2"]], ids=["inline", "local"])
@pytest.mark.parametrize("number", [HANG_UP, signal.SIGINT], ids=["nohup", "in a script"])
def test_what_the_shell_that_started_it_ignores_is_not_heard(
    number: signal.Signals, words: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    process = subprocess.Popen(
        [sys.executable, "-c", STARTED, str(number.value), *COMMAND, *WORDS, *SLOW, *words, f"out={out}"],
        stdout=subprocess.DEVNULL,
        env=environment(out),
    )
    wait_for_step(out, 3)
    process.send_signal(number)
    wait_for_step(out, steps_of(out)[-1] + 20)
    process.terminate()
    assert process.wait(300) == 75
    assert nothing_left(out)
