"""What is found of a storage: a good one and those that cannot hold a run, real ones where that is possible, and nothing is left on any."""

import os
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import servers
from pool import ranks
from small import plan

from dtrain.doctor import Case, Finding, found, storage
from dtrain.storage import lease, store

CHECKS = ["storage", "create-only", "listing", "its clock", "speed"]


def case(out: str) -> Case:
    from dataclasses import replace

    return Case(replace(plan(), out=out), {}, dict)


def looked(out: str) -> list[Finding]:
    return found(storage.storage, case(out))


def by(findings: list[Finding]) -> dict[str, str]:
    return {one.check: one.verdict for one in findings}


def test_a_folder_is_good_and_left_as_it_was(tmp_path: Path) -> None:
    findings = looked(f"{tmp_path}/a/b")
    assert list(by(findings)) == CHECKS
    assert {one.verdict for one in findings if one.check != "speed"} == {"ok"}
    assert findings[-1].facts["write_bytes_per_second"] > 1e3
    assert list(tmp_path.iterdir()) == []


def server_is_good(server: servers.Server) -> None:
    findings = looked(f"{server.url}/doctor")
    assert list(by(findings)) == CHECKS, findings
    assert by(findings) | {"speed": ""} == dict.fromkeys(CHECKS, "ok") | {"speed": ""}, findings
    assert store.children(f"{server.url}/doctor") == []
    (missing,) = found(storage.storage, case(f"{server.url.rpartition('/')[0]}/no-such-bucket/run"))
    assert missing.verdict == "stop"
    assert "no-such-bucket" in missing.text
    assert "there is no such bucket" in missing.text
    assert "\n" not in missing.text


def test_an_object_storage_is_good_and_a_bucket_that_is_not_there_is_told(s3_server: servers.Server) -> None:
    ranks(1, server_is_good, s3_server)


def test_a_file_in_the_way_stops_a_run(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("a file")
    (one,) = looked(f"{tmp_path}/mine/run")
    assert one.verdict == "stop"
    assert str(tmp_path / "mine") in one.text
    assert one.advice.startswith("out=")


def test_a_folder_that_may_not_be_written_to_stops_a_run() -> None:
    """As any user but root, who may write everywhere, and whose own temporary folders nobody else may enter."""

    def work(folder: str) -> list[Finding]:
        if os.getuid() == 0:
            os.setuid(65534)
        return looked(f"{folder}/run")

    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o555)
        ((one,),) = ranks(1, work, folder)
    assert (one.verdict, "\n" in one.text) == ("stop", False)
    assert "Permission denied" in one.text


def lying(monkeypatch: pytest.MonkeyPatch, **instead: Callable[..., Any]) -> None:
    for name, function in instead.items():
        monkeypatch.setattr(store, name, function)


def test_reading_what_was_before_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = store.read
    lying(monkeypatch, read=lambda url: b"first" if url.endswith("/again") else read(url))
    assert by(looked(str(tmp_path)))["storage"] == "stop"


def test_a_storage_that_creates_what_is_there_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lying(monkeypatch, publish=store.write)
    assert by(looked(str(tmp_path)))["create-only"] == "note"


def test_a_listing_that_lags_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    children = store.children
    lying(monkeypatch, children=lambda url: children(url)[:2])
    assert by(looked(str(tmp_path)))["listing"] == "stop"
    lying(monkeypatch, children=cache(children))
    assert by(looked(str(tmp_path)))["listing"] == "stop", "a removed file is still there"


@pytest.mark.parametrize(("kinds", "message"), [("403", "403"), ("ENOSPC", "space"), ("EROFS", "Read-only")])
def test_what_a_storage_refuses_is_one_line(kinds: str, message: str, tmp_path: Path) -> None:
    def work() -> list[Finding]:
        out = f"flaky://file/{tmp_path}"
        store.use(out, {"share": 1, "on": ["put"], "kinds": [kinds]})
        return looked(out)

    (findings,) = ranks(1, work)
    (one,) = findings
    assert (one.verdict, message in one.text, "\n" in one.text) == ("stop", True, False), one
    assert one.advice


@pytest.mark.parametrize(("seconds", "verdict"), [(0.5, "ok"), (120, "note"), (1200, "stop")])
def test_clocks_that_are_apart_are_told(seconds: float, verdict: str) -> None:
    assert storage.off(seconds).verdict == verdict


@pytest.mark.parametrize(("small", "write", "verdict"), [(0.01, 1e9, "ok"), (2.0, 1e9, "note"), (0.01, 1e6, "note")])
def test_a_slow_storage_is_told(small: float, write: float, verdict: str) -> None:
    assert storage.speed(small, write, 1e9).verdict == verdict


@pytest.mark.parametrize(
    ("free", "each", "verdict"),
    [
        (50 << 30, None, "ok"),
        (1 << 30, None, "note"),
        (50 << 30, 1 << 30, "ok"),
        (1 << 30, 1 << 20, "ok"),
        (5 << 30, 2 << 30, "note"),
        (50 << 30, 60 << 30, "stop"),
    ],
)
def test_room_is_held_against_the_checkpoints_of_the_plan(free: int, each: int | None, verdict: str) -> None:
    assert storage.room("runs/a", free, each, 3).verdict == verdict


@pytest.mark.parametrize(
    ("words", "count"),
    [
        (["steps=1000"], 3), (["steps=1000", "checkpoint.keep=1"], 2), (["steps=100"], 2), (["steps=1000", "checkpoint.keep=null"], 6),
        (["steps=1000", "checkpoint.best=eval_loss"], 4), (["steps=1000", "checkpoint.keep_every=500"], 5), (["steps=1000", "checkpoint.ephemeral=20"], 4),
    ],
)  # fmt: skip
def test_how_many_checkpoints_stand_at_a_time(words: list[str], count: int) -> None:
    assert storage.standing(plan(*words)) == count


def test_the_room_here_is_looked_at(tmp_path: Path) -> None:
    (one,) = storage.space(case(f"{tmp_path}/a/b"))
    assert "GiB free for" in one.text and "a checkpoint takes 10.5 MiB" in one.text
    assert list(storage.space(case("memory://a"))) == []


def state(out: Path) -> Finding:
    (one,) = storage.held(case(str(out)))
    return one


def changed(out: Path, **facts: object) -> None:
    token, record = lease._newest(str(out))
    lease._write(str(out), token, {**record, **facts})


def test_a_lease_is_free_held_left_or_of_another_host(tmp_path: Path) -> None:
    assert (state(tmp_path).verdict, "no run writes" in state(tmp_path).text) == ("ok", True)
    with lease.hold(str(tmp_path)):
        assert state(tmp_path).verdict == "stop"
        assert f"pid {os.getpid()}" in state(tmp_path).text
        changed(tmp_path, place="another boot/of another host")
        assert state(tmp_path).verdict == "note"
    assert "no run writes" in state(tmp_path).text
    facts: Mapping[str, object] = {"state": "held", "place": lease._place(), "pid": 1 << 22, "started": "1"}
    changed(tmp_path, **facts)
    assert (state(tmp_path).verdict, "which has ended" in state(tmp_path).text) == ("ok", True)
