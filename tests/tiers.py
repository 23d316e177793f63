"""Of a test of many cases, a few run in its tier and the others are slow tests, or campaigns.

@pytest.mark.often("tp 2", "*-muon")  # ids of cases, or patterns of them
@pytest.mark.often("tp 2", others=pytest.mark.campaign("kills"))
"""

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

import pytest


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
