"""The shapes of a model that has no formula, for strategy=auto: it is built and traced in a process of its own, so that
the one that decides loads no torch, and has no thread when it forks the ranks.

They are kept in the cache until the words, the code, the files or the versions that they came from change.
"""

import contextlib
import gc
import glob
import hashlib
import itertools
import json
import os
import signal
import subprocess
import sys
import sysconfig
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from dtrain import secrets
from dtrain.build import has_given
from dtrain.config import environment, files
from dtrain.config.installed import version
from dtrain.errors import DtrainError, StoreError, WordsError, first_line, why
from dtrain.launcher import process, zygote
from dtrain.launcher.title import retitle
from dtrain.planned import Plan
from dtrain.predict.shapes import Shapes
from dtrain.predict.state_bytes import holding_of
from dtrain.predict.stated import unstated
from dtrain.result import versions
from dtrain.secrets import screen
from dtrain.storage import caching, options, store
from dtrain.tracing import shapes_of as trace_here

PARTS = "model", "adapter", "data", "objective", "precision", "trust", "cluster", "device"
"""Keys of a plan on which the shapes of its model depend."""
HELD = {"copies": "single", "shards": "fsdp"}
"""How ranks hold the weights, on which the types between operators depend -> a strategy."""
SECONDS = 120
"""Patience with a trace: a run whose data is read for the first time may need longer than it is worth."""
SLOW = 15
"""Seconds after which a user is told what takes so long."""
ENTRIES = 1000
"""Files of a folder, or of a pattern, that are looked at for changes."""
LARGEST = 32 << 20
"""Bytes of an answer in the cache, at most."""
Answer = Mapping[str, Mapping[str, Any]]
"""`copies` and `shards`: the shapes of a model that is held so, or the `error` why there are none; `files`: those that
they depend on, and their state.
"""
_known: dict[str, Answer] = {}
"""Key -> answer, of this process."""


def shapes_of(plan: Plan) -> Shapes:
    """As dtrain.tracing.shapes_of, without torch in this process. Raises WordsError if the model cannot be traced."""
    if has_given():
        raise WordsError("an object that was passed to dtrain.run exists in this process alone")
    if missing := unstated(plan):
        raise WordsError(missing)
    key = _key(plan)
    if key not in _known:
        _known[key] = _shared(caching.folder(None) / "shapes" / key, plan)
    held = _known[key]["shards" if holding_of(plan).shards else "copies"]
    if "error" in held:
        raise WordsError(secrets.masked(held["error"]))
    shapes: Shapes = _typed(Shapes, held)
    return shapes


def known(plan: Plan) -> Shapes | None:
    """The shapes that this process has asked for already; None if it has not, or if the model has none."""
    if not _known or has_given() or _key(plan) not in _known:
        return None
    try:
        return shapes_of(plan)
    except WordsError:
        return None


def _key(plan: Plan) -> str:
    numbers = {name: number for name, number in versions().items() if name != "code"}
    numbers["transformers"] = version("transformers")
    asked = plan.to_dict()
    told = numbers, str(Path.cwd()), {name: asked[name] for name in PARTS}
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:32]


def _shared(stem: Path, plan: Plan) -> Answer:
    """The answer for a plan, which one process of this host asks for and the others find in the cache."""
    kept = f"{stem}.json"
    try:
        with caching.locked(stem, seconds=SECONDS):
            answer = _kept(kept)
            if answer is None:
                answer = _asked(plan)
                if answer["copies"].get("sample"):  # else what is missing may be there next time
                    with contextlib.suppress(StoreError):
                        store.write(kept, json.dumps(answer).encode())
            return answer
    except StoreError:  # there is no cache, or another process that has the lock does not go on
        return _asked(plan)


