"""Real storage servers on loopback, and a proxy before them that fails now and then. Fixtures in conftest.py; started and ended by the tests.

with azurite() as server: store.write(f"{server.url}/a", b"x")             # its credentials are in the environment
with server.failing(share=0.2, kinds=("503", "cut", "lost")) as port:      # of a proxy
    store.use(server.url, server.options(port))
"""

import http
import http.client
import importlib.util
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Of the account that every Azurite has: https://github.com/Azure/Azurite#default-storage-account"""
ANSWERS = {"500": "InternalError", "503": "SlowDown", "429": "TooManyRequests", "403": "AccessDenied"}
KINDS = ("503", "429", "cut", "lost")
"""Of ANSWERS: that is answered and nothing is done; cut: the connection ends and nothing is done; lost: it is done and the connection ends unanswered."""


@dataclass(frozen=True)
class Server:
    """`url` of a bucket in it. The environment has what leads there."""

    url: str
    port: int

    def options(self, port: int) -> dict[str, Any]:
        """fsspec options that say everything, for a port of 127.0.0.1."""
        return {
            "s3": {"endpoint_url": f"http://127.0.0.1:{port}", "key": "akeyid", "secret": "asecret"},
            "az": {"connection_string": connection(port)},
            "gs": {"endpoint_url": f"http://127.0.0.1:{port}", "token": "anon"},
        }[self.url.split("://")[0]]

    def environment(self, port: int) -> dict[str, str]:
        """What a process needs to be led to a port of 127.0.0.1 without options."""
        return {
            "s3": {
                "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1",
            },
            "az": {"AZURE_STORAGE_CONNECTION_STRING": connection(port)},
            "gs": {"STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}"},
        }[self.url.split("://")[0]]  # fmt: skip

    @contextmanager
    def found(self) -> Iterator["Server"]:
        """The environment leads to it for as long as the context lasts."""
        with pytest.MonkeyPatch.context() as patch:
            for name, value in self.environment(self.port).items():
                patch.setenv(name, value)
            yield self

    @contextmanager
    def listing_late(self, seconds: float) -> Iterator[int]:
        """The port of a proxy before a server of S3 that lists a bucket as it was so long ago."""
        with running([sys.executable, __file__, "late", "{port}", str(self.port), str(seconds)]) as port:
            yield port

    @contextmanager
    def failing(self, *, share: float, kinds: Sequence[str] = KINDS, seed: int = 0) -> Iterator[int]:
        """The port of a proxy before it, where a `share` of the requests fails in one of the ways of `kinds`."""
        with running(
            [sys.executable, __file__, "proxy", "{port}", str(self.port), str(share), ",".join(kinds), str(seed)]
        ) as port:
            yield port


@contextmanager
def moto() -> Iterator[Server]:
    pytest.importorskip("moto")
    with (
        running([sys.executable, "-m", "moto.server", "-p", "{port}"]) as port,
        Server("s3://bucket", port).found() as server,
    ):
        urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{port}/bucket", method="PUT")).close()
        yield server


@contextmanager
def azurite() -> Iterator[Server]:
    command = (
        os.environ.get("AZURITE_BIN")
        or shutil.which("azurite-blob")
        or shutil.which("azurite-blob", path=CACHE / "node_modules/.bin")
    )
    if not command:
        pytest.skip(f"azurite-blob is not here. Type: npm install --prefix {CACHE} azurite")
    blob = pytest.importorskip("azure.storage.blob", exc_type=ImportError)
    words = ["--silent", "--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry", "--blobPort", "{port}"]
    with running([command, *words]) as port, Server("az://bucket", port).found() as server:
        with blob.BlobServiceClient.from_connection_string(connection(port)) as client:
            client.create_container("bucket")
        yield server


@contextmanager
def gcs_emulator() -> Iterator[Server]:
    if not importlib.util.find_spec("gcp_storage_emulator"):
        pytest.skip("gcp-storage-emulator is not here. Type: pip install gcp-storage-emulator")
    with running([sys.executable, __file__, "gcs", "{port}"]) as port, Server("gs://bucket", port).found() as server:
        yield server


CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dtrain"


def connection(port: int) -> str:
    """A connection string of Azure."""
    account = "DefaultEndpointsProtocol=http;AccountName=devstoreaccount1"
    return f"{account};AccountKey={AZURE_KEY};BlobEndpoint=http://127.0.0.1:{port}/devstoreaccount1;"


