"""A folder mounted as from a file server: each read takes a while, and many can be under way, as on EFS or FSx.

Used by the suite. A read-only FUSE file system, in a process of its own: a page fault must not wait for its own
process. It needs root and /dev/fuse.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

NUM_THREADS = 32
"""Requests that the server works on at the same time."""
MAX_REQUEST_BYTES = 2**20 + 2**12
MAX_PAGES = 256
MAX_WAITING = 256
"""Requests of reading ahead that the kernel has under way."""
MS_RDONLY, MNT_DETACH = 1, 2
START_SECONDS = 10.0

# https://www.kernel.org/doc/html/latest/filesystems/fuse.html, numbers of include/uapi/linux/fuse.h
LOOKUP, FORGET, GETATTR, OPEN, READ, STATFS, RELEASE, FLUSH = 1, 2, 3, 14, 15, 17, 18, 25
INIT, OPENDIR, READDIR, RELEASEDIR, INTERRUPT, DESTROY, BATCH_FORGET = 26, 27, 28, 29, 36, 38, 42
ASYNC_READ, HAS_MAX_PAGES, KEEP_CACHE = 1, 1 << 22, 2
UNANSWERED = (FORGET, BATCH_FORGET, INTERRUPT)
IN, OUT = struct.Struct("<IIQQIIIHH"), struct.Struct("<IiQ")
DAY = 86_400


@contextlib.contextmanager
def mounted(folder: Path, latency_seconds: float) -> Iterator[Path]:
    """The files of a folder below a mount point. Raises OSError if this user cannot mount."""
    with tempfile.TemporaryDirectory(prefix="bench-distant-") as name:
        point = Path(name)
        command = [sys.executable, __file__, str(folder), name, str(latency_seconds)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as server:
            assert server.stdout
            assert server.stderr
            try:
                if server.stdout.readline() != b"mounted\n":
                    raise OSError(server.stderr.read().decode().strip().rpartition("\n")[2])
                yield point
            finally:
                _libc.umount2(name.encode(), MNT_DETACH)
                server.terminate()


_libc = ctypes.CDLL(None, use_errno=True)


class Server:
    """Answers the kernel's requests about the plain files of one folder. Node 1 is the folder, node n its file n-2."""

    def __init__(self, folder: Path, latency_seconds: float) -> None:
        self._latency_seconds = latency_seconds
        self._files = sorted(path for path in folder.iterdir() if path.is_file())
        self._fds = [os.open(path, os.O_RDONLY) for path in self._files]
        self._device = os.open("/dev/fuse", os.O_RDWR)

    def mount(self, point: Path) -> None:
        options = f"fd={self._device},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()},allow_other"
        if _libc.mount(b"distant", str(point).encode(), b"fuse", MS_RDONLY, options.encode()):
            number = ctypes.get_errno()
            raise OSError(number, f"mount: {os.strerror(number)}")

    def run(self) -> None:
        threads = [threading.Thread(target=self._work) for _ in range(NUM_THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _work(self) -> None:
        while True:
            try:
                request = os.read(self._device, MAX_REQUEST_BYTES)
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.EINTR):
                    continue
                return  # unmounted
            _, operation, unique, node, *_ = IN.unpack_from(request)
            if operation in UNANSWERED:
                continue
            try:
                answer, number = self._answer(operation, node, request[IN.size :]), 0
            except OSError as error:
                answer, number = b"", error.errno or errno.EIO
            with contextlib.suppress(OSError):  # interrupted
                os.write(self._device, OUT.pack(OUT.size + len(answer), -number, unique) + answer)

    def _answer(self, operation: int, node: int, body: bytes) -> bytes:
        if operation == INIT:
            flags = ASYNC_READ | HAS_MAX_PAGES
            ahead = struct.unpack_from("<I", body, 8)[0]
            return struct.pack("<4I2H2I2H32x", 7, 31, ahead, flags, MAX_WAITING, MAX_WAITING, 2**20, 1, MAX_PAGES, 0)
        if operation == LOOKUP:
            name = body.rstrip(b"\0").decode()
            found = next((number for number, path in enumerate(self._files, 2) if path.name == name), 0)
            if not found:
                raise FileNotFoundError(errno.ENOENT, name)
            return struct.pack("<QQQQII", found, 0, DAY, DAY, 0, 0) + self._attributes(found)
        if operation == GETATTR:
            return struct.pack("<QII", DAY, 0, 0) + self._attributes(node)
        if operation in (OPEN, OPENDIR):
            return struct.pack("<QII", 0, KEEP_CACHE, 0)
        if operation in (RELEASE, RELEASEDIR, FLUSH, DESTROY):
            return b""
        if operation == STATFS:
            return bytes(80)
        if operation == READDIR:
            at_end = struct.unpack_from("<Q", body, 8)[0]
            return b"" if at_end else b"".join(_entry(number, path.name) for number, path in enumerate(self._files, 2))
        if operation == READ:
            _, offset, num_bytes = struct.unpack_from("<QQI", body)
            time.sleep(self._latency_seconds)
            return os.pread(self._fds[node - 2], num_bytes, offset)
        raise OSError(errno.ENOSYS, "not needed")

    def _attributes(self, node: int) -> bytes:
        size = 0 if node == 1 else os.fstat(self._fds[node - 2]).st_size
        mode = 0o040555 if node == 1 else 0o100444
        return struct.pack("<3Q3Q10I", node, size, -(-size // 512), 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)


def _entry(number: int, name: str) -> bytes:
    raw = name.encode()
    return struct.pack("<QQII", number, number, len(raw), 8) + raw + bytes(-len(raw) % 8)


def main() -> None:
    folder, point, latency_seconds = sys.argv[1:]
    server = Server(Path(folder), float(latency_seconds))
    server.mount(Path(point))
    print("mounted", flush=True)
    server.run()


if __name__ == "__main__":
    main()
