"""Ranks are forked from a process that holds torch and every part: none of ours may initialise CUDA while it is imported, or no rank has a GPU.

A build of torch for CUDA shows it without a GPU or a driver. CUDA_BUILD=<python of an environment that has one> spares making it: 5 GB.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import dtrain
from dtrain.recipe import folder

PARTS = sorted(
    {
        found[1].rpartition(".")[0]
        for path in folder("conf").glob("*/*.yaml")
        for found in [re.search(r"^_target_: (dtrain\S+)", path.read_text(), re.M)]
        if found
    }
)
ASK = """
import importlib, os, sys
import torch
assert torch.version.cuda, "a build of torch for the CPU"
for name in sys.argv[1:]:
    importlib.import_module(name)
    child = os.fork()
    if not child:
        os._exit(torch.cuda._is_in_bad_fork())
    if os.waitpid(child, 0)[1]:
        sys.exit(f"after {name}")
"""
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An interpreter that has torch as it is built for CUDA, and all else as the one that runs this."""
    if "CUDA_BUILD" in os.environ:
        yield os.environ["CUDA_BUILD"]
        return
    home = tmp_path_factory.mktemp("cuda")
    made = str(home / "bin" / "python")
    try:
        subprocess.run([sys.executable, "-m", "venv", home], check=True)
        version = torch.__version__.partition("+")[0]
        # three signs of equality: no local version, as those for the CPU have, fits
        subprocess.run(
            [made, "-m", "pip", "install", "-q", "--no-compile", "--no-cache-dir", f"torch==={version}"],
            check=True,
            timeout=3000,
        )
        theirs = Path(sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)}))
        (theirs / "beside.pth").write_text(
            f"{sysconfig.get_path('purelib')}\n{Path(dtrain.__file__).parents[1]}\n"
        )  # behind its own
        yield made
    finally:
        shutil.rmtree(home)


def asked(python: str, *modules: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Imports modules one after the other, and ends at the first after which a fork could not use CUDA."""
    return subprocess.run(
        [python, "-c", ASK, *modules], cwd=cwd, capture_output=True, text=True, timeout=600, check=False
    )


def test_no_part_of_ours_initialises_cuda_while_it_is_imported(python: str, tmp_path: Path) -> None:
    found = asked(python, "torch._dynamo", "dtrain.train", *PARTS, "transformers", cwd=tmp_path)
    assert (found.returncode, found.stderr) == (0, ""), found.stderr


def test_a_module_that_does_is_seen(python: str, tmp_path: Path) -> None:
    """Or the test above shows nothing."""
    (tmp_path / "theirs.py").write_text("import torch\n\ndevice = 'cuda' if torch.cuda.is_available() else 'cpu'\n")
    found = asked(python, "dtrain.train", "theirs", cwd=tmp_path)
    assert (found.returncode, found.stderr.strip()) == (1, "after theirs")
