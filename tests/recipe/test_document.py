"""YAML becomes what its writer meant, or one sentence with the line."""

import math

import pytest

from dtrain.recipe import document
from dtrain.recipe.document import Slip, parse


def slip(text: str | bytes) -> Slip:
    with pytest.raises(Slip) as caught:
        parse(text if isinstance(text, bytes) else text.encode())
    return caught.value


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("no", "no"), ("on", "on"), ("y", "y"), ("true", True), ("False", False), ("~", None), ("", None), ("null", None),
        ("1e-3", 1e-3), ("1E5", 1e5), (".5", 0.5), ("5.", 5.0), ("-3", -3), ("+3", 3), ("1_000", 1000), ("0", 0), ("0x1f", 31), ("0o14", 12), (".inf", math.inf),
        ("1:30", "1:30"), ("3:55:00", "3:55:00"), ("2024-01-02", "2024-01-02"), ("=", "="), ("'012'", "012"), ('"1"', "1"), ("1.2.3", "1.2.3"), ("1e", "1e"),
        ("e5", "e5"), ("|\n  a\n  b", "a\nb\n"),
    ],
)  # fmt: skip
def test_a_plain_value_is_what_it_looks_like(written: str, meant: object) -> None:
    value = parse(f"a: {written}\n".encode()).plain()["a"]
    assert (value, type(value)) == (meant, type(meant))


def test_every_value_knows_its_line() -> None:
    root = parse(b"# head\r\na: 1\r\nb:\r\n  c:\r\n    2\r\n  d: [3,\r\n    4]\r\n").value
    assert (root["a"].line, root["b"].value["c"].line, root["b"].value["d"].line) == (2, 4, 6)
    assert [node.line for node in root["b"].value["d"].value] == [6, 7]


def test_merges_and_aliases_repeat_what_they_name() -> None:
    read = parse(b"a: &x {p: 1, q: 2}\nb: {<<: *x, q: 3}\nc: [*x, *x]\nd: {<<: [{q: 7}, *x]}\n").plain()
    assert read["b"] == {"p": 1, "q": 3}
    assert read["c"] == [{"p": 1, "q": 2}] * 2
    assert read["d"] == {"p": 1, "q": 7}, "the first of those merged wins"


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("a: 012", 1, "Write 12, or '012' for a name"),
        ("a: 1\nb: 2\na: 3", 3, "a is already in line 1"),
        ("a:\n\tb: 1", 2, "a tab"),
        ("a: 1\n  b: 2", 2, "not YAML"),
        ("a: [1\n", 2, "not YAML"),
        (b"a: 1\nb: \xff", 2, "byte 0xff is not UTF-8"),
        ("a: 1".encode("utf-16"), 1, "not UTF-8"),
        ("a: 1\nst\u0435ps: 3", 2, "CYRILLIC SMALL LETTER IE"),
        ("\uff53teps: 3", 1, "FULLWIDTH"),
        ("a: \u202eabc", 1, "RIGHT-TO-LEFT OVERRIDE"),
        ("a: 1\n'b c=d': 1", 2, "is not a key"),
        ("a: 1\n? [b]\n: 1", 2, "a key is a word"),
        ("a: !!python/object/apply:os.system [ls]", 1, "the tag"),
        ("a: !!str 3", 1, "the tag"),
        ("a: !mine {}", 1, "the tag"),
        ("a: &x [*x]", 1, "stands for nothing that is complete"),
        ("a: *x", 1, "stands for nothing"),
        ("a: 1\n---\nb: 2", 2, "a second document"),
        ("a: {<<: 3}", 1, "<< merges mappings"),
        ("", 1, "empty"),
        (" \n", 1, "empty"),
        ("<!DOCTYPE html>", 1, "a web page"),
        ("a: " + "9" * 50, 1, "a number of 50 characters"),
        ("a: 0" + "7" * 50, 1, "a number of 51 characters"),
        ("a: " + "x" * 30_000, 1, "a text of 30000 characters"),
        ("a: " + "[" * 90_000, 1, "more than 20 levels"),
        ("a:\n- " + "\n- ".join("1" * 11_000), 10_002, "more than 10000 values"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_told_with_its_line(text: str | bytes, line: int, message: str) -> None:
    mistake = slip(text)
    assert message in str(mistake)
    assert mistake.line == line
    assert len(str(mistake)) < 300


def test_what_aliases_repeat_is_counted_before_it_is_repeated() -> None:
    laughs = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
    laughs += "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12))
    assert "more than 10000 values" in str(slip(laughs)), "a thousand million, had they been made"
    merged = "a0: &a0 {k0: 1}\n" + "".join(
        f"a{n}: &a{n} {{p: {{<<: *a{n - 1}}}, q: *a{n - 1}}}\n" for n in range(1, 30)
    )
    assert "more than 10000 values" in str(slip(merged))


def test_without_its_c_parser_the_same_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    import yaml

    text = b"a: &x {p: 1}\nb: {<<: *x, q: [1e-3, no, 1:30]}\n"
    fast = parse(text)
    monkeypatch.setattr(document, "_Loader", yaml.SafeLoader)
    assert parse(text) == fast
