"""<cache>/machine.json: read back whole, refused where it is of another machine, torn or hostile, each with a sentence."""

import json
import os
from pathlib import Path

import pytest
from cores import figures

from dtrain.cluster import detect, measured


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = measured.place()
    path.parent.mkdir()
    return path


def test_what_was_kept_is_read_back(file: Path) -> None:
    file.write_bytes(measured.document(2, figures()))
    assert measured.read(2) == (figures(), "")


def test_the_cluster_of_this_process_has_them(file: Path) -> None:
    here = detect()
    file.write_bytes(measured.document(here.cpus, figures()))
    assert (here.figures, here.unmeasured) == (None, "type dtrain doctor to measure it")
    assert (detect().figures, detect().unmeasured) == (figures(), "")


@pytest.mark.parametrize("changed", [{"processor": "another"}, {"cpus": 3}, {"torch": "1.0"}, {"version": 0}])
def test_figures_of_another_machine_are_not_used(file: Path, changed: dict[str, object]) -> None:
    file.write_text(json.dumps({"of": {**measured.identity(2), **changed}, "figures": figures()}))
    assert measured.read(2) == (None, f"{file} is of another machine or torch. Type dtrain doctor")


def test_a_torn_file_is_ignored_at_every_byte(file: Path) -> None:
    whole = measured.document(2, figures())
    for length in range(0, len(whole), 97):
        file.write_bytes(whole[:length])
        assert measured.read(2) == (None, f"{file} is torn. Type dtrain doctor")


@pytest.mark.parametrize(
    "wrong",
    [
        {"update": {"alone": 0, "whole": 1, "together": 1}},
        {"update": {"alone": -5.0, "whole": 1, "together": 1}},
        {"update": {"alone": float("nan"), "whole": 1, "together": 1}},
        {"update": {"alone": float("inf"), "whole": 1, "together": 1}},
        {"update": {"alone": 10**400, "whole": 1, "together": 1}},
        {"update": {"alone": True, "whole": 1, "together": 1}},
        {"update": 5},
        {"attention": {"alone": [], "whole": [[1, 1]], "together": [[1, 1]]}},
        {"attention": {"alone": [[2, 1], [1, 1]], "whole": [[1, 1]], "together": [[1, 1]]}},
        {"attention": {"alone": [[n + 1, 1] for n in range(99)], "whole": [[1, 1]], "together": [[1, 1]]}},
        {"product_fp32": {"alone": [[1, 1]], "whole": [[1, [[1, 1]]]], "together": [[1, [[1, 1]]]]}},
        {"product_fp32": {"alone": [[1, None]], "whole": [[1, [[1, 1]]]], "together": [[1, [[1, 1]]]]}},
        {"product_fp32": {"alone": [[1, [[1, -1]]]], "whole": [[1, [[1, 1]]]], "together": [[1, [[1, 1]]]]}},
        {"attention": {"alone": "x" * 9, "whole": [[1, 1]], "together": [[1, 1]]}},
        {"all_reduce": [[1, 2, 3]]},
        {"all_reduce": {"1": 2}},
        {"step": 61},
        {"step": "rm -r /"},
        {"more": 1},
    ],
)
def test_figures_out_of_bounds_are_ignored(file: Path, wrong: dict[str, object]) -> None:
    file.write_text(json.dumps({"of": measured.identity(2), "figures": {**figures(), **wrong}}))
    found, why = measured.read(2)
    assert found is None
    assert why.startswith(f"{file} is ignored, as ") and why.endswith(". Type dtrain doctor")


@pytest.mark.parametrize("text", ["[" * 60000, "null", "[]", '{"of": 1}', '{"of": {}}', " " * 70000, "\xff"])
def test_no_text_is_an_error(file: Path, text: str) -> None:
    file.write_text(text, "latin-1")
    found, why = measured.read(2)
    assert found is None and str(file) in why


def test_a_pipe_or_a_folder_in_its_place_is_not_opened(file: Path) -> None:
    os.mkfifo(file)
    assert measured.read(2) == (None, f"{file} is no file of dtrain doctor. Remove it and type dtrain doctor")
    file.unlink()
    file.mkdir()
    assert measured.read(2)[0] is None
