"""A command run in a fork, and everything it did to the machine, as Python's own audit events tell it.

done = watched(["plan", "recipe=evil.yaml"])        # done.code, done.text, done.deeds == []
"""

import contextlib
import io
import os
import pickle
import select
import signal
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dtrain
import dtrain.compose.hydra  # what is imported here, before the fork, is not compiled in it
from dtrain.__main__ import main
from dtrain.launcher.process import fork

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
DEEDS = (
    "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.chown", "os.utime",
    "os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.startfile", "os.kill", "pty.spawn", "subprocess.Popen", "shutil.",
    "socket.connect", "socket.bind", "socket.sendto", "socket.gethostbyname", "pickle.find_class", "ctypes.", "ftplib.", "smtplib.", "webbrowser.", "tempfile.",
)  # fmt: skip
"""Events, or their beginnings, that a command which refuses its words has no business with."""
OURS = str(Path(dtrain.__file__).parent)
KNOWN = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")} | {"<frozen"})
LOOPBACK = ("127.0.0.1", "localhost")


@dataclass
class Done:
    """What came of a command."""

    code: int
    text: str
    deeds: list[str] = field(default_factory=list)


def watched(words: Sequence[str], *, environ: dict[str, str], foreign: Sequence[str], seconds: float = 60) -> Done:
    """Run dtrain with `words`. `foreign` are the modules whose import is a deed, and files that are not to be opened."""
    reading, writing = os.pipe()
    pid = fork(lambda: _run(writing, words, environ, tuple(foreign)))
    os.close(writing)
    data = b""
    try:
        while True:
            if not select.select([reading], [], [], seconds)[0]:
                return Done(-1, "it hung")
            part = os.read(reading, 1 << 16)
            if not part:
                break
            data += part
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reading)
    return pickle.loads(data) if data else Done(-2, "it ended without a word")


def _run(writing: int, words: Sequence[str], environ: dict[str, str], foreign: tuple[str, ...]) -> None:
    os.environ.update(environ)
    deeds: list[str] = []
    sys.addaudithook(lambda event, arguments: _note(event, arguments, foreign, deeds))
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main(words)
    with os.fdopen(writing, "wb") as pipe:
        pickle.dump(Done(code, said.getvalue(), list(deeds)), pipe)


def _note(event: str, arguments: tuple[Any, ...], foreign: tuple[str, ...], deeds: list[str]) -> None:
    deed = ""
    if event == "open":
        path, mode, flags = arguments
        if not isinstance(path, int) and (
            flags & WRITING or set(mode or "") & set("wax+") or str(path) in foreign
        ):  # a number is open already
            deed = f"open {path} {mode} {flags}"
    elif event == "import":  # by a statement; of importlib's own the code is seen below
        deed = f"import {arguments[0]}" if str(arguments[0]).split(".")[0] in foreign else ""
    elif event in ("exec", "compile"):
        code = str(arguments[0].co_filename if event == "exec" else arguments[1])
        caller = sys._getframe(2).f_code.co_filename  # 1 is the hook; the library makes classes of texts
        made = code.startswith("<") and caller.startswith(KNOWN) and not caller.startswith(OURS)
        deed = "" if code.startswith((OURS, *KNOWN)) or made else f"{event} of {code} by {caller}"
    elif event.startswith(DEEDS):
        where = arguments[1] if event.startswith("socket.") and len(arguments) > 1 else ()
        deed = "" if isinstance(where, tuple) and where and where[0] in LOOPBACK else f"{event} {arguments}"[:200]
    if deed:
        deeds.append(deed)
