"""The command line that `ps` shows for a process, and by which `doctor` knows it.

A fork has the command line of its parent, with all that was typed, secrets too. It may be as short as
`python -m dtrain`, so a title is kept in memory of its own, to which Linux is pointed (PR_SET_MM_MAP,
https://man7.org/linux/man-pages/man2/PR_SET_MM.2const.html). Kernels without that show the part of the title that has
room in the old command line.
"""

import ctypes
import os
import struct
import sys
from pathlib import Path

PR_SET_MM, PR_SET_MM_MAP = 35, 14
OURS = "dtrain-"
_title = ctypes.create_string_buffer(0)
"""The kernel reads it whenever somebody asks for the command line."""


def retitle(title: str) -> None:
    """Linux: show `title` as the command line of this process, which has no thread yet."""
    global _title
    if sys.platform != "linux":
        return
    fields = [
        int(field)
        for field in Path("/proc/self/stat").read_text("utf-8", errors="replace").rpartition(")")[2].split()[1:]
    ]
    begin, end = fields[44], fields[45]  # arg_start and arg_end of proc(5)
    if end > begin > 0:
        text = os.fsencode(title)
        ctypes.memmove(begin, text[: end - begin - 1].ljust(end - begin, b"\0"), end - begin)
        new = ctypes.create_string_buffer(text)
        if _point_to(new, fields):
            _title = new


def retitle_fork(name: str) -> None:
    """Show `name` as the first word of the title that this process inherited; alone, if that is what somebody typed."""
    if sys.platform != "linux":
        return
    inherited = os.fsdecode(Path("/proc/self/cmdline").read_bytes()).rstrip("\0")
    _, _, rest = inherited.partition(" ") if inherited.startswith(OURS) else ("", "", "")
    retitle(f"{name} {rest}".rstrip())


def _point_to(title: "ctypes.Array[ctypes.c_char]", fields: list[int]) -> bool:
    """Whether Linux took `title` as the command line. `fields`: of /proc/self/stat, from the parent's pid on."""
    libc = ctypes.CDLL(None)
    libc.sbrk.restype = ctypes.c_void_p
    code, stack = fields[22:24], fields[24]
    data, heap, environment = fields[41:43], fields[43], fields[46:48]
    begin = ctypes.addressof(title)
    kept = [*code, *data, heap, libc.sbrk(0), stack, begin, begin + len(title), *environment]
    no_auxv, no_file = (0, 0), 0xFFFFFFFF
    layout = ctypes.create_string_buffer(struct.pack("=12Q2I", *kept, *no_auxv, no_file))  # struct prctl_mm_map
    return not libc.prctl(PR_SET_MM, PR_SET_MM_MAP, layout, ctypes.c_ulong(len(layout) - 1), 0)
