"""One thread everywhere, torch warmed once, and nothing left behind: forked ranks cost 40 ms, a fresh interpreter seconds."""

import os

os.environ["OMP_NUM_THREADS"] = "1"
for _variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(_variable, None)

from pathlib import Path

import pytest
import torch
import torch._dynamo

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoded text is kept for the session, away from the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A folder of small real text: the first modules of the standard library."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name in ("abc", "argparse", "bisect", "calendar", "csv", "textwrap"):
        source = Path(os.__file__).with_name(f"{name}.py")
        (folder / source.name).write_bytes(source.read_bytes())
    return folder
