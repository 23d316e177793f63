"""The page: one HTML file that needs nothing else and asks nobody for anything.

Its data is JSON in a script element that is never run: `<`, `>` and `&` are escaped, so no value can close it. The
scripts put every value into the page as text, and the policy of the page allows these scripts, this style, and no
request (https://developer.mozilla.org/docs/Web/HTTP/CSP).
"""

import base64
import hashlib
import html
import json
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Any

FOLDER = Path(__file__).parent
SCRIPTS = {
    "run": ("page.js", "chart.js", "run.js"),
    "sweep": ("page.js", "chart.js", "curves.js", "parallel.js", "sweep.js"),
}
GENERATOR = b'<meta name="generator" content="dtrain report">'
"""Every page has it, within its first BEGINNING bytes."""
BEGINNING = 200


def document(data: Mapping[str, Any]) -> str:
    """The page of a run or a sweep, from its data, whose texts need not be escaped."""
    script = "\n".join((FOLDER / name).read_text("utf-8") for name in SCRIPTS[data["kind"]])
    style = (FOLDER / "page.css").read_text("utf-8")
    return Template((FOLDER / "page.html").read_text("utf-8")).substitute(
        title=html.escape(f"{data['name']} · dtrain"),
        style=style,
        script=script,
        style_hash=_hash(style),
        script_hash=_hash(script),
        data=embedded(data),
    )


def embedded(data: Mapping[str, Any]) -> str:
    """`data` as JSON that holds no character of HTML's syntax."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
