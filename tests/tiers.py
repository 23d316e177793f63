"""Of a test of many cases, a few run in its tier and the others are slow tests, or campaigns.

@pytest.mark.often("tp 2", "*-muon")  # ids of cases, or patterns of them
@pytest.mark.often("tp 2", others=pytest.mark.campaign("kills"))

A test of another tier than the default may take longer.
"""

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

import pytest

SECONDS = {"slow": 3600, "campaign": 900, "gpu": 300}
"""Limit of a test by its tier; of the default tier it is `timeout` in pyproject.toml."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        seconds = next((limit for tier, limit in SECONDS.items() if item.get_closest_marker(tier)), None)
        if seconds and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(seconds))


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem() -> Iterator[Any]:
    made = yield
    if isinstance(made, list) and made and (mark := made[0].get_closest_marker("often")):
        names = [item.callspec.id for item in made]
        if idle := [each for each in mark.args if not any(fnmatchcase(name, each) for name in names)]:
            raise pytest.Collector.CollectError(f"often: no case of {made[0].originalname} is {idle}, but {names}")
        for item, name in zip(made, names, strict=True):
            if not any(fnmatchcase(name, each) for each in mark.args):
                item.add_marker(mark.kwargs.get("others", "slow"))
    return made
