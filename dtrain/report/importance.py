"""How much each word of a sweep matters for a figure: the share of the variance of the jobs' ranks that its values
explain by themselves.

It is the epsilon squared of the Kruskal-Wallis test (https://doi.org/10.1080/01621459.1952.10483441), that is, the R
squared of the groups over ranks, corrected for their number (T. L. Kelley, https://doi.org/10.1073/pnas.21.9.554), so
that a word without influence has a share of about zero. Ranks make it independent of the figure's scale and of jobs
that diverged. What a word does only together with another one is in nobody's share.
"""

from collections.abc import Mapping, Sequence
from typing import Any

GROUPS = 8
"""Most groups of values of a number; a number with more values is divided by its quantiles."""
FEWEST = 6
"""Jobs below which nothing is said."""


def shares(columns: Mapping[str, Sequence[Any]], figure: Sequence[float | None]) -> dict[str, float]:
    """Key -> share, from 0 to 1, largest first. `columns`: key -> the value of each job; `figure`: of each job, None if
    it has none. Empty if there are too few jobs.
    """
    having = [index for index, value in enumerate(figure) if value is not None]
    if len(having) < FEWEST:
        return {}
    ranks = _ranks([figure[index] for index in having])
    made = {key: _share(_groups([values[index] for index in having]), ranks) for key, values in columns.items()}
    return dict(sorted(made.items(), key=lambda pair: -pair[1]))


def _ranks(values: Sequence[Any]) -> list[float]:
    """The rank of each value from 1 on; equal values share their mean rank."""
    order = sorted(range(len(values)), key=lambda index: values[index])
    ranks, begin = [0.0] * len(values), 0
    while begin < len(order):
        end = begin
        while end < len(order) and values[order[end]] == values[order[begin]]:
            end += 1
        for index in order[begin:end]:
            ranks[index] = (begin + 1 + end) / 2
        begin = end
    return ranks


def _groups(values: Sequence[Any]) -> list[Any]:
    """The group of each value: the value itself, or the quantile of a number that has many values."""
    numbers = sorted({value for value in values if type(value) in (int, float)})
    if len(numbers) <= GROUPS or any(isinstance(value, str) for value in values):
        return list(values)
    ranks = _ranks([value for value in values if value is not None])
    quantiles = iter(int((rank - 1) * GROUPS / len(ranks)) for rank in ranks)
    return [None if value is None else next(quantiles) for value in values]


def _share(groups: Sequence[Any], ranks: Sequence[float]) -> float:
    """1 - (1 - R squared) (n - 1) / (n - k), for n jobs in k groups; 0 if that is negative or unknown."""
    members: dict[Any, list[float]] = {}
    for group, rank in zip(groups, ranks, strict=True):
        members.setdefault(group, []).append(rank)
    mean = sum(ranks) / len(ranks)
    total = sum((rank - mean) ** 2 for rank in ranks)
    between = sum(len(each) * (sum(each) / len(each) - mean) ** 2 for each in members.values())
    if not total or len(members) in (1, len(ranks)):
        return 0.0
    return max(0.0, 1 - (1 - between / total) * (len(ranks) - 1) / (len(ranks) - len(members)))
