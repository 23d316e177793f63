"""One writer per `out`: of any number of runs that start together one wins, and only a run that is gone is replaced."""

import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launching import started, steps_of, wait_for_step
from pool import ranks
from servers import Server
from until import until

from dtrain.errors import LeaseError, StoreError
from dtrain.launcher.process import fork
from dtrain.storage import attempts, lease, store

ELSEWHERE = {
    "id": "other",
    "owner": "ben@node8",
    "pid": 77,
    "place": "another machine",
    "started": "1",
    "begun": 1e9,
    "renewed": 1e9,
    "state": "held",
}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pace of the tests."""
    monkeypatch.setattr(lease, "RENEW_SECONDS", 0.02)
    monkeypatch.setattr(lease, "STALE_SECONDS", 0.3)
    monkeypatch.setattr(lease, "LOOK_SECONDS", 0.02)


@pytest.fixture(params=["file", "memory"])
def out(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    url = str(tmp_path / "run") if request.param == "file" else f"memory://{tmp_path.name}"
    yield url
    store.remove(url)


def plant(out: str, token: int, record: dict[str, Any]) -> str:
    url = store.join(out, "lease", f"{token:08d}.json")
    store.write(url, json.dumps(record).encode())
    return url


def held_by_the_dead(out: str) -> None:
    """A process that took the lease and ended without giving it back."""

    def take() -> None:
        owned = lease.hold(out)
        owned.__enter__()
        os._exit(0)

    os.waitpid(fork(take), 0)


def test_the_second_run_is_refused_with_the_owner_the_time_and_what_to_do(out: str) -> None:
    with lease.hold(out), pytest.raises(LeaseError) as refused, lease.hold(out):
        pass
    message = str(refused.value)
    assert f"pid {os.getpid()}" in message and "since 20" in message and "last renewed 20" in message
    assert message.startswith(f"out={out} is being written by another run: ")
    assert message.endswith(f"Wait for it, stop it (kill {os.getpid()}), or type out=<another place>.")


def test_a_lease_that_was_given_back_is_free_and_its_number_is_not_used_again(out: str) -> None:
    tokens = []
    for _ in range(3):
        with lease.hold(out) as token:
            tokens.append(token)
            assert os.environ["DTRAIN_LEASE"] == str(token)
        assert "DTRAIN_LEASE" not in os.environ
    assert tokens == [1, 2, 3]
    assert store.children(f"{out}/lease") == ["00000003.json"], "old ones are pruned"


def test_a_run_that_failed_gives_the_lease_back(out: str) -> None:
    with pytest.raises(ZeroDivisionError), lease.hold(out):
        raise ZeroDivisionError
    with lease.hold(out) as token:
        assert token == 2


def test_the_lease_of_a_dead_process_of_this_machine_is_taken_over_at_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    held_by_the_dead(str(tmp_path))
    with lease.hold(str(tmp_path)) as token:
        assert token == 2
    assert "took over" in capfd.readouterr().err


def test_a_number_that_now_belongs_to_another_process_is_not_the_owner(out: str) -> None:
    with lease.hold(out):
        record = json.loads(store.read(f"{out}/lease/00000001.json"))
    plant(out, 1, record | {"pid": 1, "state": "held"})  # alive, but begun at another time
    with lease.hold(out) as token:
        assert token == 2


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "there", [b"", b"{", b"[]", json.dumps(ELSEWHERE).encode()], ids=["empty", "torn", "a list", "another machine"]
)
def test_a_lease_of_another_machine_is_taken_over_when_it_is_not_renewed(out: str, there: bytes) -> None:
    url = plant(out, 5, {})
    store.write(url, there)
    with lease.hold(out) as token:
        assert token == 6


@pytest.mark.usefixtures("quick")
def test_a_lease_of_another_machine_that_is_renewed_is_kept_whatever_its_clock_says(
    out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its times are years ago."""
    monkeypatch.setattr(lease, "STALE_SECONDS", 120.0)  # whoever renews it may be slow
    stop = threading.Event()

    def renew() -> None:
        beat = 0
        while not stop.wait(0.05):
            plant(out, 5, ELSEWHERE | {"renewed": 1e9 + (beat := beat + 1)})

    plant(out, 5, ELSEWHERE)
    other = threading.Thread(target=renew)
    other.start()
    try:
        with (
            pytest.raises(LeaseError, match=r"ben@node8, pid 77, since 2001-.*stop it \(ssh ben@node8 kill 77\)"),
            lease.hold(out),
        ):
            pass
    finally:
        stop.set()
        other.join()


