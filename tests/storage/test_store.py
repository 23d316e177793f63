"""Bytes at URLs: the same behaviour everywhere, one line when something is wrong."""

import os
import pickle
import stat
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import pytest
from pool import ranks
from servers import Server, free_port

from dtrain.errors import StoreError
from dtrain.launcher import process
from dtrain.storage import store


def test_a_server_that_does_not_answer_is_no_missing_file() -> None:
    with store.patience(0), pytest.raises(StoreError, match="Cannot connect"):
        store.find("http://127.0.0.1:1/text.txt")


def test_on_the_web_a_star_is_a_glob_and_a_question_mark_begins_the_query(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt", "c.md"):
        (tmp_path / name).write_text(name)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(tmp_path))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        root = f"http://127.0.0.1:{server.server_port}"
        assert store.find(f"{root}/*.txt") == [f"{root}/a.txt", f"{root}/b.txt"]
        assert store.find(f"{root}/c.md?raw=1") == [f"{root}/c.md?raw=1"]
        with pytest.raises(StoreError, match="404"):
            store.find(f"{root}/d.md")
        server.shutdown()


def contract(root: str) -> None:
    """What every storage must do."""
    url = store.join(root, "deep", "folder", "a.txt")
    assert not store.exists(url)
    assert store.size(url) == -1
    assert store.children(store.join(root, "deep")) == []
    store.write(url, b"one")
    store.write(url, b"three")
    assert (store.read(url), store.size(url), store.exists(url)) == (b"three", 5, True)
    other = store.join(root, "deep", "b.txt")
    store.publish(other, b"first")
    with pytest.raises(StoreError, match="cannot create"):
        store.publish(other, b"second")
    assert store.read(other) == b"first", "what is published is never replaced"
    assert store.children(store.join(root, "deep")) == ["b.txt", "folder"]
    assert [store.read(found) for found in store.find(store.join(root, "deep"))] == [b"first", b"three"]
    assert len(store.find(store.join(root, "deep", "*.txt"))) == 1
    assert store.find(store.join(root, "deep", "*.md")) == store.find(store.join(root, "none")) == []
    assert store.parts(url, [0, 2, 4], 2) == [b"th", b"re", b"e"]
    before = store.fingerprint(url)
    store.write(url, b"other")
    assert store.fingerprint(url) != before
    with pytest.raises(StoreError, match=r"none\.txt: it does not exist"):
        store.read(store.join(root, "none.txt"))
    store.probe(root)
    assert store.children(root) == ["deep"], "a probe leaves nothing behind"
    with process.scratch("test") as scratch:
        store.download(url, scratch / "x" / "copy")
        assert (scratch / "x" / "copy").read_bytes() == b"other"
        store.upload(scratch / "x" / "copy", store.join(root, "up", "copy"))
    assert store.read(store.join(root, "up", "copy")) == b"other"
    store.remove(store.join(root, "deep"))
    store.remove(store.join(root, "deep"))
    assert not store.exists(url)


def test_a_local_folder(tmp_path: Path) -> None:
    contract(str(tmp_path / "a b"))


def test_a_file_url(tmp_path: Path) -> None:
    contract(f"file://{tmp_path}/x")


def test_memory() -> None:
    contract("memory://contract")


def test_a_real_server(server: Server) -> None:
    ranks(1, contract, f"{server.url}/contract")


def busy(server: Server, options: dict[str, Any]) -> None:
    store.use(server.url, options)
    root = f"{server.url}/busy"
    for number in range(6):
        name, data = str(number), bytes([13, number]) * 500
        store.write(f"{root}/{name}", data)
        store.put(f"{root}/put/{name}", [data, b"", memoryview(data)])
        store.publish(f"{root}/published/{name}", data)
        assert store.read(f"{root}/{name}") == data
    assert store.sizes(f"{root}/put") == dict.fromkeys("012345", 2000)
    with pytest.raises(StoreError) as caught:
        store.publish(f"{root}/published/0", b"other")
    assert caught.value.kind == "exists"
    store.remove(root)
    assert store.children(root) == []


