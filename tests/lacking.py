"""Without the packages of the extra `dev`, tests that need one are skipped by its name: those that import it themselves, and

@pytest.mark.needs("optuna")  # a command that the test runs imports it
"""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PACKAGES = (
    "IPython", "accelerate", "adlfs", "bitsandbytes", "cmaes", "datasets", "diffusers", "gcsfs", "hydra_plugins", "ipykernel", "lightning", "lm_eval", "mlflow", "mpi4py",
    "nbclient", "nbformat", "optuna", "peft", "pyspark", "ray", "trl", "wandb",
)  # fmt: skip


def reason(package: str) -> str:
    return f"{package} is not installed; pip install -e '.[dev]' has all packages of tests"


def is_here(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # the package around it is not
        return False


class Module(pytest.Module):
    """A file of tests that is skipped whole where it imports such a package."""

    def _getobj(self) -> Any:
        try:
            return super()._getobj()
        except self.CollectError as error:
            skip_without(error.__cause__)
            raise


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    return Module.from_parent(parent, path=module_path)


def skip_without(error: BaseException | None) -> None:
    """Skip what is run or imported where an error is that one of PACKAGES is not installed."""
    package = str(getattr(error, "name", "")).split(".")[0]
    if isinstance(error, ModuleNotFoundError) and package in PACKAGES:
        pytest.skip(reason(package), allow_module_level=True)


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("needs"):
        for package in mark.args:
            if not is_here(package):
                pytest.skip(reason(package))


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Iterator[Any]:
    try:
        return (yield)
    except ModuleNotFoundError as error:
        skip_without(error)
        raise
