"""Checks of the storage of `out`: reading and writing, create-only puts, consistent listings, clock, speed, free space
and lease.

Everything is written below one new folder, which is removed again. If a local `out` does not exist yet, the folder is
in its nearest existing parent.
"""

import contextlib
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from pathlib import Path
from statistics import median

from dtrain.doctor import Case, Finding
from dtrain.errors import StoreError
from dtrain.planned import Plan
from dtrain.predict import formulas
from dtrain.predict.report import size
from dtrain.predict.state_bytes import saved
from dtrain.storage import lease, store
from dtrain.storage.errors import explain

LOOK_SECONDS = 5.0
"""A storage that does not answer within this time is reported and not asked again."""
SMALL, LARGE, TIMES = 100, 8 << 20, 5
SLOW_BYTES, SLOW_SECONDS = 10e6, 1.0
"""A save is slow below so many bytes per second, or above so many seconds for a small file."""
FREE_BYTES = 5 << 30
SKEW_SECONDS = 60.0
REFUSED_SECONDS = 900.0
"""S3 refuses signatures by a clock with a larger error:
https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html RequestTimeTooSkewed
"""


def storage(case: Case) -> Iterable[Finding]:
    """The checks that write. An error ends them."""
    with store.patience(LOOK_SECONDS):
        try:
            with _place(case.plan.out) as place:
                yield from reached(place, case.plan.out)
                for check in (created, listed, dated, fast):
                    yield from check(place)
        except StoreError as error:
            yield Finding("storage", "stop", str(error), "out=<another place>, or make this one writable")


def reached(place: str, out: str) -> Iterable[Finding]:
    """Write, read back, write again, read back."""
    url = store.join(place, "again")
    for data in (b"first", b"second"):
        store.write(url, data)
        if store.read(url) != data:
            advice = "use another storage: a run's events and lease would be lost"
            yield Finding("storage", "stop", f"{out}: a read returns older bytes than the last write", advice)
            return
    yield Finding("storage", "ok", f"{out}: bytes are written and read back")


def created(place: str) -> Iterable[Finding]:
    """Whether creating an existing file is refused. Leases on `out` and commits of checkpoints depend on it."""
    url = store.join(place, "once")
    store.publish(url, b"mine")
    if not _refused(url, b"theirs"):
        text = "creating an existing file is not refused: two runs that start in the same instant may both take `out`"
        yield Finding(
            "create-only", "note", text, "start one run at a time there, or use a storage with conditional puts"
        )
    elif store.read(url) != b"mine":
        yield Finding("create-only", "stop", "a refused create still changed the file", "use another storage")
    else:
        yield Finding("create-only", "ok", "creating an existing file is refused")


def listed(place: str) -> Iterable[Finding]:
    """Whether a listing shows new files at once, and removed files no longer."""
    folder = store.join(place, "list")
    names = [f"{number}" for number in range(3)]
    for name in names:
        store.write(store.join(folder, name), b"")
    first = store.children(folder)
    store.remove(store.join(folder, names[0]))
    second = store.children(folder)
    if first != names or second != names[1:]:
        text = f"lags behind: {len(first)} of 3 new files listed, then {len(second)} of 2"
        advice = "use a storage with consistent listings: a checkpoint could be missed"
        yield Finding("listing", "stop", text, advice)
    else:
        yield Finding("listing", "ok", "shows new files at once, and removed files no longer")


def dated(place: str) -> Iterable[Finding]:
    """Whether the clock of a storage that dates files agrees with that of this host."""
    url = store.join(place, "date")
    before = time.time()
    store.write(url, b"now")
    at = _modified(url)
    if at is not None:
        yield off(max(before - at - 1, at - time.time(), 0.0))  # dates may be whole seconds, rounded down


def off(seconds: float) -> Finding:
    """Judge the difference of two clocks."""
    text = f"the storage's clock and this one are {seconds:.1f} s apart"
    if seconds > REFUSED_SECONDS:
        return Finding("its clock", "stop", f"{text}: signed requests are refused", "timedatectl set-ntp true")
    if seconds > SKEW_SECONDS:
        return Finding("its clock", "note", text, "timedatectl set-ntp true")
    return Finding("its clock", "ok", text)


def fast(place: str) -> Iterable[Finding]:
    """Median speed of small files, of writes and of reads, one after the other."""
    data = os.urandom(LARGE)
    small = _seconds(lambda number: store.write(store.join(place, f"small-{number}"), data[:SMALL]), TIMES)
    writing = _seconds(lambda number: store.write(store.join(place, f"large-{number}"), data), 2)
    reading = _seconds(lambda number: store.read(store.join(place, f"large-{number}")), 2)
    yield speed(small, LARGE / writing, LARGE / reading)


