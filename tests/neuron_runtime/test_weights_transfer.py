"""Copies of files from any source: chunks, resumption after a kill, checks, faults of network and disk."""

from __future__ import annotations

import os
import random
import subprocess
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.file_faults import FileFaults
from helpers.grown import grow
from helpers.hub import SIGNATURE, Shelf, serving
from helpers.weights import CHUNK_BYTES, NUM_READERS, contents, shelf_with_model, size, start_fetch
from neuron_runtime.errors import ExitCode, FatalError, ServingError
from neuron_runtime.weights.fetching import Fetched, fetch
from neuron_runtime.weights.hashing import FileHash
from neuron_runtime.weights.journal import Claim, Journal, parse
from neuron_runtime.weights.source import Attempts, BrokenAnswer, Check, Listing, SourceFile, SourceUnreachable
from neuron_runtime.weights.store import Store
from neuron_runtime.weights.transfer import Amount, Tools, Transfer, TransferLimits, chunks_of

MODEL = "hf://acme/model"
LIMITS = TransferLimits(NUM_READERS, CHUNK_BYTES)


def quiet(amount: Amount) -> None:
    """A report that nobody reads."""


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return shelf_with_model(tmp_path / "hub")


@pytest.fixture
def faults(shelf: Shelf) -> FileFaults:
    faults = FileFaults()
    shelf.body = faults.body
    return faults


