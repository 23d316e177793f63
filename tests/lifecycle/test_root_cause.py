"""Who is the cause: the same evidence as real runs leave, made by hand."""

import signal
from dataclasses import replace
from typing import Any

import pytest

from dtrain.lifecycle.root_cause import Evidence, find, kind_of

GONE = "RuntimeError: [/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:35996."
LATE = (
    "RuntimeError: [/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 2000ms for recv operation to complete"
)


def error(rank: int, message: str, time: float, *, kind: str = "error", code: int = 1, **facts: Any) -> dict[str, Any]:
    return {"rank": rank, "kind": kind, "time": time, "error": message, "message": message, "exit_code": code, **facts}


def evidence(world: int, *failures: dict[str, Any], **left: Any) -> Evidence:
    nothing: dict[str, Any] = {"reports": {}, "ended": {}, "lost": [], "stacks": {}, "steps": {}}
    return Evidence(
        **{
            "began": {rank: {"rank": rank, "host": "here", "pid": 100 + rank} for rank in range(world)},
            "failures": list(failures),
            **nothing,
            **left,
        }
    )


def ended(rank: int, code: int | None, time: float = 2.0, **facts: Any) -> dict[int, dict[str, Any]]:
    return {rank: {"rank": rank, "code": code, "time": time, **facts}}


def apart(*calls: list[tuple[Any, ...]], numbers: tuple[int, ...] = ()) -> Evidence:
    """All ranks hang in a line that is no collective, and each has a record of what its device was given."""
    records = [
        [{"call": name, "number": number, "state": state, "between_two": False, "library": "nccl", "sizes": sizes[0] if sizes else [[3]]} for name, number, state, *sizes in one]
        for one in calls
    ]  # fmt: skip
    groups = numbers or (9,) * len(calls)
    hung = [
        error(
            rank,
            "no progress for 60 s",
            1.0 + rank,
            kind="hung",
            groups={"the world": groups[rank]},
            calls={"the world": one},
        )
        for rank, one in enumerate(records)
    ]
    return evidence(len(calls), *hung)


TOGETHER = "no progress for 60 s: no device has ended all_reduce, collective 7 of the world; TORCH_NCCL_ENABLE_TIMING=1 would show which one has not begun it"
CUDA = "torch.AcceleratorError: CUDA error: unspecified launch failure"


def driver(case: Evidence, *xids: tuple[int, int]) -> Evidence:
    """Rank n has the GPU at n of the bus, of which the driver has said these: (rank, number)."""
    gpus = {rank: {"host": "here", "bus": f"0000:{rank:02x}:00"} for rank in case.began}
    events = [{"host": "here", "bus": f"0000:{rank:02x}:00", "xid": number, "text": ""} for rank, number in xids]
    return replace(case, gpus=gpus, xids=[*events, {"host": "there", "bus": "0000:00:00", "xid": 79, "text": ""}])


LOST = "Xid 79 of the GPU at 0000:01:00: the host no longer reaches it: it has fallen off the bus; the GPU's fault, not the program's"
BY_DRIVER: dict[str, tuple[Evidence, int | None, str, str]] = {
    "a GPU off the bus, of which the others heard first": (
        driver(evidence(2, error(0, CUDA, 1.0), error(1, GONE, 1.1, kind="lost")), (1, 79)), 1, "gpu", LOST,
    ),
    "of a rank that was killed": (
        driver(evidence(2, error(0, GONE, 1.0, kind="lost"), ended=ended(1, -signal.SIGABRT)), (1, 79)), 1, "gpu", f"SIGABRT, native code called abort() ({LOST})",
    ),
    "of a rank that hung": (driver(apart([("all_reduce", 7, "scheduled")], [("all_reduce", 7, "scheduled")]), (1, 79)), 1, "gpu", f"no progress for 60 s ({LOST})"),
    "its own words are kept": (driver(evidence(2, error(1, CUDA, 1.0)), (1, 79), (1, 45)), 1, "gpu", f"{CUDA} ({LOST})"),
    "a mistake of the program": (
        driver(evidence(2, error(1, CUDA, 1.0)), (1, 31)), 1, "error",
        f"{CUDA} (Xid 31 of the GPU at 0000:01:00: a kernel accessed an invalid memory address; the program's fault, not the GPU's)",
    ),
    "what follows an earlier error moves no blame": (
        driver(apart([("all_reduce", 7, "scheduled")], [("all_reduce", 7, "scheduled")]), (0, 45), (1, 45)), 0, "hung",
        f"{TOGETHER} (Xid 45 of the GPU at 0000:00:00: the driver removed this program's work; a consequence of an earlier error, or of the end of the program)",
    ),
    "a mistake of the program, for which others waited": (
        driver(apart([("all_reduce", 7, "scheduled")], [("all_reduce", 7, "scheduled")]), (1, 43)), 1, "error",
        "no progress for 60 s (Xid 43 of the GPU at 0000:01:00: the GPU stopped this program after an error in it; the program's fault, not the GPU's)",
    ),
    "memory that may go on": (
        driver(evidence(2, error(1, CUDA, 1.0)), (1, 94)), 1, "error",
        f"{CUDA} (Xid 94 of the GPU at 0000:01:00: a memory error ended this program, but no other; "
        "the GPU's fault; it still works, but reset it (nvidia-smi -r) when it is free)",
    ),
    "an error that tells of no GPU": (driver(evidence(2, error(0, "ValueError: a", 1.0)), (1, 74), (0, 74)), 0, "error", "ValueError: a"),
    "another host's GPU, or one that no rank has": (driver(evidence(1, error(0, CUDA, 1.0)), (7, 79)), 0, "error", CUDA),
    "a number that is not known": (driver(evidence(1, error(0, CUDA, 1.0)), (0, 999)), 0, "error", CUDA),
}  # fmt: skip


