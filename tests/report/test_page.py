"""The page is one file that needs nothing, asks for nothing, and takes every value as a value."""

import base64
import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from reported import data, job, shown

import dtrain
from dtrain.report import page

ROOM = Path(dtrain.__file__).parent / "report"
NASTY = [
    "</script><script>alert(1)</script>",
    "<!--",
    "]]>",
    "&lt;",
    "\u2028\u2029",
    "\x00\x1b[31m",
    "'\"`${x}",
    "\ud800",
    "<img src=x onerror=alert(1)>",
]


class Parts(HTMLParser):
    """Elements with their attributes, and the text of each script and style."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.elements and self.elements[-1][0] in ("script", "style"):
            self.texts.append(data)


def a_page(tmp_path: Path, kind: str) -> str:
    place = job(tmp_path / "s" / "a", "0.1") if kind == "run" else job(tmp_path / "s" / "a", "0.1").parent
    shown(place)
    return (place / "report.html").read_text()


@pytest.mark.parametrize("kind", ["run", "sweep"])
def test_nothing_in_it_asks_for_anything(kind: str, tmp_path: Path) -> None:
    text = a_page(tmp_path, kind)
    parts = Parts(text)
    policy = next(
        values["content"] for tag, values in parts.elements if values.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy and policy.startswith("default-src 'none'; ")
    addresses = [
        values[name]
        for _, values in parts.elements
        for name in ("src", "href", "action", "srcset", "data")
        if name in values
    ]
    assert addresses == ["data:,"], "an icon of its own, so that no browser asks for one"
    assert not re.search(r"url\(|@import|fetch\(|XMLHttpRequest|WebSocket|EventSource|sendBeacon|import\(", text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
        "values are texts"
    )


@pytest.mark.parametrize("kind", ["run", "sweep"])
def test_its_policy_allows_its_own_scripts_and_style_and_no_other(kind: str, tmp_path: Path) -> None:
    parts = Parts(a_page(tmp_path, kind))
    policy = str(
        next(values["content"] for _, values in parts.elements if values.get("http-equiv") == "Content-Security-Policy")
    )
    ours = {
        "style-src": [text for text in parts.texts if ":root" in text],
        "script-src": [text for text in parts.texts if '"use strict"' in text],
    }
    for rule, [text] in ours.items():
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{rule} 'sha256-{digest}';" in policy


def test_no_value_leaves_its_place() -> None:
    names = "".join(NASTY)
    text = page.document({"kind": "sweep", "name": names, "values": [NASTY, {names: names}]})
    assert data(text) == {"kind": "sweep", "name": names, "values": [NASTY, {names: names}]}
    assert [tag for tag, _ in Parts(text).elements].count("script") == 2
    assert "<img" not in text


def test_a_page_is_small(tmp_path: Path) -> None:
    assert len(a_page(tmp_path, "sweep")) < 70_000
    assert len(a_page(tmp_path / "other", "run")) < 70_000


def test_every_script_is_of_a_page() -> None:
    assert {path.name for path in ROOM.glob("*.js")} == {name for names in page.SCRIPTS.values() for name in names}
    assert all(len(path.read_text().splitlines()) <= 400 for path in ROOM.glob("*.*s*"))