def speed(small: float, write: float, read: float) -> Finding:
    """Judge seconds per small file, and bytes per second of a large one."""
    text = (
        f"{1 / small:.0f} small files/s, one after the other; {write / 1e6:.0f} MB/s written, {read / 1e6:.0f} "
        "MB/s read, in one stream"
    )
    facts = {"small_files_per_second": 1 / small, "write_bytes_per_second": write, "read_bytes_per_second": read}
    if small > SLOW_SECONDS or min(write, read) < SLOW_BYTES:
        return Finding(
            "speed", "note", f"{text}: slow", "checkpoint.every=<more steps>, or a storage that is nearer", facts
        )
    return Finding("speed", "ok", text, facts=facts)


def space(case: Case) -> Iterable[Finding]:
    """Whether the disk of a local `out` has room for the checkpoints of the run."""
    if store.is_local(case.plan.out):
        shapes = formulas.shapes(case.plan)
        each = saved(case.plan, shapes) if shapes else None
        yield room(case.plan.out, shutil.disk_usage(_standing(case.plan.out)).free, each, standing(case.plan))


def standing(plan: Plan) -> int:
    """Most checkpoints that exist at a time, including the one being written."""
    word, steps = plan.checkpoint, plan.steps
    every, keep = Fraction(word.get("every") or steps), word.get("keep")
    saves: int = -(-steps // every) + 1
    ephemeral = bool(word.get("ephemeral"))
    if keep is None:
        return saves + ephemeral
    milestones: int = steps // word["keep_every"] if word.get("keep_every") else 0
    kept: int = min(saves, keep + 1)
    return kept + milestones + bool(word.get("best")) + ephemeral


def room(out: str, free: int, each: int | None, count: int) -> Finding:
    """Judge the free bytes for `count` checkpoints of `each` bytes (None: unknown without torch)."""
    text = f"{size(free)} free for {out}"
    advice = "free some, type checkpoint.keep=1 or out=<another place>"
    if each is None:
        text += ": a checkpoint with AdamW takes 12 bytes per parameter"
        return Finding("space", "note", text, advice) if free < FREE_BYTES else Finding("space", "ok", text)
    facts = {"free_bytes": free, "checkpoint_bytes": each, "checkpoints": count}
    if free < each:
        text += f", and a checkpoint takes {size(each)}"
        return Finding("space", "stop", text, "free some, or type out=<another place>", facts)
    if free < each * count:
        text = f"{text}, and up to {count} checkpoints of {size(each)} stand there at a time"
        return Finding("space", "note", text, advice, facts)
    text += f"; a checkpoint takes {size(each)}, up to {count} stand there at a time"
    return Finding("space", "ok", text, facts=facts)


def held(case: Case) -> Iterable[Finding]:
    """Whether another run holds the lease of `out`."""
    with store.patience(LOOK_SECONDS):
        state, who = lease.holder(case.plan.out)
    if state == "held":
        advice = "wait for it, stop it, or out=<another place>"
        yield Finding("lease", "stop", f"{case.plan.out} is being written by another run: {who}", advice)
    elif state == "left":
        yield Finding(
            "lease", "ok", f"{case.plan.out} was used by {who}, which has ended: the next run takes over at once"
        )
    elif state == "unknown":
        text = f"{case.plan.out} is used by {who}, on a host that cannot be checked from here"
        advice = f"if it has ended, the next run takes over after {lease.STALE_SECONDS:.0f} s; else out=<another place>"
        yield Finding("lease", "note", text, advice)
    else:
        yield Finding("lease", "ok", f"no run writes under {case.plan.out}")


@contextlib.contextmanager
def _place(out: str) -> Iterator[str]:
    """A new folder in the storage of `out`, removed at the end of the context."""
    place = store.join(str(_standing(out)) if store.is_local(out) else out, f".doctor-{uuid.uuid4().hex[:12]}")
    try:
        yield place
    finally:
        with contextlib.suppress(StoreError):  # already reported
            store.remove(place)


def _standing(out: str) -> Path:
    """A local `out`, or its nearest existing parent."""
    path = store.local_path(out).absolute()
    return next(each for each in (path, *path.parents) if each.exists())


def _refused(url: str, data: bytes) -> bool:
    """Whether the storage itself refuses to create an existing file; `store.publish` also checks before it creates."""
    try:
        if store.is_local(url):
            store.publish(url, data)
        else:
            fs = store.client(url)
            fs.pipe_file(fs._strip_protocol(url), data, mode="create")
    except Exception as error:
        if (error.kind if isinstance(error, StoreError) else explain(error, url).kind) != "exists":
            raise
        return True
    return False


def _modified(url: str) -> float | None:
    """Modification time of a file by the clock of its storage, in seconds since 1970; None if it has none."""
    if store.is_local(url):
        return store.local_path(url).stat().st_mtime
    fs = store.client(url)
    try:
        return float(fs.modified(fs._strip_protocol(url)).timestamp())
    except NotImplementedError:
        return None


def _seconds(act: Callable[[int], object], times: int) -> float:
    """Median duration of `act` over so many calls."""
    durations = []
    for number in range(times):
        start = time.perf_counter()
        act(number)
        durations.append(time.perf_counter() - start)
    return max(median(durations), 1e-9)
