"""A registry of images with one image behind a password, for pulls by a node that has its layers already: only the
manifest and the configuration are sent. Run in a pod by `cluster.servers`; it knows nothing of the tests."""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import socket
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

TLS_HANDSHAKE = b"\x16"
"""The first byte that a client with TLS sends."""


class Handler(BaseHTTPRequestHandler):
    """The read part of the distribution protocol."""

    protocol_version = "HTTP/1.1"
    folder: Path
    login: str

    def handle(self) -> None:
        """containerd tries TLS first, and plain HTTP if the answer to that begins like this one."""
        if self.connection.recv(1, socket.MSG_PEEK) == TLS_HANDSHAKE:
            self.wfile.write(b"HTTP/1.0 400 Bad Request\r\n\r\n")
        else:
            super().handle()

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def _answer(self) -> None:
        expected = f"Basic {base64.b64encode(self.login.encode()).decode()}"
        if self.path == "/health":
            self._send(200, b"ok", "text/plain")
        elif self.headers.get("Authorization") != expected:
            self._send(401, b"{}", "application/json")
        elif self.path == "/v2/":
            self._send(200, b"{}", "application/json")
        else:
            self._send_part()

    def _send_part(self) -> None:
        manifest, config = ((self.folder / f"{name}.json").read_bytes() for name in ("manifest", "config"))
        wanted = self.path.rpartition("/")[2]
        if "/manifests/" in self.path:
            self._send(200, manifest, json.loads(manifest)["mediaType"])
        elif wanted == digest_of(config):
            self._send(200, config, "application/octet-stream")
        else:
            self._send(404, b"{}", "application/json")

    def _send(self, code: int, body: bytes, kind: str) -> None:
        self.send_response(code)
        if code == 401:
            self.send_header("WWW-Authenticate", 'Basic realm="images"')
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Docker-Content-Digest", digest_of(body))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def digest_of(blob: bytes) -> str:
    return f"sha256:{hashlib.sha256(blob).hexdigest()}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True, help="of manifest.json and config.json")
    parser.add_argument("--login", required=True, help="NAME:PASSWORD")
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()
    Handler.folder, Handler.login = options.folder, options.login
    ThreadingHTTPServer(("127.0.0.1", options.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