def _kept(url: str) -> Answer | None:
    """The answer in the cache, unless a file has changed since."""
    try:
        answer: dict[str, Any] = json.loads(store.beginning(url, LARGEST))
        for name in HELD:  # raises for those of another version
            _typed(str, answer[name]["error"]) if "error" in answer[name] else _typed(Shapes, answer[name])
        return answer if all(_state(path) == state for path, state in answer["files"].items()) else None
    except (StoreError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _asked(plan: Plan) -> Answer:
    """The answer of a process that traces the model."""
    try:
        with process.scratch("trace") as folder:
            written = folder / "answer"
            code = _ran([plan.to_dict(), options.hand_over(), str(written)])
            text = written.read_text("utf-8") if written.exists() else ""
        answer: Answer = json.loads(text)
    except subprocess.TimeoutExpired:
        error = f"building the model and reading a sample takes longer than {SECONDS} s"
    except OSError as problem:
        error = f"no process can build the model: {why(problem)}"
    except ValueError:
        error = f"the process that built the model ended with code {code}"
    else:
        return answer
    return {name: {"error": error} for name in HELD}


def _ran(request: Sequence[Any]) -> int:
    """The exit code of a process that calls `trace`: a child of the zygote; where none can be forked, because this
    process has threads, a new interpreter. Nothing that it starts outlives it. Raises OSError and TimeoutExpired.
    """
    zygote.begin()
    child = zygote.fork(f"{__name__}.trace", *request) or _interpreter(request)
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return child.wait(SLOW)
        what = "builds the model and reads a sample, to compare layouts"
        screen.complain(f"strategy=auto {what}; strategy=ddp would not.", begin="note: ")
        return child.wait(SECONDS - SLOW)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _interpreter(request: Sequence[Any]) -> "subprocess.Popen[bytes]":
    code = (
        "import json, sys; sys.path[:], *request = json.load(sys.stdin); from dtrain.launcher import apart, process; "
        "process.die_with(int(sys.argv[1])); apart.trace(*request)"
    )
    command = [sys.executable, "-P", "-c", code, str(os.getpid())]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    assert child.stdin
    with contextlib.suppress(BrokenPipeError), child.stdin:
        child.stdin.write(json.dumps([sys.path, *request]).encode())
    return child


def trace(plan: Mapping[str, Any], storage: str, path: str) -> None:
    """In that process: write the answer for `plan` to `path`. `storage`: as `dtrain.storage.options.hand_over` gives
    it.
    """
    gc.disable()  # it would walk all that torch and transformers import, again and again: a tenth of the time
    retitle("dtrain-trace")
    with contextlib.suppress(OSError):  # if memory runs out, the kernel ends this process first
        Path("/proc/self/oom_score_adj").write_text("1000", "utf-8")
    if not os.environ.get(environment.DEBUG):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.dup2(2, 1)  # whatever the model prints
    options.take_over(storage)
    asked = Plan.from_dict(plan)
    named = [*_named([asked.model, asked.data, asked.objective])]
    answer = {name: _held(replace(asked, strategy=files.node("strategy", word))) for name, word in HELD.items()}
    answer["files"] = {file: _state(file) for file in (*named, *_code(asked.trust))}
    Path(path).write_text(json.dumps(answer), "utf-8")


def _held(plan: Plan) -> dict[str, Any]:
    try:
        return asdict(trace_here(plan))
    except DtrainError as error:
        return {"error": str(error)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {first_line(error)}"}


def _named(value: Any) -> Iterator[str]:
    """Each file that arguments name, and those of a folder or pattern."""
    if isinstance(value, Mapping):
        value = [each for name, each in value.items() if name != "_about_"]
    if isinstance(value, list | tuple):
        for each in value:
            yield from _named(each)
    elif isinstance(value, str) and value:
        path = os.path.expanduser(value)  # noqa: PTH111 - a text that may be no path, and its home not here
        found = itertools.chain(glob.iglob(path), glob.iglob(f"{path}/*"))  # noqa: PTH207 - of text that may be no path
        yield from itertools.islice(found, ENTRIES)


def _code(trust: Sequence[str]) -> Iterator[str]:
    """Each file of Python that was imported, without those of packages of which the version is known."""
    paths = sysconfig.get_paths()
    installed = tuple(paths[name] + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    for name, module in [*sys.modules.items()]:
        path = getattr(module, "__file__", None)
        if isinstance(path, str) and (name.partition(".")[0] in trust or not path.startswith(installed)):
            yield path


def _state(path: str) -> list[int] | None:
    """Numbers that change with the bytes of a file; None if there is none."""
    try:
        found = os.stat(path)  # noqa: PTH116 - of text too
    except (OSError, ValueError):
        return None
    return [found.st_mtime_ns, found.st_size]


def _typed(kind: Any, value: Any) -> Any:
    """A value of JSON as the type of a field of Shapes. Raises TypeError, ValueError or AttributeError for another."""
    if isinstance(kind, type) and is_dataclass(kind):
        hints = _hints(kind)
        return kind(**{name: _typed(hints[name], each) for name, each in value.items()})
    origin, of = get_origin(kind), get_args(kind)
    if origin is tuple:
        kinds = of[:1] * len(value) if of[-1] is Ellipsis else of
        return tuple(_typed(each, one) for each, one in zip(kinds, value, strict=True))
    if origin is types.UnionType:
        return None if value is None else _typed(of[0], value)
    if origin:
        return {name: _typed(of[1], each) for name, each in value.items()}
    if type(value) is not kind and (kind, type(value)) != (float, int):
        raise TypeError(f"{value!r} is no {kind}")
    return value


@cache
def _hints(kind: Any) -> Mapping[str, Any]:
    return get_type_hints(kind)
