"""Where a recipe from elsewhere leads: a redirect, or a name that resolves anew, to this machine or its network is not followed; a person may."""

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from commands import COMMAND

from dtrain import recipe
from dtrain.__main__ import main
from dtrain.compose import compose
from dtrain.errors import DtrainError, StoreError, WordsError
from dtrain.files import imagefiles
from dtrain.storage import clients, options, store, web

TEXT = b"to be, or not to be, that is the question\n" * 200
REFUSED = "leads to this machine or its network"


@dataclass
class Site:
    """`pages` are bodies by path; one that begins with http is where the path is redirected to. `asked` are the paths that were asked for."""

    url: str
    pages: dict[str, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)


@contextmanager
def site(host: str) -> Iterator[Site]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            made.asked.append(self.path)
            page = made.pages.get(self.path)
            self.send_response(404 if page is None else 302 if page.startswith(b"http") else 200)
            if page and page.startswith(b"http"):
                self.send_header("Location", page.decode())
            self.send_header("Content-Length", str(len(page or b"")))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(page or b"")

        do_HEAD = do_GET  # noqa: N815 - http.server's name

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer((host, 0), Handler) as server:
        made = Site(f"http://{host}:{server.server_port}")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield made
        server.shutdown()


@pytest.fixture
def near() -> Iterator[Site]:
    with site("127.0.0.1") as made:
        yield made


