"""A run as a user starts it, killed from outside again and again, and held against the one that nobody touched.

survived = survive(words, out, kills=10, seed=0)      # the same words until they are done
assert leavings(out) == leavings(untouched)           # weights, optimizer, rows: bit for bit
"""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from launching import mentioning, started
from mounts import Unsteady
from safetensors.numpy import load
from until import until

from dtrain.checkpoint import commit as commits
from dtrain.checkpoint.load import read_file
from dtrain.launcher import process
from dtrain.launcher.local.restarts import RestartLog
from dtrain.launcher.local.rounds import Rounds
from dtrain.lifecycle import signals
from dtrain.planned import Plan
from dtrain.result import OF_THE_MACHINE
from dtrain.storage import store

TARGETS = {"rank": 12, "agent": 4, "store": 4, "server": 1, "zygote": 1, "command": 1, "group": 1}
"""What is killed, and how often beside the others."""


def family(command: int) -> dict[str, list[int]]:
    """The processes of a run by what they are, as far as they live now."""
    parents = _children()
    begun = parents.get(command, [])
    zygotes = [pid for pid, name in begun if name == "dtrain-zygote"]
    servers = [pid for pid, _ in begun if pid not in zygotes] + [
        pid for each in zygotes for pid, _ in parents.get(each, [])
    ]
    return {"command": [command], "zygote": zygotes, "server": servers} | _below(servers, parents)


