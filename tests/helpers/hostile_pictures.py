"""Pictures as clients send them that are broken, or made to cost much; and URLs that name none."""

from __future__ import annotations

import base64
import random
import zlib
from collections.abc import Callable
from functools import cache

from helpers.picture_models import picture

KINDS = ("PNG", "JPEG", "GIF", "WEBP")


def spoiled(rng: random.Random) -> bytes:
    """A file of a picture that was cut, changed, repeated or continued."""
    raw = bytearray(picture(rng.randint(1, 60), rng.randint(1, 60), kind=rng.choice(KINDS)))
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(len(raw))
        match rng.randrange(4):
            case 0:
                raw[at] = rng.randrange(256)
            case 1:
                del raw[max(at, 12) :]
            case 2:
                raw[at:at] = raw[at : at + rng.randint(1, 40)] * rng.randint(1, 20)
            case 3:
                raw[at : at + 4] = rng.choice((b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x7f\xff\xff\xff"))
    return bytes(raw)


def chunk(name: bytes, content: bytes) -> bytes:
    """Of a PNG file."""
    return len(content).to_bytes(4, "big") + name + content + zlib.crc32(name + content).to_bytes(4, "big")


def png(*before: bytes, width: int = 8, height: int = 8) -> bytes:
    """A black one that says its size, with chunks before its pixels, of which there are eight lines of eight."""
    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes((8, 0, 0, 0, 0))
    lines = zlib.compress(bytes(9 * 8))
    return b"".join((b"\x89PNG\r\n\x1a\n", chunk(b"IHDR", header), *before, chunk(b"IDAT", lines), chunk(b"IEND", b"")))


def animated(num_frames: int) -> bytes:
    """A GIF without an end."""
    raw = picture(kind="GIF")
    return raw[:-1] + raw[raw.index(b",") : -1] * num_frames


@cache
def _bomb() -> bytes:
    return zlib.compress(bytes(30_000_000), 9)


_FILES: tuple[Callable[[random.Random], bytes], ...] = (
    spoiled,
    spoiled,
    spoiled,
    lambda rng: picture(rng.choice((1, 2, 500, 2000)), rng.choice((1, 3, 400)), kind=rng.choice(KINDS)),
    lambda rng: png(width=rng.choice((0, 1, 60_000, 2**31 - 1)), height=rng.choice((0, 7, 60_000, 2**32 - 1))),
    lambda rng: png(chunk(b"zTXt", b"a\0\0" + _bomb())),
    lambda rng: png(chunk(b"iCCP", b"a\0\0" + _bomb())),
    lambda rng: png(*(chunk(b"tEXt", b"a\0b") for _ in range(rng.randrange(2000)))),
    lambda rng: animated(rng.randrange(500)),
    lambda rng: picture(kind="JPEG") + b"\xff\xda" * rng.randrange(200),
    lambda rng: picture(kind="WEBP").replace(b"VP8 ", rng.choice((b"VP8X", b"VP8L", b"ANIM"))),
    lambda rng: rng.choice((b"", b"<svg/>", b"%PDF-1.7", b"PK\3\4", b"BM", b"II*\0", b"\0\0\0 ftypavif", b"GIF89a")),
    lambda rng: rng.randbytes(rng.randrange(3000)),
)
_NO_DATA: tuple[str, ...] = (
    *("", ":", "x", "picture.png", "data:", "data:,", "data:;base64,", "data:image/png,abc", "\0", "é:é", "[IMG]"),
    *("file:///etc/passwd", "http://localhost/a.png", "ftp://localhost/a", "javascript:alert(1)", "//localhost/a"),
    *("https://localhost/a.png", "https://LOCALHOST./a", "https://localhost:443/", "https://localhost:99999/"),
    *(
        "https://169.254.169.254/latest",
        "https://[::1]/",
        "https://127.0.0.1/",
        "https://2130706433/",
        "https://0x7f.1/",
    ),
    *("https://localhost@example.com/", "https://example.com\\@localhost/", "https:///", "https://", "https:localhost"),
    *(
        "https://localhost/a b",
        "https://localhost/\r\nHost: a",
        "https://localhost/" + "a" * 3000,
        "https://ｌocalhost/",
    ),
)
_ENCODED: tuple[Callable[[str], str], ...] = (
    *[lambda text: text] * 10,
    lambda text: text.rstrip("=") + "a",
    lambda text: text[:-1],
    lambda text: text[:7] + "\n" + text[7:],
    lambda text: text.replace("A", "-"),
    lambda text: text + "====" + text,
    lambda text: "é" + text,
    lambda text: text * 40,
)


def hostile_url(rng: random.Random) -> str:
    """The URL of a picture that is none, that is broken, or that says more than it has."""
    if rng.randrange(4) == 0:
        return rng.choice(_NO_DATA)
    kind = rng.choice(("image/png", "image/svg+xml", "text/html", "", "a" * 2000, "image/png;charset=utf-8"))
    encoded = base64.b64encode(rng.choice(_FILES)(rng)).decode()
    return f"{rng.choice(('data', 'data', 'data', 'DATA', 'date'))}:{kind};base64,{rng.choice(_ENCODED)(encoded)}"