@pytest.mark.usefixtures("quick")
def test_an_older_lease_may_commit_no_more(out: str) -> None:
    lease.verify(out)  # nobody holds anything: parts may be used alone
    with pytest.raises(LeaseError, match="was taken over by another run: ben@node8"), lease.hold(out):
        lease.verify(out)
        plant(out, 2, ELSEWHERE)
        with pytest.raises(LeaseError, match="taken over by another run: ben@node8, pid 77"):
            lease.verify(out)
        time.sleep(120)  # the renewal sees it too
    with pytest.raises(LeaseError), lease.hold(out):  # and it is not taken back
        store.write(f"{out}/lease/00000003.json", json.dumps(ELSEWHERE).encode())
        time.sleep(120)


@pytest.mark.usefixtures("quick")
def test_a_run_that_ignores_the_wish_to_end_is_interrupted(out: str) -> None:
    asked: list[int] = []

    def note(number: int, frame: object) -> None:
        asked.append(number)
        if len(asked) > 1:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        with pytest.raises(LeaseError, match="taken over"), lease.hold(out):
            plant(out, 2, ELSEWHERE)
            for _ in range(12000):
                time.sleep(0.01)
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(asked) == 2


@pytest.mark.usefixtures("quick")
def test_storage_that_fails_for_a_while_is_a_warning(
    out: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    broken = threading.Event()
    real, calls = store.write, []

    def write(url: str, data: bytes) -> None:
        calls.append(url)
        if broken.is_set():
            raise StoreError.during("write", url, "no route")
        real(url, data)

    monkeypatch.setattr(store, "write", write)
    with lease.hold(out) as token:
        broken.set()
        seen = len(calls)
        until(lambda: len(calls) > seen + 5)
        broken.clear()
        first = json.loads(store.read(f"{out}/lease/{token:08d}.json"))["renewed"]
        until(lambda: json.loads(store.read(f"{out}/lease/{token:08d}.json"))["renewed"] > first)
    assert capfd.readouterr().err.count("cannot be renewed") == 1


@pytest.mark.usefixtures("quick")
def test_a_lease_whose_folder_was_removed_is_written_again(out: str) -> None:
    with lease.hold(out):
        store.remove(out)
        until(lambda: store.exists(f"{out}/lease/00000001.json"))


def test_after_the_folder_was_removed_another_owner_of_the_same_number_may_not_be_written_over(out: str) -> None:
    with lease.hold(out):
        store.remove(f"{out}/lease")
        lease.verify(out)
        plant(out, 1, ELSEWHERE)
        with pytest.raises(LeaseError, match="taken over by another run: ben@node8, pid 77"):
            lease.verify(out)
        store.remove(f"{out}/lease")


@pytest.mark.parametrize(
    "name", ["3.json", "00000000000000000000000003.json", "\u0663.json", "1000000000000000000000.json"]
)
def test_a_file_that_is_no_lease_stops_nobody(name: str, tmp_path: Path) -> None:
    store.write(str(tmp_path / "lease" / name), b"{}")
    with lease.hold(str(tmp_path)):
        assert (tmp_path / "lease/00000001.json").exists()


def test_a_high_number_is_followed_by_a_higher_one(tmp_path: Path) -> None:
    plant(str(tmp_path), 99_999_999, ELSEWHERE | {"state": "released"})
    with lease.hold(str(tmp_path)):
        assert (tmp_path / "lease/100000000.json").exists()
    assert attempts.lease_of("100000000-20260101T000000-0123abcd-0001") == 100_000_000


def test_a_number_that_was_pruned_long_ago_is_worth_nothing(out: str) -> None:
    """A process that read the newest number, slept, and finds the next one free again because others came and went."""
    for _ in range(3):
        with lease.hold(out):
            pass
    assert not lease._create(out, 2, lease._record())
    assert store.children(f"{out}/lease") == ["00000003.json"]


# the command

SLOW = ("model._target_=launching.Slow", "model.rank=0", "steps=20000", "checkpoint.every=2", "evaluate.every=0")


@pytest.mark.campaign("kills")
def test_a_second_command_is_refused_and_after_a_kill_the_next_goes_on(tmp_path: Path) -> None:
    words = [*SLOW, "devices=2"]
    first = started(tmp_path, *words)
    try:
        wait_for_step(tmp_path, 5)
        second = started(tmp_path, *words)
        output, _ = second.communicate(timeout=300)
        assert (
            second.returncode == 3
            and f"is being written by another run: {lease._record()['owner']}, pid {first.pid}, since" in output
        )
        first.kill()
        first.wait()
        assert first.stdout
        first.stdout.close()
        done = steps_of(tmp_path)[-1]
        third = started(tmp_path, *words, f"stop_after={done + 3}")
        output, _ = third.communicate(timeout=300)
        assert third.returncode == 0 and "took over" in output, output
        assert steps_of(tmp_path) == list(range(1, done + 4))
    finally:
        first.kill()


@pytest.mark.parametrize("devices", [1, 2])
def test_a_command_whose_lease_was_taken_over_ends_with_one_sentence(tmp_path: Path, devices: int) -> None:
    """It finds out when it commits, long before the lease is renewed."""
    run = started(tmp_path, *SLOW, f"devices={devices}")
    wait_for_step(tmp_path, 3)
    plant(str(tmp_path), 2, ELSEWHERE)
    output, _ = run.communicate(timeout=300)
    assert run.returncode == 3, output
    assert output.count("was taken over by another run: ben@node8, pid 77") == 1 and "Traceback" not in output, output


# races


def race(out: str, log: Path, runs: int, *, dies: bool) -> list[str]:
    """`runs` processes ask for `out` together; the winner writes until all have an answer. What each was told."""
    gate, answers = os.pipe(), os.pipe()

    def one() -> None:
        os.close(gate[1])
        os.read(gate[0], 1)  # returns in all of them at once, when the test closes its end
        try:
            owned = lease.hold(out)
            token = owned.__enter__()
        except LeaseError:
            os.write(answers[1], b"refused\n")
            return
        with log.open("a", buffering=1) as file:
            file.write(f"{token} begins\n")
            os.write(answers[1], b"won\n")
            until(lambda: log.with_suffix(".over").exists())
            lease.verify(out)
            file.write(f"{token} ends\n")
        if dies:
            os._exit(0)
        owned.__exit__(None, None, None)

    log.with_suffix(".over").unlink(missing_ok=True)
    pids = [fork(one) for _ in range(runs)]
    os.close(gate[0])
    os.close(gate[1])
    os.close(answers[1])
    problems: list[str] = []
    with os.fdopen(answers[0]) as pipe:
        for _ in range(runs):
            problems.append(pipe.readline().strip())
    log.with_suffix(".over").touch()
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * runs
    return sorted(problems)


@pytest.mark.parametrize(
    "races", [8, pytest.param(30, marks=pytest.mark.campaign("kills")), pytest.param(500, marks=pytest.mark.slow)]
)
def test_of_runs_that_start_together_one_wins(tmp_path: Path, races: int) -> None:
    """Every race finds what the one before left: a lease given back, or that of a dead process."""
    chance, log = random.Random(1), tmp_path / "log"
    for _ in range(races):
        assert race(str(tmp_path / "run"), log, 4, dies=chance.random() < 0.5) == ["refused"] * 3 + ["won"]
    assert log.read_text().splitlines() == [
        f"{token} {what}" for token in range(1, races + 1) for what in ("begins", "ends")
    ]


def on_a_server(out: str, races: int, options: dict[str, Any] | None) -> list[str]:
    """In a process of its own: clients start threads, and the test's process must not have one."""
    if options:
        store.use(out, options)
    rank = int(os.environ["RANK"])
    answers = []
    for number in range(races):
        url = f"{out}/{number}"
        store.write(f"{url}/ready-{rank}", b"")
        until(lambda url=url: store.exists(f"{url}/ready-{1 - rank}"))  # type: ignore[misc]
        try:
            with lease.hold(url):
                lease.verify(url)
                store.write(f"{url}/answered-{rank}", b"")
                until(lambda url=url: store.exists(f"{url}/answered-{1 - rank}"))  # type: ignore[misc]
            answers.append("won")
        except LeaseError:
            store.write(f"{url}/answered-{rank}", b"")
            answers.append("refused")
    return answers


@pytest.mark.campaign("network")
@pytest.mark.parametrize(("faults", "races"), [(0.0, 5), (0.2, 1), pytest.param(0.2, 30, marks=pytest.mark.slow)])
def test_on_object_storage_one_wins(server: Server, faults: float, races: int) -> None:
    """Also when the storage fails now and then, or creates a file and cannot say so."""
    url = f"{server.url}/lease-{os.getpid()}-{faults}-{races}"
    with server.failing(share=faults, kinds=("503", "cut", "lost")) as port:
        for pair in zip(*ranks(2, on_a_server, url, races, server.options(port) if faults else None), strict=True):
            assert sorted(pair) == ["refused", "won"]


class Late:
    """A storage that lists a file `after` so many listings, or never."""

    def __init__(self, after: float) -> None:
        self.after, self.seen, self.children = after, dict[str, int](), store.children

    def __call__(self, url: str) -> list[str]:
        there = self.children(url)
        for name in there:
            self.seen[name] = self.seen.get(name, 0) + 1
        return [name for name in there if self.seen[name] > self.after]


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[str]:
    url = f"memory://{tmp_path.name}"
    yield url
    store.remove(url)


@pytest.mark.usefixtures("quick")
def test_a_lease_is_taken_on_storage_that_lists_late(
    memory: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By create-only files: once, with no other number, and what it wrote before is listed when the run begins."""
    late = Late(after=6)
    monkeypatch.setattr(store, "children", late)
    for number in (1, 2, 3):
        with lease.hold(memory) as token:
            assert token == number
            assert late.seen[f"{token:08d}.json"] > 6
            lease.verify(memory)
            with pytest.raises(LeaseError, match="is being written by another run"), lease.hold(memory):
                pass
    assert "took over" not in capsys.readouterr().err


@pytest.mark.usefixtures("quick")
def test_a_storage_that_never_lists_is_refused_with_a_sentence(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "LISTED_SECONDS", 0.1)
    monkeypatch.setattr(store, "children", Late(after=float("inf")))
    with (
        pytest.raises(LeaseError, match=r"does not list a file that was written .* Type out=<a place"),
        lease.hold(memory),
    ):
        pass
    monkeypatch.undo()
    assert store.children(store.join(memory, "lease")) == []


@pytest.mark.usefixtures("quick")
def test_a_lease_that_is_listed_after_it_was_removed_is_no_lease(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    url, children = plant(memory, 7, ELSEWHERE), store.children
    store.remove(url)
    monkeypatch.setattr(store, "children", lambda folder: [*children(folder), "00000007.json"])
    with lease.hold(memory) as token:
        assert token == 8
