"""The space of a sweep: every way in which people write several values, and the combinations of them."""

from collections.abc import Sequence

import pytest

from dtrain.compose.typed import typed
from dtrain.errors import WordsError
from dtrain.sweep import space
from dtrain.sweep.space import Axis, Choices, Interval

NAMES = {"model": ["cnn", "gpt", "gpt2", "mlp"]}


def axes(*words: str, seed: int = 0) -> list[Axis]:
    read, problems = typed(words)
    assert not problems
    made, problems = space.axes(read, lambda key: NAMES.get(key, ()), seed)
    if problems:
        raise WordsError(*problems)
    return list(made.values())


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1e-3,3e-3", [0.001, 0.003]),
        ("a,b,null", ["a", "b", None]),
        ("'x,y',z", ["x,y", "z"]),
        ("[1,2],[3]", [[1, 2], [3]]),
        ("range(1,4)", [1, 2, 3]),
        ("range(0,1,0.25)", [0.0, 0.25, 0.5, 0.75]),
        ("range(3,0,-1)", [3, 2, 1]),
        ("choice(a,'b c',1)", ["a", "b c", 1]),
        ("sort(3,1,2)", [1, 2, 3]),
        ("sort(3,1,2,reverse=true)", [3, 2, 1]),
        ("tag(mine,choice(1,2))", [1, 2]),
    ],
)
def test_values_are_read_as_people_write_them(text: str, values: list[object]) -> None:
    assert axes(f"key={text}") == [Choices("key", tuple(values))]


def test_a_glob_matches_the_words_of_a_group() -> None:
    assert axes("model=glob(g*)") == [Choices("model", ("gpt", "gpt2"))]
    assert axes("model=glob(*,exclude=gpt*)") == [Choices("model", ("cnn", "mlp"))]


def test_the_seed_of_the_sweep_shuffles() -> None:
    ((first,), (again,), (other,)) = (axes("seed=shuffle(range(0,50))", seed=seed) for seed in (0, 0, 1))
    assert isinstance(first, Choices) and isinstance(other, Choices)
    assert first == again != other
    assert sorted(first.values) == sorted(other.values) == list(range(50)) != list(first.values)


@pytest.mark.parametrize(
    ("text", "interval"),
    [
        ("interval(0,1)", (0.0, 1.0, False, False)),
        ("tag(log,interval(1e-5,1e-1))", (1e-5, 0.1, True, False)),
        ("int(interval(1,8))", (1.0, 8.0, False, True)),
        ("tag(int,log,interval(1,64))", (1.0, 64.0, True, True)),
    ],
)
def test_intervals(text: str, interval: Sequence[object]) -> None:
    assert axes(f"key={text}") == [Interval("key", *interval)]  # type: ignore[arg-type]


def test_the_last_key_changes_fastest() -> None:
    jobs = [*space.grid(axes("a=1,2", "b=x,y"))]
    assert jobs == [{"a": 1, "b": "x"}, {"a": 1, "b": "y"}, {"a": 2, "b": "x"}, {"a": 2, "b": "y"}]
    assert space.size(axes("a=1,2", "b=x,y")) == 4
    assert space.size(axes("a=1,2", "b=interval(0,1)")) == float("inf")


def test_all_mistakes_are_told_at_once_and_none_takes_long() -> None:
    wrong = {
        "a=range(5,5)": "an empty range",
        "b=range(0,1e12)": "1,000,000,000,000 values",
        "model=glob(x*)": "no name matches. There are: cnn, gpt, gpt2, mlp",
        "c=glob(*)": "because it is no group",
        "d=interval(1,0)": "from 1 to 0 is empty. Type interval(0,1).",
        "d=tag(int,interval(1.5,1.6))": "there is no integer from 1.5 to 1.6",
        "e=tag(log,interval(0,1))": "a lower bound above 0",
        "f=tag(loud,interval(0,1))": "not loud",
    }
    with pytest.raises(WordsError) as raised:
        axes(*wrong)
    assert len(raised.value.problems) == len(wrong)
    for (word, sentence), problem in zip(wrong.items(), raised.value.problems, strict=True):
        assert problem.startswith(f"{word} (command line): ") and sentence in problem
