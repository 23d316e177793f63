"""Launchers and sweepers of Hydra: `hydra/launcher=joblib` starts workers of the sweep's folder, `hydra/sweeper=optuna`
proposes its jobs. Neither runs a job itself.
"""

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from dtrain.compose import here
from dtrain.compose.typed import typed
from dtrain.config.schema import GROUPS
from dtrain.config.word import quote
from dtrain.errors import WordsError
from dtrain.sweep import space
from dtrain.sweep.jobs import Request, is_private

WORD = re.compile(r"\+*hydra[/.](launcher|sweeper)\b")
PACKAGES = {
    "hydra-joblib-launcher": ("joblib",),
    "hydra-submitit-launcher": ("submitit_local", "submitit_slurm"),
    "hydra-ray-launcher": ("ray", "ray_aws"),
    "hydra-rq-launcher": ("rq",),
    "hydra-optuna-sweeper": ("optuna",),
    "hydra-ax-sweeper": ("ax",),
    "hydra-nevergrad-sweeper": ("nevergrad",),
}
"""Package -> the launchers or sweepers in it."""
QUEUES = ("submitit_slurm",)
"""Launchers whose workers run elsewhere, and outlive the command."""


@dataclass(frozen=True)
class Foreign:
    """The words of a command that are Hydra's. `launcher`, `sweeper`: their names; empty: dtrain's own."""

    words: tuple[str, ...] = ()
    launcher: str = ""
    sweeper: str = ""

    @property
    def is_queue(self) -> bool:
        return self.launcher in QUEUES


OURS = Foreign()


def split(words: Sequence[str]) -> tuple[list[str], Foreign]:
    """The words of the sweep, and Hydra's. Raises WordsError for one without a name, and for a secret beside a
    launcher, which writes the words of its workers to files.
    """
    ours = [word for word in words if not WORD.match(word)]
    hydras = tuple(word.lstrip("+") for word in words if WORD.match(word))
    chosen = dict(word.split("=", 1) for word in hydras if word.startswith(("hydra/launcher=", "hydra/sweeper=")))
    foreign = Foreign(hydras, chosen.get("hydra/launcher", ""), chosen.get("hydra/sweeper", ""))
    problems = [
        f"{word.split('=')[0]} (command line): whose is it? Type hydra/{kind}=<name> too."
        for kind, name in (("launcher", foreign.launcher), ("sweeper", foreign.sweeper))
        for word in hydras
        if word.startswith(f"hydra.{kind}.") and not name
    ]
    private = [word.key for word in typed(ours)[0] if is_private(word)]
    if foreign.launcher and private:
        problems.append(
            f"{private[0]}: a launcher of Hydra's writes the words of its workers to files. Put the credentials into "
            "the environment."
        )
    if problems:
        raise WordsError(*problems)
    return ours, foreign


def _missing(foreign: Foreign) -> list[str]:
    """A sentence for each of the two whose package is known and not installed."""
    return [
        f"hydra/{kind}={name} (command line): the package {package} is not installed. Type pip install {package}."
        for kind, name in (("launcher", foreign.launcher), ("sweeper", foreign.sweeper))
        for package, names in PACKAGES.items()
        if name in names and package.endswith(kind) and not is_installed(package)
    ]


def is_installed(package: str) -> bool:
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


def searchpath() -> list[str]:
    """The working folder's own words."""
    return [path for word in here.look().words if word.key == "hydra.searchpath" for path in word.value]


def check(foreign: Foreign) -> None:
    """Raises WordsError if a package is missing, or Hydra does not know the launcher or one of its words."""
    if missing := _missing(foreign):
        raise WordsError(*missing)
    from dtrain.compose.hydra import configured

    if foreign.launcher:
        configured(foreign.words, searchpath())


def launch(foreign: Foreign, work: Callable[[Any], Any], number: int | None) -> list[Any]:
    """Call `work` in each worker that the launcher starts, and return what they return. `number`: of the workers; None:
    as many as the launcher says. Its own files go to ./outputs/workers. Raises WordsError.
    """
    from dtrain.compose.hydra import launched

    place = Path("outputs/workers").resolve()
    results = launched([*foreign.words, f"hydra.sweep.dir={quote(str(place))}"], work, number, searchpath())
    with suppress(OSError):  # it wrote some
        place.rmdir()
    return results


def propose(foreign: Foreign, request: Request, run: Callable[[list[Request]], list[Any]]) -> None:
    """Let the sweeper propose jobs, batch by batch. `run` returns the figure of each, or the error that it failed of.

    Raises WordsError.
    """
    from dtrain.compose.hydra import proposed

    def batch(jobs: Sequence[Sequence[str]]) -> list[Any]:
        return run([_request(request, words) for words in jobs])

    # `++` lets Hydra accept keys that only our own composition can check
    words = [f"{'' if word.key in GROUPS else '++'}{word}" for word in request.swept]
    proposed([*words, *(word for word in foreign.words if not word.startswith("hydra/launcher"))], batch, searchpath())


def _request(request: Request, words: Sequence[str]) -> Request:
    """The sweep with a space of this job alone."""
    given, problems = typed([word.lstrip("+") for word in words if not word.lstrip("+").startswith("hydra")])
    if problems:
        raise WordsError(*problems)
    axes = tuple(space.Choices(word.key, (word.value,)) for word in given)
    return Request(request.root, request.words, request.settings, axes)
