"""A server on loopback that speaks as much of the Hugging Face hub's protocol as its client needs to write and read a
repository of models: create, list, preupload, LFS, commit, resolve.
"""

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

REVISION = "0" * 39 + "1"


class Hub(ThreadingHTTPServer):
    """`repositories`: name -> {file -> bytes} as committed; `blobs`: LFS uploads by sha256; `commits`: number of commits."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.blobs: dict[str, bytes] = {}
        self.commits = 0
        self.refuses = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def serving() -> Iterator[Hub]:
    hub = Hub()
    thread = Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None: ...

    def do_POST(self) -> None:
        body, path = self._body(), urlsplit(self.path).path
        hub, parts = self.server, path.strip("/").split("/")
        if hub.refuses:
            self._answer({"error": "no"}, 403)
        elif path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
            hub.repositories.setdefault(name, {})
            self._answer({"url": f"{hub.url}/{name}", "id": name})
        elif path.endswith("/info/lfs/objects/batch"):
            objects = [
                {**one, "actions": {"upload": {"href": f"{hub.url}/blobs/{one['oid']}"}}}
                for one in json.loads(body)["objects"]
            ]
            self._answer({"transfer": "basic", "objects": objects})
        elif parts[4] == "preupload":
            asked = json.loads(body)["files"]
            modes = ["lfs" if one["path"].endswith(".safetensors") else "regular" for one in asked]
            files = [
                {"path": one["path"], "uploadMode": mode, "shouldIgnore": False}
                for one, mode in zip(asked, modes, strict=True)
            ]
            self._answer({"files": files})
        else:
            assert parts[4] == "commit", path
            self._commit("/".join(parts[2:4]), [json.loads(line) for line in body.splitlines()])

    def _commit(self, name: str, lines: list[dict[str, Any]]) -> None:
        hub = self.server
        new = dict[str, bytes]()
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                new[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                new[value["path"]] = hub.blobs[value["oid"]]
        hub.repositories[name] |= new
        hub.commits += 1
        self._answer({"success": True, "commitOid": REVISION, "commitUrl": f"{hub.url}/{name}/commit/{REVISION}"})

    def do_PUT(self) -> None:
        data = self._body()
        oid = self.path.rsplit("/", 1)[-1]
        assert hashlib.sha256(data).hexdigest() == oid
        self.server.blobs[oid] = data
        self._answer({})

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        parts = path.strip("/").split("/")
        name = "/".join(parts[2:4]) if parts[0] == "api" else "/".join(parts[:2])
        files = self.server.repositories.get(name)
        if files is None:
            self._answer({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
        elif "tree" in parts:
            self._answer([{"type": "file", "path": one, "size": len(data), "oid": "0"} for one, data in files.items()])
        elif parts[0] == "api":
            siblings = [{"rfilename": one} for one in files]
            self._answer({"id": name, "sha": REVISION, "siblings": siblings, "private": False})
        else:
            assert parts[2] == "resolve", path
            file = "/".join(parts[4:])
            facts = {"X-Repo-Commit": REVISION}
            if file in files:
                etag = hashlib.sha256(files[file]).hexdigest()
                self._answer(files[file], 200, {**facts, "ETag": f'"{etag}"'})
            else:
                self._answer({"error": "no"}, 404, {**facts, "X-Error-Code": "EntryNotFound"})

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            data = b""
            while size := int(self.rfile.readline(), 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return data
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _answer(self, what: Any, code: int = 200, headers: dict[str, str] | None = None) -> None:
        data = what if isinstance(what, bytes) else json.dumps(what).encode()
        self.send_response(code)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
