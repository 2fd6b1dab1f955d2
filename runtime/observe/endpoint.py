"""The Prometheus endpoint of one process."""

from __future__ import annotations

import logging
import socket
import threading
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server

from .metrics import MetricsRegistry

PORTS_TRIED_MAX = 100
"""How many ports are tried before a process runs without an endpoint."""
_log = logging.getLogger("headgate.metrics")


class MetricsEndpoint:
    """Serves a registry over HTTP from a thread of its own."""

    def __init__(self, server: WSGIServer, thread: threading.Thread, host: str) -> None:
        self._server = server
        self._thread = thread
        self.port = int(server.server_port)
        shown = socket.gethostname() if host in ("", "0.0.0.0", "::") else host
        self.url = f"http://{f'[{shown}]' if ':' in shown else shown}:{self.port}/metrics"

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def open_endpoint(metrics: MetricsRegistry, port: int | None, host: str) -> MetricsEndpoint | None:
    """Serve `metrics` at the first free port from `port` on.

    A job must not fail for want of a port: without one there is a warning, and no endpoint.

    Args:
        metrics: what to serve.
        port: 0 for any free one; None for no endpoint.
        host: the address to bind.
    """
    if port is None:
        return None
    registry = CollectorRegistry()
    registry.register(metrics)
    tried = [0] if port == 0 else range(port, min(port + PORTS_TRIED_MAX, 65536))
    problem: OSError | None = None
    for candidate in tried:
        try:
            server, thread = start_http_server(candidate, host, registry)
        except OSError as error:
            problem = error
        else:
            endpoint = MetricsEndpoint(server, thread, host)
            _log.info("metrics endpoint url=`%s`", endpoint.url)
            return endpoint
    _log.warning("no metrics endpoint port=`%s` host=`%s`: %s", port, host, problem)
    return None
