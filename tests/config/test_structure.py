"""What a file says is held against a table, and the first place that is wrong is named."""

import pytest

from dtrain.config.structure import COUNT, FINITE, NUMBER, TEXT, Each, Optional, fault

SHAPE = {
    "step": COUNT,
    "files": Each({"name": TEXT, "size": COUNT}),
    "mesh?": Each(COUNT, named=True),
    "loss?": Optional(NUMBER),
    "stream?": Optional({"seen": COUNT}),
    "norm?": FINITE,
}
RIGHT = {"step": 3, "files": [{"name": "a", "size": 4}], "more": [None]}


@pytest.mark.parametrize(
    ("changed", "clause"),
    [
        ({}, ""),
        ({"mesh": {"tp": 2}, "loss": None}, ""),
        ({"step": "ten"}, "step is 'ten', not an integer >= 0"),
        ({"step": True}, "step is True, not an integer >= 0"),
        ({"step": -1}, "step is -1, not an integer >= 0"),
        ({"step": 10**30}, "step is a number too large, not an integer >= 0"),
        ({"files": None}, "files is None, not a list"),
        ({"files": [{"name": "a"}]}, "files[0] has no size"),
        ({"files": [{"name": 1, "size": 4}]}, "files[0].name is 1, not text"),
        ({"mesh": {"tp": 2.0}}, "mesh['tp'] is 2.0, not an integer >= 0"),
        ({"mesh": [1]}, "mesh is a list, not a mapping"),
        ({"loss": float("nan")}, "loss is nan, not a number or null"),
        ({"stream": None, "norm": 1e30}, ""),
        ({"stream": {"seen": None}}, "stream.seen is None, not an integer >= 0"),
        ({"stream": 3}, "stream is 3, not a mapping"),
        ({"norm": float("inf")}, "norm is inf, not a finite number"),
        ({"norm": 10**400}, "norm is a number too large, not a finite number"),
    ],
)
def test_the_first_place_that_is_wrong_is_named(changed: dict[str, object], clause: str) -> None:
    assert fault({**RIGHT, **changed}, SHAPE) == clause


@pytest.mark.parametrize("value", [None, 3, "x", []])
def test_what_is_no_mapping_is_said(value: object) -> None:
    assert fault(value, SHAPE).startswith("it is ")