@pytest.mark.parametrize("case", BY_DRIVER)
def test_what_the_driver_says_of_a_gpu_is_told_of_the_rank_that_has_it(case: str) -> None:
    found_evidence, rank, kind, message = BY_DRIVER[case]
    cause, _ = find(found_evidence)
    assert (cause["rank"], cause["kind"], cause["error"]) == (rank, kind, message)


CASES: dict[str, tuple[Evidence, int | None, str]] = {
    "the first error": (evidence(3, error(2, "ValueError: a", 1.0), error(0, "ValueError: b", 1.1)), 2, "ValueError: a"),
    "not a victim that spoke first": (evidence(2, error(0, GONE, 1.0, kind="lost"), error(1, "ValueError: a", 1.1)), 1, "ValueError: a"),
    "a user's own broken connection": (
        evidence(2, error(0, "ConnectionResetError: connection reset", 1.0), error(1, GONE, 1.1, kind="lost")), 0, "ConnectionResetError: connection reset",
    ),
    "a storage that does not answer is no lost peer": (
        evidence(2, error(0, "cannot save s3://b: connection reset", 1.0, code=3), error(1, GONE, 1.1, kind="lost")), 0, "cannot save s3://b: connection reset",
    ),
    "killed": (evidence(2, error(0, GONE, 1.0, kind="lost"), ended=ended(1, -signal.SIGKILL)), 1, "SIGKILL, from outside or out of memory"),
    "killed for memory": (
        evidence(2, error(0, GONE, 1.0, kind="lost"), ended=ended(1, -signal.SIGKILL, for_memory=True)), 1, "SIGKILL, by the kernel: out of memory",
    ),
    "crashed": (evidence(2, error(0, GONE, 1.0, kind="lost"), ended=ended(1, -signal.SIGSEGV)), 1, "SIGSEGV, a segmentation fault in native code"),
    "aborted after an error elsewhere": (evidence(2, error(0, "ValueError: a", 1.9), ended=ended(1, -signal.SIGABRT)), 0, "ValueError: a"),
    "an exit code": (evidence(2, error(0, GONE, 1.0, kind="lost"), ended=ended(1, 7)), 1, "with exit code 7 and without a report"),
    "asked before it began": (evidence(2, error(0, GONE, 1.0, kind="lost"), ended=ended(1, 75)), 1, "it was asked to"),
    "gone unseen": (evidence(2, error(0, GONE, 1.0, kind="lost")), 1, "killed from outside, out of memory, or ended by os._exit"),
    "a lost node": (
        evidence(2, error(0, GONE, 2.0, kind="lost"), lost=[{"rank": None, "kind": "lost", "time": 5.0, "error": "node 1 is gone", "exit_code": 1}]), None, "node 1 is gone",
    ),
    "a stopped process": (
        evidence(2, error(0, LATE, 1.0, kind="timeout"), ended=ended(1, None, state="T")), 1, "SIGSTOP, and the others waited for it",
    ),
    "a held interpreter": (
        evidence(2, error(0, LATE, 1.0, kind="timeout"), ended=ended(1, None, state="R")), 1, "it did not respond: native code holds the GIL",
    ),
    "behind in a collective": (
        evidence(
            2, error(0, LATE, 1.0, kind="timeout", collective="all_reduce (dtrain/optim/clip.py:31 in clip)", groups={"the world": 118}),
            reports={1: {"rank": 1, "groups": {"the world": 117}, "where": "mypkg/model.py:12 in forward"}},
        ), 1, "it never reached collective 118 of the world, where rank 0 waits in all_reduce (dtrain/optim/clip.py:31 in clip)",
    ),
    "another collective than the others, on a device": (
        apart([("all_reduce", 7, "scheduled"), ("all_reduce", 8, "scheduled")], [("broadcast", 7, "scheduled")], [("all_reduce", 7, "scheduled")]),
        1, "it calls broadcast as collective 7 of the world, where rank 0 calls all_reduce",
    ),
    "another collective than the others, though all of them gave up": (
        apart([("all_reduce", 7, "completed")], [("all_gather", 7, "completed")], [("all_reduce", 7, "completed")]),
        1, "it calls all_gather as collective 7 of the world, where rank 0 calls all_reduce",
    ),
    "other shapes than the others": (
        apart([("all_reduce", 7, "scheduled", [[3]])], [("all_reduce", 7, "scheduled", [[3]])], [("all_reduce", 7, "scheduled", [[4]])]),
        2, "it calls all_reduce, collective 7 of the world, with the shapes [[4]], where rank 0 has [[3]]",
    ),
    "parts of unequal size are gathered": (
        apart([("all_gather", 7, "scheduled", [[3]])], [("all_gather", 7, "scheduled", [[4]])], numbers=(7, 6)),
        1, "it never reached collective 7 of the world, where rank 0 waits in all_gather",
    ),
    "a device that is busy with what comes before": (
        apart([("all_reduce", 7, "started")], [("all_reduce", 6, "completed"), ("all_reduce", 7, "scheduled")]),
        1, "its device has not begun all_reduce, collective 7 of the world, which has begun on the device of rank 0",
    ),
    "a device that does not end what the others have ended": (
        apart([("all_reduce", 7, "completed"), ("all_reduce", 8, "scheduled")], [("all_reduce", 7, "started")], [("all_reduce", 7, "completed")]),
        1, "its device has not ended all_reduce, collective 7 of the world, which has ended on the device of rank 0",
    ),
    "all devices in one collective": (apart([("all_reduce", 7, "scheduled")], [("all_reduce", 7, "scheduled")]), 0, TOGETHER),
    "devices in no collective": (apart([("all_reduce", 7, "completed")], [("all_reduce", 7, "completed")]), 0, "no progress for 60 s"),
    "stages send each other unequally much": (
        evidence(
            2, error(0, LATE, 1.0, kind="timeout", collective="recv (dtrain/parallel/pipeline.py:9 in step)", groups={"pp of ranks 0,1": 7, "the world": 3}),
            reports={1: {"rank": 1, "groups": {"pp of ranks 0,1": 9, "the world": 3}, "where": "mypkg/model.py:12 in forward"}},
        ), 1, "it is in no collective, but the others wait in one",
    ),
    "alone": (evidence(1, error(0, "no progress for 60 s", 1.0, kind="hung", where="mypkg/data.py:3 in read")), 0, "no progress for 60 s"),
    "only victims": (evidence(2, error(0, GONE, 1.0, kind="lost"), error(1, GONE, 1.1, kind="lost")), 0, GONE),
    "nothing at all": (evidence(0), None, "the ranks ended before any of them could report why"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_cause_is_told_not_the_victims(case: str) -> None:
    found_evidence, rank, message = CASES[case]
    cause, _ = find(found_evidence)
    assert (cause["rank"], cause["error"]) == (rank, message)


def test_a_killed_rank_has_its_last_step_and_the_stack_it_crashed_with() -> None:
    dump = 'Fatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent call first):\n  File "/home/me/mypkg/model.py", line 12 in forward\n'
    cause, ranks = find(
        evidence(
            2,
            error(0, GONE, 1.0, kind="lost", step=5),
            ended=ended(1, -signal.SIGSEGV),
            stacks={1: dump},
            steps={1: (5, 32, 8)},
        )
    )
    assert (cause["step"], cause["samples"], cause["pid"], cause["signal"]) == (5, [32, 39], 101, "SIGSEGV")
    assert cause["where"] == "home/me/mypkg/model.py:12 in forward"
    assert [rank["rank"] for rank in ranks] == [0, 1]


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (RuntimeError(GONE), "lost"),
        (RuntimeError(LATE), "timeout"),
        (ValueError("loss is nan"), "error"),
        (ConnectionResetError("Connection reset by peer"), "error"),
        (TimeoutError("timed out waiting 20ms"), "error"),
    ],
)
def test_what_torch_says_of_others_is_no_error_of_its_own(raised: Exception, kind: str) -> None:
    assert kind_of(raised, str(raised)) == kind
