"""What the driver says of GPUs in the kernel's log, planted: which lines count, and who is told."""

import os
from pathlib import Path

import pytest

from dtrain.lifecycle import failure, kernel_log, unwatched
from dtrain.lifecycle.gpu_faults import XIDS, fault_of
from dtrain.lifecycle.kernel_log import KernelLog, bus

LINE = "4,1234,98765432109,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=4711, name=python, GPU has fallen off the bus.\n"
LINES = {
    LINE: (79, "0000:3b:00", "pid=4711, name=python, GPU has fallen off the bus."),
    "[ 4909.922970] NVRM: Xid (0000:01:00): 13, 0005 00000000 0000502d\n": (13, "0000:01:00", "0005 00000000 0000502d"),
    "NVRM: Xid (PCI:0000:C1:00 GPU-I:05): 94, pid=1, Contained ECC error\n": (
        94,
        "0000:c1:00",
        "pid=1, Contained ECC error",
    ),
    "NVRM: Xid (PCI:0008:01:00): 119, Timeout waiting for RPC from GSP!\n": (
        119,
        "0008:01:00",
        "Timeout waiting for RPC from GSP!",
    ),
}


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "kmsg"
    path.write_text("NVRM: Xid (PCI:0000:01:00): 48, before the run began\n")
    monkeypatch.setattr(kernel_log, "KMSG", path)
    return path


def test_lines_since_the_beginning_are_read_once(planted: Path) -> None:
    log = KernelLog()
    assert log.xids() == []
    for line, (xid, address, text) in LINES.items():
        with planted.open("a") as file:
            file.write("6,1,2,-;usb 1-1: new device\n" + line)
        assert log.xids() == [{"xid": xid, "bus": address, "text": text}]
    assert log.xids() == []
    log.close()


def test_the_kernel_counts_what_it_kills_for_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vmstat = tmp_path / "vmstat"
    monkeypatch.setattr(kernel_log, "VMSTAT", vmstat)
    vmstat.write_text("pgfault 7\noom_kill 3\noom_kill_other 9\n")
    log = KernelLog()
    assert not log.has_freed_memory()
    vmstat.write_text("pgfault 8\noom_kill 4\noom_kill_other 9\n")
    assert log.has_freed_memory() and not KernelLog().has_freed_memory()
    vmstat.unlink()  # a system that does not count
    assert not KernelLog().has_freed_memory()


def test_many_lines_are_read_and_what_a_terminal_would_obey_is_written_out(planted: Path) -> None:
    log = KernelLog()
    planted.write_text(
        planted.read_text() + LINE * 1000 + "NVRM: Xid (PCI:0000:3b:00): 62, \x1b[2J\u202e\x00" + "x" * 5000 + "\n"
    )
    *_, last = events = log.xids()
    assert len(events) == 1001
    assert last["text"].startswith("\\x1b[2J\\u202e\\x00xxx")
    assert len(last["text"]) == kernel_log.LETTERS


@pytest.mark.parametrize("place", ["none", "folder", "closed"])
def test_a_log_that_may_not_be_read_says_nothing(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_log, "KMSG", tmp_path if place == "folder" else tmp_path / "none")
    log = KernelLog()
    log.close()
    assert log.xids() == []


def test_an_address_is_alike_whoever_says_it() -> None:
    assert bus("0000:3B:00.0") == bus("0:3b:0") == bus("00000000:3b:00") == "0000:3b:00"


def test_a_rank_alone_tells_what_the_driver_said_of_its_gpu(planted: Path, tmp_path: Path) -> None:
    with (
        pytest.raises(Exception, match="the host no longer reaches it") as raised,
        unwatched.alone(str(tmp_path / "out"), 0),
    ):
        failure.has_gpu(Path(os.environ["DTRAIN_REPORTS"]), 0, "0:3b:0")
        with planted.open("a") as file:
            file.write(LINE)
        raise RuntimeError("CUDA error: unspecified launch failure")
    assert raised.value.facts["kind"] == "gpu"  # type: ignore[attr-defined]


def test_an_error_that_quotes_the_driver_is_of_a_broken_gpu_where_the_xid_is() -> None:
    for number, xid in XIDS.items():
        fault = fault_of(f"RuntimeError: NVRM: Xid (PCI:0000:3b:00): {number}, pid=1")
        assert bool(fault and fault.broken) == xid.broken
