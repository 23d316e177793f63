"""A time limit in the ways people write one, and the seconds of it that the save keeps."""

import pytest
from small import plan

from dtrain.errors import WordsError


@pytest.mark.parametrize("limit", ["5400", "90:00", "1:30:00", "0-01:30:00", "5400.0"])
def test_a_limit_is_seconds_or_a_clock(limit: str) -> None:
    made = plan(f"time_limit='{limit}'")
    assert made.time_limit == 5400
    assert made.stop_seconds == 5370


def test_without_a_limit_nothing_stops() -> None:
    assert plan().stop_seconds is None


@pytest.mark.parametrize(("words", "message"), [
    (["time_limit=soon"], "hours:minutes:seconds"), (["time_limit=1h"], "time_limit=3600"), (["time_limit=30"], "time_limit=90"), (["time_limit=0"], "> 0"),
    (["grace=-1"], "Type grace=0"),
])  # fmt: skip
def test_what_is_no_limit_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(WordsError, match=message):
        plan(*words)