@pytest.fixture
def endpoint(shelf: Shelf, faults: FileFaults, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with serving(shelf) as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        yield address
        faults.released.set()


@pytest.fixture
def model(shelf: Shelf) -> Path:
    return shelf.root / "acme/model/main"


def fetched(folder: Path, digest: str = "") -> Fetched:
    return fetch(MODEL, Store(folder), quiet, digest, tools=Tools(sleep=lambda seconds: None, limits=LIMITS))


def refusal(folder: Path) -> FatalError:
    with pytest.raises(FatalError) as caught:
        fetched(folder)
    assert "\n" not in str(caught.value)
    return caught.value


class TestKilled:
    @pytest.mark.slow
    def test_a_killed_fetch_reads_again_only_the_chunks_in_flight(
        self, endpoint: str, faults: FileFaults, model: Path, tmp_path: Path
    ) -> None:
        faults.bytes_per_second = 3e6
        chance, num_kills = random.Random(7), 0
        for _ in range(4):
            sent = faults.num_sent_bytes
            with start_fetch(MODEL, tmp_path / "store", {"HF_ENDPOINT": endpoint}) as process:
                while faults.num_sent_bytes < sent + CHUNK_BYTES and process.poll() is None:
                    time.sleep(0.005)
                time.sleep(chance.random() * 0.3)
                process.kill()
            num_kills += process.returncode != 0
        assert num_kills >= 3
        assert not [path for path in (tmp_path / "store").iterdir() if not path.name.startswith(".")]
        faults.bytes_per_second = 0
        found = fetched(tmp_path / "store")
        assert contents(found.folder) == contents(model)
        assert found.read_bytes < size(model)
        assert faults.num_sent_bytes <= size(model) + num_kills * NUM_READERS * CHUNK_BYTES

    def test_what_a_crash_of_the_machine_lost_is_read_again(
        self, endpoint: str, faults: FileFaults, model: Path, tmp_path: Path
    ) -> None:
        faults.flipped["model-00001-of-00004.safetensors"] = 4_000_000
        refusal(tmp_path / "store")
        (work,) = (tmp_path / "store/.partial").iterdir()
        victim, other = (work / "files" / f"model-0000{number}-of-00004.safetensors" for number in (2, 3))
        with victim.open("r+b") as file:
            file.write(bytes(1000))
        faults.flipped.clear()
        faults.sent_bytes.clear()
        assert contents(fetched(tmp_path / "store").folder) == contents(model)
        assert faults.sent_bytes[victim.name] == (model / victim.name).stat().st_size
        assert faults.sent_bytes[other.name] == 0

    def test_two_processes_download_once(self, endpoint: str, faults: FileFaults, model: Path, tmp_path: Path) -> None:
        faults.bytes_per_second = 1e5
        first = start_fetch(MODEL, tmp_path / "store", {"HF_ENDPOINT": endpoint})
        while not faults.num_sent_bytes:
            assert first.poll() is None
            time.sleep(0.01)
        second = start_fetch(MODEL, tmp_path / "store", {"HF_ENDPOINT": endpoint})
        assert second.stderr is not None
        assert any("waiting for another process" in line for line in second.stderr)
        faults.bytes_per_second = 0
        outputs = [process.communicate(timeout=60)[0].split() for process in (first, second)]
        assert [process.returncode for process in (first, second)] == [0, 0]
        assert outputs[0][1] == outputs[1][1]
        assert contents(Path(outputs[0][1])) == contents(model)
        assert [int(read_bytes) for read_bytes, *_ in outputs] == [size(model), 0]
        assert faults.num_sent_bytes == size(model)

    def test_a_reader_never_sees_a_part_of_a_model(
        self, endpoint: str, faults: FileFaults, model: Path, tmp_path: Path
    ) -> None:
        faults.bytes_per_second = 2e6
        whole = contents(model)
        process = start_fetch(MODEL, tmp_path / "store", {"HF_ENDPOINT": endpoint})
        (tmp_path / "store").mkdir(exist_ok=True)
        num_looks = 0
        while process.poll() is None:
            for path in (tmp_path / "store").iterdir():
                assert path.name.startswith(".") or contents(path) == whole
            num_looks += 1
        process.communicate()
        assert process.returncode == 0
        assert num_looks > 10
        (entry,) = (path for path in (tmp_path / "store").iterdir() if not path.name.startswith("."))
        assert contents(entry) == whole


class TestFaults:
    def test_truncated_answers_are_continued_where_they_ended(
        self, endpoint: str, faults: FileFaults, model: Path, tmp_path: Path
    ) -> None:
        faults.num_cuts, faults.cut_bytes = 4, 40_000
        assert contents(fetched(tmp_path / "store").folder) == contents(model)
        assert faults.num_cuts == 0
        assert faults.num_sent_bytes <= size(model) + 4 * faults.cut_bytes

    def test_a_server_that_always_truncates_is_given_up(
        self, endpoint: str, faults: FileFaults, tmp_path: Path
    ) -> None:
        faults.num_cuts, faults.cut_bytes = 10**6, 0
        with pytest.raises(SourceUnreachable, match=r"after 5 attempts \((RemoteProtocol|ChunkedEncoding)Error"):
            fetched(tmp_path / "store")

    def test_a_server_that_hangs_is_cut_off_and_asked_again(
        self, endpoint: str, faults: FileFaults, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("neuron_runtime.weights.hub.TIMEOUT_SECONDS", 0.5)
        faults.num_hangs = 3
        assert contents(fetched(tmp_path / "store").folder) == contents(model)

    def test_a_server_that_only_hangs_is_given_up(
        self, endpoint: str, faults: FileFaults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("neuron_runtime.weights.hub.TIMEOUT_SECONDS", 0.2)
        faults.num_hangs, faults.cut_bytes = 10**6, 0
        with pytest.raises(SourceUnreachable, match=r"cannot be read for hf://acme/model after 5 attempts \(.*[tT]im"):
            fetched(tmp_path / "store")

    def test_a_connection_that_breaks_after_the_last_byte_is_no_failure(self, tmp_path: Path) -> None:
        class Late(Memory):
            @contextmanager
            def read(self, listing: Listing, file: SourceFile, begin: int, end: int) -> Iterator[Iterator[bytes]]:
                assert begin < end, "an empty range is an error of every server"

                def blocks() -> Iterator[bytes]:
                    yield self.files[file.name][begin:end]
                    raise BrokenAnswer("the connection broke")

                yield blocks()

        source = Late({"config.json": b"[]"})
        with pytest.raises(FatalError, match="must be a JSON object"):
            fetch(MODEL, Store(tmp_path), quiet, source=source, tools=Tools(sleep=lambda seconds: None))

    def test_a_server_that_drips_is_cut_off_and_given_up(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("neuron_runtime.weights.transfer.TIMEOUT_SECONDS", 0.05)

        class Dripping(Memory):
            @contextmanager
            def read(self, listing: Listing, file: SourceFile, begin: int, end: int) -> Iterator[Iterator[bytes]]:
                def blocks() -> Iterator[bytes]:
                    for position in range(begin, end):
                        time.sleep(0.002)
                        yield self.files[file.name][position : position + 1]

                yield blocks()

        tools = Tools(sleep=lambda seconds: None)
        with pytest.raises(SourceUnreachable, match=r"after 5 attempts .*fewer than 262,144 bytes"):
            fetch(MODEL, Store(tmp_path), quiet, source=Dripping({"config.json": bytes(10_000)}), tools=tools)

    def test_a_wrong_byte_is_found_and_only_its_file_is_read_again(
        self, endpoint: str, faults: FileFaults, model: Path, tmp_path: Path
    ) -> None:
        bad = "model-00001-of-00004.safetensors"
        faults.flipped[bad] = 4_700_000
        error = refusal(tmp_path / "store")
        assert error.exit_code is ExitCode.CHECKSUM_MISMATCH
        assert f"{bad}: its sha256 is" in str(error)
        (work,) = (tmp_path / "store/.partial").iterdir()
        assert not (work / "files" / bad).exists()
        faults.flipped.clear()
        faults.sent_bytes.clear()
        assert contents(fetched(tmp_path / "store").folder) == contents(model)
        assert faults.num_sent_bytes == faults.sent_bytes[bad] == (model / bad).stat().st_size

    def test_a_wrong_byte_of_a_small_file_is_found(self, endpoint: str, faults: FileFaults, tmp_path: Path) -> None:
        faults.flipped["config.json"] = 3
        assert "config.json: its git id is" in str(refusal(tmp_path / "store"))

    def test_an_expired_signed_address_is_renewed(
        self, endpoint: str, shelf: Shelf, model: Path, tmp_path: Path
    ) -> None:
        sent: list[str] = []
        plain = shelf.body

        def body(name: str, begin: int, blocks: Iterator[bytes]) -> Iterator[bytes]:
            sent.append(name)
            if len(sent) == 20:
                shelf.fail_next(403)
            return plain(name, begin, blocks)

        shelf.body = body
        assert contents(fetched(tmp_path / "store").folder) == contents(model)
        assert any(asked.status == 403 for asked in shelf.asked)

    @pytest.mark.parametrize("status", [503, 410])
    def test_a_signed_address_is_never_printed(
        self, endpoint: str, shelf: Shelf, tmp_path: Path, capsys: pytest.CaptureFixture[str], status: int
    ) -> None:
        """It is as good as a token while it lasts."""
        shelf.store_failure = status
        with pytest.raises(ServingError) as caught:
            fetched(tmp_path / "store")
        printed = f"{caught.value}{capsys.readouterr().err}"
        assert str(status) in printed
        assert SIGNATURE not in printed

    def test_the_hub_redirects_once_per_file(self, endpoint: str, shelf: Shelf, tmp_path: Path) -> None:
        fetched(tmp_path / "store")
        redirects = [asked.path for asked in shelf.asked if asked.status == 302]
        assert len(redirects) <= 4 * NUM_READERS
        assert sum("/large/" in asked.path for asked in shelf.asked) > 2 * len(redirects)


class TestDisk:
    def test_weights_larger_than_the_disk_are_refused_before_the_download(
        self, endpoint: str, shelf: Shelf, tmp_path: Path
    ) -> None:
        tools = Tools(free_bytes=lambda folder: 1_000_000)
        with pytest.raises(FatalError, match=r"needs [\d,]+ more bytes in .*, but 1,000,000 are free") as caught:
            fetch(MODEL, Store(tmp_path), quiet, tools=tools)
        assert caught.value.exit_code is ExitCode.STORAGE_FULL
        assert not any("/large/" in asked.path for asked in shelf.asked)

    def test_a_disk_that_fills_up_is_reported_and_resumed_after_the_cure(
        self, endpoint: str, faults: FileFaults, model: Path, tmp_path: Path
    ) -> None:
        with small_disk(tmp_path / "disk", size(model) // 2) as disk:
            tools = Tools(free_bytes=lambda folder: 10**9, limits=LIMITS)
            with pytest.raises(FatalError, match=r"No space left.*provide more space") as caught:
                fetch(MODEL, Store(disk), quiet, tools=tools)
            assert caught.value.exit_code is ExitCode.STORAGE_FULL
            subprocess.run(["mount", "-o", f"remount,size={2 * size(model)}", disk], check=True)
            found = fetched(disk)
            assert contents(found.folder) == contents(model)
            assert found.read_bytes < size(model)

    def test_an_unwritable_store_is_reported(self, endpoint: str, tmp_path: Path) -> None:
        (tmp_path / "weights").write_text("a file in the way")
        error = refusal(tmp_path / "weights")
        assert error.exit_code is ExitCode.INVALID_ENGINE_CONFIG
        assert "cannot be written: Not a directory" in str(error)

    def test_memory_does_not_grow_with_the_model(self, shelf: Shelf, endpoint: str, tmp_path: Path) -> None:
        big = shelf.root / "acme/big/main"
        for folder in (big, shelf.root / "acme/model/main"):
            folder.mkdir(exist_ok=True, parents=True)
        for path in (shelf.root / "acme/model/main").iterdir():
            (big / path.name).write_bytes(path.read_bytes())
        num_bytes = 200_000_000
        grow(big / "model-00001-of-00004.safetensors", num_bytes)
        peak_kib = {}
        for uri in (MODEL, "hf://acme/big"):
            process = start_fetch(uri, tmp_path / "store", {"HF_ENDPOINT": endpoint}, chunk_bytes=16 * 2**20)
            out, err = process.communicate(timeout=120)
            assert process.returncode == 0, err
            peak_kib[uri] = int(out.split()[2])
        assert 1024 * (peak_kib["hf://acme/big"] - peak_kib[MODEL]) < num_bytes / 10


class TestHostileNames:
    @pytest.mark.parametrize(
        "name", ["../evil.json", "/etc/config.json", "a/config.json", "..", ".manifest.json", "x\n.jinja", "\x1b.jinja"]
    )
    def test_a_listed_name_that_is_no_plain_name_is_never_written(self, name: str, tmp_path: Path) -> None:
        source = Memory({name: b"evil", "config.json": b"{}"})
        with pytest.raises(FatalError, match=r"hf://acme/model/model\.safetensors\.index\.json is missing"):
            fetch(MODEL, Store(tmp_path / "store"), quiet, source=source)
        written = {path.name for path in tmp_path.rglob("*") if path.is_file()}
        assert written <= {"config.json", "journal", source.listing().digest}

    def test_a_link_planted_in_a_download_is_not_followed(self, tmp_path: Path) -> None:
        source = Memory({"config.json": b"{}"})
        precious = tmp_path / "precious"
        precious.write_text("precious")
        files = tmp_path / "store/.partial" / source.listing().digest / "files"
        files.mkdir(parents=True)
        (files / "config.json").symlink_to(precious)
        with pytest.raises(FatalError, match="cannot be written"):
            fetch(MODEL, Store(tmp_path / "store"), quiet, source=source)
        assert precious.read_text() == "precious"


@dataclass
class Memory:
    """A source of files in memory that fails as ordered."""

    files: dict[str, bytes]
    chance: random.Random = field(default_factory=lambda: random.Random(0))
    failing: float = 0.0
    """Share of reads that end early or fail."""
    num_read_bytes: int = 0
    stop_after: int = 10**9
    """Reads after which this source raises KeyboardInterrupt, as if the process had ended."""
    uri: str = MODEL
    place: str = "memory"
    advice: str = "the test"
    failures: tuple[type[BaseException], ...] = (OSError,)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def listing(self, digest: str = "") -> Listing:
        files = {name: SourceFile(name, len(raw)) for name, raw in self.files.items()}
        return Listing("0" * 40, files)

    def check(self, listing: Listing, file: SourceFile) -> Check | None:
        return Check("crc32", f"{zlib.crc32(self.files[file.name]):08x}")

    @contextmanager
    def read(self, listing: Listing, file: SourceFile, begin: int, end: int) -> Iterator[Iterator[bytes]]:
        with self._lock:
            self.stop_after -= 1
            if self.stop_after < 0:
                raise KeyboardInterrupt
            fails, share = self.chance.random() < self.failing, self.chance.random()
        cut = begin + int(share * (end - begin)) if fails else end

        def blocks() -> Iterator[bytes]:
            with self._lock:
                self.num_read_bytes += cut - begin
            yield self.files[file.name][begin:cut]
            if fails:
                raise BrokenAnswer("ordered by the test")

        yield blocks()

    def verdict(self, error: BaseException) -> FatalError | None:
        return None


SIZES = st.lists(st.integers(0, 400), min_size=1, max_size=6)
SMALL_LIMITS = st.builds(
    TransferLimits,
    num_readers=st.integers(1, 4),
    chunk_bytes=st.integers(1, 64),
    num_files=st.integers(1, 3),
    min_bytes=st.just(1),
)


class TestBookkeeping:
    @given(SIZES, SMALL_LIMITS)
    def test_chunks_cover_each_file_once_and_in_order(self, sizes: list[int], limits: TransferLimits) -> None:
        chunks = list(chunks_of(sizes, limits))
        for number, num_bytes in enumerate(sizes):
            own = [chunk for chunk in chunks if chunk.file == number]
            assert [chunk.number for chunk in own] == list(range(len(own)))
            assert [chunk.begin for chunk in own] == [0, *(chunk.end for chunk in own)][:-1]
            assert own[-1].end == num_bytes
            assert all(chunk.end - chunk.begin <= limits.chunk_bytes for chunk in own)

    @given(
        sizes=SIZES,
        limits=SMALL_LIMITS,
        seed=st.integers(0, 2**32),
        failing=st.floats(0, 0.3),
        stops=st.lists(st.integers(0, 15), max_size=3),
    )
    def test_any_failures_and_stops_end_in_equal_files(
        self,
        tmp_path_factory: pytest.TempPathFactory,
        *,
        sizes: list[int],
        limits: TransferLimits,
        seed: int,
        failing: float,
        stops: list[int],
    ) -> None:
        chance = random.Random(seed)
        source = Memory({f"{n}.safetensors": chance.randbytes(size) for n, size in enumerate(sizes)}, chance, failing)
        folder = tmp_path_factory.mktemp("transfer")
        for stop_after in (*stops, 10**9):
            source.stop_after = stop_after
            journal = Journal(folder / "journal", "d")
            transfer = Transfer(
                Attempts(source, lambda seconds: None, (0.0,) * 50),
                source.listing(),
                list(source.files),
                folder=folder,
                journal=journal,
                tools=Tools(limits=limits),
            )
            try:
                sums = transfer.run(quiet, 0.01)
                break
            except KeyboardInterrupt:
                pass
            finally:
                journal.close()
                _wait_for(lambda: not any(t.name.startswith("transfer-") for t in threading.enumerate()))
        assert {name: (folder / name).read_bytes() for name in source.files} == source.files
        for name, raw in source.files.items():
            whole = FileHash(len(raw), None)
            whole.update(raw)
            assert sums[name] == whole.sha256
        assert transfer.amount.done_bytes == transfer.amount.total_bytes == sum(sizes)
        assert source.num_read_bytes <= sum(sizes) + len(stops) * limits.num_readers * limits.chunk_bytes

    @given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3))), st.integers(0, 10**6))
    def test_a_torn_journal_keeps_its_whole_lines(self, claims: list[tuple[str, int]], cut: int) -> None:
        lines = [b'{"version":1,"digest":"d"}\n']
        lines += [b'["%s",%d,%d,7]\n' % (name.encode(), 10 * begin, 10 * begin + 10) for name, begin in claims]
        whole = b"".join(lines)
        raw = whole[: cut % (len(whole) + 1)]
        found, num_valid = parse(raw, "d")
        assert raw[:num_valid].endswith(b"\n") or not num_valid
        num_lines = raw.count(b"\n")
        assert num_valid == sum(map(len, lines[:num_lines]))
        assert set(found) == {(name, 10 * begin) for name, begin in claims[: max(0, num_lines - 1)]}

    @given(st.binary(max_size=300))
    def test_no_journal_crashes_its_reader(self, raw: bytes) -> None:
        assert parse(raw, "d")[1] <= len(raw)

    def test_a_journal_of_another_model_is_not_believed(self, tmp_path: Path) -> None:
        first = Journal(tmp_path / "journal", "one")
        first.add(Claim("a", 0, 10, 7))
        first.close()
        same = Journal(tmp_path / "journal", "one")
        assert same.claims == {("a", 0): Claim("a", 0, 10, 7)}
        same.drop("a")
        same.close()
        dropped = Journal(tmp_path / "journal", "one")
        assert dropped.claims == {}
        dropped.close()
        other = Journal(tmp_path / "journal", "two")
        assert other.claims == {}
        other.close()


def _wait_for(condition: object, seconds: float = 30.0) -> None:
    until = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < until
        time.sleep(0.005)


@contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[Path]:
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("needs root: mounts a small file system")
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)
