"""Tests that every engine should pass, as a class for pytest: inherit it, and say how yours is typed.

class TestMine(EngineTests):
    words = ("launcher=mine", "launcher.address=127.0.0.1")

Its nodes must be processes of this host: the tests look for them by their working folder.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

COMMAND = (sys.executable, "-m", "dtrain")
RUN = (
    "model=mlp", "data=synthetic", "objective=regression", "strategy=ddp", "nodes=2", "devices=2", "batch=8",
    "logger=[]", "checkpoint.every=10",
)  # fmt: skip
FAULT = "hook.fault._target_=dtrain.testing.faults.AtStep"
HOOK = """class Says:
    about = {"figures": {}}
    every = 6

    def __call__(self, info):
        print("step", info.step, "in mine")
"""
SITE = """import os
import sys

if "dtrain.launcher.local.agent" in sys.orig_argv:
    sys.path.remove(os.path.dirname(__file__))
"""
"""Hides its folder from agents."""
LONG = 1_000_000
"""Steps of a run that does not end by itself."""


class EngineTests:
    """`words`: those of the engine. `environment`: of the command, None for that of this process. `detached`: its runs
    do not need the command. `shown`: the ranks whose output the command shows. `start`: starts the command, as
    `subprocess.Popen` does. `seconds`: the most for anything to happen.
    """

    words: Sequence[str] = ()
    environment: Mapping[str, str] | None = None
    detached: ClassVar[bool] = False
    shown: ClassVar[Sequence[int]] = range(4)
    start: ClassVar[Callable[..., Any]] = subprocess.Popen
    seconds: ClassVar[float] = 180.0

    def test_two_nodes_have_the_losses_of_local_ones(self, tmp_path: Path) -> None:
        folder = _folder(tmp_path)
        (folder / "mine.py").write_text(HOOK, "utf-8")
        says = ("hook.says._target_=mine.Says", "trust=[mine]")
        output = self._ends(folder, 0, *RUN, *says, "steps=6", "out=far", *self.words)
        labels = sorted(re.findall(r"^(.*)step 6 in mine$", output, re.MULTILINE))
        assert labels == ["", *(f"[rank {rank}] " for rank in self.shown if rank)]
        self._ends(folder, 0, *RUN, "steps=6", "out=near", "launcher=local")
        far, near = ([row["loss"] for row in _rows(folder / out)] for out in ("far", "near"))
        assert far == near and len(far) == 6

    def test_nodes_with_another_version_of_a_package_are_refused_by_name(self, tmp_path: Path) -> None:
        folder, here = _folder(tmp_path), tmp_path / "here"
        (folder / "mine.py").touch()
        (here / "mine-1.0.dist-info").mkdir(parents=True)
        (here / "mine-1.0.dist-info" / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n", "utf-8"
        )
        (here / "sitecustomize.py").write_text(SITE, "utf-8")
        environment = {**(os.environ if self.environment is None else self.environment)}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(here), environment.get("PYTHONPATH")]))
        ended = subprocess.run(
            [*COMMAND, *RUN, "trust=[mine]", "steps=6", "out=run", *self.words], cwd=folder, env=environment,
            encoding="utf-8", errors="replace", capture_output=True, timeout=self.seconds,
        )  # fmt: skip
        assert ended.returncode == 3, ended.stdout + ended.stderr
        assert "mine is not installed here and 1.0 on " in ended.stdout + ended.stderr
        self._check_nothing_left(folder)

    def test_the_first_error_of_a_rank_is_shown(self, tmp_path: Path) -> None:
        words = (FAULT, "hook.fault.action=raise", "hook.fault.step=3", "hook.fault.rank=3", "steps=20", "out=run")
        output = self._ends(_folder(tmp_path), 1, *RUN, *words, *self.words, "launcher.restarts=0")
        assert "FaultError: an injected fault" in output and "rank 3" in output, output

    def test_a_killed_rank_starts_again(self, tmp_path: Path) -> None:
        folder = _folder(tmp_path)
        words = (FAULT, "hook.fault.action=kill", "hook.fault.step=15", "hook.fault.rank=3", "steps=30", "out=run")
        self._ends(folder, 0, *RUN, *words, *self.words)
        assert _steps(folder / "run") == [*range(1, 31)] and len(_starts(folder / "run")) == 2

    def test_a_killed_agent_starts_again(self, tmp_path: Path) -> None:
        folder = _folder(tmp_path)
        with self._running(folder, "steps=1000") as command:
            os.kill(agents(folder)[-1], signal.SIGKILL)
            assert command.wait(self.seconds) == 0
        assert _steps(folder / "run") == [*range(1, 1001)] and len(_starts(folder / "run")) > 1

    def test_a_node_that_is_told_to_go_has_the_run_save(self, tmp_path: Path) -> None:
        folder = _folder(tmp_path)
        with self._running(folder, f"steps={LONG}", "checkpoint.every=0") as command:
            assert not _saved(folder / "run")
            os.kill(agents(folder)[-1], signal.SIGTERM)
            deadline = time.monotonic() + self.seconds
            while not _saved(folder / "run"):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            while self.detached and command.poll() is None:  # its scheduler may have the job come back
                command.send_signal(signal.SIGINT)
                time.sleep(2)
            assert self.detached or command.wait(self.seconds) == 75

    def test_ctrl_c_saves_and_the_run_goes_on_elsewhere(self, tmp_path: Path) -> None:
        folder = _folder(tmp_path)
        with self._running(folder, f"steps={LONG}") as command:
            command.send_signal(signal.SIGINT)
            assert command.wait(self.seconds) == 130
        done = _steps(folder / "run")[-1]
        elsewhere = ("nodes=1", "devices=1", "launcher=inline", f"steps={done + 2}", "out=run")
        self._ends(folder, 0, *RUN, *elsewhere)
        assert _steps(folder / "run") == [*range(1, done + 3)] and _starts(folder / "run")[-1] == done

    def test_a_second_ctrl_c_ends_all(self, tmp_path: Path) -> None:
        folder = _folder(tmp_path)
        with self._running(folder, f"steps={LONG}") as command:
            command.send_signal(signal.SIGINT)
            time.sleep(0.1)
            command.send_signal(signal.SIGINT)
            assert command.wait(self.seconds) == 130

    def test_a_killed_command_takes_its_run_with_it_or_finds_it_again(self, tmp_path: Path) -> None:
        folder = _folder(tmp_path)
        with self._running(folder, f"steps={LONG}") as command:
            command.kill()
            command.wait(self.seconds)
            if not self.detached:
                return
            again = self._begin(folder, *RUN, f"steps={LONG}", "out=run", *self.words)
            while "runs it" not in again.stdout.readline():
                assert again.poll() is None
            self._ends(folder, 0, "stop", "run")
            again.communicate(timeout=self.seconds)
            assert again.returncode == 0  # somebody asked for it, and it is not to be started again
        assert _saved(folder / "run")

    def _begin(self, folder: Path, *words: str) -> Any:
        environment = os.environ if self.environment is None else self.environment
        return type(self).start(
            [*COMMAND, *words], cwd=folder, env={**environment}, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )  # fmt: skip

    def _ends(self, folder: Path, code: int, *words: str) -> str:
        """The output of a command that ends with `code`, and leaves no agent."""
        command = self._begin(folder, *words)
        output = str(command.communicate(timeout=self.seconds)[0])
        assert command.returncode == code, output
        self._check_nothing_left(folder)
        return output

    @contextlib.contextmanager
    def _running(self, folder: Path, *words: str) -> Any:
        """A command whose run has made steps; at the end no agent is left."""
        command = self._begin(folder, *RUN, "out=run", *words, *self.words)
        try:
            deadline = time.monotonic() + self.seconds
            while not _steps(folder / "run") or not agents(folder):
                assert time.monotonic() < deadline and command.poll() is None, command.communicate()[0]
                time.sleep(0.05)
            yield command
        finally:
            command.kill()
            command.communicate()
        self._check_nothing_left(folder)

    def _check_nothing_left(self, folder: Path) -> None:
        deadline = time.monotonic() + self.seconds
        while agents(folder):
            assert time.monotonic() < deadline, f"agents are left: {agents(folder)}"
            time.sleep(0.05)


def agents(folder: Path) -> list[int]:
    """The processes of agents with this working folder, without their ranks and what started them."""
    pids = dict[int, int]()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            python, *arguments = (entry / "cmdline").read_bytes().split(b"\0")
            is_agent = arguments[:2] == [b"-m", b"dtrain.launcher.local.agent"] and b"python" in python
            if is_agent and (entry / "cwd").readlink() == folder:
                pids[int(entry.name)] = int(
                    (entry / "stat").read_text("utf-8", errors="replace").rsplit(")", 1)[1].split()[1]
                )
    return [pid for pid, parent in pids.items() if parent not in pids]


def _folder(tmp_path: Path) -> Path:
    """One whose name needs quotes in a shell."""
    folder = tmp_path / "it's here"
    folder.mkdir(exist_ok=True)
    return folder


def _rows(out: Path) -> list[dict[str, Any]]:
    path = out / "metrics.jsonl"
    lines = path.read_text("utf-8").splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _steps(out: Path) -> list[int]:
    return [row["step"] for row in _rows(out)]


def _saved(out: Path) -> list[Path]:
    """The marks of whole checkpoints."""
    return [*(out / "checkpoints").rglob("COMMIT.json")]


def _starts(out: Path) -> list[int]:
    """The steps at which the run has started."""
    events = [json.loads(line) for line in (out / "events.jsonl").read_text("utf-8").splitlines()]
    return [event["step"] for event in events if event["event"] == "started"]
