"""A call names what it passes: no reader counts commas, and no value ends in another's place."""

import ast
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import dtrain

ROOT = Path(dtrain.__file__).parent
MOST = 5
"""Values that a call may pass by their place."""
BY_PLACE = {
    # any number of values of one kind
    "ctx.save_for_backward": "objective/vocabulary.py",
    "ledger.settle": "integrations/importers/axolotl_optim.py",
    "self._ask": "integrations/kubernetes/launcher.py",
    "self._ends": "testing/engine.py",
    "self.op": "predict/activations.py",
    # of torch, which takes no names there
    "_Ring.apply": "parallel/ring.py",
    "asked.SDPAParams": "parallel/kernels.py",
    "attend": "parallel/context.py",
    "torch.batch_norm": "tracing/stand_ins.py",
}
"""Function -> the file that calls it with more."""
UNPACKED = 3
"""Names that one assignment or loop of `PLAIN_ROOMS` may unpack."""
PLAIN_ROOMS = ("predict", "tracing")
FORMATTED_ROOMS = (*PLAIN_ROOMS, "lifecycle", "sweep")
"""Rooms that are formatted as ruff formats, without exceptions."""


def breaches(name: str, source: str, records: Collection[str]) -> Iterator[str]:
    """`file:line: cause` of calls of `source` that hide what they pass. `records`: classes of more than MOST fields."""
    room = name.partition("/")[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and BY_PLACE.get(ast.unparse(node.func)) != name:
            if len(node.args) > MOST:
                yield f"{name}:{node.lineno}: {len(node.args)} values by place"
            if ast.unparse(node.func) in records and any(isinstance(each, ast.Starred) for each in node.args):
                yield f"{name}:{node.lineno}: fields hidden behind a star"
        stored = isinstance(node, ast.Tuple | ast.List) and isinstance(node.ctx, ast.Store)
        if room in PLAIN_ROOMS and stored and len(node.elts) > UNPACKED:
            yield f"{name}:{node.lineno}: {len(node.elts)} names unpacked"
    for number, line in enumerate(source.splitlines(), 1):
        if room in FORMATTED_ROOMS and line.endswith("# fmt: skip"):
            yield f"{name}:{number}: fmt: skip"


def large_records(sources: Mapping[str, str]) -> set[str]:
    """Dataclasses and named tuples of more than MOST fields."""
    classes = [
        node for source in sources.values() for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)
    ]
    return {
        each.name
        for each in classes
        if sum(isinstance(field, ast.AnnAssign) for field in each.body) > MOST
        and any(
            "dataclass" in ast.unparse(one) or "NamedTuple" in ast.unparse(one)
            for one in (*each.decorator_list, *each.bases)
        )
    }


def test_calls_name_what_they_pass() -> None:
    sources = {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in sorted(ROOT.rglob("*.py"))}
    records = large_records(sources)
    assert [each for name, source in sources.items() for each in breaches(name, source, records)] == []
    assert {name for name, file in BY_PLACE.items() if f"{name}(" not in sources[file]} == set(), (
        "nobody calls it any more"
    )


PLANTED = """
class Six(NamedTuple):
    a: int; b: int; c: int; d: int; e: int; f: int
made = make(1, 2, 3, 4, 5, 6)
six = Six(*five, 6)
a, b, c, d = four
table = {1: 2}  # fmt: skip
plain = make(1, 2, 3, 4, 5, f=6)
a, b, c = three
"""


def test_a_planted_breach_is_found() -> None:
    records = large_records({"": PLANTED})
    causes = ["6 values by place", "fields hidden behind a star", "4 names unpacked", "fmt: skip"]
    assert [each.split(": ", 1)[1] for each in breaches("predict/planted.py", PLANTED, records)] == causes
    assert len(list(breaches("report/planted.py", PLANTED, records))) == 2
