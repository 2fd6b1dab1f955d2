"""The options of the REST API; `options.py` has the others."""

from __future__ import annotations

from typing import Any, Final

from .option_types import Duration, Integer, Option, Ports, Size, Text

REST_PORT = Option[range | None](
    "rest.port",
    Ports(),
    None,
    "",
    "TCP port of the REST API of the coordinator, which also answers the probes of Kubernetes: a port, or "
    "a range such as `8081-8090` of which the first free one is taken. 0: the operating system chooses. "
    "Unset: any free one on an existing Ray cluster, whose clients may be elsewhere; else none, and "
    "the API has its Unix socket only.",
)
REST_BIND_ADDRESS = Option[str | None](
    "rest.bind-address",
    Text(),
    None,
    "",
    "Address that the REST API binds to; `env:NAME` reads it from the environment of the process. Unset: "
    "loopback, and on an existing Ray cluster the address of the node, as for the control port. The API "
    "asks for the job's token, but it does not encrypt.",
)
REST_ADDRESS = Option[str | None](
    "rest.address",
    Text(),
    None,
    "",
    "Host names by which clients reach the REST API, separated by commas. A request for another name is "
    "refused, unless it is for `localhost` or for an IP address.",
)
REST_BODY_MAX = Option[int](
    "headgate.rest.body-max",
    Size(at_least=1 << 10, at_most=64 << 20),
    64 << 10,
    "bytes",
    "Largest body of a request to the REST API; a larger one is refused (413).",
)
REST_OPERATIONS = Option[int](
    "headgate.rest.operations",
    Integer(at_least=1, at_most=100_000),
    256,
    "operations",
    "How many operations that clients of the REST API began are remembered. The oldest that has ended is "
    "forgotten first; while all go on, new ones are refused (503).",
)
REST_WATCHERS = Option[int](
    "headgate.rest.watchers-max",
    Integer(at_least=1, at_most=10_000),
    32,
    "clients",
    "How many clients of the REST API may follow the events of the job at once; more are refused (503).",
)
REST_EVENTS = Option[int](
    "headgate.rest.events-waiting-max",
    Integer(at_least=1, at_most=1_000_000),
    1_000,
    "events",
    "How many events wait for one client that follows them, beside the ones from before it came. A client "
    "that lets more pile up is told so, and hung up on.",
)
REST_CLOSE_TIMEOUT = Option[int](
    "headgate.rest.close-timeout",
    Duration(at_least_ms=0),
    5_000,
    "ms",
    "How long the REST API waits, once the job has ended, for operations and for answers under way.",
)
REST_OPTIONS: Final[tuple[Option[Any], ...]] = tuple(
    value for value in list(globals().values()) if isinstance(value, Option)
)