def descendants(pid: int) -> set[int]:
    """Processes below `pid`, and those of its sessions, as far as they are to be seen."""
    parents = {}
    for entry in _stats():
        try:
            parents[int(entry.parent.name)] = int(entry.read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


def below(server: int) -> dict[str, list[int]]:
    """The same of a server that is no child of a command."""
    return _below([server], _children())


def _below(servers: list[int], parents: Mapping[int, list[tuple[int, str]]]) -> dict[str, list[int]]:
    below = [child for server in servers for child in parents.get(server, [])]
    agents = [pid for pid, name in below if name.startswith("dtrain-agent")]
    stores = [pid for pid, name in below if name == "dtrain-store"]
    return {"agent": agents, "store": stores, "rank": [pid for agent in agents for pid, _ in parents.get(agent, [])]}


def _stats() -> list[Path]:
    """The stat of each process. `glob` would look at each, and fail at one that has ended meanwhile."""
    return [Path("/proc", name, "stat") for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208


def _children() -> dict[int, list[tuple[int, str]]]:
    """pid -> pids and names of what it forked and lives."""
    parents: dict[int, list[tuple[int, str]]] = {}
    for entry in _stats():
        with contextlib.suppress(OSError):
            pid, _, rest = entry.read_text().partition(" (")
            name, _, rest = rest.rpartition(") ")
            if rest[0] != "Z":
                parents.setdefault(int(rest.split()[1]), []).append((int(pid), name))
    return parents


def kill(command: int, target: str, chance: random.Random) -> bool:
    """Whether there was one to kill."""
    living = family(command)
    if target == "group":
        victims = [pid for pids in living.values() for pid in pids]
        chance.shuffle(victims)
    else:
        victims = [chance.choice(living[target])] if living[target] else []
    for pid in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return bool(victims)


def survive(
    words: Sequence[str],
    out: Path,
    *,
    kills: int,
    seed: int,
    targets: Mapping[str, int] = TARGETS,
    longest: float = 1.0,
    seconds: float = 600,
    url: str | None = None,
    storage: Unsteady | None = None,
    by: Sequence[str] = (),
) -> dict[str, int]:
    """Start the words, kill something every now and then, start them again when the command itself is dead. How often what was killed.

    `by` is the command; none: one that is forked from this process, in a tenth of the time.

    `out` is a local folder, and where the run lives unless `url` says another place. `storage` it lies on gets into trouble as often.

    Raises AssertionError, with what was printed, when the command ends in another way than by being killed or done, or refused by its storage.
    """
    chance, done, deadline = random.Random(seed), dict.fromkeys(targets, 0), time.monotonic() + seconds
    words = [*words, f"out={url or out}"]
    process = started(out, *words, by=by)
    while True:
        _moment(process, chance, longest)
        assert time.monotonic() < deadline, f"not done after {seconds} s and {done}:\n{_ended(process)}"
        code, is_over = process.poll(), sum(done.values()) >= kills
        if storage and (is_over or chance.random() < 0.5):
            storage.heal() if is_over else storage.turn(chance)
        if code is None and not is_over:
            target = chance.choices([*targets], [*targets.values()])[0]
            done[target] += kill(process.pid, target, chance)
        elif code is not None:
            output = process.communicate()[0]
            if storage:
                assert nothing_left(out)
                storage.check(url or str(out))
            if not (storage and storage.excuses(code)) and code != -signal.SIGKILL:
                assert code == 0, f"exit code {code} after {done}:\n{output}"
                return done
            process = started(out, *words, by=by)


def _moment(process: "subprocess.Popen[str]", chance: random.Random, longest: float) -> None:
    """Let a random time pass: from now, while all may still be starting, or from when ranks live."""
    if chance.random() < 0.7:
        until(lambda: process.poll() is not None or family(process.pid)["rank"], pause=0.02)
    at = time.monotonic() + chance.uniform(0.0, longest)
    while process.poll() is None and time.monotonic() < at:
        time.sleep(0.005)


def _ended(process: "subprocess.Popen[str]") -> str:
    process.kill()
    return process.communicate()[0]


@contextmanager
def served(plan: Plan, scratch: Path, **options: Any) -> Iterator[int]:
    """The launcher's server, forked from this process, which holds torch already: a second less for each test. Its pid."""
    told = {"restarts": 3, "silence": 15, "wait": 30, "address": None, "here": plan.nodes} | options
    command = process.claim(scratch, "command")  # other runs remove the folders of a run whose command is gone
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals.STOP_SIGNALS)
    pid = process.fork(
        lambda: (process.claim(scratch), Rounds(plan, scratch, RestartLog.read(scratch), **told).run()), "dtrain-server"
    )
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        yield pid
    finally:
        process.kill(pid)
        process.gone(process.memory(scratch), 120)
        os.close(command)
        shutil.rmtree(process.memory(scratch), ignore_errors=True)


def over(pid: int, scratch: Path, seconds: float = 300) -> dict[str, Any]:
    """What became of a run, when its server has ended."""
    deadline = time.monotonic() + seconds
    while (code := process.ended(pid)) is None:
        assert time.monotonic() < deadline, f"not over after {seconds} s: {below(pid)}"
        time.sleep(0.02)
    assert code == 0, f"the server ended with {code}"
    return dict(json.loads((scratch / "over.json").read_text()))


def nothing_left(out: Path, seconds: float = 120) -> bool:
    """Whether no process of the run lives: each has its scratch folder in its command line."""
    scratch, deadline = f"{out}-scratch", time.monotonic() + seconds
    while mentioning(scratch) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not mentioning(scratch)


def leavings(out: str | Path) -> dict[str, Any]:
    """What a finished run left that must not depend on how it got there: rows without times and memory, the last checkpoint's facts and bytes."""
    rows = [json.loads(line) for line in store.read(store.join(str(out), "metrics.jsonl")).decode().splitlines()]
    found, damaged = commits.first(commits.candidates(str(out)))
    assert found and not damaged
    url, commit = found
    tensors = {file["name"]: _arrays(store.join(url, file["name"]), file) for file in commit["files"]}
    return {
        "rows": [{key: value for key, value in row.items() if key not in OF_THE_MACHINE} for row in rows],
        "step": commit["step"], "facts": {key: value for key, value in commit["facts"].items() if key != "seconds"}, "tensors": tensors,
    }  # fmt: skip


def _arrays(where: str, file: dict[str, Any]) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in load(read_file(where, file)).items()}
