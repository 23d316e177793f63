"""This rank's collectives in torch's flight recorder: which were queued, began and ended on its device, in each process
group.

The host may be far ahead of a GPU, or wait for it outside of a collective; the flight recorder knows what the GPU does.
Format 2.10 of the dump, as in FlightRecorder.hpp and FlightRecorderDetail.hpp of torch 2.13.0 and 2.14.1. NCCL records
the start of a collective only with TORCH_NCCL_ENABLE_TIMING=1.
"""

import json
from collections.abc import Iterable, Mapping, MutableMapping
from contextlib import suppress
from typing import Any

from torch._C import _distributed_c10d

SIZE = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
"""torch's variables for the number of recorded calls; 0: none. Newer versions of torch warn of the second."""
CALLS = "2000"
"""torch's default."""
OVER, OPEN = 2, 6
"""Number of calls reported per group: of the last completed ones, and of the first others."""
GROUPS, TENSORS, LETTERS = 16, 4, 60
"""Limits of a report: number of groups, of tensors per call, of letters per name."""


def record(environ: MutableMapping[str, str]) -> None:
    """Record calls of later process groups, unless the environment sets a number."""
    if not any(name in environ for name in SIZE):
        environ[SIZE[0]] = CALLS


def calls(names: Mapping[str, str]) -> dict[str, list[dict[str, Any]]]:
    """Group -> its calls on this rank. `names`: torch's name of each group -> dtrain's."""
    by_group: dict[str, list[dict[str, Any]]] = {}
    any_backend = getattr(_distributed_c10d, "_dump_fr_trace_json", None)
    nccl = getattr(_distributed_c10d, "_dump_nccl_trace_json", None)
    for dump in filter(None, (any_backend, nccl)):  # a build may lack either
        with suppress(Exception):  # private: the format may change
            for name, entries in read(json.loads(dump()), names).items():
                by_group.setdefault(name, []).extend(entries)
    return dict(sorted(by_group.items(), key=lambda group: all(is_over(call) for call in group[1]))[:GROUPS])


def read(dump: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, list[dict[str, Any]]]:
    """The reported calls of a dump, by group, oldest first."""
    by_group: dict[str, list[dict[str, Any]]] = {}
    for entry in dump.get("entries", ()):
        group = str(entry["process_group"][0])
        if group in names:
            by_group.setdefault(names[group], []).append(_call(entry))
    return {name: _reported(entries) for name, entries in by_group.items()}


def is_over(call: Mapping[str, Any]) -> bool:
    return bool(call["state"] == "completed")


def _call(entry: Mapping[str, Any]) -> dict[str, Any]:
    library, _, name = str(entry["profiling_name"]).partition(":")
    state = "completed" if library == "gloo" and entry["retired"] else entry["state"]  # gloo records no events
    number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
    return {
        "call": name.removeprefix("_").removesuffix("_base")[:LETTERS],
        "number": int(number),
        "state": str(state),
        "library": library[:LETTERS],
        "between_two": bool(entry["is_p2p"]),
        "sizes": entry["input_sizes"][:TENSORS],
    }


def _reported(entries: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    kernels: dict[Any, dict[str, Any]] = {}
    for call in entries:
        kernel = (call["library"], call["between_two"], call["number"])
        # torch records the state with the last call of a kernel, which has no name
        kernels[kernel] = {**kernels.get(kernel, call), "state": call["state"]}
    over = [call for call in kernels.values() if is_over(call)]
    return [*over[-OVER:], *[call for call in kernels.values() if not is_over(call)][:OPEN]]
