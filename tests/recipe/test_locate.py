"""Where a recipe lies, and what that place can lead to."""

import hashlib
from pathlib import Path

import pytest

from dtrain.config.files import recipes
from dtrain.errors import StoreError, WordsError
from dtrain.recipe.locate import LARGEST, Place, fetch, find, story

FAR = Place("https://host/a/b/mine.yaml?v=1", "remote")
BUCKET = Place("s3://bucket/a/mine.yaml", "remote")


@pytest.mark.parametrize(
    ("name", "beside", "url", "trust"),
    [
        ("mine.yaml", None, "mine.yaml", "local"),
        ("file:///a.yaml", None, "file:///a.yaml", "local"),
        ("s3://bucket/a.yaml", None, "s3://bucket/a.yaml", "remote"),
        ("base.yaml", Place("runs/mine.yaml", "local"), "runs/base.yaml", "local"),
        ("/abs/base.yaml", Place("runs/mine.yaml", "local"), "/abs/base.yaml", "local"),
        ("https://host/x.yaml", Place("runs/mine.yaml", "local"), "https://host/x.yaml", "remote"),
        ("base.yaml", FAR, "https://host/a/b/base.yaml", "remote"),
        ("../base.yaml", FAR, "https://host/a/base.yaml", "remote"),
        ("../../../../etc/base.yaml", BUCKET, "s3://bucket/etc/base.yaml", "remote"),
        ("s3://other/base.yaml", FAR, "s3://other/base.yaml", "remote"),
        ("base.yaml", Place("memory://mine.yaml", "remote"), "memory://base.yaml", "remote"),
        ("base.yaml", Place("memory://dir/mine.yaml", "remote"), "memory://dir/base.yaml", "remote"),
    ],
)
def test_a_name_leads_to_one_place(name: str, beside: Place | None, url: str, trust: str) -> None:
    place = find(name, beside)
    assert (place.url, place.trust) == (url, trust)


def test_built_in_recipes_go_by_their_names() -> None:
    assert {"digits", "shakespeare", "gpt2"} <= recipes().keys()
    assert (find("digits", FAR).trust, str(find("digits"))) == ("own", "recipes/digits.yaml")


@pytest.mark.parametrize(
    "name",
    [
        "/etc/passwd", "~/.netrc", "file:///etc/passwd", "file:/etc/passwd", "FILE:///etc/passwd", "local:///etc/passwd", "//etc/passwd", "data:,steps.1",
        "simplecache::file:///etc/x.yaml", "https://h/x.yaml::file:///y", "git:///repo/x.yaml", "memory://x.yaml", "flaky://file/etc/x.yaml",
    ],
)  # fmt: skip
def test_from_elsewhere_nothing_leads_to_this_machine(name: str) -> None:
    with pytest.raises(WordsError, match="a recipe from elsewhere cannot build on"):
        find(name, FAR)


def test_a_pin_holds_the_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(b"steps: 3\n")
    digest = hashlib.sha256(b"steps: 3\n").hexdigest()
    for pin in (digest, digest.upper(), digest[:32]):
        assert fetch(find(f"{tmp_path}/a.yaml@sha256:{pin}")) == b"steps: 3\n"
    (tmp_path / "a.yaml").write_bytes(b"steps: 4\n")
    with pytest.raises(
        WordsError,
        match=f"does not match its pin: it has @sha256:{hashlib.sha256(b'steps: 4' + bytes([10])).hexdigest()}",
    ):
        fetch(find(f"{tmp_path}/a.yaml@sha256:{digest}"))


@pytest.mark.parametrize("pin", ["", "abcdef12", "x" * 64, "a" * 65, "a" * 64 + " "])
def test_a_pin_that_holds_nothing_is_refused(pin: str) -> None:
    with pytest.raises(WordsError, match="32 to 64 hex digits"):
        find(f"a.yaml@sha256:{pin}")


def test_no_more_is_read_than_a_recipe_has(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(b"#" * (LARGEST + 1))
    with pytest.raises(WordsError, match="larger than 1 MiB"):
        fetch(Place(f"{tmp_path}/a.yaml", "local"))
    with pytest.raises(StoreError, match="/dev/zero: it is a device, not a file"):
        fetch(Place("/dev/zero", "local"))


def test_the_folder_of_a_run_stands_for_its_recipe(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("steps: 1")
    (tmp_path / "plan.yaml").write_text("steps: 2")
    assert fetch(find(str(tmp_path))) == b"steps: 1"


def test_what_is_not_there_is_told() -> None:
    with pytest.raises(StoreError, match="does not exist"):
        fetch(find("memory://nothing.yaml"))


def test_the_story_is_the_first_sentence() -> None:
    assert (
        story("# @package _global_\n#\n# A small thing. And more.\n# hardware x\nsteps: 1 # one\n")
        == "A small thing. And more."
    )
    assert story("steps: 1 # one") == ""


def test_a_place_is_shown_without_its_secrets() -> None:
    assert "hunter2" not in str(Place("https://host/a.yaml?X-Amz-Signature=hunter2", "remote"))
