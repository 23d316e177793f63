"""COMMIT.json: written once, last; what does not verify is no checkpoint."""

import json
from pathlib import Path
from typing import Any

import pytest

from dtrain.checkpoint import commit
from dtrain.errors import StoreError
from dtrain.storage.attempts import folder as folder_of
from dtrain.storage.attempts import listed

SHARD = {"name": "rank-0.safetensors", "size": 4, "sha256": "0" * 64}


def body(step: int, **changed: Any) -> dict[str, Any]:
    return {
        "step": step,
        "facts": {"step": step, "optim": {}},
        "files": [SHARD],
        "tensors": {"w": {"shape": [4, 2], "dtype": "torch.float32"}},
        "pieces": [piece([0, 0], [1, 2]), piece([1, 0], [3, 1]), piece([1, 1], [3, 1])],
        **changed,
    }


def piece(offset: list[int], shape: list[int], **changed: Any) -> dict[str, Any]:
    return {"name": "w", "key": f"w{offset}", "file": "rank-0.safetensors", "offset": offset, "shape": shape, **changed}


def attempt(out: Path, step: int, name: str = "a", **changed: Any) -> Path:
    """A committed attempt with one file of four bytes."""
    folder = Path(folder_of(str(out), step)) / name
    folder.mkdir(parents=True)
    (folder / "rank-0.safetensors").write_bytes(b"1234")
    commit.write(str(folder), body(step, **changed))
    return folder


def test_what_is_written_is_read(tmp_path: Path) -> None:
    assert commit.read(str(attempt(tmp_path, 3)))["pieces"] == body(3)["pieces"]


def test_facts_of_a_run_are_read(tmp_path: Path) -> None:
    for step, stream in enumerate(
        ({"seen": 32, "batch": 8, "passed": 1, "passed_over": [40]}, {"seen": 32, "batch": 8, "passed": 0}, None), 3
    ):
        facts = {"step": step, "optim": {}, "stream": stream, "spikes": GUARD, "scale": {"value": 2.0**70, "good": 0}}
        assert commit.read(str(attempt(tmp_path, step, facts=facts)))["facts"] == facts


def test_a_checkpoint_in_the_place_of_another_is_passed_over(tmp_path: Path) -> None:
    attempt(tmp_path, 3)
    attempt(tmp_path, 7).parent.rename(tmp_path / "checkpoints/step-00000009")
    chosen, damaged = commit.first(commit.candidates(str(tmp_path)))
    assert chosen and chosen[1]["step"] == 3
    assert len(damaged) == 1 and "it is of step 7" in damaged[0][1]


def test_a_commit_is_never_replaced(tmp_path: Path) -> None:
    folder = attempt(tmp_path, 3)
    with pytest.raises(StoreError, match=r"COMMIT\.json"):
        commit.write(str(folder), body(4))
    assert commit.read(str(folder))["step"] == 3


def cut(folder: Path) -> None:
    path = folder / commit.NAME
    path.write_bytes(path.read_bytes()[:-20])


def changed(folder: Path) -> None:
    path = folder / commit.NAME
    path.write_text(path.read_text().replace('"step": 3', '"step": 9'))


def without_digest(folder: Path) -> None:
    document = json.loads((folder / commit.NAME).read_text())
    del document["digest"]
    (folder / commit.NAME).write_text(json.dumps(document))


