"""API keys: accepted and refused requests, changes of the file, and secrecy of keys."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from helpers.chat_model import write_chat_model
from helpers.front_end import Serving, make_model, serving
from helpers.serve_command import FRONT_END, children, get, post, serve
from neuron_runtime.commands.command_line import main
from neuron_runtime.commands.serve import API_KEY_VARIABLE
from neuron_runtime.config import ServerOptions
from neuron_runtime.errors import ExitCode, InvalidConfig
from neuron_runtime.server.auth import CHECK_SECONDS, MAX_KEYS, ApiKeys, parse_keys

KEYS = ("sk-first-0123456789", "sk-second-abcdefgh")
BODY = {"prompt": "a core", "max_tokens": 2}
OPEN = ("/health", "/live", "/metrics", "/ping", "/version", "/openapi.json", "/docs", "/docs/static/swagger-ui.css")
GUARDED = (
    *(("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("GET", "/v1/models/m")),
    *(("POST", "/tokenize"), ("POST", "/detokenize"), ("GET", "/nothing"), ("GET", "//v1/models"), ("GET", "/HEALTH")),
    *(("GET", "/docsx"), ("GET", "/openapi.json/")),
)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "api-key"
    path.write_text("\n".join(KEYS) + "\n")
    return path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(model_dir: Path, key_file: Path) -> AsyncIterator[Serving]:
    options = ServerOptions(access_log=False, allowed_origins=("https://chat.example",))
    async with serving(model_dir, api_key_file=key_file, options=options) as one:
        yield one


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize("key", KEYS)
async def test_every_key_of_the_file_is_served(served: Serving, key: str) -> None:
    answer = await served.http.post("/v1/completions", json=BODY, headers=bearer(key))
    assert answer.status_code == 200
    models = await served.http.get("/v1/models", headers={"authorization": f"bearer  {key}"})
    assert models.status_code == 200


@pytest.mark.parametrize(("method", "path"), GUARDED)
async def test_every_path_except_the_open_ones_needs_a_key(served: Serving, method: str, path: str) -> None:
    url = f"{str(served.http.base_url).rstrip('/')}{path}"
    for headers in (
        {},
        bearer("wrong"),
        {"authorization": "Bearer"},
        {"authorization": KEYS[0]},
        {"authorization": f"Basic {KEYS[0]}"},
    ):
        answer = await served.http.request(method, url, headers=headers)
        assert answer.status_code == 401, headers
        error = answer.json()["error"]
        assert (error["type"], error["code"], error["param"]) == ("authentication_error", "invalid_api_key", None)


@pytest.mark.parametrize("path", OPEN)
async def test_probes_metrics_and_documentation_need_no_key(served: Serving, path: str) -> None:
    assert (await served.http.get(path)).status_code == 200


@pytest.mark.parametrize("path", ["/docs/../v1/models", "/docs/static/../../v1/models", "/docs/%2e%2e/v1/models"])
async def test_a_path_below_the_documentation_does_not_bypass_the_key(served: Serving, path: str) -> None:
    url = served.http.base_url
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    assert (await reader.read()).startswith(b"HTTP/1.1 404 ")
    writer.close()


async def test_a_key_prefix_and_two_keys_are_refused(served: Serving) -> None:
    for wrong in (KEYS[0][:-1], KEYS[0] + "x", " ".join(KEYS), KEYS[0].upper(), "\xff"):
        headers = [(b"authorization", f"Bearer {wrong}".encode("latin-1"))]
        assert (await served.http.get("/v1/models", headers=headers)).status_code == 401


async def test_the_challenge_says_whether_a_key_was_sent(served: Serving) -> None:
    none = await served.http.get("/v1/models")
    assert none.headers["www-authenticate"] == 'Bearer realm="neuron-serving"'
    wrong = await served.http.get("/v1/models", headers=bearer("nobody"))
    assert wrong.headers["www-authenticate"] == 'Bearer realm="neuron-serving", error="invalid_token"'
    assert "nobody" not in wrong.text


async def test_the_key_is_checked_before_the_body_is_read(served: Serving) -> None:
    url = served.http.base_url
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000\r\nExpect: 100-continue\r\n\r\n"
    )
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 401 ")
    assert b"connection: close" in head.lower()
    assert b"invalid_api_key" in await reader.read()
    writer.close()


async def test_a_refused_client_keeps_its_connection(served: Serving) -> None:
    url = served.http.base_url
    reader, writer = await asyncio.open_connection(url.host, url.port)
    ask = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n%b\r\n{}"
    for authorization, status in ((b"", b"401"), (b"Authorization: Bearer " + KEYS[0].encode() + b"\r\n", b"400")):
        writer.write(ask % authorization)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 " + status)
        length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"content-length"))
        await reader.readexactly(length)
    writer.close()


async def test_a_cors_preflight_needs_no_key_and_the_refusal_is_readable(served: Serving) -> None:
    origin = {"origin": "https://chat.example"}
    asked = {**origin, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    preflight = await served.http.options("/v1/completions", headers=asked)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "https://chat.example"
    assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
    refused = await served.http.post("/v1/completions", json=BODY, headers=origin)
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "https://chat.example")
    other = await served.http.get("/v1/models", headers={**bearer(KEYS[0]), "origin": "https://other.example"})
    assert "access-control-allow-origin" not in other.headers


# The file


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def replace(path: Path, text: str) -> None:
    """Replaces the file as a kubelet does."""
    new = path.with_name("new")
    new.write_text(text)
    os.replace(new, path)


async def test_keys_are_numbered_by_line_and_stripped(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_bytes(b"\n  one\t\r\n\ntwo")
    keys = ApiKeys(path)
    assert [keys.number_of(key) for key in (b"one", b"two", b"three", b"")] == [1, 2, None, None]


async def test_a_changed_key_file_takes_effect_and_revokes_old_keys(tmp_path: Path) -> None:
    path, clock = tmp_path / "keys", Clock()
    path.write_text("old")
    keys = ApiKeys(path, clock)
    replace(path, "new\n")
    assert keys.number_of(b"old") == 1
    clock.now += CHECK_SECONDS
    assert (keys.number_of(b"old"), keys.number_of(b"new")) == (None, 1)


async def test_a_secret_updated_by_the_kubelet_takes_effect(tmp_path: Path) -> None:
    # Files of a volume are links through `..data`, which is switched to another folder atomically.
    for number in (1, 2):
        (tmp_path / f"..{number}").mkdir()
        (tmp_path / f"..{number}" / "keys").write_text(f"sk-{number}")
    (tmp_path / "..data").symlink_to("..1")
    (tmp_path / "keys").symlink_to("..data/keys")
    clock = Clock()
    keys = ApiKeys(tmp_path / "keys", clock)
    assert keys.number_of(b"sk-1") == 1
    (tmp_path / "..data_tmp").symlink_to("..2")
    os.replace(tmp_path / "..data_tmp", tmp_path / "..data")
    clock.now += CHECK_SECONDS
    assert (keys.number_of(b"sk-1"), keys.number_of(b"sk-2")) == (None, 1)


@pytest.mark.parametrize("broken", ["", " \n", "a key\n", "ключ"], ids=["empty", "blank", "a space", "not ASCII"])
async def test_keys_stay_in_force_when_the_file_breaks_or_disappears(
    tmp_path: Path, broken: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path, clock = tmp_path / "keys", Clock()
    path.write_text("old")
    keys = ApiKeys(path, clock)
    replace(path, broken)
    for after in (3, 6):
        while clock.now < after:
            clock.now += CHECK_SECONDS
            assert (keys.number_of(b"old"), keys.number_of(broken.encode())) == (1, None)
        path.unlink(missing_ok=True)
    assert capsys.readouterr().err.count("stay valid") == 1
    replace(path, "new")
    clock.now += CHECK_SECONDS
    assert (keys.number_of(b"old"), keys.number_of(b"new")) == (None, 1)


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "1 to"),
        (b"good\nsecret with a space\n", "line 2 of"),
        (b"\xff\xfe", "line 1 of"),
        (b"\n".join(b"k%d" % n for n in range(MAX_KEYS + 1)), f"{MAX_KEYS} keys"),
        (b"k" * 100_000, "64 KiB"),
    ],
)
async def test_a_file_without_usable_keys_is_refused_without_printing_them(raw: bytes, says: str) -> None:
    with pytest.raises(InvalidConfig, match=says) as refusal:
        parse_keys(raw, "/keys")
    assert refusal.value.field == "--api-key-file"
    assert "secret" not in str(refusal.value)


# The command


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--api-key-file", "/nonexistent/keys"], "--api-key-file: cannot read /nonexistent/keys: No such file"),
        (["--api-key", "with space"], "--api-key: line 1 of --api-key is not a key"),
        (["--api-key", "hush", "--api-key-file", "/dev/null"], "--api-key: cannot be combined with --api-key-file"),
    ],
)
async def test_unusable_keys_end_the_command_before_a_port_opens(
    flags: list[str], says: str, model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(model_dir), "--port", "0", *flags]) == ExitCode.INVALID_ENGINE_CONFIG
    stderr = capsys.readouterr().err
    assert says in stderr
    assert "serving" not in stderr
    assert "hush" not in stderr


@pytest.mark.slow
@pytest.mark.parametrize("way", ["file", "variable"])
async def test_a_key_appears_only_in_its_file(
    way: str, tmp_path: Path, key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "variable":
        monkeypatch.setenv(API_KEY_VARIABLE, KEYS[0])
    flags = ["--api-key-file", str(key_file)] if way == "file" else []
    model = write_chat_model(tmp_path / "tiny", max_length=256)
    record = tmp_path / "record"
    with serve(str(model), "--backend", "simulated", "--port", "0", "--record", str(record), *flags) as command:
        url = command.until_ready()
        answer = post(f"{url}/v1/completions", BODY, bearer(KEYS[0]))
        assert answer.status_code == 200
        assert post(f"{url}/v1/completions", BODY).status_code == 401
        # A key in a query would be in foreign logs.
        assert get(f"{url}/v1/models?api_key={KEYS[0]}").status_code == 401
        seen = [answer.text, str(answer.headers), get(f"{url}/metrics").text]
        seen += [get(f"{url}{path}").text for path in OPEN]
        processes = [(command.process.pid, ""), *children(command.process.pid)]
        seen += [Path(f"/proc/{pid}/cmdline").read_text() for pid, _ in processes]
        seen += [Path(f"/proc/{pid}/environ").read_text() for pid, _ in processes[1:]]
        holders = [
            path for path in command.tmp_dir.rglob("*") if path.is_file() and KEYS[0].encode() in path.read_bytes()
        ]
        assert [path.name for path in holders] == ([] if way == "file" else ["api-keys"])
        assert all(path.stat().st_mode & 0o077 == 0 for path in holders)
        command.child(FRONT_END)  # the path is in the command line, the key is not
        assert command.end() == 0
    seen += [command.text, record.read_text() if record.exists() else ""]
    assert len(processes) == 3
    assert not [text for text in seen for key in KEYS if key in text]
