"""The Prometheus endpoint of one process, and the figures of the process itself."""

from __future__ import annotations

import contextlib
import io
import logging
import socket
import threading
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from socketserver import TCPServer
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.registry import Collector

from ...operators.clock import Clock, SystemClock
from ..listening import GREETING_BYTES_MAX, LOOPBACK, Admission, ListenerLimits
from ..options.network import ANY_ADDRESS
from .catalogue import BY_NAME, PREFIX
from .metrics import MetricsRegistry

PORTS_TRIED_MAX = 100
"""The number of ports that are tried before a process runs without an endpoint."""
_log = logging.getLogger("headgate.metrics")
CGROUP_FILES: Final = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
"""The paths of the second and the first version of control groups, as a container sees its own."""
NO_LIMIT_BYTES: Final = 1 << 60
"""The first version writes a number about this large where there is no limit."""


class MetricsEndpoint:
    """Serves a registry over HTTP from a thread of its own."""

    def __init__(self, server: _Server, host: str, node_host: str) -> None:
        self._server = server
        self._thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
        self._thread.start()
        self.port = int(server.server_port)
        # All interfaces were asked for, so that others can connect: loopback would not help them.
        node = socket.gethostname() if node_host == LOOPBACK else node_host
        shown = node if host in ANY_ADDRESS else host
        self.url = f"http://{f'[{shown}]' if ':' in shown else shown}:{self.port}/metrics"

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingWSGIServer):
    """An HTTP server that gives each request a thread, and bounds their number, time and size."""

    admission: Admission

    def admit(self, limits: ListenerLimits) -> None:
        """Set the limits; to be called before any request is served."""
        self.admission = Admission(limits, "metrics endpoint")
        self._lock = threading.Lock()

    def server_bind(self) -> None:
        """Bind, without asking DNS for the own name as `HTTPServer` does: it may take seconds to answer."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self.admission.enter(request, partial(_hang_up, request))
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self.admission.leave(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.debug("a request was broken off", exc_info=True)


class _Handler(WSGIRequestHandler):
    """Reads one request, in bounded time and memory."""

    def setup(self) -> None:
        super().setup()
        assert isinstance(self.server, _Server)
        seconds = self.server.admission.limits.handshake_timeout_s
        self.rfile = io.BufferedReader(_Request(self.connection, SystemClock(), seconds))

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""


class _Request(io.RawIOBase):
    """The bytes of one request; the socket's timeout is the rest of the time, also for the answer."""

    def __init__(self, connection: socket.socket, clock: Clock, seconds: float) -> None:
        self._connection = connection
        self._clock = clock
        self._until = clock.monotonic() + seconds
        self._bytes_left = GREETING_BYTES_MAX

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._until - self._clock.monotonic()
        if left <= 0 or not self._bytes_left:
            raise TimeoutError("the request is too long, or takes too long")
        self._connection.settimeout(left)
        count = self._connection.recv_into(memoryview(buffer)[: self._bytes_left])
        self._bytes_left -= count
        return count


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def open_endpoint(
    metrics: MetricsRegistry,
    port: int | None,
    host: str,
    limits: ListenerLimits | None = None,
    node_host: str = LOOPBACK,
) -> MetricsEndpoint | None:
    """Serve `metrics` at the first free port from `port` on.

    A job must not fail for want of a port: without one there is a warning, and no endpoint.

    Args:
        metrics: what to serve.
        port: 0 for any free one; None for no endpoint.
        host: the address to bind.
        limits: of connections and of the time for a request.
        node_host: the address of this machine, for the endpoint's URL if `host` stands for all addresses.
    """
    if port is None:
        return None
    registry = CollectorRegistry()
    registry.register(JobMetrics(metrics))
    registry.register(ProcessMetrics(metrics))
    app = make_wsgi_app(registry)
    tried = [0] if port == 0 else range(port, min(port + PORTS_TRIED_MAX, 65536))
    problem: OSError | None = None
    for candidate in tried:
        try:
            server = _serve(app, candidate, host)
        except OSError as error:
            problem = error
        else:
            server.admit(limits or ListenerLimits())
            endpoint = MetricsEndpoint(server, host, node_host)
            _log.info("metrics endpoint url=`%s`", endpoint.url)
            return endpoint
    _log.warning("no metrics endpoint port=`%s` host=`%s`: %s", port, host, problem)
    return None


def _serve(app: Callable[..., Any], port: int, host: str) -> _Server:
    """A server that listens; `host` may be a name, an IPv4 or an IPv6 address.

    Raises:
        OSError: the port is taken, or there is no such address.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = found[0]
    kind = type("_Server", (_Server,), {"address_family": family})
    return make_server(str(address[0]), port, app, kind, handler_class=_Handler)


class JobMetrics(Collector):
    """The metrics of a registry as families of prometheus_client."""

    def __init__(self, metrics: MetricsRegistry) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        """Yield all metrics, with the values of now; prometheus_client calls this."""
        for family in self._metrics.collect():
            metric = Metric(family.name, family.help, family.kind)
            for sample in family.samples:
                metric.add_sample(sample.name, sample.labels, sample.value)
            yield metric

    def describe(self) -> Iterable[Metric]:
        """Return nothing: no metric is known before it exists; prometheus_client calls this."""
        return ()


class ProcessMetrics(Collector):
    """The figures of `ProcessCollector` of prometheus_client, once for each job of the registry."""

    def __init__(self, metrics: MetricsRegistry) -> None:
        self._metrics = metrics
        self._found = ProcessCollector(namespace=PREFIX.rstrip("_"), registry=None)

    def collect(self) -> Iterable[Metric]:
        """The figures of this process as metric families; prometheus_client calls this."""
        jobs = sorted(self._metrics.job_names)
        for found in self._found.collect():
            doc = BY_NAME[found.name.removeprefix(PREFIX)]
            family = CounterMetricFamily if doc.kind == "counter" else GaugeMetricFamily
            metric = family(found.name, doc.help, labels=["job_name"])
            for sample in found.samples:
                for job in jobs:
                    metric.add_metric([job], sample.value)
            yield metric
        limit = memory_limit_bytes()
        if limit is not None:
            doc = BY_NAME["process_memory_limit_bytes"]
            metric = GaugeMetricFamily(doc.sample, doc.help, labels=["job_name"])
            for job in jobs:
                metric.add_metric([job], limit)
            yield metric

    def describe(self) -> Iterable[Metric]:
        """Nothing: no metric is known before it exists; prometheus_client calls this."""
        return ()


def memory_limit_bytes(files: Iterable[Path] = CGROUP_FILES) -> int | None:
    """The memory limit of the container around this process; None: there is none."""
    for file in files:
        try:
            text = file.read_text().strip()
        except OSError:
            continue
        if text.isdecimal() and int(text) < NO_LIMIT_BYTES:
            return int(text)
    return None