DAMAGES: dict[str, tuple[Any, str]] = {
    "cut": (cut, "damaged"),
    "changed": (changed, "its digest differs"),
    "a list": (lambda folder: (folder / commit.NAME).write_text("[]"), "damaged"),
    "no digest": (without_digest, "damaged"),
    "no shard": (
        lambda folder: (folder / "rank-0.safetensors").unlink(),
        "rank-0.safetensors is missing or has another size",
    ),
    "half a shard": (
        lambda folder: (folder / "rank-0.safetensors").write_bytes(b"12"),
        "rank-0.safetensors is missing or has another size",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_one_is_named_and_passed_over(tmp_path: Path, damage: str) -> None:
    good, bad = attempt(tmp_path, 2), attempt(tmp_path, 3)
    act, message = DAMAGES[damage]
    act(bad)
    with pytest.raises(StoreError, match=message) as caught:
        commit.read(str(bad))
    assert str(bad) in str(caught.value)
    chosen, damaged = commit.first(commit.candidates(str(tmp_path)))
    assert chosen is not None
    assert chosen[0] == str(good)
    assert len(damaged) == 1
    assert damaged[0] == (str(bad), damaged[0][1]) and message in damaged[0][1]


def position(**changed: Any) -> dict[str, Any]:
    """The facts of a run that has done three steps of eight samples, and has passed over a batch."""
    return {"step": 3, "optim": {}, "stream": {"seen": 32, "batch": 8, "passed": 1, "passed_over": [40], **changed}}


POSITIONS: dict[str, tuple[dict[str, Any], str]] = {
    "samples are negative": ({"seen": -8}, "facts.stream.seen is -8, not an integer >= 0"),
    "samples are beyond all data": (
        {"seen": 10**30},
        "facts.stream.seen is a number too large, not an integer >= 0",
    ),
    "samples are a fraction": ({"seen": 160.5}, "facts.stream.seen is 160.5, not an integer >= 0"),
    "a batch passed over is null": (
        {"passed_over": [None]},
        r"facts.stream.passed_over\[0\] is None, not an integer >= 0",
    ),
    "samples are more than the steps": (
        {"seen": 40},
        "it has seen 40 samples, but 3 steps and 1 skipped batches of 8 samples are 32",
    ),
    "samples are fewer than the steps": (
        {"batch": 16},
        "it has seen 32 samples, but 3 steps and 1 skipped batches of 16 samples are 64",
    ),
}
GUARD: dict[str, Any] = {"norms": [1.0, 1e30], "losses": [2.0, -1.0], "row": 0}
GUARDS: dict[str, tuple[dict[str, Any], str]] = {
    "norms are null": ({"norms": [None]}, r"facts.spikes.norms\[0\] is None, not a finite number"),
    "losses are not finite": ({"losses": [float("nan"), 1.0]}, r"facts.spikes.losses\[0\] is nan, not a finite number"),
    "norms are more than losses": ({"losses": []}, "facts.spikes has 2 norms and 0 losses"),
    "the row is negative": ({"row": -1}, "facts.spikes.row is -1, not an integer >= 0"),
}
PLAIN = "is not a plain file name"
COVERED = "the pieces of w do not cover it exactly once"
HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "a path": ({"files": [SHARD | {"name": "../../../secret"}]}, PLAIN),
    "an absolute path": ({"files": [SHARD | {"name": "/etc/passwd"}]}, PLAIN),
    "a url": ({"files": [SHARD | {"name": "memory://x"}]}, PLAIN),
    "a name of another system": ({"files": [SHARD | {"name": "..\\secret"}]}, PLAIN),
    "a list as a name": ({"files": [SHARD | {"name": ["a"]}]}, "name is a list, not text"),
    "one file twice": ({"files": [SHARD, SHARD]}, "is listed twice"),
    "a size below zero": ({"files": [SHARD | {"size": -1}]}, "size is -1, not an integer >= 0"),
    "a size that is no number": ({"files": [SHARD | {"size": float("nan")}]}, "size is nan, not an integer >= 0"),
    "a digest that is none": ({"files": [SHARD | {"sha256": None}]}, "damaged"),
    "no files": ({"files": None}, "damaged"),
    "facts of another step": ({"facts": {"step": 9, "optim": {}}}, "it is of step 3, its facts of step 9"),
    **{
        f"a stream whose {name}": ({"facts": position(**changed)}, clause)
        for name, (changed, clause) in POSITIONS.items()
    },
    **{
        f"a window of spikes whose {name}": (
            {"facts": {"step": 3, "optim": {}, "spikes": {**GUARD, **changed}}},
            clause,
        )
        for name, (changed, clause) in GUARDS.items()
    },
    "a loss scale that is none": (
        {"facts": {"step": 3, "optim": {}, "scale": {"value": None, "good": 1}}},
        "facts.scale.value is None, not a finite number",
    ),
    "attempts passed over that are none": ({"passed_over": [None]}, r"passed_over\[0\] is None, not text"),
    "facts that are none": ({"facts": "x"}, "facts is 'x', not a mapping"),
    "a hole": ({"pieces": body(3)["pieces"][1:]}, COVERED),
    "an overlap": ({"pieces": [piece([0, 0], [2, 2]), piece([1, 0], [2, 2])]}, COVERED),
    "one piece over another": ({"pieces": [piece([0, 0], [4, 1]), piece([0, 0], [4, 1])]}, COVERED),
    "a piece outside": ({"pieces": [piece([1, 0], [4, 2])]}, COVERED),
    "a piece of another number of dims": ({"pieces": [piece([0], [8])]}, COVERED),
    "an offset below zero": ({"pieces": [piece([-1, 0], [4, 2])]}, "is -1, not an integer >= 0"),
    "a piece of nothing": ({"pieces": [piece([0, 0], [4, 2], name="v")]}, "damaged"),
    "a piece that lies nowhere": (
        {"pieces": [piece([0, 0], [4, 2], file="rank-1.safetensors")]},
        "has no file or no tensor",
    ),
    "a shape beyond all memory": (
        {"tensors": {"w": {"shape": [10**30, 10**30], "dtype": "torch.float32"}}},
        "a number too large",
    ),
    "a shape with a fraction": (
        {"tensors": {"w": {"shape": [4.0, 2], "dtype": "torch.float32"}}},
        "is 4.0, not an integer >= 0",
    ),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_what_a_commit_must_not_say_is_refused_in_one_line(tmp_path: Path, kind: str) -> None:
    """Its digest is right: whoever wrote it knows the format."""
    (tmp_path / "secret").write_bytes(b"1234")
    changed, message = HOSTILE[kind]
    with pytest.raises(commit.DamagedError, match=message) as caught:
        commit.read(str(attempt(tmp_path, 3, **changed)))
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 1000


TEXTS = {
    "nested": b"[" * 100_000,
    "a number without end": b'{"step": ' + b"9" * 10_000 + b"}",
    "no text": bytes(range(256)),
    "pickle": b"\x80\x04cos\nsystem\n.",
}


@pytest.mark.parametrize("kind", TEXTS)
def test_bytes_that_are_no_commit_are_refused_in_one_line(tmp_path: Path, kind: str) -> None:
    folder = attempt(tmp_path, 3)
    (folder / commit.NAME).write_bytes(TEXTS[kind])
    with pytest.raises(commit.DamagedError) as caught:
        commit.read(str(folder))
    assert len(str(caught.value).splitlines()) == 1


def test_a_name_that_stands_twice_is_refused(tmp_path: Path) -> None:
    """The digest is that of what a reader who takes the last one sees."""
    folder = attempt(tmp_path, 3)
    path = folder / commit.NAME
    path.write_text(path.read_text().replace('{"format": 1,', '{"format": 1, "step": 4,'))
    with pytest.raises(commit.DamagedError, match="it has a name twice"):
        commit.read(str(folder))


def test_a_commit_without_end_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = attempt(tmp_path, 3)
    monkeypatch.setattr(commit, "LARGEST", 100)
    with pytest.raises(commit.DamagedError, match=r"it has \d+ bytes"):
        commit.read(str(folder))


def test_thousands_of_pieces_are_checked_at_once(tmp_path: Path) -> None:
    pieces = [piece([row, column], [1, 1], key=f"{row}.{column}") for row in range(200) for column in range(20)]
    assert (
        len(
            commit.read(
                str(attempt(tmp_path, 3, tensors={"w": {"shape": [200, 20], "dtype": "torch.float32"}}, pieces=pieces))
            )["pieces"]
        )
        == 4000
    )


def test_a_newer_format_is_refused_by_its_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit, "FORMAT", 2)
    folder = attempt(tmp_path, 3)
    monkeypatch.undo()
    with pytest.raises(StoreError, match="format 2, this version reads 1"):
        commit.read(str(folder))


def test_what_was_never_committed_is_passed_over_in_silence(tmp_path: Path) -> None:
    attempt(tmp_path, 2)
    (attempt(tmp_path, 3) / commit.NAME).unlink()
    (tmp_path / "checkpoints" / "notes.txt").write_text("mine")
    chosen, damaged = commit.first(commit.candidates(str(tmp_path)))
    assert chosen is not None
    assert (chosen[1]["step"], damaged) == (2, [])


def test_the_newest_step_wins_and_of_one_step_the_newest_attempt(tmp_path: Path) -> None:
    early, late = "20250101T000000-0000000b", "20250102T000000-0000000a"
    for step, name in ((2, early), (10, early), (10, late), (9, "20260101T000000-0000000c")):
        attempt(tmp_path, step, name)
    chosen, _ = commit.first(commit.candidates(str(tmp_path)))
    assert chosen is not None
    assert chosen[0].endswith(f"step-00000010/{late}")


def test_what_a_newer_lease_wrote_is_newer_whatever_its_step(tmp_path: Path) -> None:
    """A run that was stalled while another took over, and committed too late."""
    for step, name in (
        (10, "00000003-20250101T000000-0000000b-0001"),
        (8, "00000004-20240101T000000-0000000a-0001"),
        (12, "20250101T000000-0000000b"),
    ):
        attempt(tmp_path, step, name)
    assert [one.step for one in listed(str(tmp_path))] == [8, 10, 12]


def test_folders_with_names_of_others_are_passed_over(tmp_path: Path) -> None:
    attempt(tmp_path, 3)
    for name in ("step-", "step-\u00b2", "step-00000004x", "step-" + "9" * 100, "step--0000001"):
        (tmp_path / "checkpoints" / name / "a").mkdir(parents=True)
    assert [one.step for one in listed(str(tmp_path))] == [3]


def test_nothing_is_nothing(tmp_path: Path) -> None:
    assert commit.first(commit.candidates(str(tmp_path / "none"))) == (None, [])
