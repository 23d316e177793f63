"""Options of sbatch and srun that a user adds: read as these read them, and refused where the plan states the same.

launcher.more=['--constraint=a100', '-C a100', '--container-image=nvcr.io#nvidia/pytorch:25.01']
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dtrain.config.word import cut

OPTION = re.compile(r"(?:#SBATCH\s+)?(?:--(?P<long>[a-z][a-z-]*)(?:=|\s+|$)|-(?P<short>[A-Za-z])=?\s*)(?P<value>.*)")
PLAIN = re.compile(r"[\w.:,@/+*%&|()\[\]=~^!-]*")
"""Values that a line of #SBATCH takes without quotes: outside of them, # begins a comment."""
LETTERS: Mapping[str, str] = {
    "A": "account", "D": "chdir", "G": "gpus", "J": "job-name", "M": "clusters", "N": "nodes", "V": "version",
    "W": "wait", "a": "array", "c": "cpus-per-task", "e": "error", "h": "help", "i": "input", "n": "ntasks",
    "o": "output", "p": "partition", "q": "qos", "t": "time",
}  # fmt: skip
TASKS = "One task on each node starts its ranks: type devices=<ranks of a node>."
LINES = "What the job says goes to the log that the command shows. Leave it out."
WAITS = "The command itself waits, or does not: type launcher.detach=true."
TIME = re.compile(r"\d+(:[0-5]?\d){0,2}|\d+-\d+(:[0-5]?\d){0,2}|UNLIMITED|INFINITE", re.IGNORECASE)
"""Minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]]."""
SPAN = re.compile(r"(?P<number>\d+(?:\.\d+)?) *(?P<unit>s(?:econds?)?|m(?:in(?:utes?)?)?|h(?:ours?)?|d(?:ays?)?)")
SPANS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
TIMES = ("time", "time-min")
CONTAINERS = ("container", "container-image", "container-name")
SHOWN = "dtrain plan <the words> shows the script. Leave it out."
STATED: Mapping[str, str] = {
    "nodes": "Type nodes=<number>.",
    **dict.fromkeys(("ntasks", "ntasks-per-node", "ntasks-per-core", "ntasks-per-socket", "ntasks-per-gpu"), TASKS),
    "cpus-per-task": "Type threads=<cores of a rank>.",
    **dict.fromkeys(("output", "error", "input", "open-mode"), LINES),
    "job-name": "The command finds the job by its name. Leave it out, or type --comment=<text>.",
    **dict.fromkeys(
        ("export", "export-file"),
        "The job has the environment of the command. Type launcher.setup=['export <name>=<value>'] for more.",
    ),
    "array": "Type -m and sweep.workers=<number> for a sweep.",
    "signal": "Type launcher.save_before=<seconds>.",
    "chdir": "The job runs in the folder where the words are typed.",
    "clusters": "squeue and scancel would ask another cluster. Set SLURM_CLUSTERS=<name> instead.",
    **dict.fromkeys(("wait", "parsable"), WAITS),
    **dict.fromkeys(("wrap", "test-only", "help", "usage", "version"), SHOWN),
}  # fmt: skip
"""Options that the plan, or dtrain itself, states -> what to type instead."""
GPUS = ("gpus", "gpus-per-node", "gpus-per-task", "gres")


@dataclass(frozen=True)
class Option:
    """`name`: the long one, without dashes, where it is known; of other short ones the letter."""

    name: str
    value: str
    text: str

    def line(self) -> str:
        """As it stands behind #SBATCH."""
        if PLAIN.fullmatch(self.value):
            value = self.value
        else:
            value = '"{}"'.format(re.sub(r'(["\\])', r"\\\1", self.value))
        if len(self.name) == 1:
            return f"-{self.name} {value}".rstrip()
        return f"--{self.name}={value}" if value else f"--{self.name}"


