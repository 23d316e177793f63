"""Errors (Xid) that NVIDIA's driver writes to the kernel log during a run; none if the log cannot be read. Whether the
kernel killed a process to free memory.
"""

import contextlib
import os
import re
from pathlib import Path
from typing import Any

from dtrain.secrets import screen

KMSG = Path("/dev/kmsg")
"""Each read returns one record, https://www.kernel.org/doc/Documentation/ABI/testing/dev-kmsg; readable by all users if
kernel.dmesg_restrict=0.
"""
VMSTAT = Path("/proc/vmstat")
XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-f]+:[0-9a-f]+:[0-9a-f]+)[^)]*\): (\d+)\b[, ]*(.*)", re.IGNORECASE)
"""`NVRM: Xid (PCI:0000:3b:00): 79, pid=4711, name=python, GPU has fallen off the bus.`"""
RECORD, MOST, LETTERS = 8192, 1 << 24, 200
"""Largest record in bytes, largest number of bytes read, largest number of letters of a reported line."""


def memory_kills() -> int:
    """The number of processes that the kernel of this host has killed to free memory; 0 where it does not count them
    (`oom_kill` of proc_vmstat(5), Linux 4.13 and later).
    """
    with contextlib.suppress(OSError):
        for line in VMSTAT.read_text("utf-8").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


class KernelLog:
    """The kernel log from the construction of this object on."""

    def __init__(self) -> None:
        self._memory_kills = memory_kills()
        self._file: int | None = None
        with contextlib.suppress(OSError):
            self._file = os.open(KMSG, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._file, 0, os.SEEK_END)

    def xids(self) -> list[dict[str, Any]]:
        """The errors since the last call, oldest first; `bus` is the address of the GPU."""
        matches = XID.finditer(self._read().decode(errors="replace"))
        return [{"xid": int(m[2]), "bus": bus(m[1]), "text": screen.on_one_line(m[3])[:LETTERS]} for m in matches]

    def has_freed_memory(self) -> bool:
        """Whether the kernel has killed a process to free memory."""
        return memory_kills() > self._memory_kills

    def _read(self) -> bytes:
        data = bytearray()
        while self._file is not None and len(data) < MOST:
            try:
                record = os.read(self._file, RECORD)
            except BrokenPipeError:  # new records have overwritten older ones
                continue
            except OSError:  # no more records for now
                break
            if not record:
                break
            data += record
        return bytes(data)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def bus(address: str) -> str:
    """The normal form of a PCI bus address: the driver omits the function, and torch leading zeros."""
    domain, number, device = (int(part.split(".")[0], 16) for part in address.split(":"))
    return f"{domain:04x}:{number:02x}:{device:02x}"
