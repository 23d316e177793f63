"""Checks the `requires` section of a config (dtrain/config/schema.py) before anything is launched, without torch.

dtrain requires.versions="['torch>=2.11',scikit-learn]" requires.gpus=1 requires.memory=40
"""

import dtrain
from dtrain.cluster import Cluster
from dtrain.config.installed import python, version
from dtrain.config.schema import Config
from dtrain.errors import PreflightError

GIB = 1 << 30


def check(config: Config, cluster: Cluster) -> None:
    """Raises PreflightError with every requirement that is not met."""
    missing = unmet(config, cluster)
    if missing:
        raise PreflightError(*missing)


def unmet(config: Config, cluster: Cluster) -> list[str]:
    """One sentence for each requirement that is not met."""
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
    """The problem with a required version; empty if it is met."""
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        wanted = Requirement(text)
    except InvalidRequirement:
        return "not a package with a version. Write torch>=2.11, or scikit-learn."
    installed = _installed(wanted.name)
    if installed and wanted.specifier.contains(installed, prereleases=True):
        return ""
    return (
        f"{wanted.name} {f'is {installed}' if installed else 'is not installed'}. Type pip install "
        f"'{wanted.name}{wanted.specifier}'."
    )


def _installed(name: str) -> str:
    """The installed version; empty if there is none."""
    ours = {"dtrain": dtrain.__version__, "python": python()}
    return ours.get(name) or version(name)
