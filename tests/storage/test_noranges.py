"""A web server that ignores byte ranges: a small file is read whole, a large one is refused for what its server lacks."""

import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dtrain.errors import StoreError
from dtrain.storage import store, web
from dtrain.weights import safetensors, torchfile

WEIGHTS = {f"w{number}": torch.full((100, 100), float(number)) for number in range(3)}


class Quiet(SimpleHTTPRequestHandler):
    """It answers each request with the whole file."""

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def site(tmp_path: Path) -> Iterator[str]:
    save_file(WEIGHTS, tmp_path / "w.safetensors")
    torch.save(WEIGHTS, tmp_path / "w.pt")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=tmp_path)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_small_file_is_read(site: str, tmp_path: Path) -> None:
    assert [*safetensors.tensors(f"{site}/w.safetensors")] == [*WEIGHTS]
    assert [*torchfile.tensors(f"{site}/w.pt")] == [(name,) for name in WEIGHTS]
    data = (tmp_path / "w.pt").read_bytes()
    assert store.parts(f"{site}/w.pt", [5, 900], 7) == [data[5:12], data[900:907]]


def test_a_large_one_is_refused_with_what_to_type(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "WHOLE", 1000)
    reads = (
        lambda: safetensors.tensors(f"{site}/w.safetensors"),
        lambda: torchfile.tensors(f"{site}/w.pt"),
        lambda: store.ending(f"{site}/w.pt", 100),
        lambda: store.opened(f"{site}/w.pt", lambda file: (file.seek(1000), file.read(10))),
    )
    for read in reads:
        with pytest.raises(StoreError, match=r"gives no parts of a file .* Download it, and type its path"):
            read()
