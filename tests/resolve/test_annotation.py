"""The values that an annotation declares, read off its source."""

import ast

import pytest

from dtrain.config import constraints
from dtrain.resolve import annotation


def allowed(argument: str) -> str:
    function = ast.parse(f"def f({argument}): ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    (default,) = function.args.defaults or [None]
    return annotation.allowed(function.args.args[0].annotation, default)


@pytest.mark.parametrize(
    ("argument", "good", "bad"),
    [
        ("x: int", [3, -1], [1.5, "3", None, True]),
        ("x: float = 1", [3, 0.5], ["a", None, False]),
        ("x: bool", [True], ["yes", 1]),
        ("x: str", ["a", 2024], [None, ["a"], True]),
        ("x: int = None", [3, None], ["a"]),
        ("x: 'int | None'", [3, None], ["a", 1.5]),
        ("x: typing.Optional[float]", [3, None], ["a"]),
        ("x: Union[int, str, None]", [3, "a", None], [[1]]),
        ("x: Literal['relu', 'gelu']", ["relu"], ["rel", None, 1]),
        ("x: Literal['relu', None]", ["relu", None], ["null"]),
        ("x: int | Literal['auto']", [3, "auto"], ["aut"]),
        ("x: list[int]", [[], [1, 2]], [1, [1.5], ["a"], "1,2"]),
        ("x: Sequence[str]", [["a"]], ["a"]),
        ("x: tuple[float, float]", [[1, 0.5]], [[1], [1, "a"]]),
        ("x: tuple[int, ...] = ()", [[1], []], [["a"]]),
        ("x: list", [[1, "a"]], [1]),
    ],
)
def test_plain_values_are_declared(argument: str, good: list[object], bad: list[object]) -> None:
    assert all(constraints.fits(value, allowed(argument)) for value in good), allowed(argument)
    assert not any(constraints.fits(value, allowed(argument)) for value in bad), allowed(argument)


@pytest.mark.parametrize(
    "argument",
    [
        "x", "x=3", "x: Any", "x: Path", "x: dict[str, int]", "x: int | Path", "x: Optional[Shape]", "x: Callable[..., int]",
        "x: list[list[int]]", "x: list[int | None]", "x: tuple[int, str]", "x: Literal[1, 2]", "x: Literal['text']",
        "x: Literal['a or b']", "x: float = 'auto'", "x: 'not python'", "x: Literal['int >= 1']", "x: tuple[()]",
    ],
)  # fmt: skip
def test_other_annotations_declare_nothing(argument: str) -> None:
    assert allowed(argument) == ""
