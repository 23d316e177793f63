"""Text of files and of other processes is UTF-8 in every locale: whoever reads or writes it says so."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import dtrain

ROOT = Path(dtrain.__file__).parents[1]
TAKES = {"read_text": 1, "write_text": 2}
"""Method -> the number of arguments with which its encoding comes."""
MODES = frozenset("rwaxt+")


def unsaid(source: str) -> Iterator[int]:
    """The lines of calls that leave an encoding to the locale."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or "encoding" in {keyword.arg for keyword in node.keywords}:
            continue
        is_builtin = isinstance(node.func, ast.Name)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        named = [keyword.value for keyword in node.keywords if keyword.arg == "mode"]
        texts = [each.value for each in (*node.args[:2], *named) if isinstance(each, ast.Constant)]
        modes = [text for text in texts if isinstance(text, str) and text and {*text} <= MODES | {"b"}]
        is_text = "b" not in "".join(modes) if modes else is_builtin
        if (
            (name in TAKES and len(node.args) < TAKES[name])
            or (name in ("open", "fdopen") and is_text)
            or (name in ("run", "Popen", "check_output") and "text" in {keyword.arg for keyword in node.keywords})
        ):
            yield node.lineno


@pytest.mark.parametrize(
    "call",
    [
        "Path(a).read_text()",
        "a.write_text(b)",
        "open(a)",
        "a.open('w')",
        "open(a, mode='r')",
        "subprocess.run(a, text=True)",
    ],
)
def test_an_encoding_of_the_locale_is_seen(call: str) -> None:
    assert list(unsaid(call)) == [1]


def test_every_text_has_an_encoding() -> None:
    files = [*(ROOT / "dtrain").rglob("*.py"), *(ROOT / "project").rglob("*.py")]
    found = {str(path.relative_to(ROOT)): [*unsaid(path.read_text("utf-8"))] for path in files}
    assert not {name: lines for name, lines in found.items() if lines}
