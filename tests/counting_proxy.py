"""A proxy on loopback before an object storage, which notes each GET: python counting_proxy.py <port of the server> <file>.

Prints its own port. A line of the file: key, value of the Range header or -, bytes of the answer.
"""

import http.client
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PORT, NOTES = int(sys.argv[1]), Path(sys.argv[2])


class Proxy(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None: ...

    def forward(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        server = http.client.HTTPConnection("127.0.0.1", PORT)
        server.request(self.command, self.path, body, dict(self.headers))
        answer = server.getresponse()
        data = answer.read()
        if self.command == "GET":
            with NOTES.open("a") as notes:
                notes.write(f"{self.path.split('?')[0]}\t{self.headers.get('Range', '-')}\t{len(data)}\n")
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "content-length", "server", "date"):
                self.send_header(name, value)
        self.send_header("Content-Length", answer.getheader("Content-Length") or str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_HEAD = do_PUT = do_POST = forward  # noqa: N815


proxy = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
print(proxy.server_port, flush=True)
proxy.serve_forever()
