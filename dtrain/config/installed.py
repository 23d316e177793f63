"""The versions of Python and of installed packages. None of them is imported."""

import sys


def python() -> str:
    """The version of Python, such as 3.11.7."""
    return sys.version.split()[0]


def version(package: str) -> str:
    """The version of a package; empty if it is not installed, such as a checkout or a plain folder."""
    from importlib import metadata  # 50 modules, for a question that few commands ask

    try:
        return metadata.version(package)
    except (metadata.PackageNotFoundError, ValueError):
        return ""
