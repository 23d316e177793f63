"""The words of a sweep: which keys have several values, the words of each job, and its folder. `dtrain -m
optim.lr=1e-3,3e-3`.
"""

import re
from collections.abc import Callable, Sequence

from dtrain import secrets
from dtrain.compose import here
from dtrain.compose.check import shown
from dtrain.compose.typed import typed
from dtrain.config.schema import GROUPS
from dtrain.config.word import Word, quote, slug
from dtrain.errors import WordsError
from dtrain.storage import options


def multirun(
    words: Sequence[str], job: Callable[[Sequence[str]], float | None], *, check: Callable[[Sequence[str]], object]
) -> str:
    """Run `job` with the words of every combination of a sweep, through Hydra's sweeper and launcher. Returns the
    folder of the jobs.

    Each job gets its own folder below `sweep.out` (or `out`), named after its values. With Hydra's own sweeper, `check`
    gets the words of every job before the first one runs; the WordsErrors that it raises are collected.
    """
    asked, problems = typed(words)
    for_hydra = [word for word in asked if re.match(r"hydra[/.](launcher|sweeper)\b", word.key)]
    ours = [word for word in asked if word not in for_hydra]
    problems += [
        f"{word} ({word.source}): with -m, only hydra/launcher, hydra/sweeper and their arguments are allowed."
        for word in ours
        if word.key[:5] == "hydra"
    ]
    swept = [word for word in ours if word.sweep]
    if not swept and not problems and not for_hydra:
        problems.append("-m: no word has several values. Type optim.lr=1e-3,3e-3 for example, or leave -m out.")
    private = [word.key for word in ours if options.is_one(word.key) or secrets.redact_arg(str(word)) != str(word)]
    if private and any(word.key.startswith("hydra/launcher") for word in for_hydra):
        problems.append(
            f"{private[0]}: a launcher of Hydra's writes the words of its jobs to files. Put the credentials into the "
            "environment."
        )
    problems += [
        f"{shown(word)}: the folder of a job is named after what is swept, and a secret cannot be."
        for word in swept
        if word.key in private
    ]
    problems += [
        f"{shown(word)}: a folder or URL. Type {word.key}=<text>."
        for word in ours
        if word.key in ("out", "sweep.out") and not isinstance(word.value, str | int | None)
    ]
    if problems:
        raise WordsError(*problems)
    plain = [word for word in ours if not word.sweep and word.key not in ("out", "sweep.out")]
    named = [str(word.value) for key in ("sweep.out", "out") for word in ours if word.key == key]
    root = (
        named[0].rstrip("/")
        if named
        else f"outputs/sweep-{slug(secrets.redact_arg(str(word)).replace('=', '-', 1) for word in ours)}"
    )

    def task(values: Sequence[str]) -> float | None:
        out = f"{root}/{slug(value.replace('=', '-') for value in values)}"
        return job([*map(str, plain), *values, f"out={quote(out)}"])

    if not any(word.key == "hydra/sweeper" for word in for_hydra):
        _check_all(plain, swept, check)
    # Hydra composes every job too; `++` lets it accept keys that only our own composition can check
    overrides = [f"{'' if word.key in GROUPS else '++'}{word}" for word in swept] + [str(word) for word in for_hydra]
    from dtrain.compose.hydra import sweep

    paths = [path for word in here.look().words if word.key == "hydra.searchpath" for path in word.value]
    sweep(overrides, task, paths)
    return root


def _check_all(plain: Sequence[Word], swept: Sequence[Word], check: Callable[[Sequence[str]], object]) -> None:
    """Raises WordsError with the mistakes of all jobs."""
    from dtrain.compose.hydra import jobs

    problems: dict[str, None] = {}
    for words in jobs(swept):
        try:
            check([*map(str, plain), *words])
        except WordsError as error:
            problems |= dict.fromkeys(error.problems)
    if problems:
        raise WordsError(*problems)
