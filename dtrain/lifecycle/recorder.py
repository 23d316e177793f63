"""The collectives of this rank in torch's flight recorder: which were queued, began and ended on its device,
in each process group.

The host may be far ahead of a GPU, or wait for it in a line that is no collective: the record says where the GPU is.
Format 2.10 of the dump, as read in FlightRecorder.hpp and FlightRecorderDetail.hpp of torch 2.13.0 and 2.14.1. NCCL's
begin is known only with TORCH_NCCL_ENABLE_TIMING=1.
"""

import json
from collections.abc import Iterable, Mapping, MutableMapping
from contextlib import suppress
from typing import Any

from torch._C import _distributed_c10d

SIZE = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
"""Variables by which users say how many calls are recorded; 0: none. Later versions of torch warn of the second."""
CALLS = "2000"
"""As torch has it where nobody says."""
OVER, OPEN = 2, 6
"""So many calls of each group are told: the last that are over, and the first that are not."""
GROUPS, TENSORS, LETTERS = 16, 4, 60
"""More are left out."""


def record(environ: MutableMapping[str, str]) -> None:
    """From the next process group on calls are recorded, unless the environment says how many."""
    if not any(name in environ for name in SIZE):
        environ[SIZE[0]] = CALLS


def calls(names: Mapping[str, str]) -> dict[str, list[dict[str, Any]]]:
    """Those of this rank in each process group that `names` calls otherwise than torch does; nothing where torch
    records none.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for ask in (
        getattr(_distributed_c10d, "_dump_fr_trace_json", None),
        getattr(_distributed_c10d, "_dump_nccl_trace_json", None),
    ):
        with suppress(Exception):  # private, and of another format one day
            for name, entries in read(json.loads(ask()), names).items() if ask else ():
                found[name] = [*found.get(name, []), *entries]
    return dict(sorted(found.items(), key=lambda group: all(is_over(call) for call in group[1]))[:GROUPS])


def read(dump: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, list[dict[str, Any]]]:
    """The calls of a dump that are told, by group, first things first."""
    by_group: dict[str, list[dict[str, Any]]] = {}
    for entry in dump.get("entries", ()):
        group = str(entry["process_group"][0])
        if group in names:
            by_group.setdefault(names[group], []).append(_call(entry))
    return {name: _some(entries) for name, entries in by_group.items()}


def is_over(call: Mapping[str, Any]) -> bool:
    return bool(call["state"] == "completed")


def _call(entry: Mapping[str, Any]) -> dict[str, Any]:
    library, _, name = str(entry["profiling_name"]).partition(":")
    state = "completed" if library == "gloo" and entry["retired"] else entry["state"]  # gloo has no events to be seen
    number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
    return {
        "call": name.removeprefix("_").removesuffix("_base")[:LETTERS], "number": int(number), "state": str(state),
        "library": library[:LETTERS],
        "between_two": bool(entry["is_p2p"]), "sizes": entry["input_sizes"][:TENSORS],
    }  # fmt: skip


def _some(entries: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    kernels: dict[Any, dict[str, Any]] = {}
    for call in entries:
        kernel = (call["library"], call["between_two"], call["number"])
        kernels[kernel] = _together(kernels[kernel], call) if kernel in kernels else call
    over = [call for call in kernels.values() if is_over(call)]
    return [*over[-OVER:], *[call for call in kernels.values() if not is_over(call)][:OPEN]]


def _together(first: dict[str, Any], last: dict[str, Any]) -> dict[str, Any]:
    """Of several calls that are one kernel, torch knows the state of the last alone, which has no name of its own."""
    return {**first, "state": last["state"]}
