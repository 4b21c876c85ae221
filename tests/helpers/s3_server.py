"""A real S3 server on loopback: the Versity gateway over a folder, which checks signatures and answers as S3 does.

The program is built from `tests/cluster/build/s3` like those of the cluster. A proxy in front of it logs requests and
makes the faults that a test orders; signatures pass unchanged.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from cluster.rig.binaries import ensure
from helpers.file_faults import FileFaults
from helpers.ports import free_ports

ACCESS_KEY, SECRET_KEY = "reader-key", "reader-secret"
BUCKET = "models"
READ_BYTES = 2**18


@dataclass
class S3Server:
    endpoint: str
    """Through the proxy."""
    direct: str
    faults: FileFaults = field(default_factory=FileFaults)
    asked: list[tuple[str, str, int]] = field(default_factory=list)
    """Method, path and status of each request through the proxy."""
    failures: list[int] = field(default_factory=list)
    """Statuses of the next answers; 0 closes the connection."""
    received: Counter[str] = field(default_factory=Counter)
    """Bytes of uploads by the last part of their path."""
    upload_bytes_per_second: float = 0.0
    """The speed of each request, if not 0."""

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def client(self) -> Any:
        """A client of the administrator, past the proxy."""
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=self.direct,
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
            region_name="us-east-1",
        )

    def upload(self, folder: Path, prefix: str, part_bytes: int | None = None, **more: Any) -> None:
        """Upload the files of a folder, in parts if they are larger than a part."""
        from boto3.s3.transfer import TransferConfig

        size = part_bytes or 2**40
        config = TransferConfig(multipart_threshold=size, multipart_chunksize=size, max_concurrency=2)
        client = self.client()
        for path in sorted(folder.iterdir()):
            client.upload_file(str(path), BUCKET, f"{prefix}/{path.name}", Config=config, ExtraArgs=more)


def use(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the environment of a client of the server, without other AWS settings, and forget earlier requests."""
    for name in ("AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, os.devnull)
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    server.asked.clear()
    server.received.clear()
    server.faults.sent_bytes.clear()


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[S3Server]:
    """Serves an empty bucket `models` from a folder. Raises NotPossibleHere without Go."""
    program = str(ensure("s3")["s3"] / "versitygw")
    (folder / "data").mkdir(parents=True)
    environment = {**os.environ, "ROOT_ACCESS_KEY": ACCESS_KEY, "ROOT_SECRET_KEY": SECRET_KEY}
    with contextlib.ExitStack() as running:
        port = running.enter_context(free_ports())
        log = running.enter_context((folder / "log").open("wb"))
        command = [program, "--port", f"127.0.0.1:{port}", "--keep-alive", "--quiet", "posix", str(folder / "data")]
        process = running.enter_context(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        running.callback(process.terminate)
        server = S3Server("", f"http://127.0.0.1:{port}")
        proxy = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (_Proxy,), {"server_": server, "port": port}))
        proxy.daemon_threads = True
        running.enter_context(proxy)
        server.endpoint = f"http://127.0.0.1:{proxy.server_address[1]}"
        thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        running.callback(thread.join)
        running.callback(proxy.shutdown)
        running.callback(server.faults.released.set)
        _wait(server, process, folder / "log")
        yield server


def _wait(server: S3Server, process: subprocess.Popen[bytes], log: Path) -> None:
    from botocore.exceptions import BotoCoreError

    for _ in range(200):
        assert process.poll() is None, log.read_text()
        try:
            server.client().create_bucket(Bucket=BUCKET)
            return
        except BotoCoreError:
            time.sleep(0.05)
    raise AssertionError(log.read_text())


class _Proxy(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_: S3Server
    port: int

    def do_GET(self) -> None:
        self._forward()

    def do_HEAD(self) -> None:
        self._forward()

    def do_PUT(self) -> None:
        self._forward()

    def do_POST(self) -> None:
        self._forward()

    def do_DELETE(self) -> None:
        self._forward()

    def log_message(self, *args: Any) -> None:
        """Requests are in `asked`."""

    def _body(self, path: str) -> bytes:
        blocks = []
        left = int(self.headers.get("Content-Length", "0"))
        while left:
            blocks.append(self.rfile.read(min(left, READ_BYTES)))
            left -= len(blocks[-1])
            self.server_.received[path.rpartition("/")[2]] += len(blocks[-1])
            if self.server_.upload_bytes_per_second:
                time.sleep(len(blocks[-1]) / self.server_.upload_bytes_per_second)
            if not blocks[-1]:
                break
        return b"".join(blocks)

    def _forward(self) -> None:
        path = urlsplit(self.path).path
        body = self._body(path)
        if self.server_.failures:
            status = self.server_.failures.pop(0)
            self.server_.asked.append((self.command, path, status))
            self.close_connection = True
            if status:
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()
            return
        upstream = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(upstream), contextlib.suppress(ConnectionError):
            upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() != "expect":  # answered by this server
                    upstream.putheader(name, value)
            upstream.endheaders(body or None)
            answer = upstream.getresponse()
            self.server_.asked.append((self.command, path, answer.status))
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("connection", "date", "server"):
                    self.send_header(name, value)
            self.end_headers()
            if self.command == "HEAD":
                return
            blocks = iter(lambda: answer.read(READ_BYTES), b"")
            content_range = answer.getheader("Content-Range", "")
            if content_range:
                begin = int(content_range.removeprefix("bytes ").partition("-")[0])
                blocks = self.server_.faults.body(path, begin, blocks)
            num_left = int(answer.getheader("Content-Length", "0"))
            for block in blocks:
                self.wfile.write(block)
                num_left -= len(block)
            if num_left:
                self.close_connection = True
