"""A run as a job of Slurm: sbatch submits a script that executes `dtrain run <out>` on the first node, and there srun
starts an agent on each node of the job.

The script turns USR1, which Slurm sends before the time limit, into a saved state and a requeued job. After SIGTERM
(preemption, scancel) the state is saved too, and the script waits for Slurm, which alone knows whether the job comes
back. It asks Slurm whether it does end the job: a run that ends by its own time_limit frees its nodes at once.
"""

import contextlib
import os
import re
import shlex
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

from dtrain.cluster import network
from dtrain.config.word import cut
from dtrain.errors import PreflightError, WordsError
from dtrain.launcher import detached, sbatch
from dtrain.launcher.answer import answer
from dtrain.launcher.children import Children
from dtrain.launcher.local import attached
from dtrain.launcher.sbatch import Option
from dtrain.planned import Plan
from dtrain.result import Result
from dtrain.secrets import masked
from dtrain.storage import store

VALUE = re.compile(r"[\w.:,@/+][\w.:,@/+-]*")
VARIABLES = {"time": "SBATCH_TIMELIMIT", "array": "SBATCH_ARRAY_INX"}
"""Options whose variable has another name. sbatch prefers variables to what stands in a script."""
HIDING = ("SBATCH_ERROR", "SBATCH_WAIT", "SBATCH_ARRAY_INX", "SBATCH_INPUT")
"""Variables of options that no script of ours has, and that would hide what the job says, or make it another one."""
ASKED = ("State", "Reason", "StartTime", "RestartCnt")
WAITS = {
    "PENDING": "queued",
    "CONFIGURING": "waiting for its nodes to boot",
    "REQUEUED": "queued",
    "SUSPENDED": "suspended",
}
"""States in which a job does nothing, and why."""
REPLACED = ("cpus-per-task", "gpus-per-node")
UNREACHED = (
    re.compile("resolve_ctls|configuration source|contact slurm controller|slurm.conf|munge|refused|timed out", re.I),
    "Slurm's controller is not reached from here. Type the words on a host where sinfo answers, such as a login node.",
)
"""Errors of Slurm's commands on a host that does not reach it, and the sentence for them."""
PREEMPTED_SECONDS = 900
"""Longest time between the SIGTERM of a preemption and the end of the job (GraceTime)."""
SETUP = """\
failed() {{
  code=$?
  [ "${{FUNCNAME[1]}}" = main ] || return 0  # what a line calls is its own affair
  echo "dtrain: launcher.setup: '$(sed -n "$1p" "$0")' failed, exit code $code" >&2
  exit 3
}}
trap 'failed $LINENO' ERR
{lines}
trap - ERR
set +eu
[ -n "$stop" ] && exit 75
"""
"""Around lines of the user. No `set -e` or `set -u`: activate scripts use unset variables, and commands that fail."""
SCRIPT = """\
trap 'limit=1; ${{run:+kill -TERM $run}}' USR1  # the time limit is near
trap 'stop=1; ${{run:+kill -TERM $run}} 2> /dev/null' USR2  # Ctrl-C, or dtrain stop
trap : TERM  # preempted or cancelled: every step gets it
cd {folder} || exit 3
{setup}{command} &
run=$!
while kill -0 "$run" 2> /dev/null; do wait "$run"; done  # each signal ends one
wait "$run"; code=$?
if [ "$code" = 75 ] && [ -n "$limit" ]; then
  echo "note: the time limit is near; the job is queued again and goes on from its saved state"
  scontrol requeue "$SLURM_JOB_ID"
fi
# Slurm ends what it preempted, which comes back, and what was cancelled,
# which does not; the rest ends here
own() {{
  [ -n "$stop" ] && return
  case $(squeue -h -j "$SLURM_JOB_ID" -O State,PreemptTime) in
    RUNNING*N/A*) return ;;
    *N/A*) ;;
    ?*) [ -n "$said" ] || echo "note: the job is preempted; Slurm queues it again"; said=1 ;;
  esac
  false
}}
if [ "$code" = 75 ]; then
  for _ in {{1..{wait}}}; do own && break; sleep 1; done
fi
exit "$code"
"""


