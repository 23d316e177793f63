"""Loggers of a user's own with the methods of before are refused, before anything runs."""

import pytest
from small import plan

from dtrain.errors import WordsError
from dtrain.logger import Logger


class Before:
    def __init__(self, out: str, steps: int) -> None: ...

    def log(self, step: int, scalars: object) -> None: ...

    def close(self) -> None: ...


class Derived(Logger):
    def __init__(self, out: str, steps: int) -> None: ...


def test_the_methods_of_before_are_named_with_those_of_now() -> None:
    with pytest.raises(WordsError) as caught:
        plan(f"logger.mine._target_={__name__}.Before", f"trust=[{__name__}]")
    assert "log is now scalars(step, values), close is now end(result)" in str(caught.value)
    assert plan(f"logger.mine._target_={__name__}.Derived", f"trust=[{__name__}]").loggers
