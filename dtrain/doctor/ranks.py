"""Check that starts the ranks of the plan: whether they connect, their bandwidth, and whether their hosts agree."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dtrain.build import build
from dtrain.doctor import Case, Finding
from dtrain.errors import DtrainError, first_line
from dtrain.launcher import zygote
from dtrain.planned import Plan
from dtrain.predict.report import size
from dtrain.secrets import screen

LOOP = "dtrain.doctor.bandwidth.measure"
TIMEOUT_SECONDS, WAIT_SECONDS = 60.0, 60.0
"""Limits for a collective, and for the nodes to join."""
SLOW = {"gloo": 0.05e9, "nccl": 5e9}
"""Bus bandwidth of the largest all_reduce, in bytes per second; less means a broken or overloaded network."""
ADVICE = {
    "gloo": "look for other programs on these cores or this network",
    "nccl": "NCCL_DEBUG=INFO before the command says how GPUs are connected, nvidia-smi topo -m how they could be",
}
"""Advice for a backend that is slow."""
FAILED = "try devices=2, then nodes=2, to see where it begins to fail"
KILLED = "dmesg | grep -i 'killed process' says whether memory ran out: then free some, or use fewer devices"
"""Advice for ranks that failed, or were killed by SIGKILL."""
APART_SECONDS = 5.0
SAME = ("dtrain", "torch")

Row = Mapping[str, Any]


def exchange(case: Case) -> Iterable[Finding]:
    """Start the ranks with the plan's own launcher and a loop that measures."""
    if case.plan.world == 1:
        yield Finding("ranks", "ok", "only one. Type devices=2 or nodes=2 to measure between ranks")
        return
    if "error" in case.torch():
        return
    try:
        with zygote.kept():
            zygote.begin()
            result = build(case.plan.launcher).launch(measuring(case.plan))
    except DtrainError as error:
        text = f"{case.plan.world} rank(s) could not work together: {first_line(error)}"
        killed = error.facts.get("signal") == "SIGKILL" or error.facts.get("kind") == "memory"
        yield Finding("ranks", "stop", text, KILLED if killed else FAILED)
        return
    yield alike(result.metrics["ranks"])
    yield judged(result.metrics["links"])


def measuring(plan: Plan, loop: str = LOOP) -> Plan:
    """The same plan with a measuring loop, no restarts and short timeouts."""
    launcher = {**plan.launcher, "restarts": 0, **({"wait": WAIT_SECONDS} if "wait" in plan.launcher else {})}
    return replace(
        plan.with_loop(loop), launcher=launcher, backend={**plan.backend, "timeout": TIMEOUT_SECONDS}, others=()
    )


def alike(ranks: Sequence[Row]) -> Finding:
    """Judge whether the ranks have the same versions and time."""
    hosts = sorted({rank["host"] for rank in ranks})
    text = f"{len(ranks)} met, on {', '.join(hosts)}"
    for package in ranks[0]["versions"]:
        there = {rank["versions"].get(package): rank["host"] for rank in ranks}
        if len(there) > 1:
            where = ", ".join(f"{version} on {host}" for version, host in there.items())
            advice = f"pip install {package}=={ranks[0]['versions'][package]} on all"
            return Finding("ranks", "stop" if package in SAME else "note", f"{text}: {package} is {where}", advice)
    clocks = [rank["clock"] for rank in ranks]
    apart = max(clocks) - min(clocks)
    if len(hosts) > 1 and apart > APART_SECONDS:
        return Finding(
            "ranks", "note", f"{text}: their clocks are {apart:.0f} s apart", "timedatectl set-ntp true, on all"
        )
    return Finding("ranks", "ok", text, facts={"clocks_apart_seconds": apart, "ranks": list(ranks)})


def judged(links: Sequence[Row]) -> Finding:
    """Judge the figures of `dtrain.doctor.bandwidth`, with a table of them."""
    facts = {"links": list(links)}
    text = f"bus bandwidth in GB/s of the slowest group; for small messages the latency\n{table(links)}"
    wrong = next((row for row in links if not row["right"]), None)
    if wrong:
        problem = f"{wrong['operation']} over {wrong['axis']} by {wrong['backend']} gives wrong numbers"
        advice = "dtrain doctor with fewer devices or nodes finds the one that is broken"
        return Finding("bandwidth", "stop", f"{problem}\n{table(links)}", advice, facts)
    largest = {row["backend"]: row for row in links if row["operation"] == "all_reduce" and row["axis"] == "world"}
    slow = [backend for backend, row in largest.items() if row["busbw"] < SLOW[backend]]
    if slow:
        return Finding("bandwidth", "note", f"{slow[0]} is slow; {text}", ADVICE[slow[0]], facts)
    return Finding("bandwidth", "ok", text, facts=facts)


def table(links: Sequence[Row]) -> str:
    """A line for each axis, backend and size."""
    operations = list(dict.fromkeys(row["operation"] for row in links))
    lines = [("axis", "ranks", "by", "message", *operations)]
    keys = dict.fromkeys((row["axis"], row["ranks"], row["backend"]) for row in links)
    for axis, count, backend in keys:
        mine = [row for row in links if (row["axis"], row["backend"]) == (axis, backend)]
        sizes = sorted({row["bytes"] for row in mine})
        for message in sizes:
            of = {row["operation"]: row for row in mine if row["bytes"] == message}
            cells = [
                f"{of[name]['seconds'] * 1e6:.0f} us" if message == sizes[0] else f"{of[name]['busbw'] / 1e9:.2f}"
                for name in operations
            ]
            lines.append((axis, str(count), backend, size(message), *cells))
    return screen.table(lines, str.rjust)
