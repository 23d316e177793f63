"""Names of a checkpoint become names of the model."""

from pathlib import Path

import pytest

from dtrain.errors import StoreError
from dtrain.weights import names


def test_patterns_rename_in_order_and_null_leaves_out() -> None:
    rules = names.table({"h.*.attn.*": "blocks.*.attention.*", "h.*": "blocks.*", "ema.*": None, "idle": "x"})
    ours, faults = names.renamed(["h.0.attn.q.weight", "h.0.norm", "ema.a", "head"], rules)
    assert ours == {"blocks.0.attention.q.weight": "h.0.attn.q.weight", "blocks.0.norm": "h.0.norm", "head": "head"}
    assert faults == ["idle matches no name there that an earlier line leaves"]


def test_two_names_do_not_become_one() -> None:
    assert names.renamed(["a.x", "b.x"], names.table({"*.x": "x"}))[1] == ["a.x and b.x both become x"]


def test_a_table_comes_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("h.*: blocks.*\n")
    (tmp_path / "a.json").write_text('{"h.*": "blocks.*"}')
    for end in ("yaml", "json"):
        rules = names.table(str(tmp_path / f"a.{end}"))
        assert names.renamed(["h.1"], rules)[0] == {"blocks.1": "h.1"}
    assert names.table("{'h.*': 'blocks.*'}") == names.table({"h.*": "blocks.*"})
    (tmp_path / "b.yaml").write_text("{")
    with pytest.raises(StoreError, match="it is neither YAML nor JSON"):
        names.table(str(tmp_path / "b.yaml"))
    with pytest.raises(StoreError, match=r"none\.yaml"):
        names.table(str(tmp_path / "none.yaml"))


@pytest.mark.parametrize(
    ("given", "cause"),
    [
        ([1], "it is not a mapping"),
        ({"a": 1}, "a: 1 does not map a name to a name, or to null"),
        ({"a": "b.*"}, r"a: b\.\* has more \* than the name that it replaces"),
    ],
)
def test_a_wrong_table_is_told_with_an_example(given: object, cause: str) -> None:
    with pytest.raises(StoreError, match=f"{cause}.*Type init_names={{"):
        names.table(given)


def test_a_prefix_is_dropped_where_the_model_has_none() -> None:
    theirs = {name: name for name in ("module.a.w", "module.b.w", "loss.w")}
    assert names.without_prefix(theirs, {"a.w", "b.w"}) == {
        "a.w": "module.a.w",
        "b.w": "module.b.w",
        "loss.w": "loss.w",
    }
    plain = {"a.w": "a.w", "x.a.w": "x.a.w"}
    assert names.without_prefix(plain, {"a.w"}) == plain
    assert names.without_prefix({"q": "q"}, {"a.w"}) == {"q": "q"}


def test_lists_have_three_names_and_the_count() -> None:
    assert names.listed("missing", [f"n{n}" for n in range(9)]) == ["missing (9): n0, n1, n2 and 6 more"]
    assert names.listed("missing", []) == []
    assert names.hint({"h.0.norm.weight"}, {"x.0.norm.weight", "q"}).startswith(
        "Type init_names={'x.0.norm.weight': 'h.0.norm.weight', ...}"
    )
    assert "'<its name there>': 'h'" in names.hint({"h"}, {"zzz"})
    assert names.hint((), {"b", "a"}) == "Type init_names={'a': null, ...} for what the model does not need"
    assert names.listed("x", ["a\x1b[2Jb\n"]) == ["x (1): a?[2Jb?"]
