"""The broker that tests start listens on loopback alone."""

from __future__ import annotations

import psutil

from headgate.testing.servers.pulsar import PulsarServer


def test_it_listens_on_loopback_alone(server: PulsarServer) -> None:
    listening = {
        (connection.laddr.ip.removeprefix("::ffff:"), connection.laddr.port)
        for process in psutil.Process().children(recursive=True)
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert ("127.0.0.1", server.port) in listening
    assert {address for address, _ in listening} <= {"127.0.0.1", "::1"}
