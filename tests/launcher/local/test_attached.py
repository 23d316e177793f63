"""An engine from outside the package (tests/outside/kit/engine.py): one file, one YAML, and the run is as safe as a local one."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import COMMAND, Forked
from killing import descendants, leavings
from launching import WORDS, free_port, mentioning, steps_of, wait_for_step

KIT = Path(__file__).parents[2] / "outside"
SLOW = ("model._target_=launching.Slow", "model.rank=0", "model.seconds=0.05", "nodes=2", "devices=1", "batch=8")


class Begun:
    """The command in a folder with the kit. `words` come last."""

    def __init__(self, out: Path, *words: str, launcher: str = "processes") -> None:
        folder, scratch = out.with_name("kit"), out.with_name(f"{out.name}-scratch")
        if not folder.exists():
            shutil.copytree(KIT, folder, ignore=shutil.ignore_patterns("__pycache__"))
        scratch.mkdir(exist_ok=True)
        env = {
            **os.environ,
            "PYTHONPATH": f"{folder}:{Path(__file__).parents[2]}:{Path(__file__).parents[3]}",
            "TMPDIR": str(scratch),
        }
        env.pop("DTRAIN_SECRET", None)
        self.address = f"127.0.0.1:{free_port()}"
        own = ["model=mlp", "trust=[launching,kit]", f"launcher={launcher}"]
        own += [f"launcher.address={self.address}"] if launcher == "processes" else []
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self.command = Forked([*COMMAND, *WORDS, *own, f"out={out}", *words], cwd=folder, env=env, **pipes)

    def agents(self) -> list[int]:
        """Both agents; their ranks have the same command line."""
        return [pid for pid in descendants(self.command.pid) if _is_agent(pid, self.address)]

    def end(self, code: int) -> str:
        """What was printed, once the command has ended with `code` and nothing of the run is left."""
        output, _ = self.command.communicate(timeout=300)
        assert self.command.returncode == code, output
        deadline = time.monotonic() + 30
        while mentioning(self.address) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not mentioning(self.address)
        assert "Traceback" not in output
        return output


def _is_agent(pid: int, address: str) -> bool:
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
        parent = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
        above = Path(f"/proc/{parent}/cmdline").read_bytes().decode()
    except OSError:
        return False
    return f"local.agent\0{address}" in line and f"local.agent\0{address}" not in above


def test_its_losses_are_those_of_local(tmp_path: Path) -> None:
    Begun(tmp_path / "a", "nodes=2", "devices=2").end(0)
    Begun(tmp_path / "b", "nodes=2", "devices=2", launcher="local").end(0)
    assert leavings(tmp_path / "a") == leavings(tmp_path / "b")


def test_a_node_that_cannot_start_python_ends_the_run_soon_and_says_so(tmp_path: Path) -> None:
    begun = Begun(tmp_path / "run", "nodes=2", "launcher.restarts=1", "launcher.python=/bin/false")
    output = begun.end(1)
    assert "the agent of node(s) 0, 1 was started 2 times and ended" in output


@pytest.mark.often("agent", "server")
@pytest.mark.campaign("kills")
@pytest.mark.parametrize("target", ["rank", "agent", "server"])
def test_a_run_goes_on_whatever_is_killed(target: str, tmp_path: Path) -> None:
    words = (*SLOW, "steps=60", "checkpoint.every=5")
    begun = Begun(tmp_path / "run", *words)
    wait_for_step(tmp_path / "run", 10)
    agent = begun.agents()[0]
    victims = {
        "agent": agent,
        "rank": int(Path(f"/proc/{agent}/task/{agent}/children").read_text().split()[0]),
        "server": next(pid for pid in descendants(begun.command.pid) if _name(pid).startswith("dtrain-server")),
    }
    os.kill(victims[target], signal.SIGKILL)
    begun.end(0)
    Begun(tmp_path / "untouched", *words, "model.seconds=0").end(0)
    assert steps_of(tmp_path / "run") == list(range(1, 61))
    assert leavings(tmp_path / "run") == leavings(tmp_path / "untouched")


def _name(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode().partition("\0")[0]


@pytest.mark.often("15-75")
@pytest.mark.campaign("signals")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_one_signal_saves_and_the_words_go_on(number: int, code: int, tmp_path: Path) -> None:
    words = (*SLOW, "steps=2000")
    begun = Begun(tmp_path / "run", *words)
    wait_for_step(tmp_path / "run", 3)
    begun.command.send_signal(number)
    begun.end(code)
    done = steps_of(tmp_path / "run")[-1]
    assert 3 <= done < 2000
    Begun(tmp_path / "run", *words, f"steps={done + 2}", launcher="local").end(0)
    assert steps_of(tmp_path / "run") == list(range(1, done + 3))


@pytest.mark.campaign("signals")
def test_ctrl_c_saves_where_a_daemon_that_ignores_it_starts_the_agents(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\ntrap '' INT HUP\nexec {sys.executable} \"$@\"\n")
    python.chmod(0o700)
    begun = Begun(tmp_path / "run", *SLOW, "steps=2000", f"launcher.python={python}")
    wait_for_step(tmp_path / "run", 3)
    begun.command.send_signal(signal.SIGINT)
    assert "interrupted after" in begun.end(130)
    assert steps_of(tmp_path / "run")[-1] < 2000 and leavings(tmp_path / "run")


@pytest.mark.campaign("signals")
def test_a_second_ctrl_c_ends_all_at_once(tmp_path: Path) -> None:
    begun = Begun(tmp_path / "run", *SLOW, "steps=20000")
    wait_for_step(tmp_path / "run", 2)
    begun.command.send_signal(signal.SIGINT)
    begun.command.send_signal(signal.SIGINT)
    begun.end(130)


@pytest.mark.campaign("kills")
def test_a_killed_command_takes_every_agent_with_it(tmp_path: Path) -> None:
    begun = Begun(tmp_path / "run", *SLOW, "steps=20000")
    wait_for_step(tmp_path / "run", 2)
    begun.command.kill()
    begun.end(-signal.SIGKILL)