@pytest.mark.campaign("network")
def test_a_server_that_fails_now_and_then(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dtrain.storage.patience.LONGEST_WAIT", 0.1)
    with server.failing(share=0.2) as port:
        ranks(1, busy, server, server.options(port))


def refused(server: Server, options: dict[str, Any], kind: str, message: str) -> None:
    """Every operation tells it in one line, and those that would be told the same again are not tried again."""
    store.use(server.url, options)
    for act in (
        store.probe,
        store.read,
        store.exists,
        store.children,
        lambda url: store.publish(url, b"x"),
        lambda url: store.put(url, [b"x"]),
    ):
        with store.patience(0), pytest.raises(StoreError, match=message) as caught:
            act(f"{server.url}/a")
        assert caught.value.kind == kind
        assert "\n" not in str(caught.value)
        assert caught.value.__cause__ is caught.value.__context__ is None, (
            "what a client raises may hold secrets, and does not pickle"
        )
        pickle.dumps(caught.value)


def test_a_server_that_refuses(server: Server) -> None:
    with server.failing(share=1, kinds=["403"]) as port:
        ranks(1, refused, server, server.options(port), "denied", "Check (AWS|AZURE|GOOGLE)_.* or out_options")


def test_a_server_that_is_not_there(server: Server) -> None:
    ranks(1, refused, server, server.options(free_port()), "busy", "onnect.*Is the network there")


def test_a_bucket_that_is_not_there(server: Server) -> None:
    def look() -> None:
        url = server.url.replace("bucket", "none")
        for act in (store.probe, lambda url: store.publish(url, b"x"), lambda url: store.put(url, [b"x"])):
            with pytest.raises(StoreError, match=r"no such bucket|does not exist") as caught:
                act(f"{url}/a")
            assert caught.value.kind == "missing"

    ranks(1, look)


def test_one_client_for_all_threads_and_a_new_one_after_a_fork_or_other_options(tmp_path: Path) -> None:
    url = f"flaky://file/{tmp_path}"
    store.use(url, {"share": 0})
    with ThreadPoolExecutor(4) as pool:
        clients = set(pool.map(lambda _: id(store.client(url)), range(8)))
    mine = store.client(f"{url}/deep/a")
    assert clients == {id(mine)}

    def in_child() -> tuple[bool, float]:
        return store.client(url) is mine, store.client(url).share

    assert ranks(1, in_child) == [(False, 0)]
    store.use(url, {"share": 1, "kinds": "403"})
    assert store.client(url).share == 1
    with pytest.raises(StoreError, match="403"):
        store.read(url)
    store.use(url, {})
    assert store.children(url) == []


def test_a_file_that_goes_between_two_looks_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.publish(f"{tmp_path}/a", b"theirs")

    def gone(url: str) -> bytes:
        raise StoreError.during("read", url, "it does not exist", kind="missing")

    monkeypatch.setattr(store, "read", gone)
    with pytest.raises(StoreError, match="cannot create") as caught:
        store.publish(f"{tmp_path}/a", b"mine")
    assert caught.value.kind == "exists"


def test_what_is_below_a_file_is_not_there(tmp_path: Path) -> None:
    store.write(f"{tmp_path}/a", b"x")
    assert (store.exists(f"{tmp_path}/a/b"), store.size(f"{tmp_path}/a/b"), store.children(f"{tmp_path}/a/b")) == (
        False,
        -1,
        [],
    )
    with pytest.raises(StoreError, match="Not a directory") as caught:
        store.read(f"{tmp_path}/a/b")
    assert caught.value.kind == "missing"


def test_join_knows_no_double_slash() -> None:
    assert store.join("s3://b/a/", "c", "d") == "s3://b/a/c/d"


def test_a_reader_sees_old_bytes_or_new_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = str(tmp_path / "a")
    store.write(url, b"old")
    seen = []

    def watching(replace: Callable[..., None]) -> Callable[..., None]:
        def act(*arguments: Any) -> None:
            seen.append(store.read(url))
            replace(*arguments)
            seen.append(store.read(url))

        return act

    monkeypatch.setattr(store.disk, "replace", watching(store.disk.replace))
    store.write(url, b"new")
    assert seen == [b"old", b"new"]
    assert [path.name for path in tmp_path.iterdir()] == ["a"], "no part is left behind"


def test_a_write_that_fails_leaves_no_part_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store.disk, "replace", full)
    with pytest.raises(StoreError, match=r"cannot write .*/a: No space left on device"):
        store.write(str(tmp_path / "a"), b"x")
    assert list(tmp_path.iterdir()) == []


def test_files_have_the_rights_the_user_wants(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        store.write(str(tmp_path / "a"), b"x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640


@pytest.mark.parametrize(
    ("url", "message"),
    [("nowhere://a", "nowhere"), ("/proc/nothing/a", "/proc/nothing/a"), ("/dev/null/a", "Not a directory")],
)
def test_a_place_that_cannot_be_is_named(url: str, message: str) -> None:
    with pytest.raises(StoreError, match=message) as caught:
        store.probe(url)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 3


def test_a_package_that_is_missing_is_named_with_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(StoreError, match=r"pip install 'dtrain\[s3\]'"):
        store.read("s3://b/a")


def test_a_home_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    store.write("~/a", b"x")
    assert (tmp_path / "a").read_bytes() == store.read("~/a") == b"x"


@pytest.mark.parametrize("form", ["file://{}", "file://localhost{}", "file:{}", "local://{}", "FILE://{}", "{}"])
def test_a_file_url_is_the_path_it_names(form: str, tmp_path: Path) -> None:
    url = form.format(tmp_path / "out")
    store.write(f"{url}/a.txt", b"here")
    assert (tmp_path / "out" / "a.txt").read_bytes() == b"here"
    assert store.read(f"{url}/a.txt") == b"here"
    assert store.children(url) == ["a.txt"]
    assert store.find(f"{url}/*.txt") == [str(tmp_path / "out" / "a.txt")]


def test_a_file_url_says_spaces_as_python_does_and_a_path_keeps_its_percent_signs(tmp_path: Path) -> None:
    store.write((tmp_path / "a b%20c").as_uri(), b"here")
    assert store.read(str(tmp_path / "a b%20c")) == b"here"


def test_a_file_of_another_host_is_refused() -> None:
    with pytest.raises(StoreError, match=r"host7 is another host, whose files are not here\. Type file:///<path>"):
        store.read("file://host7/data/x")
