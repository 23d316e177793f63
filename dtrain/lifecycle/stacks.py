"""Reads stacks: the innermost line of the user's code or of dtrain, the collective that it is in, the microbatch."""

import os
import re
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterable, Sequence
from itertools import takewhile
from pathlib import Path
from types import FrameType

Frames = Sequence[tuple[FrameType, int]]
"""Frames and line numbers, outermost first."""

LIBRARIES = re.compile(r"[/\\](site|dist)-packages[/\\](torch|functorch|numpy|fsspec|safetensors|pluggy|_pytest)[/\\]")
"""Libraries whose lines are not reported as the place of an error."""
STANDARD = sysconfig.get_path("stdlib") + os.sep
DISTRIBUTED = re.compile(r"[/\\]torch[/\\]distributed[/\\](?!c10d_logger)")
BACKWARD = "_engine_run_backward"
"""torch's function for the backward, which may wait for other ranks without a Python frame of its own."""
STARTED = "run_rank"
"""The function that calls the training loop."""
DUMPED = re.compile(r'^  File "(.+)", line (\d+),? in (.+)$', re.MULTILINE)
"""A line of a stack as faulthandler writes it, or as a traceback does."""


def of_thread(identity: int | None) -> Frames:
    """The frames of a running thread."""
    frame = sys._current_frames().get(identity or 0)
    return list(traceback.walk_stack(frame))[::-1] if frame else []


def own(frames: Frames) -> str | None:
    """The innermost line outside of libraries, such as `mypkg/model.py:12 in forward`."""
    return _innermost(_entries(frames))


def collective(frames: Frames) -> str | None:
    """The collective that a stack is in, such as `all_reduce (dtrain/mesh/__init__.py:92 in max)`, or None."""
    return _collective(_entries(frames))


def microbatch(frames: Frames) -> int | None:
    """The number of the microbatch, from 0, if the stack is inside one."""
    file = f"dtrain{os.sep}loop{os.sep}step.py"
    indices = (frame.f_locals.get("index") for frame, _ in frames if frame.f_code.co_filename.endswith(file))
    return next((index for index in indices if isinstance(index, int)), None)


def lines(frames: Frames) -> list[str]:
    """A stack as a traceback shows it, outermost first."""
    first = max((index + 1 for index, (frame, _) in enumerate(frames) if frame.f_code.co_name == STARTED), default=0)
    return [text.rstrip("\n") for text in traceback.StackSummary.extract(iter(frames[first:])).format()]


def current(text: str) -> list[str]:
    """The stack of the current thread in faulthandler's last dump, else of the main thread: outermost line first, from
    the loop on.
    """
    start = "Current thread " if "Current thread " in text else "Thread 0x"
    block = text.rpartition(start)[2].split("\n\n")[0].splitlines()
    inner = takewhile(lambda line: not line.endswith(f" in {STARTED}"), filter(DUMPED.match, block))
    return [*inner][::-1]


def dumped(text: str) -> str | None:
    """The innermost line outside of libraries in the stack of `current`."""
    return _innermost([DUMPED.findall(line)[0] for line in reversed(current(text))])


def waited(text: str) -> str | None:
    """The collective in the stack of `current`, or None."""
    return _collective([DUMPED.findall(line)[0] for line in reversed(current(text))])


def sent(error: BaseException) -> str | None:
    """Like `own`, in the traceback from another process, which multiprocessing makes the cause of the error."""
    cause = error.__cause__
    while cause is not None and not type(cause).__name__.endswith("RemoteTraceback"):
        cause = cause.__cause__
    block = str(cause or "").rpartition("Traceback (most recent call last)")[2]
    return _innermost(DUMPED.findall(block)[::-1])


def place(file: str, line: int, function: str) -> str:
    """`file` relative to the parent of its package, or to the entry of the import path that has it."""
    package = Path(file).parent
    while (package / "__init__.py").exists():
        package = package.parent
    if package != Path(file).parent:
        return f"{Path(file).relative_to(package)}:{line} in {function}"
    entries = (str(Path(entry).absolute()) for entry in sys.path)
    under = [entry for entry in entries if file.startswith(entry + os.sep)]
    return f"{file.removeprefix(max(under, key=len, default='')).lstrip(os.sep)}:{line} in {function}"


def others(main: int | None, leave_out: Iterable[int | None]) -> dict[str, str]:
    """Name -> innermost line outside of libraries, of each other thread that has one."""
    threads = [thread for thread in threading.enumerate() if thread.ident not in (main, *leave_out)]
    lines = {thread.name: own(of_thread(thread.ident)) for thread in threads}
    return {name: line for name, line in lines.items() if line}


def _entries(frames: Frames) -> list[tuple[str, str, str]]:
    """(file, line, function), innermost first."""
    return [(frame.f_code.co_filename, str(line), frame.f_code.co_name) for frame, line in reversed(frames)]


def _collective(stack: Sequence[tuple[str, str, str]]) -> str | None:
    inner = list(takewhile(lambda frame: not _is_own_file(frame[0]), stack))
    name = next((function for file, _, function in inner if DISTRIBUTED.search(file)), None)
    if any(function == BACKWARD for _, _, function in inner):
        name = name or "the backward"
    return name and f"{name} ({_innermost(stack)})"


def _innermost(stack: Iterable[tuple[str, str, str]]) -> str | None:
    """The first entry outside of libraries."""
    return next((place(file, int(line), function) for file, line, function in stack if _is_own_file(file)), None)


def _is_own_file(file: str) -> bool:
    is_standard = file.startswith(STANDARD) and "-packages" not in file
    return not (file.startswith("<") or LIBRARIES.search(file) or is_standard)