@pytest.fixture
def far() -> Iterator[Site]:
    """That nobody is to be led to."""
    with site("127.0.0.2") as made:
        made.pages = {"/base.yaml": b"steps: 3\n", "/text.txt": TEXT}
        yield made


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known of any server."""
    monkeypatch.setattr(clients, "_judges", {})
    monkeypatch.setattr(clients, "_open", {})
    monkeypatch.setattr(web, "_named", set())


def test_no_recipe_below_one_from_elsewhere_is_read_inside(near: Site, far: Site) -> None:
    near.pages = {"/mine.yaml": b"recipe: base.yaml\nsteps: 5\n", "/base.yaml": f"{far.url}/base.yaml".encode()}
    with pytest.raises(WordsError, match=REFUSED):
        recipe.read(f"{near.url}/mine.yaml")
    assert not far.asked
    near.pages["/base.yaml"] = f"{near.url}/other.yaml".encode()
    near.pages["/other.yaml"] = b"seed: 7\n"
    assert {word.key: word.value for word in recipe.read(f"{near.url}/mine.yaml")} == {"seed": 7, "steps": 5}


def test_a_public_server_sends_a_person_nowhere_inside(near: Site, far: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    near.pages = {"/mine.yaml": f"{far.url}/base.yaml".encode()}
    assert [word.value for word in recipe.read(f"{near.url}/mine.yaml")] == [3], (
        "inside, servers send a person where they like"
    )
    far.asked.clear()
    monkeypatch.setattr(web, "is_public", lambda address: str(address) == "127.0.0.1")
    web._named.clear()
    with pytest.raises(WordsError, match=REFUSED):
        recipe.read(f"{near.url}/mine.yaml")
    assert not far.asked
    assert [word.value for word in recipe.read(f"{far.url}/base.yaml")] == [3], "a person may name a server inside"


def test_data_of_a_recipe_is_not_read_inside_but_a_person_may(
    near: Site, far: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    near.pages["/text.txt"] = f"{far.url}/text.txt".encode()
    near.pages["/mine.yaml"] = f"defaults: [{{override /data: text}}]\ndata: {{path: '{near.url}/text.txt'}}\n".encode()
    assert main([f"recipe={near.url}/mine.yaml", f"out={tmp_path / 'run'}", "steps=1"]) == 3
    assert REFUSED in capsys.readouterr().err
    assert not far.asked
    clients._judges.clear()
    clients._open.clear()
    assert store.find(f"{near.url}/text.txt") and far.asked, "what a person types goes where it likes"


def test_a_name_that_resolves_anew_is_judged_again(far: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """It leads outside when it is looked at, and inside when it is connected to."""
    really, answers, port = socket.getaddrinfo, ["93.184.216.34"], int(far.url.rpartition(":")[2])

    def answer(host: str, *args: Any, **more: Any) -> Any:
        if host != "rebinds.example.org":
            return really(host, *args, **more)
        address = answers.pop() if answers else "127.0.0.2"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    store.write(
        "memory://wary/mine.yaml",
        f"defaults: [{{override /data: text}}]\ndata: {{path: 'http://rebinds.example.org:{port}/text.txt'}}\n".encode(),
    )
    config = compose(["recipe=memory://wary/mine.yaml"])
    assert not answers
    with store.patience(0), pytest.raises(StoreError, match=REFUSED):
        store.read(config.data["path"])
    assert not far.asked


@pytest.mark.campaign("commands")
def test_ranks_are_as_wary(near: Site, far: Site, tmp_path: Path) -> None:
    """What is read by the ranks alone, in other processes: there is what the recipe's own server gives, and nothing of another one."""
    near.pages = {
        "/mine.yaml": f"defaults: [{{override /data: text}}]\ndata: {{path: '{near.url}/text.txt', sequence: 8}}\n".encode(),
        "/text.txt": TEXT,
    }
    words = [
        *COMMAND,
        "model=gpt",
        "model.width=16",
        "steps=1",
        "launcher=local",
        "devices=2",
        f"recipe={near.url}/mine.yaml",
    ]
    done = subprocess.run([*words, f"out={tmp_path / 'a'}"], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    child = "import sys; from dtrain.storage import options, store; options.take_over(sys.argv[1]); print(store.read(sys.argv[2])[:5])"
    compose([f"recipe={near.url}/mine.yaml"])
    told = options.hand_over()
    assert json.loads(told)["web"]["wary"] == [near.url.removeprefix("http://")]

    def reads() -> str:
        done = subprocess.run(
            [sys.executable, "-c", child, told, f"{near.url}/text.txt"],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        return done.stdout + done.stderr

    assert "to be" in reads()
    near.pages["/text.txt"] = f"{far.url}/text.txt".encode()
    assert REFUSED in reads()
    assert not far.asked


def test_small_words_lead_nowhere_else(near: Site, far: Site) -> None:
    near.pages = {
        "/mine.yaml": f"expect: {{loss: [0, 9], small: ['data.path={near.url}/text.txt']}}\n".encode(),
        "/text.txt": f"{far.url}/text.txt".encode(),
    }
    config = compose([f"recipe={near.url}/mine.yaml"])
    config = compose([*config.expect.small, "data=text"])
    with store.patience(0), pytest.raises(StoreError, match=REFUSED):
        store.find(config.data["path"])
    assert not far.asked


def test_a_public_server_leads_no_data_and_no_row_inside(
    near: Site, far: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`near` is public, `far` is not: a redirect is refused from a row's server, from a table's own and from data's."""
    monkeypatch.setattr(web, "is_public", lambda address: str(address) == "127.0.0.1")
    monkeypatch.setattr(web, "is_inside", lambda host: host != "127.0.0.1")
    near.pages = {"/a.jpg": f"{far.url}/text.txt".encode(), "/b.jpg": b"\xff\xd8\xff"}
    near.pages["/c.jpg"] = f"{near.url}/b.jpg".encode()
    near.pages["/table.csv"] = b"image\na.jpg\n"
    store.write("memory://wary/table.csv", f"image\n{near.url}/a.jpg\n".encode())
    for table in ("memory://wary/table.csv", f"{near.url}/table.csv"):
        with store.patience(0), pytest.raises(DtrainError, match=REFUSED):
            imagefiles.rows(table, tmp_path, "image", None)
    with store.patience(0), pytest.raises(StoreError, match=REFUSED):
        store.read(f"{near.url}/a.jpg")
    assert not far.asked
    assert store.read(f"{near.url}/c.jpg") == near.pages["/b.jpg"], "a public server may lead to a public one"
    assert store.read(f"{far.url}/text.txt") == TEXT, "a person may name a server inside"
