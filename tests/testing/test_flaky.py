"""A storage that fails on purpose: what each fault looks like, the same again each time."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dtrain.errors import StoreError
from dtrain.storage import store
from dtrain.testing import flaky
from dtrain.testing.faults import Crash


@pytest.fixture(params=["memory", "file"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"flaky://memory{tmp_path}" if request.param == "memory" else f"flaky://file/{tmp_path}/run"


def told(root: str, **options: Any) -> Any:
    """The filesystem below the store, from here on with these faults."""
    store.use(root, options)
    return store.client(root)


def test_without_a_fault_it_is_the_storage_below(root: str, tmp_path: Path) -> None:
    told(root)
    for name in ("a", "deep/b"):
        store.publish(store.join(root, name), name.encode())
    assert store.children(root) == ["a", "deep"]
    assert store.sizes(root) == {"a": 1}
    assert store.find(root) == [f"{root}/a", f"{root}/deep/b"]
    assert store.read(f"{root}/deep/b") == b"deep/b"
    with pytest.raises(StoreError, match="other bytes are there"):
        store.publish(f"{root}/a", b"x")
    store.probe(root)
    store.download(f"{root}/a", tmp_path / "copy")
    store.upload(tmp_path / "copy", f"{root}/up")
    assert store.read(f"{root}/up") == b"a"
    store.remove(f"{root}/deep")
    assert store.children(root) == ["a", "up"]
    assert not store.exists(f"{root}/deep/b")


@pytest.mark.parametrize(
    "kind", [kind for kind in flaky.ERRORS if kind not in ("timeout", "cut", "429", "500", "502", "503", "504", "EIO")]
)
def test_what_will_not_pass_is_told_at_once(root: str, kind: str) -> None:
    below = told(root, share=1, kinds=[kind])
    with pytest.raises(StoreError):
        store.put(f"{root}/a", [b"x"])
    assert len(below.operations) == 1, "it is not tried again"


@pytest.mark.parametrize(
    "kind", ["timeout", "cut", "429", "500", "502", "503", "504", "EIO", "unanswered", "partial", "short", "delay"]
)
def test_what_may_pass_is_tried_again(root: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dtrain.storage.patience.LONGEST_WAIT", 0.001)
    told(root, share=0.5, kinds=kind, on="put", delay=0, seed=3)
    for number in range(8):
        store.put(f"{root}/{number}", [b"some", b"thing"])
        store.write(f"{root}/again", str(number).encode())
    assert {store.read(f"{root}/{number}") for number in range(8)} == {b"something"}
    assert store.read(f"{root}/again") == b"7"


@pytest.mark.parametrize("kind", ["unanswered", "cut", "503"])
def test_a_publish_whose_answer_is_lost_succeeds(root: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dtrain.storage.patience.LONGEST_WAIT", 0.001)
    for at in range(4):
        told(root, at=at, kinds=kind)
        store.publish(f"{root}/{at}", b"mine")
        with pytest.raises(StoreError) as caught:
            store.publish(f"{root}/{at}", b"theirs")
        assert caught.value.kind == "exists"
        assert store.read(f"{root}/{at}") == b"mine"


def test_patience_ends(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dtrain.storage.patience.LONGEST_WAIT", 0.05)
    told(root, share=1, kinds=503)
    with store.patience(0.3), pytest.raises(StoreError, match=r"answered 503 \(tried \d+ times in \d+ s\)") as caught:
        store.read(f"{root}/a")
    assert caught.value.kind == "busy"


def test_a_put_cut_short_in_silence_is_a_publish_that_failed(root: str) -> None:
    told(root, at=1, kinds="short")
    with pytest.raises(StoreError, match="other bytes are there"):
        store.publish(f"{root}/a", b"something")


def test_one_bit_is_turned(root: str) -> None:
    told(root, share=1, kinds="flip", on="put")
    store.put(f"{root}/a", [bytes(100)])
    assert sum(byte.bit_count() for byte in store.read(f"{root}/a")) == 1
    told(root, share=1, kinds="flip", on="get")
    assert sum(byte.bit_count() for byte in store.read(f"{root}/a")) in (0, 2)


def test_what_was_not_synced_is_seen_until_the_power_is_cut(root: str) -> None:
    below = told(root, share=1, kinds="unsynced")
    store.publish(f"{root}/a", b"one")
    store.put(f"{root}/deep/b", [b"two"])
    assert (store.read(f"{root}/a"), store.children(root), store.sizes(f"{root}/deep")) == (
        b"one",
        ["a", "deep"],
        {"b": 3},
    )
    below.cut_power()
    assert store.children(root) == []
    assert not store.exists(f"{root}/a")


def test_after_a_crash_nothing_is_done(root: str) -> None:
    below = told(root, at=2, kinds="torn", on="put")
    store.put(f"{root}/a", [b"one"])
    store.put(f"{root}/b", [b"two"])
    for _ in range(2):
        with pytest.raises(Crash):
            store.put(f"{root}/c", [b"three"])
    assert len(below.operations) == 3
    told(root)
    assert (store.sizes(root), store.read(f"{root}/c")) == ({"a": 3, "b": 3, "c": 2}, b"th")


def test_the_same_again_each_time(root: str) -> None:
    def failed(seed: int) -> list[bool]:
        told(root, share=0.5, kinds=["ENOSPC", "403"], seed=seed, on=["put"])
        found = []
        for number in range(20):
            try:
                store.put(f"{root}/{number}", [b"x"])
                found.append(False)
            except StoreError:
                found.append(True)
        return found

    assert failed(1) == failed(1) != failed(2)
    assert 3 < sum(failed(1)) < 17


def test_a_word_that_is_no_fault_is_told(root: str) -> None:
    store.use(root, {"kinds": "504,flop"})
    with pytest.raises(StoreError, match=r"there is no flop\. Allowed: timeout, cut, 401"):
        store.read(root)
    store.use(root, {})


def test_the_environment_tells_faults_to_any_process(tmp_path: Path) -> None:
    code = "import fsspec, sys; fsspec.open(sys.argv[1], 'wb').open()"
    url = f"flaky://file/{tmp_path}/a"
    done = subprocess.run(
        [sys.executable, "-c", code, url],
        env={"DTRAIN_FLAKY": "share=1 kinds=kill"},
        capture_output=True,
        timeout=300,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == -9, done.stderr
