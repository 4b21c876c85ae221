"""Where the server listens, with IPv6 and on a kernel without it."""

from __future__ import annotations

import socket

import pytest

from neuron_runtime.processes.supervisor import listen


@pytest.mark.parametrize("host", ["::", "0.0.0.0"])
@pytest.mark.parametrize("has_ipv6", [True, False])
def test_all_addresses_are_those_that_the_kernel_has(
    host: str, has_ipv6: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_ipv6:
        monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    with listen(host, 0) as listener:
        port = listener.getsockname()[1]
        assert listener.family == (socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET)
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
