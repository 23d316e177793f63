"""Files as people have them, and what is said of broken ones: one line, with the place."""

import sys
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from imported import imported

from dtrain.errors import WordsError
from dtrain.integrations.importers.ledger import Code
from dtrain.integrations.importers.read import parse

MERGES_ONCE = yaml.__version__ >= "6.0.4"
"""Whether PyYAML merges each key once; before, a merge of merges repeated them all."""
BROKEN = {
    "a comment in JSON": (
        "a.json",
        '{\n  "fp16": {} // half\n}',
        "a.json:2:14: not JSON: JSON has no comments. Remove this one.",
    ),
    "a comment before JSON": ("a.json", "# half\n{}", "a.json:1:1: not JSON: JSON has no comments"),
    "a trailing comma": ("a.json", '{"a": 1,}', "a comma after the last value. Remove it."),
    "a trailing comma in a list": ("a.json", '{"a": [1, 2,]}', "a comma after the last value"),
    "single quotes": ("a.json", "{'a': 1}", "double quotes"),
    "Python's words": ("a.json", '{"a": True}', "true, false and null"),
    "a missing comma": ("a.json", '{"a": 1 "b": 2}', "a comma is missing"),
    "half a file": ("a.json", '{"a": {', "ends too early"),
    "a key twice in JSON": ("a.json", '{"a": 1, "a": 2}', "a is given twice"),
    "a key twice in YAML": ("a.yaml", "a: 1\nb: 2\na: 3", "a.yaml:3:1: not YAML: a is given twice"),
    "indentation": ("a.yaml", "a:\n  b: 1\n c: 2", "a.yaml:3:"),
    "a tab": ("a.yaml", "a:\n\tb: 1", "a.yaml:2:1: not YAML"),
    "a tag": ("a.yaml", "a: !!python/object/apply:os.system [id]", "not YAML: could not determine a constructor"),
    "aliases without end": ("a.yaml", "a: &x [1, *x]", "more than 20000 values"),
    "aliases of aliases": (
        "a.yaml",
        "a: &a [1, 1, 1, 1]\n"
        + "".join(f"{name}: &{name} [*{of}, *{of}, *{of}, *{of}]\n" for of, name in pairwise("abcdefghijklmnop")),
        "more than 20000 values",
    ),
    "merges of merges": (
        "a.yaml",
        "a: &a {k: 1}\n"
        + "".join(
            f"{two}: &{two} {{<<: [{','.join([f'*{one}'] * 9)}], {two}: 1}}\n" for one, two in pairwise("abcdefghi")
        ),
        "no key belongs to" if MERGES_ONCE else "more than 20000 values",
    ),
    "a list as a key": ("a.yaml", "? [a, b]\n: 1", "a key that is not a scalar"),
    "a number of 5,000 digits": ("a.json", '{"a": 1' + "0" * 5000 + "}", "not JSON: Exceeds the limit"),
    "a number of 5,000 digits in TOML": ("a.toml", "a = 1" + "0" * 5000, "not TOML: Exceeds the limit"),
    "Python too deep": ("a.py", "Trainer(max_steps=" + "-" * 200_000 + "1)", "a.py: not Python: nested too deep"),
    "a bracket": ("a.yaml", "a: [1, 2", "not YAML"),
    "TOML": ("a.toml", "[training]\nsteps = ", "not TOML"),
    "Python": ("a.py", "trainer = Trainer(max_steps=)", "a.py:1: not Python"),
    "Python without a run": ("a.py", "print('hello')", "calls none of Trainer"),
    "a script whose config is elsewhere": (
        "a.py",
        "LightningCLI(Net, Data)",
        "reads its trainer from a YAML file here. Import the file",
    ),
    "no text": ("a.yaml", b"\x89PNG\r\n\xff", "not a text"),
    "nothing": ("a.yaml", "", "empty"),
    "a list": ("a.yaml", "- 1\n- 2", "list, where keys and values are expected"),
    "prose": ("notes", "Dear reader,\nthis is a letter.", "str, where keys and values are expected"),
    "a web page": ("ds.json", "<!DOCTYPE html>\n<html><body>", "a web page. Give the address of the file itself"),
    "a tokenizer": (
        "tokenizer.json",
        '{"vocab": {' + ",".join(f'"w{number}": {number}' for number in range(90_000)) + "}}",
        "larger than 1 MiB, too large for a config",
    ),
    "too deep": ("a.json", '{"a":' * 4000 + "1" + "}" * 4000, "deep"),
    "a number beyond all": ("a.json", '{"a": 1e400}', "not a plausible number"),
    "no number": ("a.yaml", "a: .nan", "not a plausible number"),
    "a name with a dot": (
        "a.json",
        '{"fp16.enabled": true, "fp16": {"enabled": false}}',
        "fp16.enabled is given twice",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_gets_one_line(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name, text, message = BROKEN[case]
    Path(name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(WordsError) as error:
        imported(Path(name))
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 250


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("2e-5", 2e-5),
        ("1e6", 1e6),
        ("1.5E-3", 1.5e-3),
        ("-1e3", -1e3),
        ("no", False),
        ("'no'", "no"),
        ("1_000", 1000),
        ("1.0", 1.0),
        ("e5", "e5"),
    ],
)
def test_numbers_of_yaml_are_those_that_the_tools_read(written: str, read: object) -> None:
    assert parse(f"a: {written}".encode(), "a.yaml") == {"a": read}


def test_names_are_texts() -> None:
    assert parse(b"1: a\ntrue: b\nnull: c\n1.0: d", "a.yaml") == {"1": "a", "true": "b", "null": "c", "1.0": "d"}


def test_aliases_and_merges_of_yaml_are_what_they_stand_for() -> None:
    assert parse(b"x: &x {lr: 1e-3}\ny: {<<: *x, eps: 1}\nz: [*x, *x]", "a.yaml") == {
        "x": {"lr": 1e-3},
        "y": {"lr": 1e-3, "eps": 1},
        "z": [{"lr": 1e-3}] * 2,
    }


def test_a_file_whose_name_does_not_tell() -> None:
    assert parse(b'{"a": 1}', "config") == {"a": 1}
    assert parse(b"[a]\nb = 1", "https://example.org/c?raw=1") == {"a": {"b": 1}}
    assert parse(b"trainer = pl.Trainer(max_steps=1)", "snippet") == {"trainer": {"max_steps": 1}}
    assert parse("\ufeffa: 1".encode(), "config.yml") == {"a": 1}


def test_what_an_alias_repeats_and_what_is_merged_is_read() -> None:
    text = b"base: &base\n  lr: 1e-4\n  decay: 0.1\noptimizer:\n  <<: *base\n  lr: 2e-4\nagain: *base\n"
    assert parse(text, "a.yaml") == {
        "base": (base := {"lr": 1e-4, "decay": 0.1}),
        "optimizer": base | {"lr": 2e-4},
        "again": base,
    }


@pytest.mark.parametrize(
    "arguments", ["{'max_steps': 100, 'precision': '16-mixed'}", "dict(max_steps=100, precision='16-mixed')"]
)
def test_arguments_that_a_script_keeps_in_a_dict(arguments: str) -> None:
    assert parse(f"shared = {arguments}\nTrainer(**shared, devices=2)\n".encode(), "a.py")["trainer"] == {
        "max_steps": 100,
        "precision": "16-mixed",
        "devices": 2,
    }


def test_values_of_python() -> None:
    source = b"""
STEPS = 100
again = 1
again = 2
callback = ModelCheckpoint(every_n_train_steps=STEPS)
trainer = L.Trainer(max_steps=STEPS, devices=again, precision="bf16" if fast else "32", callbacks=[callback], profiler=None, limit=-1, *rest, **more)
"""
    read = parse(source, "a.py")["trainer"]
    assert read["max_steps"] == 100
    assert read["devices"] == "again"
    assert isinstance(read["devices"], Code), "which of two values is meant is not known"
    assert isinstance(read["precision"], Code)
    assert read["callbacks"] == [{"class_path": "ModelCheckpoint", "init_args": {"every_n_train_steps": 100}}]
    assert (read["profiler"], read["limit"], read["args.0"], read["**more"]) == (None, -1, "*rest", "more")


def test_no_line_of_a_python_file_is_run(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\nTrainer(max_steps=__import__('antigravity') or 3)\n"
    )
    assert "computed in Python" in imported(path).told("refused")["trainer.max_steps"]
    assert not (tmp_path / "ran").exists()
    assert "antigravity" not in sys.modules
