"""Fetches pictures from hosts that the operator of a server allows, and from no address of its own network.

Called by `sources`, on a thread. A fetch has limits on bytes, seconds and redirects; looking up a name counts, which
the system itself does not end in time. The address that is connected to is one that was checked, so that nobody can
change it in between.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from urllib.parse import urljoin, urlsplit

from neuron_runtime.errors import InvalidRequest
from neuron_runtime.pictures.sources import NO_URL, NOT_FETCHED, too_large
from neuron_runtime.reading_threads import ReadingThreads

FETCH_SECONDS = 10.0
"""For a picture, redirects included."""
MAX_REDIRECTS = 3
MAX_URL_CHARACTERS = 2048
NAMES_AT_ONCE = 8
"""Names that are looked up at the same time. One that hangs keeps its thread."""
_CHUNK = 1 << 16
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_URL = re.compile(r"https://[A-Za-z0-9.-]+(:\d{1,5})?([/?#][\x21-\x7e]*)?", re.IGNORECASE)

Connect = Callable[[str, int, float], socket.socket]
"""To an address and port, within so many seconds."""


def _connected(address: str, port: int, seconds: float) -> socket.socket:
    return socket.create_connection((address, port), seconds)


def _resolved(host: str) -> list[str]:
    return [str(one[4][0]) for one in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]


class Fetcher:
    """allowed_hosts: names, each with `:PORT` if it is not 443."""

    def __init__(
        self,
        allowed_hosts: Sequence[str],
        *,
        resolve: Callable[[str], list[str]] = _resolved,
        connect: Connect = _connected,
        context: ssl.SSLContext | None = None,
        seconds: float = FETCH_SECONDS,
    ) -> None:
        self._allowed = frozenset(one.lower().removesuffix(":443") for one in allowed_hosts)
        self._resolve = resolve
        self._names = ReadingThreads(NAMES_AT_ONCE, "names")
        self._connect = connect
        self._context = context
        self._seconds = seconds

    def fetch(self, url: str, at: str, max_bytes: int) -> bytes:
        """Raises InvalidRequest, which names the place where the client wrote the URL."""
        ends = time.monotonic() + self._seconds
        try:
            for _ in range(MAX_REDIRECTS + 1):
                found = self._get(url, at, max_bytes, ends)
                if isinstance(found, bytes):
                    return found
                url = urljoin(url, found)
        except (OSError, http.client.HTTPException, ValueError) as error:
            late = time.monotonic() >= ends
            why = f"took longer than {self._seconds:g} s" if late else f"failed ({_plain(error)})"
            raise InvalidRequest.at(at, f"cannot be fetched: {urlsplit(url).hostname} {why}", NOT_FETCHED) from error
        raise InvalidRequest.at(at, f"cannot be fetched: more than {MAX_REDIRECTS} redirects", NOT_FETCHED)

    def _get(self, url: str, at: str, max_bytes: int, ends: float) -> bytes | str:
        """The bytes at a URL, or where it redirects to."""
        host, port, target = self._checked(url, at)
        address = self._address(host, at, ends)
        raw = self._connect(address, port, _left(ends))
        context = self._context or ssl.create_default_context()
        with raw, context.wrap_socket(raw, server_hostname=host, do_handshake_on_connect=False) as secured:
            # Whatever the other side does, its connection ends in time.
            timer = threading.Timer(max(ends - time.monotonic(), 0), _shut, (secured,))
            timer.daemon = True
            timer.start()
            try:
                secured.do_handshake()
                connection = http.client.HTTPSConnection(host, port)
                connection.sock = secured
                connection.request("GET", target, headers={"Accept": "image/*", "Accept-Encoding": "identity"})
                with contextlib.closing(connection.getresponse()) as response:
                    return self._answer(response, at, max_bytes, ends)
            finally:
                timer.cancel()

    def _answer(self, response: http.client.HTTPResponse, at: str, max_bytes: int, ends: float) -> bytes | str:
        if response.status in (301, 302, 303, 307, 308):
            return response.headers.get("location") or ""
        if response.status != 200:
            raise InvalidRequest.at(at, f"cannot be fetched: its host answers {response.status}", NOT_FETCHED)
        if (response.length or 0) > max_bytes:
            raise too_large(at, max_bytes)
        parts, size = list[bytes](), 0
        while part := response.read1(_CHUNK):
            size += len(part)
            if size > max_bytes:
                raise too_large(at, max_bytes)
            parts.append(part)
        if time.monotonic() >= ends or response.length:
            raise http.client.IncompleteRead(b"", response.length)
        return b"".join(parts)

    def _checked(self, url: str, at: str) -> tuple[str, int, str]:
        """Host, port and what to ask it for."""
        if len(url) > MAX_URL_CHARACTERS or not _URL.fullmatch(url):
            problem = f"must be an https URL of at most {MAX_URL_CHARACTERS} characters, without credentials"
            raise InvalidRequest.at(at, f"{problem}, also where it redirects to", NO_URL)
        parts = urlsplit(url)
        host, port = (parts.hostname or "").rstrip("."), parts.port or 443
        if (host if port == 443 else f"{host}:{port}") not in self._allowed:
            problem = f"names {host[:100]}, whose pictures this server does not fetch (allowedHosts)"
            raise InvalidRequest.at(at, f"{problem}: send the picture as a `data:` URL", NO_URL)
        return host, port, (parts.path or "/") + (f"?{parts.query}" if parts.query else "")

    def _address(self, host: str, at: str, ends: float) -> str:
        found = self._names.submit(self._resolve, host)
        try:
            addresses = found.result(_left(ends))
        finally:
            found.cancel()
        for one in addresses:
            if not is_public(one):
                raise InvalidRequest.at(at, f"names {host}, which has an address that is not public", NO_URL)
        if not addresses:
            raise OSError(f"no address of {host}")
        return addresses[0]


def is_public(text: str) -> bool:
    """Whether an address is one of the internet, and of no network inside it."""
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        inside = address.ipv4_mapped or address.sixtofour
        if inside is None and address in _NAT64:
            inside = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inside is not None:
            return is_public(str(inside))
        if address.teredo is not None or address.is_site_local:
            return False
    return address.is_global and not address.is_multicast and not address.is_reserved


def _left(ends: float) -> float:
    """Seconds. Raises TimeoutError."""
    seconds = ends - time.monotonic()
    if seconds <= 0:
        raise TimeoutError
    return seconds


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has ended
        # Not that of TLS, which would change what the other thread is reading from.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def _plain(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
