"""`python -m dtrain ...` and other Python programs, forked from the test process, which holds torch: a new interpreter takes seconds to import it."""

import faulthandler
import logging
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from multiprocessing import resource_tracker
from pathlib import Path
from types import ModuleType
from typing import Any

import tensorboard.plugins.hparams.metadata
import tensorboard.summary.writer.event_file_writer  # noqa: F401 # a logger of every run: 0.15 s

from dtrain import __main__
from dtrain.launcher import process

COMMAND = (sys.executable, "-m", "dtrain")
LOOK_SECONDS = 5.0
STANDARD = {name: signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)}


class Forked(subprocess.Popen[str]):
    """A Python program: `[sys.executable, "-m", "dtrain", ...]`, with `"-c", code`, with a file, or with `"-"` for standard input. Like a new
    interpreter, it has the descriptors, folder and environment that it is given, but modules are already imported."""

    def _execute_child(  # type: ignore[override] # subprocess keeps it to itself
        self, args: Sequence[str], executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any, env: Any, startupinfo: Any,
        creationflags: Any, shell: Any, p2cread: int, p2cwrite: int, c2pread: int, c2pwrite: int, errread: int, errwrite: int,
        restore_signals: Any, gid: Any, gids: Any, uid: Any, umask: Any, start_new_session: bool, *more: Any,
    ) -> None:  # fmt: skip
        assert threading.active_count() == 1, "a fork has none of the threads of this process"
        own = [end if end >= 0 else number for number, end in enumerate((p2cread, c2pwrite, errwrite))]
        program = list(map(str, args[1:]))
        self.pid = process.fork(lambda: _become(program, own, cwd, env, start_new_session), "dtrain-command")
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]


def _become(program: list[str], own: Sequence[int], cwd: Any, env: Any, session: bool) -> None:
    faulthandler.disable()  # as the next lines do: it would write to a descriptor of which another file has the number now
    logging.shutdown()
    resource_tracker._resource_tracker._fd = None  # type: ignore[attr-defined]
    for number, end in enumerate([os.dup(end) for end in own]):
        os.dup2(end, number)
    os.closerange(3, 1 << 16)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, mode, closefd=False) for number, mode in enumerate("rww"))
    sys.stderr.reconfigure(line_buffering=True)  # type: ignore[attr-defined] # as Python's own is
    if session:
        os.setsid()
    os.chdir(cwd or ".")
    if env is not None:
        os.environ.clear()
        os.environ.update({name: str(value) for name, value in env.items()})
    for number, handler in STANDARD.items():
        signal.signal(number, handler)
    warnings.filters[:] = [each for each in warnings.filters if each[0] == "ignore"]
    threading.excepthook = threading.__excepthook__
    sys.unraisablehook = sys.__unraisablehook__
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    _interpret(*program)


def _interpret(what: str, *words: str) -> None:
    """Do what a new interpreter does with these arguments."""
    if what not in ("-m", "-c", "-"):
        sys.argv = [what, *words]
        sys.path.insert(0, str(Path(what).parent.absolute()))
        runpy.run_path(what, run_name="__main__")
        return
    sys.path.insert(0, os.getcwd())  # noqa: PTH109
    if what == "-m":
        assert words[0] == "dtrain"
        sys.modules["__main__"] = __main__  # loading processes import it
        sys.argv = [str(__main__.__file__), *words[1:]]
        sys.exit(__main__.main())
    code, name = (words[0], "<string>") if what == "-c" else (sys.stdin.read(), "<stdin>")
    sys.argv = [what, *words[1:]]
    sys.modules["__main__"] = ModuleType("__main__")
    exec(compile(code, name, "exec"), vars(sys.modules["__main__"]))


def run(*words: str, **how: Any) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` of the command, with its output as text."""
    return python(*COMMAND[1:], *words, **how)


def python(
    *program: str, timeout: float = 300, input: str | None = None, **how: Any
) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` of a Python program, with its output as text. `timeout`: seconds in which nobody waits for a core."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | (
        {} if input is None else {"stdin": subprocess.PIPE}
    )
    with Forked([sys.executable, *program], text=True, **{**pipes, **how}) as running:
        try:
            output, error = _communicate(running, input, timeout)
        except BaseException:
            running.kill()
            raise
    return subprocess.CompletedProcess(running.args, running.returncode, output, error)


def _communicate(running: Forked, input: str | None, timeout: float) -> tuple[str, str]:
    """`communicate`; seconds in which processes wait for a core count a quarter. Raises TimeoutExpired."""
    began, waited = time.monotonic(), _waited()
    while True:
        try:
            return running.communicate(input, timeout=min(timeout, LOOK_SECONDS))
        except subprocess.TimeoutExpired:
            seconds = time.monotonic() - began
            if max(seconds - (_waited() - waited), seconds / 4) >= timeout:
                raise
            input = None  # it is sent


def _waited() -> float:
    """Seconds, since this machine started, in which some process waited for a core; 0 where Linux does not count them."""
    try:
        return int(Path("/proc/pressure/cpu").read_text().split("total=")[1].split()[0]) / 1e6
    except OSError:
        return 0.0
