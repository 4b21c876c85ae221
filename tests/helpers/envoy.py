"""The real Envoy with an endpoint picker: requests go to the server that the picker names.

Its configuration is what gateways with endpoint pickers make of a pool: every request goes through external processing,
and then to the address in a header. The program is a wheel, installed apart, once.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cluster.rig.machine import wait_until
from cluster.rig.needs import NotPossibleHere
from helpers.environments import python_environment
from helpers.ports import free_ports

FOLDER = Path(__file__).parents[1] / "cluster" / "build" / "envoy"
DESTINATION = "x-gateway-destination-endpoint"
"""The header in which a picker names an endpoint."""


def program() -> Path:
    """Raises NotPossibleHere."""
    environment = python_environment("envoy", FOLDER / "requirements.txt").parent
    (found,) = environment.glob("lib/python*/site-packages/envoy/_bin/envoy")
    return found


def _of_type(name: str, **fields: Any) -> dict[str, Any]:
    return {"@type": f"type.googleapis.com/envoy.extensions.{name}", **fields}


def _address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


def configuration(port: int, picker: int) -> dict[str, Any]:
    """A gateway on `port` whose picker is on another port of this machine."""
    external = _of_type(
        "filters.http.ext_proc.v3.ExternalProcessor",
        grpc_service={"envoy_grpc": {"cluster_name": "picker"}},
        processing_mode={
            "request_header_mode": "SEND",
            "request_body_mode": "FULL_DUPLEX_STREAMED",
            "request_trailer_mode": "SEND",
            "response_header_mode": "SKIP",
        },
    )
    filters = [
        {"name": "picker", "typed_config": external},
        {"name": "router", "typed_config": _of_type("filters.http.router.v3.Router")},
    ]
    to_pool = {"match": {"prefix": "/"}, "route": {"cluster": "pool", "timeout": "600s"}}
    manager = _of_type(
        "filters.network.http_connection_manager.v3.HttpConnectionManager",
        stat_prefix="gateway",
        http_filters=filters,
        route_config={"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [to_pool]}]},
    )
    over_http2 = _of_type("upstreams.http.v3.HttpProtocolOptions", explicit_http_config={"http2_protocol_options": {}})
    endpoint = {"endpoint": {"address": _address(picker)}}
    clusters = [
        {
            "name": "pool",
            "type": "ORIGINAL_DST",
            "lb_policy": "CLUSTER_PROVIDED",
            "original_dst_lb_config": {"use_http_header": True, "http_header_name": DESTINATION},
        },
        {
            "name": "picker",
            "type": "STATIC",
            "typed_extension_protocol_options": {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": over_http2},
            "load_assignment": {"cluster_name": "picker", "endpoints": [{"lb_endpoints": [endpoint]}]},
        },
    ]
    chain = {"filters": [{"name": "http", "typed_config": manager}]}
    listener = {"name": "gateway", "address": _address(port), "filter_chains": [chain]}
    return {"static_resources": {"listeners": [listener], "clusters": clusters}}


@contextlib.contextmanager
def running(folder: Path, picker: int) -> Iterator[str]:
    """The URL of a gateway. Raises NotPossibleHere."""
    binary = program()
    with free_ports() as port:
        file, log = folder / "envoy.json", folder / "envoy.log"
        file.write_text(json.dumps(configuration(port, picker)))
        command = [binary, "-c", file, "--concurrency", "1", "--disable-hot-restart", "--log-level", "warn"]
        with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:

            def is_open() -> bool:
                assert process.poll() is None, log.read_text()
                with socket.socket() as one:
                    return one.connect_ex(("127.0.0.1", port)) == 0

            try:
                wait_until("Envoy listens", is_open)
                yield f"http://127.0.0.1:{port}"
            finally:
                process.kill()


if __name__ == "__main__":
    try:
        program()
    except NotPossibleHere as error:
        sys.exit(str(error))
