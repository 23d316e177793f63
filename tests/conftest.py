"""One thread everywhere, torch warmed once, and nothing left behind: forked ranks cost 40 ms, a fresh interpreter seconds."""

import os
import signal

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # by the `&` of a script: what is tested here is the other case
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ["OMP_NUM_THREADS"] = "1"
for _variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(_variable, None)

from collections.abc import Iterator
from pathlib import Path

import pool
import pytest
import servers
import torch

from dtrain.launcher import process, warm

torch.set_num_threads(1)
warm.first_step()

pytest_plugins = ["workers", "changed", "lacking", "tiers"]


def pytest_configure(config: pytest.Config) -> None:
    """What dtrain/strategy/fsdp.py and ddp.py ignore when they are imported, for the tests after that in which they were."""
    config.addinivalue_line("filterwarnings", "ignore:FSDP2-wrapped module .* returned a view tensor")
    config.addinivalue_line("filterwarnings", "ignore:Grad strides do not match bucket view strides")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`slow` of a class names its tests that CI does not run: the contract of engines whose clusters take long."""
    for item in items:
        if getattr(item, "originalname", "") in getattr(getattr(item, "cls", None), "slow", ()):
            item.add_marker("slow")


def pytest_collection_finish() -> None:
    """Every rank is forked from here."""
    pool.prepare()


def pytest_unconfigure() -> None:
    """Remove the temporary folders of commands that tests have killed, as the next command would."""
    process.remove_stale(Path())


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is None or nextitem.path != item.path:
        pool.end_residents()


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


@pytest.fixture(scope="session")
def s3_server() -> Iterator[servers.Server]:
    with servers.moto() as running:
        yield running


@pytest.fixture(scope="session")
def azure_server() -> Iterator[servers.Server]:
    with servers.azurite() as running:
        yield running


@pytest.fixture(scope="session")
def gcs_server() -> Iterator[servers.Server]:
    with servers.gcs_emulator() as running:
        yield running


@pytest.fixture(scope="session")
def s3(s3_server: servers.Server) -> str:
    """The URL of a bucket on an S3 server of this machine. Use it from forked ranks: a client of S3 starts threads."""
    return s3_server.url


@pytest.fixture(scope="session", params=["s3", "azure", "gcs"])
def server(request: pytest.FixtureRequest) -> servers.Server:
    """A server of S3, of Azure, of GCS, one after the other. Use it from forked ranks."""
    running: servers.Server = request.getfixturevalue(f"{request.param}_server")
    return running
