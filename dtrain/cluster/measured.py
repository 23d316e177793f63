"""Figures of this machine's cores, as `dtrain doctor` measured them: <cache>/machine.json. Only the process that
resolves a run reads them; a plan's digest does not depend on them.

A rate is measured in three ways: `alone`, one process on one thread; `whole`, one process on all cores; `together`, as
many processes as cores, each on one thread. The file is bounded and checked number by number: it may be anybody's.
"""

import json
import os
import re
import stat
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from dtrain.config import home
from dtrain.config.installed import version

Figures = Mapping[str, Any]
VERSION = 2
"""Of the file; it goes up when a figure changes its meaning."""
WAYS = ("alone", "whole", "together")
PRODUCTS = ("product_fp32", "product_bf16")
"""Operations per second for each number of rows and, of these, for each width of a square weight."""
RATES = ("convolution", "attention")
"""Operations per second for each size: channels, tokens."""
STREAMS = ("pointwise", "update")
"""Bytes per second: of operators on each element, and of an optimizer."""
HOSTS = ("step", "operator", "copies", "shards", "tp", "pp", "byte")
"""Seconds of the host: of a step, of an operator, forward and backward, and of a collective of each kind of layout; and
of a byte of shards that is copied around one."""
CALLS = ("all_reduce", "all_gather", "reduce_scatter", "send_recv")
MOST_BYTES, MOST_POINTS = 1 << 16, 32
LEAST, MOST = 1e-12, 1e18
"""Limits of a rate, of bytes and of seconds, whatever the machine."""


def place(environ: Mapping[str, str] = os.environ) -> Path:
    """Where the file is: beside what else is made once."""
    return home.cache(environ) / "dtrain/machine.json"


def identity(cpus: int) -> dict[str, Any]:
    """The processor, number of cores and torch, of which alone the figures are."""
    return {"version": VERSION, "processor": processor(), "cpus": cpus, "torch": version("torch")}


def processor() -> str:
    """The processor by the name, family, model and stepping that the kernel gives."""
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8", errors="replace")
    except OSError:
        import platform

        return platform.processor() or platform.machine()
    names = ("vendor_id", "cpu family", "model", "model name", "stepping")
    found = {name.strip(): value.strip() for name, value in re.findall(r"^([\w ]+?)\s*:(.*)$", text, re.MULTILINE)}
    return " ".join(found[name] for name in names if name in found) or os.uname().machine


def read(cpus: int, environ: Mapping[str, str] = os.environ) -> tuple[Figures | None, str]:
    """(the figures of this machine, or None; why there are none, as a sentence)."""
    file = place(environ)
    try:
        if not stat.S_ISREG(file.stat().st_mode) or file.stat().st_size > MOST_BYTES:
            return None, f"{file} is no file of dtrain doctor. Remove it and type dtrain doctor"
        known = json.loads(file.read_bytes())
    except FileNotFoundError:
        return None, "type dtrain doctor to measure it"
    except OSError as error:
        return None, f"{file} cannot be read: {error.strerror}"
    except (ValueError, RecursionError):
        return None, f"{file} is torn. Type dtrain doctor"
    if not isinstance(known, dict) or not isinstance(known.get("of"), dict):
        return None, f"{file} holds no figures. Type dtrain doctor"
    if known["of"] != identity(cpus):
        return None, f"{file} is of another machine or torch. Type dtrain doctor"
    figures = known.get("figures")
    wrong = problem(figures)
    return (None, f"{file} is ignored, as {wrong}. Type dtrain doctor") if wrong else (figures, "")


def document(cpus: int, figures: Figures) -> bytes:
    """The file."""
    return json.dumps({"of": identity(cpus), "figures": figures}, indent=1).encode()


def problem(figures: Any) -> str:
    """A mistake in figures; empty if there is none."""
    measured = {*PRODUCTS, *RATES, *STREAMS}
    if not isinstance(figures, dict) or set(figures) - {*measured, *HOSTS, *CALLS} or not measured <= set(figures):
        return "its figures have other names"
    for name in (*PRODUCTS, *RATES):
        ways, is_right = figures[name], _is_table_of_tables if name in PRODUCTS else _is_table
        if not isinstance(ways, dict) or {*ways} != {*WAYS} or not all(map(is_right, ways.values())):
            return f"{name} is no rate for each size"
    for name in STREAMS:
        ways = figures[name]
        if not isinstance(ways, dict) or {*ways} != {*WAYS} or not all(map(_is_number, ways.values())):
            return f"{name} is no number of bytes per second"
    for name in set(figures) & {*HOSTS}:
        if not _is_number(figures[name]) or figures[name] > 60:
            return f"{name} is no number of seconds"
    return next((f"{name} is no table of bytes and seconds" for name in CALLS if not _is_table(figures.get(name))), "")


def _is_table(value: Any, is_right: Callable[[Any], bool] | None = None) -> bool:
    """Pairs of an ascending number and another, or what `is_right` takes; none is one too."""
    if value is None:
        return True
    if not isinstance(value, list) or not 1 <= len(value) <= MOST_POINTS:
        return False
    if not all(isinstance(pair, list) and len(pair) == 2 and _is_number(pair[0]) for pair in value):
        return False
    ascends = all(one[0] < other[0] for one, other in pairwise(value))
    return ascends and all(map(is_right or _is_number, (pair[1] for pair in value)))


def _is_table_of_tables(value: Any) -> bool:
    return _is_table(value, lambda inner: inner is not None and _is_table(inner))


def _is_number(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and LEAST <= value <= MOST  # which NaN is not
