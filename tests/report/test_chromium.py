"""The pages in a browser: nothing is asked for, nothing is complained of, and what one does with them works.

Without the packages chromium it is skipped: `apt-get install chromium`.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import Chromium, chromium
from reported import job, many, shown

pytestmark = [
    pytest.mark.campaign("documents"),
    pytest.mark.skipif(not shutil.which("chromium"), reason="there is no chromium: apt-get install chromium"),
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with chromium(tmp_path_factory.mktemp("browser")) as running:
        yield running


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("reports") / "s"
    many(root, 1000)
    shown(root)
    assert (root / "report.html").stat().st_size < 3_000_000
    return f"file://{root}/report.html"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    place = job(tmp_path_factory.mktemp("runs") / "a", "0.1", losses=[3.0, 2.5, 2.2, 2.0], status="spiked")
    shown(place)
    return f"file://{place}/report.html"


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
def test_it_opens_without_a_request_and_without_a_complaint_and_fits(
    browser: Chromium, sweep: str, run: str, width: int, dark: bool
) -> None:
    for url in (sweep, run):
        browser.open(url, width=width, dark=dark)
        assert browser.requests() == [url]
        assert browser.complaints() == []
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        drawn = "[...document.querySelectorAll('canvas')].every((c) => c.width > 0 && c.toDataURL().length > 1000)"
        assert browser.evaluate(drawn)


def test_texts_have_the_contrast_that_people_need(browser: Chromium, sweep: str) -> None:
    """At least 4.5, that of https://www.w3.org/TR/WCAG22/#contrast-minimum, of every text on what is behind it."""
    for dark in (False, True):
        browser.open(sweep, width=1440, dark=dark)
        assert browser.evaluate(CONTRAST) == []


CONTRAST = """(() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, at) => sum + v * [0.2126, 0.7152, 0.0722][at], 0);
  const behind = (element) => { for (let e = element; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor); if (c.length < 4 || c[3] > 0) return c; } };
  return [...document.querySelectorAll("main *")].filter((e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()) && e.offsetParent)
    .map((e) => [e.tagName, e.textContent.slice(0, 30), ...[light(parse(getComputedStyle(e).color)), light(behind(e))].sort((a, b) => b - a)])
    .filter(([, , a, b]) => (a + 0.05) / (b + 0.05) < 4.5);
})()"""


def test_what_can_be_pressed_has_a_name_and_the_keys_reach_it(browser: Chromium, sweep: str, run: str) -> None:
    for url in (sweep, run):
        browser.open(url, width=1440)
        unnamed = browser.evaluate(
            "[...document.querySelectorAll('button, input, select, canvas')].filter((e) => !(e.textContent.trim() || "
            "e.getAttribute('aria-label') || e.labels?.length)).map((e) => e.outerHTML)"
        )
        assert unnamed == []
        tree = browser.call("Accessibility.getFullAXTree")["nodes"]
        images = [node["name"]["value"] for node in tree if node.get("role", {}).get("value") in ("image", "img")]
        assert images and all(images)


def test_filter_sort_choice_and_stroke_change_all_parts_of_the_page(browser: Chromium, sweep: str) -> None:
    browser.open(sweep, width=1440)
    rows = "document.querySelectorAll('tbody tr').length"
    first = "document.querySelector('tbody tr td:nth-child(2)').textContent"
    assert browser.evaluate(rows) == 25 and browser.evaluate(first) == "1.000"
    browser.evaluate("[...document.querySelectorAll('th button')].find((b) => b.textContent === 'optim.lr').click()")
    browser.evaluate(
        "[...document.querySelectorAll('th button')].find((b) => b.textContent.startsWith('optim.lr')).click()"
    )
    assert browser.evaluate("document.querySelector('th[aria-sort=descending]').textContent") == "optim.lr ↓"
    assert browser.evaluate("document.querySelector('tbody td.mono').textContent") == "0.999"
    for text, count in (
        ("status=failed", 25),
        ("optim.lr=0.01..0.019", 10),
        ("optim.lr<0.005", 5),
        ("optim.lr=0.5,0.25", 2),
        ("no such", 0),
    ):
        browser.evaluate(
            f"(() => {{ const box = document.querySelector('input[type=search]'); box.value = {text!r}; box.dispatchEvent(new Event('input')); }})()"
        )
        assert browser.evaluate(rows) == count, text
    browser.evaluate("filterBy('', ''); change({ filter: '' })")
    card = "document.querySelector('.card h3').textContent"
    assert browser.evaluate(card) == "Best of 1,000 jobs"
    browser.evaluate("document.querySelector('.plot canvas').focus()")
    for kind in ("keyDown", "keyUp"):
        browser.call("Input.dispatchKeyEvent", type=kind, key="ArrowDown", code="ArrowDown", windowsVirtualKeyCode=40)
    assert browser.evaluate(card) == "Job 2 of 1,000"
    browser.evaluate("document.querySelectorAll('tbody button')[9].click()")
    assert browser.evaluate(card) != "Job 2 of 1,000"
    canvas = "document.querySelector('.wide canvas')"
    browser.evaluate(f"{canvas}.scrollIntoView({{ block: 'center' }})")
    left, top, height = browser.evaluate(
        f"(() => {{ const b = {canvas}.getBoundingClientRect(); return [b.left, b.top, b.height]; }})()"
    )
    browser.drag((left + 44, top + height - 20), (left + 44, top + height / 2))
    assert "optim.lr=" in browser.evaluate("document.querySelector('input[type=search]').value")
    assert "of 1,000 jobs" in browser.evaluate("document.querySelector('.bar span').textContent")
    assert browser.complaints() == []


