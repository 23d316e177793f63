"""Modules that a file of the working folder hides: `python -m dtrain` finds ./queue.py before Python's own queue."""

import os
import sys

PACKAGES = ("fsspec", "hydra", "numpy", "omegaconf", "safetensors", "torch", "yaml")


def by_a_file(error: Exception) -> str:
    """The sentence for an import that failed because a file of the working folder was taken; empty for other errors."""
    name = getattr(error, "name", None) if isinstance(error, ImportError) else _module(error)
    top = str(name).partition(".")[0]
    file = getattr(sys.modules.get(top), "__file__", None) or ""
    here = os.getcwd()  # noqa: PTH109 - pathlib may be what is hidden
    if top not in (*sys.stdlib_module_names, *PACKAGES) or file not in _files(here, top):
        return ""
    return f"{file} hides the module {top} that Python or dtrain needs. Rename it."


def _module(error: Exception) -> str:
    """The module that lacks the attribute of an AttributeError."""
    return str(getattr(getattr(error, "obj", None), "__name__", ""))


def _files(folder: str, name: str) -> tuple[str, str]:
    return os.path.join(folder, f"{name}.py"), os.path.join(folder, name, "__init__.py")  # noqa: PTH118
