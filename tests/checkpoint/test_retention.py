"""What stays and what goes; and that nothing goes before something newer stands."""

import threading
from pathlib import Path

import pytest
from checkpoint.test_commit import attempt

from dtrain.checkpoint import commit as commits
from dtrain.checkpoint import retention
from dtrain.checkpoint.retention import Policy, Retention
from dtrain.errors import LeaseError, StoreError
from dtrain.storage import lease, store
from dtrain.storage.attempts import listed

NAME = "00000001-20260101T000000-0000000a-0001"


def kept(out: Path) -> list[int]:
    return sorted(one.step for one in listed(str(out)))


@pytest.mark.parametrize(
    ("policy", "scores", "stays"),
    [
        (Policy(10, 1), {}, [60]),
        (Policy(10, 2), {}, [50, 60]),
        (Policy(10, 0), {}, [60]),
        (Policy(10, None), {}, [10, 20, 30, 40, 50, 60]),
        (Policy(10, 1, keep_every=20), {}, [20, 40, 60]),
        (Policy(10, 1, best="eval_loss"), {10: 3.0, 20: 1.0, 30: 2.0, 40: float("nan"), 60: 4.0}, [20, 60]),
        (Policy(10, 1, best="eval_loss"), {10: 1.0, 20: 1.0}, [10, 60]),
        (Policy(10, 1, best="eval_loss"), {}, [60]),
        (
            Policy(10, 1, best="eval_accuracy", best_is="highest"),
            {10: 0.3, 20: 0.9, 30: 0.9, 40: float("nan"), 60: 0.1},
            [20, 60],
        ),
        (Policy(20, 2, ephemeral=10), {}, [40, 60]),
        (Policy(0, 2, ephemeral=20), {}, [30, 50, 60]),
        (Policy(20, 1, ephemeral=10, best="eval_loss"), {10: 0.0, 20: 1.0, 40: 2.0}, [10, 60]),
    ],
)
def test_a_policy_says_what_stays(policy: Policy, scores: dict[int, float], stays: list[int]) -> None:
    assert sorted(policy.staying([60, 50, 40, 30, 20, 10], scores)) == stays


def test_checkpoints_come_every_so_many_steps_and_between() -> None:
    assert [step for step in range(1, 13) if Policy(6, 1, ephemeral=4).due(step)] == [4, 6, 8, 12]
    assert not any(Policy(0, 1).due(step) for step in range(1, 10))


def test_the_best_stays_also_for_a_run_that_goes_on(tmp_path: Path) -> None:
    """The figure stands beside the commit."""
    for step, loss in ((10, 2.0), (20, 1.0), (30, 3.0)):
        folder = attempt(tmp_path, step, NAME)
        Retention(str(tmp_path), Policy(10, 1, best="eval_loss")).score(str(folder), {"eval_loss": loss, "other": 0.0})
    attempt(tmp_path, 40, NAME)
    Retention(str(tmp_path), Policy(10, 1, best="eval_loss")).apply(40)
    assert kept(tmp_path) == [20, 40]


def test_what_died_goes_when_a_newer_one_stands_and_what_is_newer_stays(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        (attempt(tmp_path, step, NAME) / commits.NAME).unlink(missing_ok=step != 20)
    attempt(tmp_path, 25, NAME)
    attempt(tmp_path, 5, NAME)
    (attempt(tmp_path, 8, NAME) / commits.NAME).write_text("{")
    Retention(str(tmp_path), Policy(10, 2)).apply(25)
    assert kept(tmp_path) == [5, 8, 25, 30], "step 30 may be of a run that is living"
    attempt(tmp_path, 40, NAME)
    Retention(str(tmp_path), Policy(10, 2)).apply(40)
    assert kept(tmp_path) == [25, 40]


def test_a_damaged_newer_one_stays_until_it_is_old(tmp_path: Path) -> None:
    attempt(tmp_path, 10, NAME)
    (attempt(tmp_path, 30, NAME) / commits.NAME).write_text("{")
    attempt(tmp_path, 20, NAME)
    Retention(str(tmp_path), Policy(10, 1)).apply(20)
    assert kept(tmp_path) == [20, 30]


def test_the_original_of_a_damaged_copy_stays(tmp_path: Path) -> None:
    """Whoever copies a checkpoint under another step gives the copy the same name."""
    for step in (10, 20, 99, 30):
        attempt(tmp_path, step, NAME)
    Retention(str(tmp_path), Policy(10, 2), damaged={f"step-00000099/{NAME}"}).apply(30)
    assert kept(tmp_path) == [20, 30, 99]


def test_a_link_is_never_followed(tmp_path: Path) -> None:
    """Whoever puts a link among the checkpoints must not make us empty what it leads to."""
    elsewhere, out = tmp_path / "elsewhere", tmp_path / "out"
    attempt(elsewhere, 1, NAME)
    attempt(out, 20, NAME)
    (out / "checkpoints" / "step-00000001").symlink_to(elsewhere / "checkpoints" / "step-00000001")
    (out / "checkpoints" / "step-00000002").mkdir()
    (out / "checkpoints" / "step-00000002" / "a").symlink_to(elsewhere)
    Retention(str(out), Policy(10, 1)).apply(20)
    assert kept(elsewhere) == [1]


def test_the_commit_goes_first_and_what_cannot_go_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (10, 20, 30):
        attempt(tmp_path, step, NAME)
    gone: list[str] = []
    remove = store.remove

    def stubborn(url: str) -> None:
        gone.append(url)
        if "00000010" in url and not url.endswith(commits.NAME):
            raise StoreError.during("remove", url, "it is not yours")
        remove(url)

    monkeypatch.setattr(store, "remove", stubborn)
    with pytest.raises(StoreError, match="it is not yours"):
        Retention(str(tmp_path), Policy(10, 1)).apply(30)
    assert [url.endswith(commits.NAME) for url in gone if "00000020" in url] == [True, False, False]
    assert not (tmp_path / "checkpoints" / "step-00000020").exists(), "the others went all the same"


def test_what_is_being_written_stays_whatever_its_step(tmp_path: Path) -> None:
    """A run that went back saves a step again, while what was old before is still being removed."""
    for step in (10, 20, 30):
        attempt(tmp_path, step, NAME)
    living = attempt(tmp_path, 20, "00000001-a-0009")
    (living / commits.NAME).unlink()
    (attempt(tmp_path, 20, "00000001-a-0008") / commits.NAME).unlink()
    retention = Retention(str(tmp_path), Policy(10, 1))
    retention.begin(str(living), 20)
    retention.apply(30)
    assert [one.name for one in listed(str(tmp_path)) if one.step == 20] == [living.name]


def test_whoever_lost_the_lease_removes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (10, 20, 30):
        attempt(tmp_path, step, NAME)

    def lost(out: str) -> None:
        raise LeaseError(f"{out} was taken over")

    monkeypatch.setattr(lease, "verify", lost)
    with pytest.raises(LeaseError):
        Retention(str(tmp_path), Policy(10, 1)).apply(30)
    assert kept(tmp_path) == [10, 20, 30]


def test_many_checkpoints_go_several_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a smaller `keep`: one after the other, a short run would end long before they are gone."""
    for step in range(10, 410, 10):
        attempt(tmp_path, step, NAME)
    together, remove = threading.Barrier(4), retention.remove

    def removes_with_others(url: str) -> None:
        together.wait(60)
        remove(url)

    monkeypatch.setattr(retention, "remove", removes_with_others)
    Retention(str(tmp_path), Policy(10, 4)).apply(400)
    assert kept(tmp_path) == [370, 380, 390, 400]
