"""Ports and addresses, limits of what listens there, the REST API, and buffers between subtasks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from ...errors import OptionError
from ...operators.sizes import format_size
from ...state.queryable import OLD_VALUES_MAX, OLD_VALUES_MAX_OPTION
from .recovery import STANDBY_COORDINATORS
from .types import Boolean, Duration, Integer, Option, Ports, Size, Text

ENVIRONMENT_PREFIX: Final = "env:"
"""A host that begins so is read from an environment variable of the process that listens."""
ANY_ADDRESS: Final = ("", "0.0.0.0", "::")
"""Hosts that can be bound, but not connected to."""
CONTROL_PORT = Option[range](
    "jobmanager.rpc.port",
    Ports(),
    range(1),
    "TCP port of the coordinator's control connections: a port, or a range such as `6070-6079` of which "
    "the first free one is taken. 0: the operating system chooses.",
)
CONTROL_BIND_HOST = Option[str | None](
    "jobmanager.bind-host",
    Text(),
    None,
    "Address that the control port binds to, such as `0.0.0.0` for all of them. `env:NAME` reads it from "
    "the environment of the process. Unset: loopback; on an existing Ray cluster the address of the node.",
)
CONTROL_HOST = Option[str | None](
    "jobmanager.rpc.address",
    Text(),
    None,
    "Address at which workers reach the control port. `env:NAME` reads it from the environment "
    "of the process. Unset: the address that the port binds to, or that of the node if it binds to all.",
)
DATA_PORT = Option[range](
    "taskmanager.data.port",
    Ports(),
    range(1),
    "TCP port at which a worker takes records of other workers: a port, or a range such as `6121-6140` of "
    "which the first free one is taken. Workers of one machine need a port each. 0: the operating system "
    "chooses.",
)
DATA_BIND_HOST = Option[str | None](
    "taskmanager.bind-host",
    Text(),
    None,
    "Address that the data port of each worker binds to, such as `0.0.0.0` for all interfaces. `env:NAME` "
    "reads it from the environment of the worker. Unset: loopback; on an existing Ray cluster the address "
    "of the node.",
)
DATA_HOST = Option[str | None](
    "taskmanager.host",
    Text(),
    None,
    "Address at which other workers reach a worker. It is the same text for all workers, so write "
    "`env:NAME`, such as `env:POD_IP`, where they run on several machines: each reads it from its own "
    "environment. Unset: the address that the port binds to, or that of the node if it binds to all.",
)
PORT_PATIENCE = Option[int](
    "headgate.listener.port-patience",
    Duration(),
    10_000,
    "The time for which a process tries again while all ports that it may take are taken, because the "
    "port of a process that was killed is free a moment later. After that it is an error.",
)
HANDSHAKE_TIMEOUT = Option[int](
    "headgate.listener.handshake-timeout",
    Duration(at_least_ms=100),
    10_000,
    "A connection to a port of the job is closed if the peer has not shown the job's token within this "
    "time. A request to a metrics endpoint must be over within it.",
)
UNAUTHENTICATED_MAX = Option[int](
    "headgate.listener.unauthenticated-max",
    Integer(at_least=1, at_most=100_000, unit="connections"),
    256,
    "How many connections to one port may be open without having shown the job's token. Above this number "
    "the oldest of them is closed. All connections to a metrics endpoint count.",
)
CONNECTIONS_MAX = Option[int](
    "headgate.listener.connections-max",
    Integer(at_least=1, at_most=1_000_000, unit="connections"),
    4096,
    "How many connections to one process may be open on its control or data ports. Further ones are "
    "closed at once. A coordinator has two for each worker and one for each client, a worker one for each "
    "worker that sends to it.",
)
FRAME_SIZE_MAX = Option[int](
    "headgate.listener.frame-size-max",
    Size(at_least=1 << 20, at_most=(4 << 30) - 1),
    1 << 30,
    "Largest frame that travels between workers. Larger batches are cut; a single record above this fails "
    "the job as `data`. Raise it only if the memory of the workers holds several such records.",
)
MESSAGE_SIZE_MAX = Option[int](
    "headgate.control.message-size-max",
    Size(at_least=1 << 20, at_most=(4 << 30) - 1),
    1 << 30,
    "Largest message on the control port and at workers, such as a job with its code, or the state that "
    "a checkpoint keeps in the log. A connection that brings a larger one is closed.",
)
UNSENT_SIZE_MAX = Option[int](
    "headgate.control.unsent-max",
    Size(at_least=1 << 10),
    256 << 20,
    "A peer on the control port that does not read is taken for dead, and its connection is closed, if "
    "this much waits for it when another message comes. The message itself does not count.",
)
CONTROL_TOKEN_FILE = Option[str | None](
    "headgate.control.token-file",
    Text(),
    None,
    "A file with the token of the job, such as a mounted secret: at least 16 characters. "
    "A client that has the token commands the job. Unset: the token is random.",
)
CONTROL_TOKEN_IN_STORAGE = Option[bool](
    "headgate.control.token-in-storage",
    Boolean(),
    False,
    "Keep the token of the job in its storage also where every reader of the storage can read it, as in "
    "a bucket. In a local directory it is kept in any case, as a file that only the job's user reads.",
)
REST_PORT = Option[range | None](
    "rest.port",
    Ports(),
    None,
    "TCP port of the REST API of the coordinator, which also answers the probes of Kubernetes: a port, or "
    "a range such as `8081-8090` of which the first free one is taken. 0: the operating system chooses. "
    "Unset: any free one on an existing Ray cluster, whose clients may be elsewhere; else none, and "
    "the API has its Unix socket only.",
)
REST_BIND_ADDRESS = Option[str | None](
    "rest.bind-address",
    Text(),
    None,
    "Address that the REST API binds to; `env:NAME` reads it from the environment of the process. Unset: "
    "loopback, and on an existing Ray cluster the address of the node, as for the control port. The API "
    "asks for the job's token, but it does not encrypt.",
)
REST_ADDRESS = Option[str | None](
    "rest.address",
    Text(),
    None,
    "Host names by which clients reach the REST API, separated by commas. A request for another name is "
    "refused, unless it is for `localhost` or for an IP address.",
)
REST_BODY_MAX = Option[int](
    "headgate.rest.body-max",
    Size(at_least=1 << 10, at_most=64 << 20),
    64 << 10,
    "Largest body of a request to the REST API; a larger one is refused (413).",
)
REST_OPERATIONS = Option[int](
    "headgate.rest.operations",
    Integer(at_least=1, at_most=100_000, unit="operations"),
    256,
    "How many operations that clients of the REST API began are remembered. The oldest that has ended is "
    "forgotten first; while all go on, new ones are refused (503).",
)
REST_WATCHERS = Option[int](
    "headgate.rest.watchers-max",
    Integer(at_least=1, at_most=10_000, unit="clients"),
    32,
    "How many clients of the REST API may follow the events of the job at once; more are refused (503).",
)
REST_GRAFANA_URL = Option[str | None](
    "headgate.rest.grafana-url",
    Text(),
    None,
    "Address of a Grafana dashboard to which the web UI links, such as "
    "`https://grafana.example.com/d/headgate-job?var-job_name={job}`; `{job}` becomes the name of the job. "
    "Unset: there is no link.",
)
REST_LOG_LINES = Option[int](
    "headgate.rest.log-lines",
    Integer(at_most=100_000, unit="lines"),
    500,
    "How many lines of the log the coordinator keeps in memory for the web UI and `/v1/job/logs`, for each "
    "of the levels DEBUG, INFO, WARNING and ERROR. A line has at most 2,000 characters, and its traceback "
    "8,000. 0: none, and workers send none.",
)
REST_LOST_RECORDS = Option[int](
    "headgate.rest.lost-records",
    Integer(at_most=10_000, unit="records"),
    20,
    "How many samples of dropped records the coordinator keeps in memory for the web UI and "
    "`/v1/job/lost`, for each step and reason: their event times, positions and types of errors. 0: none.",
)
REST_LOST_VALUES = Option[bool](
    "headgate.rest.lost-values",
    Boolean(),
    False,
    "Whether these samples have the records themselves and the texts of errors, up to 500 characters of "
    "each. Everyone with the token of the job can read them.",
)
REST_CURVES = Option[int](
    "headgate.rest.curves-span",
    Duration(),
    900_000,
    "How far back the curves of the web UI and of `/v1/job/curves` reach, with one point per second while "
    "the job runs. The coordinator keeps them in memory: 40 bytes per step and point. 0: there are none.",
)
REST_EVENTS = Option[int](
    "headgate.rest.events-waiting-max",
    Integer(at_least=1, at_most=1_000_000, unit="events"),
    1_000,
    "How many events wait for one client that follows them, beside the ones from before it came. A client "
    "that lets more pile up gets an event that says so, and is disconnected.",
)
QUERY_TOKEN_FILE = Option[str | None](
    "headgate.queries.token-file",
    Text(),
    None,
    "A file with a second token, of at least 16 characters, on the coordinator's machine. A client with "
    "this one lists and reads queryable states, and is refused all else (403). Unset: only the token of "
    "the job reads them.",
)
QUERY_TIMEOUT = Option[int](
    "headgate.queries.timeout",
    Duration(at_least_ms=1),
    5_000,
    "How long a query of state waits for the subtask that has the key. A subtask answers between two "
    "batches, so a query waits for a slow call of the user's code.",
)
QUERY_ANSWER_MAX = Option[int](
    "headgate.queries.answer-max",
    Size(at_least=1, at_most=64 << 20),
    1 << 20,
    "Largest value that a query of state answers, as JSON; for a larger one the query is refused.",
)
OLD_VALUES = Option[int](
    OLD_VALUES_MAX_OPTION,
    Size(at_least=0, at_most=1 << 40),
    OLD_VALUES_MAX,
    "How many bytes of old values one subtask keeps for each state that is queryable as of checkpoints. "
    "If more changes between two checkpoints, the level `committed` is not available (503) until the "
    "next checkpoint.",
)
QUERY_WAITING_MAX = Option[int](
    "headgate.queries.waiting-max",
    Integer(at_least=1, at_most=100_000, unit="queries"),
    128,
    "How many queries of state of one job may wait for their answers; further ones are refused (503).",
)
QUERY_CLIENTS_MAX = Option[int](
    "headgate.queries.connections-max",
    Integer(at_most=100_000, unit="connections"),
    128,
    "How many clients may be connected to the data port of one worker at a time, to read state there "
    "directly; further ones are refused, and ask the REST API instead. 0: none.",
)
QUERY_REQUEST_MAX = Option[int](
    "headgate.queries.request-max",
    Size(at_least=1 << 10, at_most=16 << 20),
    256 << 10,
    "Largest request of a client that reads state directly at a worker. A connection that brings a larger "
    "one is closed.",
)
QUERY_UNANSWERED_MAX = Option[int](
    "headgate.queries.unanswered-max",
    Integer(at_least=1, at_most=1_000_000, unit="keys"),
    1_000,
    "With this many keys of one connection unanswered, a worker reads no further requests from it until "
    "half of them are answered. Those that have been received already count on top.",
)
QUERY_PAGE_ROWS = Option[int](
    "headgate.queries.page-rows",
    Integer(at_least=1, at_most=1_000_000, unit="rows"),
    10_000,
    "How many rows one request of a scan of state answers at most; the rest comes with further requests.",
)
QUERY_PAGE_BYTES = Option[int](
    "headgate.queries.page-bytes",
    Size(at_least=1, at_most=32 << 20),
    8 << 20,
    "With this many bytes of values, as JSON, a request of a scan of state is answered.",
)
QUERY_PAGE_TIME = Option[int](
    "headgate.queries.page-time",
    Duration(at_least_ms=1),
    2_000,
    "After this time a request of a scan of state is answered with the rows that it has found.",
)
QUERY_SLICE = Option[int](
    "headgate.queries.slice",
    Duration(at_least_ms=1),
    5,
    "How long a subtask reads for a scan before it goes on with its batches and barriers.",
)
QUERY_SCANS_MAX = Option[int](
    "headgate.queries.scans-max",
    Integer(at_least=1, at_most=1_000, unit="scans"),
    8,
    "How many scans of state of one job are open at the same time; further ones are refused (503).",
)
QUERY_SCAN_IDLE = Option[int](
    "headgate.queries.scan-idle",
    Duration(at_least_ms=1),
    30_000,
    "A scan of state that nobody goes on with for this time is over. Until then a scan of the level "
    "`committed` keeps the values of its checkpoint.",
)
QUERY_SUBSCRIPTIONS_MAX = Option[int](
    "headgate.queries.subscriptions-max",
    Integer(at_least=1, at_most=10_000, unit="subscriptions"),
    100,
    "How many clients may follow the changes of keys of queryable states of one job at the same time; "
    "further ones are refused (503).",
)
QUERY_CHANGES_INTERVAL = Option[int](
    "headgate.queries.changes-interval",
    Duration(at_least_ms=1),
    200,
    "How often the coordinator looks for changes for each client that follows keys. At the level `live` "
    "the values are read each time, so this is also how often a client is told of changes at most. At "
    "the level `committed` they are read once per checkpoint.",
)
REST_CLOSE_TIMEOUT = Option[int](
    "headgate.rest.close-timeout",
    Duration(at_least_ms=0),
    5_000,
    "How long the REST API waits, once the job has ended, for operations, for clients that have not asked "
    "yet how theirs ended, and for answers under way.",
)
BUFFERS_PER_CHANNEL = Option[int](
    "taskmanager.network.memory.buffers-per-channel",
    Integer(at_least=1, at_most=10_000, unit="buffers"),
    2,
    "Exclusive buffers of each channel, which may be under way without a further credit.",
)
FLOATING_BUFFERS = Option[int](
    "taskmanager.network.memory.floating-buffers-per-gate",
    Integer(at_most=100_000, unit="buffers"),
    8,
    "Buffers the channels of one input gate share, given to those with a backlog.",
)
BUFFER_TIMEOUT_ENABLED = Option[bool](
    "execution.buffer-timeout.enabled",
    Boolean(),
    True,
    "Send partly filled buffers after `execution.buffer-timeout.interval`. false: only when they are full, "
    "or something that may not wait comes behind them, such as a barrier.",
)
BUFFER_TIMEOUT = Option[int](
    "execution.buffer-timeout.interval",
    Duration(),
    100,
    "A partly filled buffer is sent after this time at the latest; 0: at once. It is sent earlier if its "
    "subtask is idle, the receiver has taken all buffers before it, and the process has time to spare.",
    ("execution.buffer-timeout",),
)
BUFFER_ROWS = Option[int](
    "headgate.buffer.rows",
    Integer(at_least=1, at_most=1_048_576, unit="rows"),
    32_768,
    "Small column batches are put together until a buffer has this many rows, or is full, or has waited "
    "for the buffer timeout.",
)
BUFFER_SIZE = Option[int](
    "headgate.buffer.max-size",
    Size(at_least=1024),
    1_048_576,
    "Largest size of one buffer; a single larger record still travels, alone.",
)
BUFFER_SIZE_MIN = Option[int](
    "taskmanager.memory.min-segment-size",
    Size(),
    256,
    "The least size to which debloating shrinks a buffer; it starts from `headgate.buffer.max-size`.",
)
DEBLOAT = Option[bool](
    "taskmanager.network.memory.buffer-debloat.enabled",
    Boolean(),
    False,
    "Make buffers smaller in front of slow subtasks, so that little is under way there.",
)
DEBLOAT_TARGET = Option[int](
    "taskmanager.network.memory.buffer-debloat.target",
    Duration(at_least_ms=1),
    1000,
    "The time that a subtask should need for all records that wait in front of it.",
)
DEBLOAT_PERIOD = Option[int](
    "taskmanager.network.memory.buffer-debloat.period",
    Duration(at_least_ms=1),
    200,
    "How often throughput is measured, and the size of buffers follows it.",
)
DEBLOAT_SAMPLES = Option[int](
    "taskmanager.network.memory.buffer-debloat.samples",
    Integer(at_least=1, at_most=10_000, unit="periods"),
    20,
    "How many periods the size is averaged over: more for steadiness, fewer for speed.",
)
DEBLOAT_THRESHOLD = Option[int](
    "taskmanager.network.memory.buffer-debloat.threshold-percentages",
    Integer(at_least=1, at_most=100, unit="%"),
    25,
    "Changes of the size that are smaller than this are not passed on to the senders.",
)


def contradictions(values: Mapping[str, Any]) -> Iterator[tuple[str, OptionError]]:
    """Options of this module that are fine alone and wrong together, each with the key to blame.

    Among them are settings under which no peer could connect.
    """
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
    least = values.get(BUFFER_SIZE_MIN.key, BUFFER_SIZE_MIN.default)
    most = values.get(BUFFER_SIZE.key, BUFFER_SIZE.default)
    if least > most:
        blamed = BUFFER_SIZE_MIN if BUFFER_SIZE_MIN.key in values else BUFFER_SIZE
        yield (
            blamed.key,
            OptionError(
                f"the smallest buffer is larger than the largest "
                f"least=`{format_size(least)}` most=`{format_size(most)}`",
                fix=f"lower {BUFFER_SIZE_MIN.key}, or raise {BUFFER_SIZE.key}",
            ),
        )