class Slurm:
    """`partition`, `account`, `qos` and `time` as sbatch takes them; `more`: other options of sbatch. `setup`: lines of
    shell before the run, such as `module load`. `python`: the interpreter on the nodes; null: the path of this one.
    `save_before`: seconds before the time limit at which the run saves. `detach`: the command ends once the job is
    submitted.
    """

    about: ClassVar = {"where": "elsewhere", "detached": True}

    def __init__(
        self, *, partition: str | None, account: str | None, qos: str | None, time: str | None, more: Sequence[str],
        setup: Sequence[str], python: str | None, save_before: int, detach: bool, restarts: int, silence: float,
        wait: float, address: str | None,
    ) -> None:  # fmt: skip
        self.detach = detach
        self._asked = {"partition": partition, "account": account, "qos": qos, "time": _limit(time)}
        self._more, self._setup, self._save_before = [*more], [*setup], save_before
        self._python = python or sys.executable
        self._serving: dict[str, Any] = {"restarts": restarts, "silence": silence, "wait": wait, "address": address}

    @property
    def inside(self) -> bool:
        return "SLURM_JOB_ID" in os.environ and "SLURM_STEP_ID" not in os.environ

    def describe(self, plan: Plan) -> str:
        """The script for sbatch. Raises WordsError for words that cannot stand in it."""
        return self._script(plan, ["-m", "dtrain", "run", plan.out], {"nodes": plan.nodes})

    def submit(self, plan: Plan, environment: Mapping[str, str]) -> str:
        return self._queue(plan, self.describe(plan), environment)

    def submit_workers(self, plan: Plan, command: Sequence[str], environment: Mapping[str, str]) -> str:
        script = self._script(plan, command[1:], {"nodes": 1, "array": f"0-{plan.nodes - 1}"})
        return self._queue(plan, script, environment)

    def jobs(self, out: str) -> Collection[str]:
        return {*_ask("squeue", "--me", "--noheader", f"--name={detached.name_of(out)}", "--format=%F").split()}

    def waiting(self, job: str) -> str:
        """Of the workers of a sweep, which are an array, none has begun."""
        said = _ask("squeue", "--noheader", f"--jobs={job}", f"--Format={','.join(f'{each}:40' for each in ASKED)}")
        states = [[line[at : at + 40].strip() for at in range(0, 160, 40)] for line in said.splitlines()]
        if not states or any(state not in WAITS for state, *_ in states):
            return ""
        state, reason, begin, restarts = states[0]
        again = " again" if restarts.isdecimal() and int(restarts) else ""
        when = f"Slurm expects it to begin at {begin}" if begin[:1].isdecimal() else "Slurm cannot say when it begins"
        why = f" ({reason})" if reason not in ("", "None") else ""
        return f"job {job} is {WAITS[state]}{again}{why}; {when}"

    def cancel(self, job: str, *, save: bool) -> None:
        if save:
            _ask("scancel", "--state=PENDING", job)
            with contextlib.suppress(PreflightError):  # it was queued, and is gone
                _ask("scancel", "--batch", "--signal=USR2", job)
        else:
            _ask("scancel", job)

    def log(self, out: str, job: str) -> Path:
        return detached.log_file(out, f"slurm-{job}")

    def reading(self, out: str, job: str) -> AbstractContextManager[object]:
        return nullcontext()

    def notes(self, plan: Plan) -> Iterator[str]:
        if plan.nodes > 1 and store.is_local(plan.out) and store.local_path(plan.out).is_relative_to("/tmp"):
            yield (
                f"out={plan.out}: /tmp is most often a folder of each node alone. Type out=<a folder that all nodes "
                "share>, or a URL."
            )
        with contextlib.suppress(ValueError):
            is_in_container = any(sbatch.option(text).name in sbatch.CONTAINERS for text in self._more)
            if is_in_container and self._python == sys.executable:
                yield (
                    f"launcher.more asks for a container, and the script runs {self._python}, the Python of this host. "
                    "Type launcher.python=python for the Python of the image."
                )

    def launch(self, plan: Plan) -> Result:
        """Serve the run on this node of the job. Raises PreflightError outside of one."""
        if not self.inside:
            raise PreflightError(
                f"launcher=slurm: this command submits no job. Type salloc --nodes={plan.nodes} first, or leave "
                "launcher=slurm out."
            )
        hosts = _ask("scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]).split()
        steps = Steps(hosts, plan.devices * plan.threads, self._python)
        here = self._serving["address"] or network.outward(hosts[-1])
        return attached.launch(plan, engine=steps, **{**self._serving, "address": here})

    def _script(self, plan: Plan, arguments: Sequence[str], shape: Mapping[str, Any]) -> str:
        """`arguments`: of Python. Raises WordsError."""
        more, problems = list[Option](), [*self._wrong(plan)]
        for text in self._more:
            try:
                more.append(sbatch.option(text))
            except ValueError as error:
                problems.append(f"launcher.more: {error}")
        ours, gpus = self._ours(plan, shape), plan.devices if plan.device == "cuda" else 0
        problems += sbatch.problems(more, ours=ours, words=self._asked, nodes=ours["nodes"], gpus=gpus)
        if problems:
            raise WordsError(*problems)
        script = SCRIPT.format(
            folder=shlex.quote(str(Path.cwd())),
            setup=SETUP.format(lines="\n".join(self._setup)) if self._setup else "",
            command=shlex.join([self._python, *arguments]),
            wait=PREEMPTED_SECONDS,
        )
        options = (f"#SBATCH {line}" for line in self._lines(plan, ours, more))
        return "\n".join(["#!/bin/bash", *options, script])

    def _queue(self, plan: Plan, script: str, environment: Mapping[str, str]) -> str:
        self.log(plan.out, "").parent.mkdir(parents=True, exist_ok=True)
        names = re.findall(r"^#SBATCH --([a-z-]+)", script, re.MULTILINE)
        without = [*HIDING, *(VARIABLES.get(name, f"SBATCH_{name.upper().replace('-', '_')}") for name in names)]
        said = _ask("sbatch", "--parsable", script=script, environment=environment, without=without)
        return said.partition(";")[0].strip()

    def _ours(self, plan: Plan, shape: Mapping[str, Any]) -> dict[str, Any]:
        """Option -> value, as the plan and this launcher state them."""
        return {
            "job-name": detached.name_of(plan.out), **shape, "ntasks-per-node": 1,
            "cpus-per-task": plan.devices * plan.threads, "output": f'"{self.log(plan.out, "%j")}"',
            "open-mode": "append", "export": "ALL", "signal": f"B:USR1@{self._save_before}",
            **({"gpus-per-node": plan.devices} if plan.device == "cuda" else {}),
        }  # fmt: skip

    def _lines(self, plan: Plan, ours: Mapping[str, Any], more: Sequence[Option]) -> Iterator[str]:
        """The options of the job. Those of the user for cores and GPUs replace ours."""
        asked = {sbatch.stated(each.name) or each.name for each in more}
        for name, value in ours.items():
            is_asked = name in asked or (name == "gpus-per-node" and asked.intersection(sbatch.GPUS))
            if name not in REPLACED or not is_asked:
                yield f"--{name}={value}"
        yield "--requeue"
        yield from (f"--{name}={value}" for name, value in self._asked.items() if value is not None)
        yield from (each.line() for each in more if each.name in REPLACED or sbatch.stated(each.name) not in ours)

    def _wrong(self, plan: Plan) -> Iterator[str]:
        for name, value in self._asked.items():
            if name != "time" and value is not None and not VALUE.fullmatch(value):
                yield f"launcher.{name}={cut(value)!r}: sbatch takes one word without quotes."
        try:
            sbatch.duration(self._asked["time"] or "0")
        except ValueError as error:
            yield f"launcher.time: {error} Type launcher.time=4:00:00."
        if any(masked(line) != line for line in (*self._more, *self._setup)):
            yield (
                "launcher.more or launcher.setup holds a secret, and stands in a script that others can read. Set it "
                "in the environment of this command, which the job has too."
            )
        for name, text in (("out", plan.out), ("the working folder", str(Path.cwd()))):
            if re.search(r"[\n\r\"\\%]", text):
                yield f"{name} is {cut(text)!r}: sbatch takes no path with a quote, a backslash, % or a new line."


def _limit(time: str | None) -> str | None:
    """`time` as sbatch takes it; what is no time at all is refused with the other words."""
    with contextlib.suppress(ValueError):
        return time and sbatch.duration(time)
    return time


class Steps:
    """The nodes of a job, as an engine: srun starts an agent on each."""

    def __init__(self, hosts: Sequence[str], cores: int, python: str) -> None:
        self._hosts, self._cores, self._python, self._children = hosts, cores, python, Children()

    def prepare(self, plan: Plan) -> None:
        there = len(self._hosts)
        if there < plan.nodes:
            raise PreflightError(
                f"nodes={plan.nodes}, but this allocation of Slurm has {there}. Type nodes={there}, or run the command "
                "outside of it, where it submits a job."
            )

    def start(self, nodes: Sequence[int], command: Sequence[str], environment: Mapping[str, str]) -> None:
        for node in nodes:
            where = [f"--nodelist={self._hosts[node]}", "--nodes=1", "--ntasks=1", f"--cpus-per-task={self._cores}"]
            srun = ["srun", *where, "--overlap", "--input=none", "--export=ALL", self._python, *command[1:]]
            self._children.start([node], srun, environment)

    def alive(self) -> Collection[int]:
        return self._children.alive()

    def stop(self) -> None:
        self._children.stop()


def _ask(
    *command: str, script: str = "", environment: Mapping[str, str] | None = None, without: Collection[str] = ()
) -> str:
    """The output of a command of Slurm. Raises PreflightError with its own sentence."""
    return answer(
        command, launcher="slurm", install="Type the words on a host of the cluster.", stdin=script,
        environment=environment, without=without, unreached=UNREACHED,
    )  # fmt: skip