def free_port() -> int:
    """A port below those that a system gives away itself, so that nobody gets it between here and the server's start."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


@contextmanager
def running(command: Sequence[str], seconds: float = 300) -> Iterator[int]:
    """A process that listens on the port it yields, which `{port}` in the command becomes. Ends with the context."""
    port = free_port()
    process = subprocess.Popen(
        [word.replace("{port}", str(port)) for word in command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + seconds
    try:
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < deadline, f"{command} does not listen"
                time.sleep(0.05)
        yield port
    finally:
        process.kill()
        process.wait()


class Proxy(BaseHTTPRequestHandler):
    """Passes requests on to a port, or fails."""

    protocol_version = "HTTP/1.1"
    backend: int
    share: float
    kinds: Sequence[str]
    chance: random.Random
    lock = threading.Lock()

    def handle_one(self) -> None:
        body = self.body()
        with self.lock:
            fault = self.chance.choice(self.kinds) if self.chance.random() < self.share else ""
        if fault in ANSWERS:
            words = (
                f"<?xml version='1.0'?><Error><Code>{ANSWERS[fault]}</Code><Message>{ANSWERS[fault]}</Message></Error>"
            )
            self.answer(int(fault), [("Content-Type", "application/xml")], words.encode())
            return
        if fault != "cut":
            client = http.client.HTTPConnection("127.0.0.1", self.backend)
            headers = {
                name: value
                for name, value in self.headers.items()
                if name.lower() not in ("transfer-encoding", "expect", "connection")
            }
            headers["Content-Length"] = str(len(body))
            client.request(self.command, self.path, body, headers)
            response = client.getresponse()
            data = response.read()
            client.close()
            if not fault:
                self.answer(response.status, response.getheaders(), data)
                return
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = do_PATCH = handle_one  # noqa: N815 - http.server looks for these

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while length := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(length))
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass
        return b"".join(parts)

    def answer(self, status: int, headers: Sequence[tuple[str, str]], data: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in ("transfer-encoding", "connection", "content-length") or (
                self.command == "HEAD" and name.lower() == "content-length"
            ):
                self.send_header(name, value)
        if self.command != "HEAD" and status not in (204, 304):
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


def serve_proxy(port: str, backend: str, share: str, kinds: str, seed: str) -> None:
    Proxy.backend, Proxy.share, Proxy.kinds, Proxy.chance = (
        int(backend),
        float(share),
        kinds.split(","),
        random.Random(int(seed)),
    )
    ThreadingHTTPServer(("127.0.0.1", int(port)), Proxy).serve_forever()


class LateProxy(Proxy):
    """Lists the objects of a bucket, as far as they were written through it, as they were `late` seconds ago."""

    late, changes = 0.0, list[tuple[float, str, int]]()
    """Of `changes`: time, key, size or -1 when it was removed."""

    def answer(self, status: int, headers: Sequence[tuple[str, str]], data: bytes) -> None:
        address = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(address.query, keep_blank_values=True))
        key = urllib.parse.unquote(address.path).removeprefix("/bucket").lstrip("/")
        if self.command == "PUT" and key and status == 200:
            self.changes.append((time.monotonic(), key, int(self.headers.get("Content-Length") or 0)))
        elif self.command == "DELETE" and key:
            self.changes.append((time.monotonic(), key, -1))
        elif self.command == "POST" and "delete" in query:
            gone = re.findall("<Deleted>.*?<Key>(.*?)</Key>", data.decode(), re.DOTALL)
            self.changes.extend((time.monotonic(), each, -1) for each in gone)
        elif self.command == "GET" and not key and "list-type" in query:
            data = self.listing(query.get("prefix", ""), query.get("delimiter", "")).encode()
        super().answer(status, headers, data)

    def listing(self, prefix: str, delimiter: str) -> str:
        then, sizes = time.monotonic() - self.late, dict[str, int]()
        for at, key, size in self.changes:
            if at <= then:
                sizes[key] = size
        there = {key: size for key, size in sizes.items() if size >= 0 and key.startswith(prefix)}
        folders, files = set[str](), list[str]()
        for key in sorted(there):
            first, slash, _ = key.removeprefix(prefix).partition(delimiter) if delimiter else ("", "", "")
            folders |= {prefix + first + slash} if slash else set()
            files += [] if slash else [key]
        contents = "".join(
            f'<Contents><Key>{key}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>"x"</ETag><Size>{there[key]}</Size>'
            "<StorageClass>STANDARD</StorageClass></Contents>"
            for key in files
        )
        below = "".join(f"<CommonPrefixes><Prefix>{each}</Prefix></CommonPrefixes>" for each in sorted(folders))
        return (
            '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>bucket</Name>'
            f"<Prefix>{prefix}</Prefix><KeyCount>{len(files) + len(folders)}</KeyCount><MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated>"
            f"{contents}{below}</ListBucketResult>"
        )


def serve_late(port: str, backend: str, seconds: str) -> None:
    LateProxy.backend, LateProxy.late, LateProxy.share, LateProxy.kinds = int(backend), float(seconds), 0.0, ()
    LateProxy.chance = random.Random(0)
    ThreadingHTTPServer(("127.0.0.1", int(port)), LateProxy).serve_forever()


def serve_gcs(port: str) -> None:
    """The emulator, with what it lacks of GCS: the condition that makes an upload create-only, and bytes that end as they were sent."""
    from gcp_storage_emulator import server
    from gcp_storage_emulator.__main__ import main
    from gcp_storage_emulator.handlers import objects

    upload, read, lock = objects._multipart_upload, server._read_data, threading.Lock()

    def conditional(request: Any, response: Any, storage: Any) -> None:
        with lock:
            there = request.data["meta"]["name"] in storage.objects.get(request.params["bucket_name"], {})
            if there and request.query.get("ifGenerationMatch") == ["0"]:
                response.status = http.HTTPStatus.PRECONDITION_FAILED
            else:
                upload(request, response, storage)

    def exact(handler: Any, query: Any) -> Any:
        kind, _, edge = str(handler.headers.get("Content-Type")).partition("; boundary=")
        if (
            kind != "multipart/related"
        ):  # how gcsfs uploads; the emulator's parser drops a carriage return at the end of the bytes
            return read(handler, query)
        end = b"\n--" + edge.strip('"').encode()
        meta, rest = server._read_raw_data(handler).split(b"\n\n", 1)[1].split(end, 1)
        return {
            "meta": json.loads(meta),
            "content": rest.split(b"\n\n", 1)[1].rpartition(end)[0],
            "content-type": "application/octet-stream",
        }

    objects._multipart_upload, server._read_data = conditional, exact
    main(["start", "--host", "127.0.0.1", "--port", port, "--in-memory", "--default-bucket", "bucket"])


if __name__ == "__main__":
    {"proxy": serve_proxy, "late": serve_late, "gcs": serve_gcs}[sys.argv[1]](*sys.argv[2:])
