"""Ports, name, clock and what killed runs left, each verdict both ways."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
from small import plan
from until import until

from dtrain.doctor import Case, Finding, host
from dtrain.launcher import process, zygote


def case(address: str | None = None, **environ: str) -> Case:
    made = plan("nodes=2")
    return Case(replace(made, launcher={**made.launcher, "address": address}), environ, dict)


def only(findings: object) -> Finding:
    (one,) = findings  # type: ignore[misc]
    return one


def test_a_port_of_this_machine_can_be_reached_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert only(host.loopback(case())).verdict == "ok"

    def refuse(*_: object, **__: object) -> None:
        raise OSError("Operation not permitted")

    monkeypatch.setattr(socket, "create_server", refuse)
    assert only(host.loopback(case())).verdict == "stop"


def test_the_address_for_other_nodes_must_be_free() -> None:
    assert list(host.door(case())) == []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        finding = only(host.door(case(f"127.0.0.1:{port}")))
        assert finding.verdict == "stop"
        assert "ss -ltnp" in finding.advice
    assert only(host.door(case(f"127.0.0.1:{port}"))).verdict == "ok"
    assert only(host.door(case("127.0.0.1:port"))).verdict == "stop"


@pytest.mark.parametrize(
    ("address", "alone", "configured", "verdict"),
    [
        ("10.0.0.5", False, False, "ok"),
        ("127.0.1.1", False, False, "note"),
        ("", False, False, "note"),
        ("10.9.9.9", False, False, "note"),
        ("", True, False, "ok"),
        ("127.0.1.1", False, True, "ok"),
    ],
)
def test_a_name_must_lead_other_hosts_here(address: str, alone: bool, configured: bool, verdict: str) -> None:
    finding = host.named(
        "node7", address, "", alone=alone, known={"10.0.0.5", "127.0.0.1", "127.0.1.1"}, configured=configured
    )
    assert finding.verdict == verdict


def test_this_host_has_a_name() -> None:
    assert socket.gethostname() in only(host.name(case())).text


@pytest.mark.parametrize(
    ("state", "now", "verdict"),
    [(0, time.time(), "ok"), (None, time.time(), "ok"), (5, time.time(), "note"), (0, 86400.0, "stop")],
)
def test_a_clock_is_held_or_not(state: int | None, now: float, verdict: str) -> None:
    assert host.kept(state, 1500, now).verdict == verdict


def test_the_clock_here_is_looked_at() -> None:
    assert only(host.clock(case())).verdict in ("ok", "note")


@pytest.mark.parametrize(
    ("free", "names", "verdict"),
    [(9 << 30, 10, "ok"), (9 << 30, None, "ok"), (1 << 29, 10, "note"), (1 << 20, 10, "stop"), (9 << 30, 0, "stop")],
)
def test_the_scratch_folder_has_room(free: int, names: int | None, verdict: str) -> None:
    assert host.room("/tmp", free, names).verdict == verdict


def test_a_run_that_goes_on_is_no_left_over_and_one_that_was_killed_whole_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_everywhere", lambda: tmp_path)
    folder = process.memory(Path("launch-of-a-run"))
    holder = subprocess.Popen(
        [sys.executable, "-c", f"from pathlib import Path; from dtrain.launcher import process; process._everywhere = lambda: Path({str(tmp_path)!r})\n"
         "process.claim(Path('launch-of-a-run')); print(flush=True); import time; time.sleep(60)"],
        stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert holder.stdout
        holder.stdout.readline()
        assert process.stale() == []
    finally:
        holder.kill()
        holder.communicate()
    assert process.stale() == [folder]
    (folder / "copy").write_bytes(bytes(3 << 20))
    findings = [one for one in host.left(case()) if "in memory" in one.text]
    assert [one.verdict for one in findings] == ["note"]
    assert "left 3 MiB" in findings[0].text
    assert str(folder) in findings[0].advice


def test_a_folder_of_reports_of_a_killed_run_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead, ours = (tmp_path / f"dtrain-{os.getuid()}-{pid}-0-" for pid in (1 << 22, os.getpid()))
    dead.mkdir()
    ours.mkdir()
    (advice,) = [one.advice for one in host.left(case()) if "folder of reports" in one.text]
    assert str(dead) in advice and str(ours) not in advice


@pytest.mark.parametrize("left", [False, True])
def test_a_server_whose_command_is_gone_is_told_and_another_is_not(left: bool) -> None:
    command = 1 << 22 if left else os.getpid()
    named = ["-m", "dtrain.launcher.local.server", str(command)]
    server = subprocess.Popen(
        [sys.executable, "-c", "import os, time; os.fork(); time.sleep(60)", *named], start_new_session=True
    )
    try:
        until(lambda: host._read(f"/proc/{server.pid}/cmdline").endswith(f"{command}\0"))
        advice = " ".join(finding.advice for finding in host.left(case()) if finding.text.startswith("processes"))
        assert (str(server.pid) in advice.split()) == left
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def test_a_zygote_whose_command_is_gone_is_told_and_another_is_not() -> None:
    line = [f"{zygote.NAME} {1 << 22} /tmp", "-c", "import time; time.sleep(60)"]
    orphan = subprocess.Popen(line, executable=sys.executable)  # by its name, another process started it
    living = zygote.Zygote()
    try:
        for pid in (orphan.pid, living.pid):
            until(lambda: host.ZYGOTE.match(host._read(f"/proc/{pid}/cmdline")))  # noqa: B023 - called at once
        findings = [(finding.text, finding.advice) for finding in host.left(case())]
        assert [str(orphan.pid) in advice.split() for text, advice in findings if text.startswith("processes")] == [
            True
        ]
        assert str(living.pid) not in " ".join(advice for _, advice in findings).split()
    finally:
        orphan.kill()
        orphan.wait()
        living.close()
