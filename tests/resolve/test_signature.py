"""What a target takes is read off its source, and none of it runs."""

import ast
import sys
from pathlib import Path

import pytest

from dtrain.resolve.signature import Missing, Signature, class_of, home_of, lineage, signature

SOURCE = """
import os
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from .parts import Base, Shared as Other
from .parts import *
open("{marker}", "w").write("ran")

@dataclass
class Data:
    root: str
    size: int = 3
    tags: list = field(default_factory=list)
    seen: int = field(default=0, init=False)
    _: KW_ONLY

@dataclass
class More(Data):
    extra: float = 0.5

class Net(Base):
    pass

class Wide(Base):
    def __init__(self, depth, *, wide=1, **others): ...

class Meta(metaclass=type):
    def __init__(self, a): ...

class Made:
    def __new__(cls, *args): ...

def make(a, b=1, /, c=2, *, d): ...

@decorated
def hidden(a): ...

def plain(a, b=1): ...

class Kinds:
    @classmethod
    def small(cls, a, b=1): ...
    @staticmethod
    def made(a): ...
    def called(self): ...

Again = Net
preset = partial(plain, a=3)
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "readonlypkg"
    folder.mkdir()
    (folder / "__init__.py").write_text(SOURCE.format(marker=tmp_path / "ran"))
    (folder / "parts.py").write_text(
        "class Base:\n    def __init__(self, width, depth=2): ...\nclass Shared:\n    pass\nclass Starred:\n    def __init__(self, x): ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "signature_of"),
    [
        (
            "Data",
            Signature(("root",), ("size", "tags"), allowed={"root": "text", "size": "int", "tags": "list of any"}),
        ),
        (
            "More",
            Signature(
                ("root",),
                ("size", "tags", "extra"),
                allowed={"root": "text", "size": "int", "tags": "list of any", "extra": "number"},
            ),
        ),
        ("Net", Signature(("width",), ("depth",))),
        ("parts.Base", Signature(("width",), ("depth",))),
        ("Other", Signature()),
        ("Starred", Signature(("x",), ())),
        ("Wide", Signature(("depth",), ("wide",), open=True)),
        ("plain", Signature(("a",), ("b",))),
        ("Kinds.small", Signature(("a",), ("b",))),
        ("Kinds.made", Signature(("a",))),
        ("Kinds.called", None),
        ("Net.whatever", None),
        ("Again", Signature(("width",), ("depth",))),
        ("preset", Signature((), ("a", "b"))),
        ("Meta", None),
        ("Made", None),
        ("hidden", None),
        ("parts", None),
    ],
)
def test_what_a_target_takes(name: str, signature_of: Signature | None, package: Path) -> None:
    assert signature(f"readonlypkg.{name}") == signature_of
    assert not (package / "ran").exists() and "readonlypkg" not in sys.modules


def test_what_is_not_there_is_told_with_what_is(package: Path) -> None:
    assert signature("readonlypkg.Kinds.smal") == Missing("readonlypkg.Kinds", "smal", ("small", "made", "called"))
    taken = signature("readonlypkg.Nett")
    assert isinstance(taken, Missing) and "Net" in taken.others and "Starred" in taken.others


def test_a_package_without_an_init_file_is_read_wherever_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place, name in (("one", "nets"), ("two", "inner/deep")):
        (tmp_path / place / "spacepkg" / name).parent.mkdir(parents=True)
        (tmp_path / place / "spacepkg" / f"{name}.py").write_text("class Net:\n    def __init__(self, width): ...\n")
        monkeypatch.syspath_prepend(str(tmp_path / place))
    for target in ("spacepkg.nets.Net", "spacepkg.inner.deep.Net"):
        assert signature(target) == Signature(("width",))
    assert isinstance(signature("spacepkg.nets.Nett"), Missing)
    assert (
        signature("spacepkg.nowhere.Net") is None
        and signature("spacepkg.Net") is None
        and signature("spacepkg") is None
    )


def test_torch_is_read_and_what_is_not_installed_is_passed_over() -> None:
    linear = signature("torch.nn.Linear")
    assert (
        isinstance(linear, Signature)
        and linear.required == ("in_features", "out_features")
        and "bias" in linear.optional
    )
    assert isinstance(signature("torch.nn.Linnear"), Missing)
    assert (
        signature("torch.optim.AdamW") and signature("nowhere.to.be.Found") is None and signature("math.sqrt") is None
    )


def test_of_modules_whose_names_a_package_takes_over_only_those_are_parsed_that_have_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of transformers is found without parsing the 2,400 files of the others, 20 seconds and a gigabyte."""
    folder, parsed, parse = tmp_path / "vast", list[bytes](), ast.parse
    folder.mkdir()
    (folder / "__init__.py").write_text("from .inner import *")
    (folder / "inner.py").write_text("from .other import *\nfrom .mine import *")
    (folder / "other.py").write_text("class Other: ...")
    (folder / "mine.py").write_text("class Mine:\n    def __init__(self, width): ...")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(ast, "parse", lambda source, *more: parsed.append(source) or parse(source, *more))
    assert class_of("vast.Mine") and signature("vast.Mine") == Signature(("width",))
    assert home_of("vast.Mine") == "vast.mine"
    assert len(parsed) == 3 and not any(b"Other" in source for source in parsed)
    assert signature("vast.Absent") == Missing("vast", "Absent", ("Other", "Mine"))


RETURNS = """import torch


def plain() -> torch.optim.AdamW: ...
def quoted() -> "torch.optim.AdamW": ...
def round() -> "square": ...
def square() -> round: ...
"""


def test_a_function_has_the_lineage_of_the_class_that_it_says_it_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "returnpkg.py").write_text(RETURNS)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("plain", "quoted"):
        assert [statement.name for _, statement in lineage(f"returnpkg.{name}")][:2] == ["AdamW", "Adam"]
    assert lineage("returnpkg.round") == []
