"""Whether what a recipe requires is here, before anything is launched, and without torch: `requires` of
dtrain/config/schema.py.

dtrain requires.versions="['torch>=2.11',scikit-learn]" requires.gpus=1 requires.memory=40
"""

import platform
from importlib.metadata import PackageNotFoundError, version

import dtrain
from dtrain.cluster import Cluster
from dtrain.config.schema import Config
from dtrain.errors import PreflightError

GIB = 1 << 30


def check(config: Config, cluster: Cluster) -> None:
    """Raises PreflightError with everything that is required and not here."""
    missing = unmet(config, cluster)
    if missing:
        raise PreflightError(*missing)


def unmet(config: Config, cluster: Cluster) -> list[str]:
    """One sentence for everything that is required and not here."""
    required = config.requires
    problems = [(f"versions={each}", sentence) for each in required.versions if (sentence := _version(str(each)))]
    if required.gpus is not None and cluster.gpus < required.gpus:
        problems.append(
            (f"gpus={required.gpus}", f"this host has {cluster.gpus}. Type requires.gpus=0 to try without.")
        )
    if required.memory is not None and cluster.memory < required.memory * GIB:
        where = "a GPU here" if cluster.gpus else "this host"
        problems.append(
            (
                f"memory={required.memory:g}",
                f"{where} has {cluster.memory / GIB:.0f} GiB. Type requires.memory=null to try all the same.",
            )
        )
    return [f"requires.{word} ({_source(config, word)}): {sentence}" for word, sentence in problems]


def _source(config: Config, word: str) -> str:
    return config.sources.get(f"requires.{word.split('=')[0]}", "default")


def _version(text: str) -> str:
    """The problem with a package, if any."""
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        wanted = Requirement(text)
    except InvalidRequirement:
        return "not a package with a version. Write torch>=2.11, or scikit-learn."
    found = _installed(wanted.name)
    if found and wanted.specifier.contains(found, prereleases=True):
        return ""
    return (
        f"{wanted.name} {f'is {found}' if found else 'is not installed'}. Type pip install "
        f"'{wanted.name}{wanted.specifier}'."
    )


def _installed(name: str) -> str:
    """The version that is here, or nothing."""
    ours = {"dtrain": dtrain.__version__, "python": platform.python_version()}
    try:
        return ours.get(name) or version(name)
    except PackageNotFoundError:
        return ""
