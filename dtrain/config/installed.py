"""The versions of installed packages. None of them is imported."""


def version(package: str) -> str:
    """The version of a package; empty if it is not installed, such as a checkout or a plain folder."""
    from importlib import metadata  # 50 modules, for a question that few commands ask

    try:
        return metadata.version(package)
    except (metadata.PackageNotFoundError, ValueError):
        return ""