def option(text: str) -> Option:
    """One option with its value: `--name=value`, `--name value`, `-N2` or `-N 2`, the value in quotes or not. Raises
    ValueError for anything else.
    """
    match = OPTION.fullmatch(text.strip())
    value = match["value"].strip() if match else ""
    if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
        value = value[1:-1]
    if not match or not value.isprintable() or re.match(r"-\S|.*\s--?[A-Za-z]", value):
        raise ValueError(f"{cut(text)!r} is no option of sbatch. Type one in each item: --<name>=<value>.")
    name = match["long"] or LETTERS.get(match["short"], match["short"])
    return Option(name, duration(value) if name in TIMES else value, text)


def duration(text: str) -> str:
    """A time limit as sbatch takes it, which knows no units: 4:00:00 for 4h. Raises ValueError."""
    span = SPAN.fullmatch(text)
    if span:
        seconds = round(float(span["number"]) * SPANS[span["unit"][0]])
        days, rest = divmod(seconds, 86400)
        hours = f"{days}-{rest // 3600}" if days else f"{rest // 3600}"
        return f"{hours}:{rest // 60 % 60:02}:{rest % 60:02}"
    if not TIME.fullmatch(text):
        raise ValueError(
            f"{cut(text)!r} is no time limit: minutes, hours:minutes:seconds, days-hours:minutes:seconds, or 4h."
        )
    return text


def stated(name: str) -> str:
    """The option of `STATED` that a name means, which may be abbreviated as getopt allows; empty for another."""
    if name in STATED:
        return name
    return next((each for each in STATED if len(name) > 1 and each.startswith(name)), "")


def problems(
    options: Sequence[Option], *, ours: Mapping[str, object], words: Mapping[str, str | None], nodes: int, gpus: int
) -> Iterator[str]:
    """A sentence for each option that states something else than the plan. `ours`: option -> the value that the script
    has. `words`: option -> the launcher's own word for it. `gpus`: of each node.
    """
    for each in options:
        name = stated(each.name)
        if name and not _is_alike(name, each.value, ours.get(name)):
            has = f", and the plan has {ours[name]}" if name in ("nodes", "cpus-per-task") else ""
            instead = STATED[name]
            if name == "nodes" and each.value.isdecimal():
                instead = f"Type nodes={each.value}."
            yield f"launcher.more: {cut(each.text)!r} is stated by the plan{has}. {instead}"
        elif words.get(each.name) not in (None, each.value):
            yield (
                f"launcher.more: {cut(each.text)!r} contradicts launcher.{each.name}={words[each.name]}. Leave one out."
            )
        elif each.name in GPUS:
            yield from _of_gpus(each, nodes if each.name == "gpus" else 1, gpus)


def _is_alike(name: str, asked: str, ours: object) -> bool:
    """Whether an option says what the script says already; a node may have more cores than its ranks use."""
    if name == "cpus-per-task" and asked.isdecimal():
        return int(asked) >= int(str(ours))
    return ours is not None and asked == str(ours)


def _of_gpus(each: Option, nodes: int, gpus: int) -> Iterator[str]:
    counts = [_count(part, each.name) for part in each.value.split(",")]
    known = [count for count in counts if count is not None]
    if not known or sum(known) == nodes * gpus:
        return
    if gpus:
        yield (
            f"launcher.more: {cut(each.text)!r} asks for {sum(known)} GPU(s), and the plan has {nodes * gpus}. Type "
            "devices=<GPUs of a node>."
        )
    else:
        yield (
            f"launcher.more: {cut(each.text)!r} asks for GPUs, and the plan is for CPUs. Say what the nodes are: type "
            "cluster=h100x8, or another word of cluster."
        )


def _count(part: str, name: str) -> int | None:
    """The GPUs that `a100:4`, or in --gres `gpu:a100:4`, asks for; None if it asks for something else."""
    kind, *rest = part.split(":") if name == "gres" else ("gpu", *part.split(":"))
    if kind.removeprefix("gres/") != "gpu":
        return None
    last = rest[-1] if rest else "1"
    return int(last) if last.isdecimal() else 1