def test_a_curve_of_one_point_is_a_dot(browser: Chromium, tmp_path: Path) -> None:
    job(tmp_path / "a", "0.1", losses=[3.0])
    shown(tmp_path / "a")
    browser.open(f"file://{tmp_path}/a/report.html", width=1440)
    dots = browser.evaluate(
        "(() => { const dots = []; Plot.prototype.dot = function (x, y) { dots.push([x, y]); }; "
        "for (const plot of plots) plot.redraw(); return dots; })()"
    )
    assert len(dots) >= browser.evaluate("document.querySelectorAll('canvas').length"), (
        "the held-out one has had its dots"
    )


def test_values_beyond_the_shown_range_are_told_at_the_end_of_their_axis(browser: Chromium, tmp_path: Path) -> None:
    root = tmp_path / "s"
    for number in range(20):
        job(root / f"{number}", f"0.{number:02}", eval_loss=1 + number / 20 if number < 18 else 4000.0 + number)
    shown(root)
    browser.open(f"file://{root}/report.html", width=1440)
    texts = browser.evaluate(
        "(() => { const texts = [], draw = CanvasRenderingContext2D.prototype.fillText; "
        "CanvasRenderingContext2D.prototype.fillText = function (text, ...rest) { texts.push(text); draw.call(this, text, ...rest); }; "
        "change({ figure: 0 }); return texts; })()"
    )
    assert "2 up to 4019" in texts


def test_a_run_shows_the_curve_of_the_metric_that_it_is_judged_by(browser: Chromium, tmp_path: Path) -> None:
    place = job(tmp_path / "a", "0.1", losses=[3.0, 2.5, 2.0])
    best = {"eval_f1": {"value": 0.8, "step": 2}}
    events = [{"time": 1005.0 + step, "event": "evaluated", "step": step, "eval_f1": value, "best": best}
              for step, value in ((1, 0.5), (2, 0.8), (3, 0.7))]  # fmt: skip
    with (place / "events.jsonl").open("a") as file:
        file.write("".join(json.dumps(event) + "\n" for event in events))
    shown(place)
    browser.open(f"file://{place}/report.html", width=1440)
    assert browser.evaluate("[...document.querySelectorAll('.lane h3')].map((e) => e.textContent)")[:3] == [
        "Events",
        "Loss",
        "F1",
    ]
    assert "0.8000 best eval_f1, step 2" in browser.evaluate(
        "document.querySelector('header').innerText.replace(/\\s+/g, ' ')"
    )
    assert browser.complaints() == []


def test_a_hostile_sweep_runs_nothing(browser: Chromium, tmp_path: Path) -> None:
    nasty = "<img src=x onerror=window.hit=1>"
    root = tmp_path / "s"
    for number in range(8):
        job(
            root / f"{nasty}{number}",
            f"'{nasty}{number}'",
            status="failed",
            files={"failure.json": f'{{"error": "{nasty}", "traceback": "</pre>{nasty}"}}'},
        )
    shown(root)
    url = f"file://{root}/report.html"
    browser.open(url, width=1440)
    assert browser.evaluate("window.hit") is None and browser.evaluate("document.querySelectorAll('img').length") == 0
    assert (browser.requests(), browser.complaints()) == ([url], [])
    assert nasty in browser.evaluate("document.body.innerText")
