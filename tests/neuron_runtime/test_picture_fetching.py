"""Pictures at https URLs: only of allowed hosts, at public addresses that were checked, and within limits."""

from __future__ import annotations

import contextlib
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from neuron_runtime.errors import InvalidRequest
from neuron_runtime.pictures.fetching import MAX_REDIRECTS, NAMES_AT_ONCE, Fetcher, is_public

HOST = "pictures.example"
PUBLIC = "93.184.215.14"
AT = "messages[0].content[0].image_url"
MAX_BYTES = 1000

INSIDE = [
    *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1"),
    *("255.255.255.255", "198.18.0.1", "240.0.0.1", "::1", "::", "fe80::1%eth0", "fc00::1", "fd00:ec2::254", "ff02::1"),
    *("::ffff:127.0.0.1", "::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "2001:0:1::", "fec0::1"),
]


class Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        with contextlib.suppress(OSError):
            match self.path.partition("?"):
                case ("/picture", *_):
                    self._send(200, b"the picture")
                case ("/to", _, url):
                    self.send_response(302)
                    self.send_header("location", url)
                    self.send_header("content-length", "0")
                    self.end_headers()
                case ("/large", *_):
                    self._send(200, bytes(MAX_BYTES + 1))
                case ("/endless", *_):
                    self.send_response(200)
                    self.end_headers()
                    while True:
                        self.wfile.write(bytes(100))
                case ("/short", *_):
                    self.send_response(200)
                    self.send_header("content-length", "100")
                    self.end_headers()
                    self.wfile.write(b"cut")
                    self.close_connection = True
                case ("/slow", *_):
                    self.send_response(200)
                    self.end_headers()
                    stopping.wait()
                case ("/slow-head", *_):
                    while not stopping.wait(0.02):
                        self.wfile.write(b"HTTP/1.1 200 OK\r\nx")
                case _:
                    self._send(404, b"")

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Clients may leave."""


stopping = threading.Event()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    key, certificate = folder / "key", folder / "certificate"
    subject = ["-subj", f"/CN={HOST}", "-addext", f"subjectAltName=DNS:{HOST}"]
    made = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-noenc", "-days", "1", *subject]
    subprocess.run(["openssl", "req", *made, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    return certificate, key


@pytest.fixture(scope="module")
def port(certificate: tuple[Path, Path]) -> Iterator[int]:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(*certificate)
    with Server(("127.0.0.1", 0), Answers) as server:
        server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        stopping.set()
        server.shutdown()
        thread.join()
    stopping.clear()


class Net:
    """Names with addresses, and connections that all end at one server here."""

    def __init__(self, port: int, certificate: Path) -> None:
        self.addresses = {HOST: [PUBLIC]}
        self.connected = list[tuple[str, int]]()
        self._port = port
        self._context = ssl.create_default_context(cafile=str(certificate))

    def fetcher(self, *allowed: str, seconds: float = 30.0) -> Fetcher:
        return Fetcher(
            allowed or (HOST,),
            resolve=lambda host: self.addresses[host],
            connect=self._connect,
            context=self._context,
            seconds=seconds,
        )

    def _connect(self, address: str, port: int, seconds: float) -> socket.socket:
        self.connected.append((address, port))
        return socket.create_connection(("127.0.0.1", self._port), seconds)


@pytest.fixture
def net(port: int, certificate: tuple[Path, Path]) -> Net:
    return Net(port, certificate[0])


def refused(fetcher: Fetcher, url: str) -> str:
    with pytest.raises(InvalidRequest) as error:
        fetcher.fetch(url, AT, MAX_BYTES)
    assert error.value.field == AT
    return str(error.value)


def test_a_picture_is_fetched_from_the_address_that_was_checked(net: Net) -> None:
    assert net.fetcher().fetch(f"https://{HOST}/picture", AT, MAX_BYTES) == b"the picture"
    assert net.connected == [(PUBLIC, 443)]


def test_a_port_must_be_allowed_too(net: Net) -> None:
    assert "allowedHosts" in refused(net.fetcher(), f"https://{HOST}:8443/picture")
    assert net.fetcher(f"{HOST}:8443").fetch(f"https://{HOST}:8443/picture", AT, MAX_BYTES) == b"the picture"


@pytest.mark.parametrize(
    "url",
    [
        "https://other.example/picture",
        "http://pictures.example/picture",
        "https://user@pictures.example/picture",
        "https://pictures.example@other.example/",
        "https://pictures.example.other.example/",
        "https://[::1]/picture",
        "https://pictures.example/a picture",
        "https://pictures.example\\@other.example/",
        "https://pictures.example:99999/",
        "https:///picture",
        f"https://{HOST}/{'a' * 2048}",
    ],
)
def test_other_urls_are_refused_before_anything_is_connected(net: Net, url: str) -> None:
    refused(net.fetcher(), url)
    assert not net.connected


@pytest.mark.parametrize("address", INSIDE)
def test_a_host_with_an_address_inside_is_refused(net: Net, address: str) -> None:
    assert not is_public(address)
    net.addresses[HOST] = [PUBLIC, address]
    assert "an address that is not public" in refused(net.fetcher(), f"https://{HOST}/picture")
    assert not net.connected


@pytest.mark.parametrize("address", [PUBLIC, "2606:4700:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_addresses_of_the_internet_are_public(address: str) -> None:
    assert is_public(address)


def test_redirects_are_followed_where_they_may_lead(net: Net) -> None:
    assert net.fetcher().fetch(f"https://{HOST}/to?/to?/picture", AT, MAX_BYTES) == b"the picture"
    for url in ("https://other.example/", "http://pictures.example/", "file:///etc/passwd", "//169.254.169.254/"):
        refused(net.fetcher(), f"https://{HOST}/to?{url}")
    net.addresses["moves.example"] = ["10.0.0.1"]
    net.connected.clear()
    fetcher = net.fetcher(HOST, "moves.example")
    assert "not public" in refused(fetcher, f"https://{HOST}/to?https://moves.example/picture")
    assert net.connected == [(PUBLIC, 443)]


def test_redirects_end(net: Net) -> None:
    url = f"https://{HOST}/to?" * (MAX_REDIRECTS + 1) + f"https://{HOST}/picture"
    assert "more than 3 redirects" in refused(net.fetcher(), url)


@pytest.mark.parametrize("path", ["large", "endless"])
def test_a_picture_of_too_many_bytes_is_not_read_to_its_end(net: Net, path: str) -> None:
    assert f"at most {MAX_BYTES} bytes" in refused(net.fetcher(), f"https://{HOST}/{path}")


@pytest.mark.parametrize(("path", "why"), [("gone", "answers 404"), ("short", "cannot be fetched")])
def test_a_host_that_has_no_whole_picture_is_named(net: Net, path: str, why: str) -> None:
    assert why in refused(net.fetcher(), f"https://{HOST}/{path}")


@pytest.mark.parametrize("path", ["slow", "slow-head"])
def test_a_slow_host_is_left(net: Net, path: str) -> None:
    assert "took longer than 0.5 s" in refused(net.fetcher(seconds=0.5), f"https://{HOST}/{path}")


def test_a_host_that_cannot_prove_its_name_is_refused(net: Net) -> None:
    net.addresses["other.example"] = [PUBLIC]
    assert "cannot be fetched" in refused(net.fetcher("other.example"), "https://other.example/picture")


def test_a_host_that_nobody_knows_is_refused() -> None:
    def unknown(host: str) -> list[str]:
        raise socket.gaierror(-2, "Name or service not known")

    assert "Name or service not known" in refused(Fetcher([HOST], resolve=unknown), f"https://{HOST}/picture")


def test_names_that_take_long_to_look_up_are_left(net: Net) -> None:
    """As many as there are threads for them, and one behind these."""
    hangs = threading.Event()

    def resolve(host: str) -> list[str]:
        assert hangs.wait(60)
        return [PUBLIC]

    fetcher = Fetcher([HOST], resolve=resolve, connect=net._connect, context=net._context, seconds=0.1)
    asked = [threading.Thread(target=refused, args=(fetcher, f"https://{HOST}/picture")) for _ in range(NAMES_AT_ONCE)]
    try:
        for one in asked:
            one.start()
        assert "took longer than 0.1 s" in refused(fetcher, f"https://{HOST}/picture")
        for one in asked:
            one.join()
    finally:
        hangs.set()
    assert not net.connected
    fetcher._seconds = 30.0
    assert fetcher.fetch(f"https://{HOST}/picture", AT, MAX_BYTES) == b"the picture"
