"""One thread everywhere, torch warmed once, and nothing left behind: forked ranks cost 40 ms, a fresh interpreter seconds."""

import os

os.environ["OMP_NUM_THREADS"] = "1"
for _variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(_variable, None)

import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch._dynamo

torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    """What dtrain/strategy/fsdp.py ignores when it is imported, for the tests after that in which it was."""
    config.addinivalue_line("filterwarnings", "ignore:FSDP2-wrapped module .* returned a view tensor")


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
def s3() -> Iterator[str]:
    """The URL of a bucket on an S3 server of this machine. Use it from forked ranks: a client of S3 starts threads."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    said = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}
    server = subprocess.Popen([sys.executable, "-m", "moto.server", "-p", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                assert server.poll() is None, "the S3 server ended"
                time.sleep(0.05)
        urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{port}/bucket", method="PUT")).close()
        with pytest.MonkeyPatch.context() as patch:
            for name, value in said.items():
                patch.setenv(name, value)
            yield "s3://bucket"
    finally:
        server.kill()
        server.wait()
