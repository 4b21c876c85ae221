"""`kubectl neuron` as a user runs it, found by the real kubectl, against a real API server.

Logs need kubelets: `test_story.py` has them.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from cluster.rig.binaries import ensure
from cluster.rig.machine import GO_SETTINGS
from helpers.apiserver import ApiServer, service_account
from helpers.operators import BY_KIND, Namespace, client_of, eventually, operating, run_settings
from helpers.serve_command import serve

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
READER = service_account("neuron-serving", "other-0")
"""A user without rights."""


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Shell:
    """A shell with kubectl and the plugin in PATH, and a kubeconfig."""

    kubeconfig: Path

    def __call__(self, *arguments: str, **environment: str) -> Done:
        bins = [str(ensure("hyper")["hyper"]), str(Path(sys.executable).parent), os.environ["PATH"]]
        env = {"PATH": os.pathsep.join(bins), "KUBECONFIG": str(self.kubeconfig), **GO_SETTINGS, **environment}
        env.setdefault("HOME", str(self.kubeconfig.parent))  # kubectl keeps a cache there
        command = ["kubectl", "neuron", *arguments]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=120)
        return Done(done.returncode, done.stdout, done.stderr.strip())


@pytest.fixture
def shell(server: ApiServer) -> Shell:
    return Shell(server.kubeconfig("admin"))


async def test_why_reads_the_cluster_of_the_kubeconfig_and_the_namespace_of_its_context(
    server: ApiServer, shell: Shell, tmp_path: Path
) -> None:
    namespace = Namespace(server)
    async with client_of(server) as client, operating(client, run_settings()):
        namespace.put_model()
        await namespace.settle()
        crashed = {"terminated": {"exitCode": 31, "message": "needs 40 GiB, 32 GiB per core"}}
        status = {"name": "runtime", "image": "i", "imageID": "i", "ready": False, "restartCount": 1, "state": crashed}
        namespace.start_pod("chat-1", {"phase": "Running", "containerStatuses": [status]})
        await eventually(lambda: namespace.condition("Available")[1] == "DeviceOutOfMemory")

        expected = f"NeuronModel {namespace.name}/chat: DeviceOutOfMemory\n"
        told = shell("why", "chat", "-n", namespace.name)
        print(told.out)
        assert (told.code, told.err) == (0, "")
        assert told.out.startswith(expected)
        assert "pod chat-1, container runtime: needs 40 GiB, 32 GiB per core (exit code 31)" in told.out
        assert told.out.endswith(f"$ kubectl neuron logs chat -n {namespace.name}\n")

        config = json.loads(shell.kubeconfig.read_text())
        config["contexts"][0]["context"]["namespace"] = namespace.name
        config["current-context"] = ""
        chosen = tmp_path / "chosen"
        chosen.write_text(json.dumps(config))
        assert shell("why", "chat", "--context", "test", KUBECONFIG=str(chosen)).out.startswith(expected)
        assert shell("why", "chat", "--context=test", f"--kubeconfig={chosen}").out.startswith(expected)

        refused = shell("why", "chat", "-n", namespace.name, "--as", READER)
        assert refused.code == 1
        assert refused.err.startswith("kubectl neuron: Error from server (Forbidden)")

        done = shell("chat", "chat", "-n", namespace.name)
        assert (done.code, done.out) == (1, "")
        assert re.fullmatch(r"kubectl neuron: no replica answers \(.+\): kubectl neuron why chat says why", done.err)


async def test_chat_reaches_a_model_through_the_api_servers_proxy(server: ApiServer, shell: Shell) -> None:
    namespace = Namespace(server)
    flags = ("--host", "0.0.0.0", "--port", "0", "--served-model-name", "chat", "--max-model-len", "512")
    flags += ("--backend", "simulated")  # test_story.py reads an answer
    with serve(str(ROOT / "examples" / "demo-model"), *flags) as command:
        async with client_of(server) as client, operating(client, run_settings()):
            namespace.put_model()
            await namespace.settle()
        port = urlsplit(command.until_ready()).port
        assert port
        # Plays kubelet and controllers: the Service leads to a pod that is the process on this machine.
        ip = own_address()
        namespace.start_pod("chat-1", {"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}]})
        pod = {"kind": "Pod", "namespace": namespace.name, "name": "chat-1"}
        address, ports = {"ip": ip, "targetRef": pod}, [{"name": "http", "port": port, "protocol": "TCP"}]
        subset = {"addresses": [address], "ports": ports}
        body = {"apiVersion": "v1", "kind": "Endpoints", "metadata": {"name": "chat"}, "subsets": [subset]}
        server.apply(f"/api/v1/namespaces/{namespace.name}/endpoints/chat", body)
        question = "What is a NeuronModel?"
        asked = shell("chat", "chat", question, "-n", namespace.name, "--temperature", "0")
        print(asked.out, asked.err)
        assert (asked.code, asked.err) == (0, "")
        assert re.search(r".+\n.*first token after \d+ ms, \d+ tokens in \d", asked.out, re.DOTALL)

        too_long = shell("chat", "chat", "word " * 2000, "-n", namespace.name)
        assert too_long.code == 1
        assert too_long.err.startswith("kubectl neuron: HTTP 400: This model's maximum context length is 512 tokens")


def own_address() -> str:
    """An address of this machine that is not loopback, to which the API server's proxy refuses to connect."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("198.51.100.1", 9))  # sends nothing
        return str(probe.getsockname()[0])


async def test_a_model_whose_job_has_not_run_has_no_log(server: ApiServer, shell: Shell) -> None:
    namespace = Namespace(server)
    async with client_of(server) as client, operating(client, run_settings()):
        namespace.put_model()
        await eventually(lambda: namespace.list(BY_KIND["Job"]))
        done = shell("logs", "chat", "-n", namespace.name)
        assert done.code == 1
        assert done.err == "kubectl neuron: nothing of chat has run yet: kubectl neuron why chat says why"


def test_wrong_names_and_servers_are_one_line_of_kubectls(server: ApiServer, shell: Shell, tmp_path: Path) -> None:
    namespace = Namespace(server)
    ghost = shell("why", "ghost", "-n", namespace.name)
    assert (ghost.code, ghost.out) == (1, "")
    assert ghost.err == (
        'kubectl neuron: Error from server (NotFound): neuronmodels.neuron-serving.dev "ghost" not found'
    )
    assert shell("why", "chat", KUBECONFIG=str(tmp_path / "none")).err.count("\n") == 0
    assert shell("chat", "chat", "--max-tokens", "0").code == 2
    assert shell("dance").code == 2
