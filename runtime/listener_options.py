"""The options of what listens on a socket; `options.py` has the others."""

from __future__ import annotations

from typing import Any, Final

from .option_types import Boolean, Duration, Integer, Option, Size, Text

HANDSHAKE_TIMEOUT = Option[int](
    "headgate.listener.handshake-timeout",
    Duration(at_least_ms=100),
    10_000,
    "ms",
    "A connection to a port of the job is closed if the peer has not shown the job's token within this "
    "time. A request to a metrics endpoint must be over within it.",
)
UNAUTHENTICATED_MAX = Option[int](
    "headgate.listener.unauthenticated-max",
    Integer(at_least=1, at_most=100_000),
    256,
    "connections",
    "How many connections to one port may be open without having shown the job's token. Above this number "
    "the oldest of them is closed. All connections to a metrics endpoint count.",
)
CONNECTIONS_MAX = Option[int](
    "headgate.listener.connections-max",
    Integer(at_least=1, at_most=1_000_000),
    4096,
    "connections",
    "How many connections to one process may be open on its control or data ports. Further ones are "
    "closed at once. A coordinator has two for each worker and one for each client, a worker one for each "
    "worker that sends to it.",
)
FRAME_SIZE_MAX = Option[int](
    "headgate.listener.frame-size-max",
    Size(at_least=1 << 20, at_most=(4 << 30) - 1),
    1 << 30,
    "bytes",
    "Largest frame that travels between workers. Larger batches are cut; a single record above this fails "
    "the job as `data`. Raise it only if the memory of the workers holds several such records.",
)
MESSAGE_SIZE_MAX = Option[int](
    "headgate.control.message-size-max",
    Size(at_least=1 << 20, at_most=(4 << 30) - 1),
    1 << 30,
    "bytes",
    "Largest message on the control port and at workers, such as a job with its code, or the state that "
    "a checkpoint keeps in the log. A connection that brings a larger one is closed.",
)
UNSENT_SIZE_MAX = Option[int](
    "headgate.control.unsent-max",
    Size(at_least=1 << 10),
    256 << 20,
    "bytes",
    "A peer on the control port that does not read is taken for dead, and its connection is closed, if "
    "this much waits for it when another message comes. The message itself does not count.",
)
CONTROL_TOKEN_FILE = Option[str | None](
    "headgate.control.token-file",
    Text(),
    None,
    "",
    "A file with the token of the job, such as a mounted secret: at least 16 characters. "
    "Whoever has it commands the job. Unset: the token is random.",
)
CONTROL_TOKEN_IN_STORAGE = Option[bool](
    "headgate.control.token-in-storage",
    Boolean(),
    False,
    "",
    "Keep the token of the job in its storage also where everybody who reads the storage "
    "can read it, as in a bucket. In a local directory it is kept in any case, as a file that only the "
    "job's user reads.",
)
LISTENER_OPTIONS: Final[tuple[Option[Any], ...]] = tuple(
    value for value in list(globals().values()) if isinstance(value, Option)
)
