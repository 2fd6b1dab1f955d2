"""The options of ports and addresses: where a job listens, and at which address its peers reach it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from ..errors import OptionError
from .availability_options import STANDBY_COORDINATORS
from .option_types import Duration, Option, Ports, Text

ENVIRONMENT_PREFIX: Final = "env:"
"""A host that begins so is read from an environment variable of the process that listens."""
ANY_ADDRESS: Final = ("", "0.0.0.0", "::")
"""Hosts that can be bound and that nobody can connect to."""

CONTROL_PORT = Option[range](
    "jobmanager.rpc.port",
    Ports(),
    range(1),
    "",
    "TCP port of the coordinator's control connections: a port, or a range such as `6070-6079` of which "
    "the first free one is taken. 0: the operating system chooses.",
)
CONTROL_BIND_HOST = Option[str | None](
    "jobmanager.bind-host",
    Text(),
    None,
    "",
    "Address that the control port binds to, such as `0.0.0.0` for all of them. `env:NAME` reads it from "
    "the environment of the process. Unset: loopback; on an existing Ray cluster the address of the node.",
)
CONTROL_HOST = Option[str | None](
    "jobmanager.rpc.address",
    Text(),
    None,
    "",
    "Address at which workers reach the control port. `env:NAME` reads it from the environment "
    "of the process. Unset: the address that the port binds to, or that of the node if it binds to all.",
)
DATA_PORT = Option[range](
    "taskmanager.data.port",
    Ports(),
    range(1),
    "",
    "TCP port at which a worker takes records of other workers: a port, or a range such as `6121-6140` of "
    "which the first free one is taken. Workers of one machine need a port each. 0: the operating system "
    "chooses.",
)
DATA_BIND_HOST = Option[str | None](
    "taskmanager.bind-host",
    Text(),
    None,
    "",
    "Address that the data port of each worker binds to, such as `0.0.0.0` for all interfaces. `env:NAME` "
    "reads it from the environment of the worker. Unset: loopback; on an existing Ray cluster the address "
    "of the node.",
)
DATA_HOST = Option[str | None](
    "taskmanager.host",
    Text(),
    None,
    "",
    "Address at which other workers reach a worker. It is the same text for all workers, so write "
    "`env:NAME`, such as `env:POD_IP`, where they run on several machines: each reads it from its own "
    "environment. Unset: the address that the port binds to, or that of the node if it binds to all.",
)
PORT_PATIENCE = Option[int](
    "headgate.listener.port-patience",
    Duration(),
    10_000,
    "ms",
    "How long a process tries again while all ports that it may take are taken, before that is an error: "
    "the port of a process that was killed is free a moment later.",
)
NETWORK_OPTIONS: Final[tuple[Option[Any], ...]] = tuple(
    value
    for value in list(globals().values())
    if isinstance(value, Option) and value is not STANDBY_COORDINATORS
)


def network_contradictions(values: Mapping[str, Any]) -> Iterator[tuple[str, OptionError]]:
    """Settings under which nobody could connect, each with the key to blame."""
    for option in (CONTROL_HOST, DATA_HOST):
        if values.get(option.key) in ANY_ADDRESS:
            yield (
                option.key,
                OptionError(
                    f"nobody can connect to this address key=`{option.key}` "
                    f"value=`{values[option.key]}`",
                    fix="write the address that peers connect to; the bind-host may be this one",
                ),
            )
    ports = values.get(CONTROL_PORT.key, CONTROL_PORT.default)
    if values.get(STANDBY_COORDINATORS.key) and len(ports) == 1 and ports[0] != 0:
        yield (
            CONTROL_PORT.key,
            OptionError(
                f"one control port is too few for a coordinator and its standby "
                f"key=`{CONTROL_PORT.key}` value=`{ports[0]}`",
                fix="a coordinator that hangs still has its port when the other one takes over: write a "
                f"range, such as {ports[0]}-{min(ports[0] + 1, 65535)}",
            ),
        )
