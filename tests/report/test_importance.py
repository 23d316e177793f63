"""What mattered: a share of variance that a word explains by itself."""

import random

import pytest

from dtrain.report import importance


def test_the_word_that_decides_has_nearly_all_and_one_without_influence_nearly_nothing() -> None:
    draw = random.Random(0)
    jobs = [(lr, seed, width) for lr in (1, 2, 3, 4) for seed in range(8) for width in (8, 16)]
    figure = [lr * 10 + width / 100 + draw.random() for lr, _, width in jobs]
    columns = {"width": [job[2] for job in jobs], "seed": [job[1] for job in jobs], "lr": [job[0] for job in jobs]}
    shares = importance.shares(columns, figure)
    assert next(iter(shares)) == "lr" and shares["lr"] > 0.9
    assert shares["seed"] < 0.05 and shares["width"] < 0.1


def test_many_random_values_of_a_word_without_influence_explain_nothing() -> None:
    draw = random.Random(1)
    means = [
        importance.shares({"lr": [draw.random() for _ in range(64)]}, [draw.random() for _ in range(64)])["lr"]
        for _ in range(50)
    ]
    assert sum(means) / len(means) < 0.05
    lrs = [draw.random() for _ in range(64)]
    assert importance.shares({"lr": lrs}, [(lr - 0.5) ** 2 for lr in lrs])["lr"] > 0.85, "also what is not monotonic"


def test_it_is_the_epsilon_squared_of_kruskal_and_wallis() -> None:
    """Of three groups of three in order, H is 7.2: epsilon squared is (7.2 - 3 + 1) / (9 - 3)."""
    assert importance.shares({"g": list("aaabbbccc")}, [1.0, 2, 3, 40, 50, 60, 700, 800, 900])["g"] == pytest.approx(
        5.2 / 6
    )
    assert importance.shares({"g": list("aabbccdd")}, [1.0] * 8) == {"g": 0.0}, "ties share their rank"


def test_jobs_that_diverged_and_jobs_without_a_figure_do_not_hide_the_others() -> None:
    columns = {"lr": [1, 1, 1, 2, 2, 2, 3, 3, 3, 3]}
    figure = [0.1, 0.2, 0.15, 0.5, 0.6, 0.55, float("inf"), 1e30, float("inf"), None]
    assert importance.shares(columns, figure)["lr"] > 0.8


def test_too_few_jobs_tell_nothing() -> None:
    assert importance.shares({"lr": [1, 2, 3]}, [1.0, 2.0, 3.0]) == {}
    assert importance.shares({"lr": list("abcdefgh"), "one": ["x"] * 8}, [float(n) for n in range(8)]) == {
        "lr": 0.0,
        "one": 0.0,
    }
