"""Which checkpoint is the newest: never one that hides work that was done later, and where it cannot be said, nothing is chosen and nothing removed."""

import shutil
from pathlib import Path

import pytest
from checkpoint.test_commit import attempt
from checkpoint.test_sharded import alone, commit, sharded, state_on

from dtrain.checkpoint import commit as commits
from dtrain.errors import StoreError
from dtrain.mesh import Mesh
from dtrain.storage import lease, store
from dtrain.verb import checkpoint as verb


def start(mesh: Mesh, out: Path, *steps: int, keep: int | None = 2) -> int:
    """One start of a run: take the lease, restore, save after these steps. The step it went on from."""
    with lease.hold(str(out)):
        state, checkpoint = state_on(mesh, steps=0), sharded(mesh, out, keep=keep)
        checkpoint.restore(state)
        begun = state.step
        for step in steps:
            state.step = step
            commit(checkpoint, state)
        return begun


def steps_of(out: Path) -> list[int]:
    return sorted(int(name.removeprefix("step-")) for name in store.children(str(out / "checkpoints")))


@pytest.fixture
def three_starts(tmp_path: Path) -> Path:
    """A run that was started three times: its leases are 1, 2 and 3."""
    alone(lambda mesh: [start(mesh, tmp_path / "a", step, keep=None) for step in (40, 80, 120)])
    return tmp_path / "a"


def test_what_is_trained_on_copied_checkpoints_is_newer_than_they_are(three_starts: Path, tmp_path: Path) -> None:
    b = tmp_path / "b"
    shutil.copytree(three_starts / "checkpoints", b / "checkpoints")
    assert alone(lambda mesh: [start(mesh, b, 240), start(mesh, b, 280)]) == [120, 240]
    assert steps_of(b) == [240, 280]
    assert commits.find(str(b))[1]["step"] == 280


def test_a_removed_folder_of_leases_makes_nothing_old_new_again(three_starts: Path) -> None:
    shutil.rmtree(three_starts / "lease")
    assert alone(lambda mesh: start(mesh, three_starts, 240)) == 120
    shutil.rmtree(three_starts / "lease")
    assert alone(lambda mesh: start(mesh, three_starts)) == 240


def test_checkpoints_of_two_runs_in_one_folder_are_refused_with_both_and_nothing_is_removed(
    three_starts: Path, tmp_path: Path
) -> None:
    b = tmp_path / "b"
    alone(lambda mesh: start(mesh, b, 240))
    shutil.copytree(three_starts / "checkpoints", b / "checkpoints", dirs_exist_ok=True)
    steps = steps_of(b)
    for act in (
        lambda: alone(lambda mesh: start(mesh, b, 280)),
        lambda: commits.find(str(b)),
        lambda: verb.run(["export", f"out={b}", f"to={tmp_path / 'x'}"]),
    ):
        with pytest.raises(
            (StoreError, AssertionError),
            match=r"two checkpoints claim to be the newest: step 240 \(.*\) .* step 120 \(.*copy that folder to",
        ):
            act()
    assert steps_of(b) == steps == [40, 80, 120, 240]
    assert verb.run(["export", f"out={b}", f"to={tmp_path / 'x'}", "step=240"]) == 0
    newest = next(path for path in (b / "checkpoints/step-00000120").iterdir())
    intended = next(path for path in (b / "checkpoints/step-00000240").iterdir())
    shutil.copytree(intended, tmp_path / "c/checkpoints/step-00000240" / intended.name)
    assert alone(lambda mesh: start(mesh, tmp_path / "c")) == 240, "as the message says"
    shutil.rmtree(intended.parent)
    assert commits.find(str(b))[0] == str(newest)


def test_a_table_of_such_a_folder_says_so(
    three_starts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    attempt(three_starts, 240, "00000001-20260101T000000-0000000a-0001")
    assert verb.run(["ls", f"out={three_starts}"]) == 0
    assert "two checkpoints claim to be the newest" in capsys.readouterr().out


def test_what_was_passed_over_as_damaged_is_no_rival_when_it_is_whole_again(three_starts: Path) -> None:
    """Files that were away for a while; the run went on from an older checkpoint meanwhile."""
    file = next((three_starts / "checkpoints/step-00000120").glob("*/*.safetensors"))
    away = file.rename(three_starts / "away")
    assert alone(lambda mesh: start(mesh, three_starts, 100, keep=None)) == 80
    away.rename(file)
    assert alone(
        lambda mesh: [start(mesh, three_starts), start(mesh, three_starts, 110), start(mesh, three_starts, 160)]
    ) == [100, 100, 110]
    assert steps_of(three_starts) == [110, 120, 160]
    alone(lambda mesh: start(mesh, three_starts, 200))
    assert steps_of(three_starts) == [160, 200], "it goes when what stays is newer in every way"


def test_what_has_done_more_steps_is_never_removed(tmp_path: Path) -> None:
    """Put there while the run was on its way."""

    def work(mesh: Mesh) -> None:
        with lease.hold(str(tmp_path)):
            state, checkpoint = state_on(mesh), sharded(mesh, tmp_path, keep=1)
            attempt(tmp_path, 50, "00000001-20260101T000000-0000000a-0001")
            for state.step in (10, 20, 30):
                commit(checkpoint, state)

    alone(work)
    assert steps_of(tmp_path) == [30, 50]
