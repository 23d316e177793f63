"""Without the packages of the extra `dev`, tests that need one are skipped by its name: those that import it themselves, and

@pytest.mark.needs("optuna")  # a command that the test runs imports it
"""

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest

PACKAGES = (
    "IPython", "adlfs", "bitsandbytes", "cmaes", "datasets", "diffusers", "gcsfs", "hydra_plugins", "ipykernel", "lightning", "lm_eval", "mlflow", "mpi4py",
    "nbclient", "optuna", "peft", "pyspark", "ray", "trl", "wandb",
)  # fmt: skip


def reason(package: str) -> str:
    return f"{package} is not installed; pip install -e '.[dev]' has all packages of tests"


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("needs"):
        for package in mark.args:
            if importlib.util.find_spec(package) is None:
                pytest.skip(reason(package))


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Iterator[Any]:
    try:
        return (yield)
    except ModuleNotFoundError as error:
        package = str(error.name).split(".")[0]
        if package not in PACKAGES:
            raise
        pytest.skip(reason(package))
