"""docs/reports.md: each public report is in one line of the table, and the test that a line names exists."""

import re

from changed import ROOT

PAGE = (ROOT / "docs/reports.md").read_text()


def test_every_line_names_a_test_that_exists() -> None:
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = re.findall(r"^\|.*\| `(test_\w+)` \|$", PAGE, re.MULTILINE)
    assert len(named) == len(re.findall(r"#\d+.*\|$", PAGE, re.MULTILINE))
    assert [name for name in named if f"def {name}(" not in tests] == []


def test_every_report_is_in_one_line() -> None:
    reports = re.findall(r"[\w-]+#\d+", PAGE)
    assert len(reports) == len(set(reports)) >= 49
