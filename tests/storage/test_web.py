"""What a server may do with an answer: in two packets, cut short, in drops, without end. None of it is taken for the whole, nothing is waited for long."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dtrain import recipe
from dtrain.__main__ import main
from dtrain.errors import StoreError, WordsError
from dtrain.storage import store, web

RECIPE = b"model: mlp\nsteps: 20\n" + b"#" * 60 + b"\nbatch: 7\nseed: 11\n"


@contextlib.contextmanager
def answering(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """The URL of a server that answers each request so."""

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = server.accept()
                threading.Thread(target=one, args=(connection,), daemon=True).start()

    def one(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.recv(1 << 16)
            answer(connection)

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}/mine.yaml"
        server.shutdown(socket.SHUT_RDWR)


def head(length: int | None) -> bytes:
    return (
        b"HTTP/1.1 200 OK\r\nConnection: close\r\n"
        + (b"" if length is None else f"Content-Length: {length}\r\n".encode())
        + b"\r\n"
    )


def in_two(connection: socket.socket) -> None:
    connection.sendall(head(len(RECIPE)) + RECIPE[:30])
    time.sleep(0.2)
    connection.sendall(RECIPE[30:])


def without_length(connection: socket.socket) -> None:
    connection.sendall(head(None) + RECIPE[:30])
    time.sleep(0.2)
    connection.sendall(RECIPE[30:])


def in_chunks(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n")
    for part in (RECIPE[:30], RECIPE[30:], b""):
        connection.sendall(f"{len(part):x}\r\n".encode() + part + b"\r\n")
        time.sleep(0.2)


def cut(connection: socket.socket) -> None:
    connection.sendall(head(len(RECIPE)) + RECIPE[:30])


def cut_in_chunks(connection: socket.socket) -> None:
    connection.sendall(
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n15\r\n" + RECIPE[:21] + b"\r\n"
    )


def in_drops(connection: socket.socket) -> None:
    connection.sendall(head(None))
    for _ in range(2000):
        connection.sendall(b"#")
        time.sleep(0.05)


def endless(connection: socket.socket) -> None:
    connection.sendall(head(None))
    while True:
        connection.sendall(b"#" * (1 << 16))


def silent(connection: socket.socket) -> None:
    time.sleep(600)


@pytest.mark.parametrize("answer", [in_two, without_length, in_chunks])
def test_a_recipe_is_read_to_its_end(answer: Callable[[socket.socket], None]) -> None:
    with answering(answer) as url:
        assert {word.key: word.value for word in recipe.read(url)} == {
            "model": "mlp",
            "steps": 20,
            "batch": 7,
            "seed": 11,
        }


@pytest.mark.campaign("network")
@pytest.mark.parametrize("answer", [cut, cut_in_chunks])
def test_an_answer_that_breaks_off_is_no_recipe_and_no_data(
    answer: Callable[[socket.socket], None], tmp_path: Path
) -> None:
    with answering(answer) as url, store.patience(0):
        with pytest.raises(WordsError, match=rf"recipe={url}: cannot read {url}: "):
            recipe.read(url)
        with pytest.raises(StoreError, match="cannot read"):
            store.read(url)
        with pytest.raises(StoreError, match="cannot read"):
            store.download(url, tmp_path / "copy")


@pytest.mark.parametrize("answer", [in_drops, silent])
def test_a_slow_server_is_left(answer: Callable[[socket.socket], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "ANSWER_SECONDS", 0.5)
    with answering(answer) as url, pytest.raises(WordsError, match=r"no answer within 0\.\d+ s"):
        recipe.read(url)


@pytest.mark.campaign("network")
def test_what_comes_slowly_but_steadily_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a tokenizer.json on a slow link: each part of it earns time for the next; what stops coming, or comes in drops, is left."""
    monkeypatch.setattr(store, "ANSWER_SECONDS", 2.0)

    def steadily(connection: socket.socket) -> None:
        connection.sendall(head(12_000))
        for _ in range(12):
            time.sleep(0.3)
            connection.sendall(b"#" * 1000)

    def then_silent(connection: socket.socket) -> None:
        connection.sendall(head(1 << 30) + b"#" * 100_000)
        time.sleep(600)

    with answering(steadily) as url:
        assert store.small(url, 1 << 20, pace=500) == b"#" * 12_000
        with pytest.raises(StoreError, match="no answer within"):
            store.small(url, 1 << 20)
    for answer in (then_silent, in_drops, silent):
        with answering(answer) as url, pytest.raises(StoreError, match="no answer within"):
            store.small(url, 1 << 20, pace=500)


def test_the_recipes_below_a_recipe_are_waited_for_as_long_in_all(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(store, "ANSWER_SECONDS", 1.0)
    with answering(silent) as url:
        (tmp_path / "a.yaml").write_text(
            f"recipe: [{', '.join(f'{url}?{number}' for number in range(20))}]\nsteps: 3\n"
        )
        with pytest.raises(WordsError, match=r"no answer within [\d.]+ s") as refused:
            recipe.read(str(tmp_path / "a.yaml"))
    assert str(refused.value).count("was not read: the recipes before it took 1 s") >= 18


def test_an_answer_without_end_is_not_read_to_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(endless) as url:
        with pytest.raises(WordsError, match="larger than 1 MiB"):
            recipe.read(url)
        assert main(["import", url]) == 2
    assert "larger than 1 MiB, too large for a config" in capsys.readouterr().err


def test_a_file_to_import_is_waited_for_as_a_recipe_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(store, "ANSWER_SECONDS", 0.5)
    with answering(in_drops) as url:
        assert main(["import", url]) == 3
    assert "no answer within 0." in capsys.readouterr().err
    assert main(["import", "/dev/zero"]) == 3
    assert "it is a device, not a file" in capsys.readouterr().err


@pytest.mark.campaign("network")
def test_data_may_take_long_but_not_be_silent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(web, "SILENCE_SECONDS", 3.0)

    def longer_than_that(connection: socket.socket) -> None:
        connection.sendall(head(20))
        for _ in range(20):
            connection.sendall(b"x")
            time.sleep(0.2)

    with answering(longer_than_that) as url:
        store.download(url, tmp_path / "copy")
        assert (tmp_path / "copy").read_bytes() == b"x" * 20
    with answering(silent) as url, store.patience(0), pytest.raises(StoreError, match="cannot read"):
        store.download(url, tmp_path / "copy")


@pytest.mark.parametrize("status", [404, 503])
def test_a_server_that_fails_is_not_one_without_the_file(status: int) -> None:
    answer = f"HTTP/1.1 {status} Told\r\nConnection: close\r\nContent-Length: 0\r\n\r\n".encode()
    with answering(lambda connection: connection.sendall(answer)) as url, store.patience(0):
        if status == 404:
            assert store.size(url) == -1 and not store.exists(url)
            return
        for look in (store.size, store.exists):
            with pytest.raises(StoreError, match="503"):
                look(url)
