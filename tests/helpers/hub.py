"""A local Hugging Face hub: serves the requests of huggingface_hub from folders as the real hub does.

Used by tests in this process (`serving`) and as a program outside or inside a test cluster:

    python -m helpers.hub --root DIR --port 8080 [--host 0.0.0.0] [--private org/name=TOKEN] [--gated org/name=TOKEN]

As a program it takes orders for faults and tells what it sent at port + 2 (`ControlHandler`).
`DIR/org/name/REVISION/` holds the files of one revision, `main` being the default. It needs the standard library only.
Like the real hub it pins commits (a hash over names and contents), redirects weights to a store at another address
(same host, port + 1) which refuses a request with the hub's token, supports ranges, returns 401 to anonymous callers
for private and missing repositories, and sends X-Error-Code. It refuses every unknown path and method (501), so that
unexpected requests are noticed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import re
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, parse_qsl, quote, unquote, urlsplit

from helpers.file_faults import FileFaults

SIGNATURE = "signed-for-an-hour"
"""In the addresses of the store; a secret like a token."""
LARGE_SUFFIXES = (".safetensors", ".bin", ".gguf")
CHUNK_BYTES = 1 << 20


class Refused(Exception):
    """A response other than 200."""

    def __init__(self, status: int, code: str = "", message: str = "") -> None:
        super().__init__(message or code)
        self.status = status
        self.code = code
        self.message = message or code


@dataclass(frozen=True)
class Asked:
    """One answered request, for tests to count."""

    method: str
    path: str
    range: str
    status: int


@dataclass(frozen=True)
class StoredFile:
    path: Path
    name: str
    size: int
    oid: str
    """The git blob id of the contents."""
    sha256: str

    @property
    def is_large(self) -> bool:
        return self.name.endswith(LARGE_SUFFIXES)


@lru_cache(maxsize=1024)
def _stored(path: Path, name: str, size: int, changed_ns: int) -> StoredFile:
    git, sha256 = hashlib.sha1(b"blob %d\0" % size), hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            git.update(chunk)
            sha256.update(chunk)
    return StoredFile(path, name, size, git.hexdigest(), sha256.hexdigest())


@dataclass
class Shelf:
    """The repositories below a folder, their access rights, and the failures requested by a test."""

    root: Path
    private: Mapping[str, str] = field(default_factory=dict)
    """Repository to the token with access."""
    gated: Mapping[str, str] = field(default_factory=dict)
    """Repository to the token whose owner accepted its terms."""
    asked: list[Asked] = field(default_factory=list)
    body: Callable[[str, int, Iterator[bytes]], Iterator[bytes]] = lambda name, begin, blocks: blocks
    """Name, first position and blocks of a body to the blocks that are sent: `FileFaults.body`."""
    info: Callable[[dict[str, Any]], Any] = lambda answer: answer
    """The answer about a model to the JSON that is sent, or to other bytes."""
    store_failure: int = 0
    """Status of every answer of the store, if not 0."""
    _failures: list[int] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def fail_next(self, *statuses: int) -> None:
        """Status codes of the next responses, in order. 0 closes the connection without a response."""
        with self._lock:
            self._failures.extend(statuses)

    def next_failure(self) -> int | None:
        with self._lock:
            return self._failures.pop(0) if self._failures else None

    def note(self, asked: Asked) -> None:
        with self._lock:
            self.asked.append(asked)

    def files(self, repository: str, revision: str) -> tuple[str, dict[str, StoredFile]]:
        """Commit and files of a revision: a branch, or the commit of one. Raises Refused."""
        for folder in sorted((self.root / repository).iterdir()):
            if revision in (folder.name, commit := self._commit(folder)):
                return commit, self._read(folder)
        raise Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")

    def commit(self, repository: str, revision: str = "main") -> str:
        return self._commit(self.root / repository / revision)

    def check_visible(self, repository: str, token: str | None) -> None:
        exists = (self.root / repository).is_dir()
        if exists and self.private.get(repository, token) == token:
            return
        if token is None:
            raise Refused(401, message="Invalid username or password.")
        if token not in self.tokens:
            raise Refused(401, message="Invalid credentials in Authorization header")
        raise Refused(404, "RepoNotFound", "Repository not found")

    def check_readable(self, repository: str, token: str | None) -> None:
        self.check_visible(repository, token)
        if self.gated.get(repository, token) != token:
            raise Refused(401 if token is None else 403, "GatedRepo", f"Access to model {repository} is restricted.")

    @property
    def tokens(self) -> set[str]:
        return {*self.private.values(), *self.gated.values()}

    def _commit(self, folder: Path) -> str:
        digest = hashlib.sha1()
        for name, file in self._read(folder).items():
            digest.update(f"{name} {file.oid}\n".encode())
        return digest.hexdigest()

    @staticmethod
    def _read(folder: Path) -> dict[str, StoredFile]:
        files: dict[str, StoredFile] = {}
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            name, status = path.relative_to(folder).as_posix(), path.stat()
            files[name] = _stored(path.resolve(), name, status.st_size, status.st_mtime_ns)
        return files


REPOSITORY = r"(?P<repository>[\w.-]+/[\w.-]+)"
API = re.compile(rf"/api/models/{REPOSITORY}(/revision/(?P<revision>.+))?")
TREE = re.compile(rf"/api/models/{REPOSITORY}/tree/(?P<revision>[^/]+)(/(?P<folder>.+))?")
RESOLVE = re.compile(rf"/{REPOSITORY}/resolve/(?P<revision>[^/]+)/(?P<name>.+)")
LARGE = re.compile(rf"/large/{REPOSITORY}/(?P<commit>\w+)/(?P<name>.+)")


class Handler(BaseHTTPRequestHandler):
    """Shared by hub and store: requested failures, ranges, the log of requests."""

    protocol_version = "HTTP/1.1"
    shelf: Shelf
    scheme = "http"

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, *args: Any) -> None:
        """Requests are recorded in the shelf, not printed."""

    def _answer(self) -> None:
        try:
            failure = self.shelf.next_failure()
            if failure == 0:
                self.close_connection = True
                self.connection.close()
                return
            if failure is not None:
                raise Refused(failure, message="ordered by a test")
            self._route()
        except Refused as refused:
            body = json.dumps({"error": refused.message}).encode()
            headers = {"X-Error-Message": refused.message, "Content-Type": "application/json"}
            self._send(refused.status, {**headers, **({"X-Error-Code": refused.code} if refused.code else {})}, body)

    def _route(self) -> None:
        raise NotImplementedError

    def _send_file(self, file: StoredFile, headers: dict[str, str]) -> None:
        begin, end = 0, file.size
        status = 200
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            begin = int(match[1])
            end = min(file.size, int(match[2]) + 1) if match[2] else file.size
            if begin >= end:
                self._send(416, {"Content-Range": f"bytes */{file.size}"}, b"")
                return
            status = 206
            headers = {**headers, "Content-Range": f"bytes {begin}-{end - 1}/{file.size}"}
        self._send_headers(status, {**headers, "Accept-Ranges": "bytes"}, end - begin)
        if self.command == "HEAD":
            return
        num_left = end - begin
        with contextlib.suppress(ConnectionError):
            for block in self.shelf.body(file.name, begin, _blocks(file.path, begin, end)):
                self.wfile.write(block)
                num_left -= len(block)
        if num_left:
            self.close_connection = True

    def _send_json(self, value: Any) -> None:
        self._send(200, {"Content-Type": "application/json"}, json.dumps(value).encode())

    def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self._send_headers(status, headers, len(body))
        if self.command != "HEAD":
            self.wfile.write(body)

    def _send_headers(self, status: int, headers: dict[str, str], num_bytes: int) -> None:
        self.shelf.note(Asked(self.command, urlsplit(self.path).path, self.headers.get("Range", ""), status))
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(num_bytes))
        self.end_headers()


class HubHandler(Handler):
    """Metadata, small files and access control."""

    store_port: int

    def _route(self) -> None:
        url = urlsplit(self.path)
        path = url.path
        scheme, _, token = self.headers.get("Authorization", "").partition(" ")
        if scheme not in ("", "Bearer"):
            raise Refused(401, message="Invalid credentials in Authorization header")
        if path == "/health":
            self._send(200, {}, b"ok")
        elif match := TREE.fullmatch(path):
            folder = unquote(match["folder"] or "").rstrip("/")
            recursive = parse_qs(url.query).get("recursive", ["false"])[0].lower() in ("true", "1")
            self._tree(match["repository"], unquote(match["revision"]), folder, token or None, recursive)
        elif match := API.fullmatch(path):
            with_sizes = parse_qs(url.query).get("blobs", ["false"])[0].lower() in ("true", "1")
            self._info(match["repository"], unquote(match["revision"] or "main"), token or None, with_sizes)
        elif match := RESOLVE.fullmatch(path):
            self._resolve(match["repository"], unquote(match["revision"]), unquote(match["name"]), token or None)
        else:
            raise Refused(501, message=f"this hub does not know {self.command} {path}")

    def _info(self, repository: str, revision: str, token: str | None, with_sizes: bool) -> None:
        self.shelf.check_visible(repository, token)
        commit, files = self.shelf.files(repository, revision)
        siblings = []
        for file in files.values():
            sibling: dict[str, Any] = {"rfilename": file.name}
            if with_sizes:
                sibling |= {"size": file.size, "blobId": file.oid} | _large_entry(file)
            siblings.append(sibling)
        answer = self.shelf.info(
            {
                "_id": commit[:24],
                "id": repository,
                "modelId": repository,
                "sha": commit,
                "private": repository in self.shelf.private,
                "gated": "manual" if repository in self.shelf.gated else False,
                "disabled": False,
                "downloads": 0,
                "likes": 0,
                "tags": [],
                "siblings": siblings,
            }
        )
        if isinstance(answer, bytes):
            self._send(200, {"Content-Type": "text/html"}, answer)
        else:
            self._send_json(answer)

    def _tree(self, repository: str, revision: str, folder: str, token: str | None, recursive: bool) -> None:
        """Files and folders directly in a folder, or all files below it."""
        self.shelf.check_visible(repository, token)
        _, files = self.shelf.files(repository, revision)
        begins, entries = f"{folder}/" if folder else "", {}
        for file in files.values():
            below = file.name.removeprefix(begins)
            name, deeper, _ = (below, "", "") if recursive else below.partition("/")
            if file.name.startswith(begins):
                kind = {"type": "directory"} if deeper else {"type": "file", "size": file.size} | _large_entry(file)
                entries[name] = {"oid": file.oid, "path": begins + name, **kind}
        if not entries:
            raise Refused(404, "EntryNotFound", f"{folder} does not exist")
        self._send_json([*entries.values()])

    def _resolve(self, repository: str, revision: str, name: str, token: str | None) -> None:
        self.shelf.check_readable(repository, token)
        commit, files = self.shelf.files(repository, revision)
        headers = {"X-Repo-Commit": commit}
        if name not in files:
            raise Refused(404, "EntryNotFound", "Entry not found")
        file = files[name]
        if not file.is_large:
            self._send_file(file, {**headers, "ETag": f'"{file.oid}"'})
            return
        linked = {"X-Linked-Size": str(file.size), "X-Linked-ETag": f'"{file.sha256}"'}
        host = self.headers["Host"].partition(":")[0]
        location = (
            f"{self.scheme}://{host}:{self.store_port}/large/{repository}/{commit}/{quote(name)}?signature={SIGNATURE}"
        )
        self._send(302, {**headers, **linked, "Location": location}, b"")


class StoreHandler(Handler):
    """The store of the weights. The address is the permission, as with signed URLs."""

    def _route(self) -> None:
        match = LARGE.fullmatch(urlsplit(self.path).path)
        if match is None:
            raise Refused(501, message=f"this store does not know {self.command} {self.path}")
        if self.shelf.store_failure:
            raise Refused(self.shelf.store_failure, message="ordered by a test")
        if parse_qs(urlsplit(self.path).query) != {"signature": [SIGNATURE]}:
            raise Refused(403, message="the address is not signed")
        if "Authorization" in self.headers:
            raise Refused(400, message="only one way of authorization is allowed, and the address is one")
        _, files = self.shelf.files(match["repository"], match["commit"])
        self._send_file(files[unquote(match["name"])], {})


class ControlHandler(BaseHTTPRequestHandler):
    """What `FileFaults` and the shelf offer to tests in this process, for those that only reach it by HTTP:
    `GET /?bytes_per_second=1e6&flipped=model.safetensors:99&store_failure=503` sets these and returns what was sent.
    `listed=NAME` adds a name to the files of every model; empty: no more."""

    shelf: Shelf
    faults: FileFaults

    def do_GET(self) -> None:
        for name, value in parse_qsl(urlsplit(self.path).query, keep_blank_values=True):
            if name == "flipped":
                file, _, position = value.partition(":")
                self.faults.flipped = {file: int(position)} if position else {}
            elif name == "store_failure":
                self.shelf.store_failure = int(value)
            elif name == "listed":
                self.shelf.info = partial(_with_name, value) if value else _unchanged
            elif name == "bytes_per_second":
                self.faults.bytes_per_second = float(value)
            else:
                self.send_error(400, f"no such order: {name}")
                return
        asked = [[asked.method, asked.path, asked.range, asked.status] for asked in self.shelf.asked]
        body = json.dumps({"sent_bytes": self.faults.sent_bytes, "asked": asked}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """The test that asks knows."""


def _with_name(name: str, answer: dict[str, Any]) -> dict[str, Any]:
    return {**answer, "siblings": [*answer["siblings"], {"rfilename": name, "size": 4, "blobId": "0" * 40}]}


def _unchanged(answer: dict[str, Any]) -> dict[str, Any]:
    return answer


def _blocks(path: Path, begin: int, end: int) -> Iterator[bytes]:
    with path.open("rb") as source:
        source.seek(begin)
        while begin < end and (block := source.read(min(CHUNK_BYTES, end - begin))):
            yield block
            begin += len(block)


def _large_entry(file: StoredFile) -> dict[str, Any]:
    if not file.is_large:
        return {}
    return {"lfs": {"oid": file.sha256, "sha256": file.sha256, "size": file.size, "pointerSize": 134}}


@contextlib.contextmanager
def _both(
    shelf: Shelf, host: str, port: int, scheme: str = "http"
) -> Iterator[tuple[ThreadingHTTPServer, ThreadingHTTPServer]]:
    """Binds hub and store; port 0 takes free ports."""
    store = ThreadingHTTPServer((host, port and port + 1), type("BoundStore", (StoreHandler,), {"shelf": shelf}))
    bound = {"shelf": shelf, "scheme": scheme, "store_port": store.server_address[1]}
    with store, ThreadingHTTPServer((host, port), type("BoundHub", (HubHandler,), bound)) as hub:
        hub.daemon_threads = store.daemon_threads = True
        yield hub, store


@contextlib.contextmanager
def _in_thread(server: ThreadingHTTPServer) -> Iterator[None]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()


@contextlib.contextmanager
def serving(shelf: Shelf, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """Serves in threads of this process, with `tls` over HTTPS; yields the address for HF_ENDPOINT."""
    scheme = "https" if tls else "http"
    with _both(shelf, "127.0.0.1", 0, scheme) as (hub, store):
        if tls:
            for server in (hub, store):
                server.socket = tls.wrap_socket(server.socket, server_side=True)
        with _in_thread(store), _in_thread(hub):
            yield f"{scheme}://127.0.0.1:{hub.server_address[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description="A Hugging Face hub for one machine.")
    parser.add_argument("--root", type=Path, required=True, help="DIR/org/name/REVISION/ holds a revision's files")
    parser.add_argument("--host", default="0.0.0.0")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--private", action="append", default=[], metavar="ORG/NAME=TOKEN")
    parser.add_argument("--gated", action="append", default=[], metavar="ORG/NAME=TOKEN")
    options = parser.parse_args()
    private, gated = (dict(entry.split("=", 1) for entry in entries) for entries in (options.private, options.gated))
    shelf, faults = Shelf(options.root, private, gated), FileFaults()
    shelf.body = faults.body
    control = type("BoundControl", (ControlHandler,), {"shelf": shelf, "faults": faults})
    with (
        _both(shelf, options.host, options.port) as (hub, store),
        _in_thread(store),
        ThreadingHTTPServer((options.host, options.port + 2), control) as controller,
        _in_thread(controller),
    ):
        print(f"hub: {options.root} at http://{options.host}:{hub.server_address[1]}", flush=True)
        hub.serve_forever()


if __name__ == "__main__":
    main()
