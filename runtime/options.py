"""Every option of a job: key, type, default, unit, meaning. Nothing is listed that nothing reads.

Keys, defaults and meanings are Flink's where the meaning is Flink's; our own start with `headgate.`.
`python -m headgate.runtime.options` prints this table as Markdown (docs/options.md).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from ..errors import OptionError, UsageError
from ..operators.durations import format_duration
from ..operators.sizes import format_size
from .availability_options import AVAILABILITY_OPTIONS
from .batch_options import BATCH_OPTIONS
from .checkpoint_options import (
    CHECKPOINT_OPTIONS,
    backlog_contradictions,
    unaligned_contradictions,
)
from .listener_options import LISTENER_OPTIONS
from .liveness_options import HEARTBEAT_INTERVAL, HEARTBEAT_TIMEOUT, LIVENESS_OPTIONS
from .metrics_options import METRICS_OPTIONS
from .network_options import NETWORK_OPTIONS, network_contradictions
from .option_types import Boolean, Choice, Duration, Integer, Option, Ratio, Size, Text
from .ray_options import RAY_OPTIONS
from .recovery_options import RECOVERY_OPTIONS
from .rest_options import REST_OPTIONS
from .restart_options import RESTART_OPTIONS

T = TypeVar("T")


STATE_BACKEND = Option[str](
    "state.backend.type",
    Choice(("hashmap", "rocksdb"), (("memory", "hashmap"),)),
    "hashmap",
    "",
    "Where keyed state lies: in memory (`hashmap`, also `memory`), or on local disk (`rocksdb`).",
    ("state.backend",),
)
MANAGED_MEMORY = Option[int](
    "taskmanager.memory.managed.size",
    Size(at_least=1 << 20),
    256 << 20,
    "bytes",
    "Memory of one worker process for state that lies on disk; all subtasks share it.",
)
ROCKSDB_WRITE_BUFFER_RATIO = Option[float](
    "state.backend.rocksdb.memory.write-buffer-ratio",
    Ratio(),
    0.5,
    "",
    "The part of `taskmanager.memory.managed.size` for what is not yet in files; the rest caches reads.",
)
ROCKSDB_WRITE_BUFFER_SIZE = Option[int](
    "state.backend.rocksdb.writebuffer.size",
    Size(at_least=64 << 10),
    64 << 20,
    "bytes",
    "What one state of one subtask collects in memory before it becomes a file.",
)
ROCKSDB_WRITE_BUFFERS = Option[int](
    "state.backend.rocksdb.writebuffer.count",
    Integer(at_least=2, at_most=100),
    2,
    "buffers",
    "Write buffers of one state, the one being filled included, before writes wait.",
)
ROCKSDB_THREADS = Option[int](
    "state.backend.rocksdb.thread.num",
    Integer(at_least=1, at_most=1000),
    2,
    "threads",
    "Threads of a worker that write and merge files.",
)
ROCKSDB_OPEN_FILES = Option[int](
    "state.backend.rocksdb.files.open",
    Integer(at_least=16, at_most=1_000_000),
    512,
    "files",
    "Files that one state of one subtask keeps open.",
)
ROCKSDB_BLOCK_SIZE = Option[int](
    "state.backend.rocksdb.block.blocksize",
    Size(at_least=1 << 10),
    4 << 10,
    "bytes",
    "How much is read from a file at a time.",
)
BUFFER_TIMEOUT = Option[int](
    "execution.buffer-timeout.interval",
    Duration(),
    100,
    "ms",
    "A partly filled buffer is sent after this time; 0: at once.",
    ("execution.buffer-timeout",),
)
PARALLELISM = Option[int](
    "parallelism.default",
    Integer(at_least=1, at_most=32768),
    1,
    "subtasks",
    "Parallelism of operators that do not set their own.",
)
MAX_PARALLELISM = Option[int | None](
    "pipeline.max-parallelism",
    Integer(at_least=1, at_most=32768),
    None,
    "key groups",
    "Number of key groups, fixed for the life of the job's state; unset: the next power of two of "
    "1.5 × parallelism, at least 128.",
)
CHAINING = Option[bool](
    "pipeline.operator-chaining.enabled",
    Boolean(),
    True,
    "",
    "Run operators joined by a forward edge in one subtask. A source and the event time of its splits are "
    "in one in any case.",
    ("pipeline.operator-chaining",),
)
WATERMARK_INTERVAL = Option[int](
    "pipeline.auto-watermark-interval",
    Duration(),
    200,
    "ms",
    "How often watermarks of live data are sent; 0: after every batch, also of data at rest.",
)
TAKEOVERS_MAX = Option[int](
    "headgate.coordinator.takeovers-max",
    Integer(at_least=1),
    10,
    "takeovers",
    "How often coordinators of one run may die within `headgate.coordinator.takeovers-window` without a "
    "checkpoint in between; at the next time the job fails.",
)
TAKEOVERS_WINDOW = Option[int](
    "headgate.coordinator.takeovers-window",
    Duration(at_least_ms=1_000),
    600_000,
    "ms",
    "The time in which deaths of coordinators are counted.",
)
BUFFERS_PER_CHANNEL = Option[int](
    "taskmanager.network.memory.buffers-per-channel",
    Integer(at_least=1, at_most=10_000),
    2,
    "buffers",
    "Exclusive buffers of each channel: what may be under way without a further credit.",
)
FLOATING_BUFFERS = Option[int](
    "taskmanager.network.memory.floating-buffers-per-gate",
    Integer(at_most=100_000),
    8,
    "buffers",
    "Buffers the channels of one input gate share, given to those with a backlog.",
)
DEBLOAT = Option[bool](
    "taskmanager.network.memory.buffer-debloat.enabled",
    Boolean(),
    False,
    "",
    "Make buffers smaller in front of slow subtasks, so that little is under way there.",
)
DEBLOAT_TARGET = Option[int](
    "taskmanager.network.memory.buffer-debloat.target",
    Duration(at_least_ms=1),
    1000,
    "ms",
    "How long a subtask should take for all that waits in front of it.",
)
DEBLOAT_PERIOD = Option[int](
    "taskmanager.network.memory.buffer-debloat.period",
    Duration(at_least_ms=1),
    200,
    "ms",
    "How often throughput is measured, and the size of buffers follows it.",
)
DEBLOAT_SAMPLES = Option[int](
    "taskmanager.network.memory.buffer-debloat.samples",
    Integer(at_least=1, at_most=10_000),
    20,
    "periods",
    "How many periods the size is averaged over: more for steadiness, fewer for speed.",
)
DEBLOAT_THRESHOLD = Option[int](
    "taskmanager.network.memory.buffer-debloat.threshold-percentages",
    Integer(at_least=1, at_most=100),
    25,
    "%",
    "Changes of the size that are smaller than this are not passed on to the senders.",
)
BUFFER_SIZE_MIN = Option[int](
    "taskmanager.memory.min-segment-size",
    Size(),
    256,
    "bytes",
    "What debloating leaves of a buffer at least; `headgate.buffer.max-size` is where it starts from.",
)
S3_ENDPOINT = Option[str | None](
    "s3.endpoint", Text(), None, "", "Address of the S3 service; unset: that of the region."
)
S3_REGION = Option[str | None](
    "s3.region",
    Text(),
    None,
    "",
    "Region of the S3 service; unset: from the environment.",
    ("s3.endpoint.region",),
)
S3_PATH_STYLE = Option[bool | None](
    "s3.path-style-access",
    Boolean(),
    None,
    "",
    "Put the bucket into the path instead of the host name (MinIO and other S3-alikes); none: if "
    "`s3.endpoint` is set.",
    ("s3.path.style.access",),
)
CODE_SIZE = Option[int](
    "headgate.code.size-max",
    Size(),
    512 << 20,
    "bytes",
    "Largest size of the files in the zip file of `kubernetes.code.archive`, and of that file itself. They "
    "are unpacked into a volume of 4 GB.",
)
S3_CONNECTIONS_MAX = Option[int](
    "s3.connection.maximum",
    Integer(at_least=1, at_most=10_000),
    32,
    "connections",
    "How many connections to S3 each client keeps open. A process has one client for checkpoints, and one "
    "for the files that sinks write. The reader of files has a pool of its own.",
)
S3_CONNECT_TIMEOUT = Option[int](
    "s3.connection.establish.timeout",
    Duration(at_least_ms=1),
    10_000,
    "ms",
    "How long a connection to S3 may take to be established. Then the request is tried again.",
)
S3_TIMEOUT = Option[int](
    "s3.connection.timeout",
    Duration(at_least_ms=1),
    30_000,
    "ms",
    "How long S3 may be silent while its answer is due. Then the request is tried again.",
)
S3_ATTEMPTS_MAX = Option[int](
    "s3.attempts.maximum",
    Integer(at_least=1, at_most=1_000),
    8,
    "attempts",
    "How often a request to S3 is made, the first time included, while its errors may pass: a connection "
    "that breaks, a time-out, a server that is busy. The pauses in between grow, to 5 s for checkpoints "
    "and 20 s for the files of connectors.",
)
S3_UPLOAD_PARTS_MAX = Option[int](
    "s3.fast.upload.active.blocks",
    Integer(at_least=1, at_most=1_000),
    4,
    "parts",
    "How many parts of one file, of 8 MB each, are uploaded at once for a checkpoint, or may wait for "
    "their upload in a sink before the sink holds its records back. Each is in memory.",
)
BUFFER_ROWS = Option[int](
    "headgate.buffer.rows",
    Integer(at_least=1, at_most=1_048_576),
    32_768,
    "rows",
    "Small column batches are put together until a buffer has this many rows, or is full, or has waited "
    "for the buffer timeout.",
)
BUFFER_SIZE = Option[int](
    "headgate.buffer.max-size",
    Size(at_least=1024),
    1_048_576,
    "bytes",
    "Largest size of one buffer; a single larger record still travels, alone.",
)
TASK_SLICE = Option[int](
    "headgate.task.slice",
    Duration(at_least_ms=1),
    50,
    "ms",
    "Longest stretch of user code between two looks at barriers, credits and timers; longer batches "
    "are split.",
)

ASYNC_WAITING_RECORDS = Option[int](
    "headgate.async.waiting-records",
    Integer(),
    65_536,
    "records",
    "What a step with calls under way takes beyond them, so that a barrier comes through; more waits.",
)
ITERATION_MEMORY = Option[int](
    "headgate.iteration.memory",
    Size(),
    64 * 2**20,
    "bytes",
    "What the head of a loop holds in memory of what came back; more goes to disk, and input waits.",
)

MATCH_PARTIAL_MAX = Option[int](
    "headgate.match.partial-max",
    Integer(at_least=1),
    100_000,
    "partial matches",
    "What may be under way for one key of a pattern: partial matches, and records that they have taken "
    "(a record once for each beginning behind which it was taken). More fails the job.",
)

REPLACED_FILES_MAX = Option[int](
    "headgate.sink.replaced-files-max",
    Integer(at_least=1, at_most=100_000_000),
    1_000_000,
    "files",
    "How many files of earlier runs one sink with `overwrite` may replace; the job log keeps their names "
    "until they are deleted. With more the run is refused.",
)

ALLOW_PICKLE = Option[bool](
    "headgate.state.allow-pickle",
    Boolean(),
    True,
    "",
    "false: nothing that lies in checkpoints and savepoints is unpickled. Jobs with state of no declared "
    "type are refused, and so are checkpoints and savepoints that hold pickled state.",
)

OPTIONS: tuple[Option[Any], ...] = (
    *CHECKPOINT_OPTIONS,
    *RESTART_OPTIONS,
    *RECOVERY_OPTIONS,
    *LIVENESS_OPTIONS,
    *LISTENER_OPTIONS,
    *METRICS_OPTIONS,
    *NETWORK_OPTIONS,
    *REST_OPTIONS,
    *RAY_OPTIONS,
    *BATCH_OPTIONS,
    *AVAILABILITY_OPTIONS,
    *(
        value
        for value in list(globals().values())
        if isinstance(value, Option) and value not in LIVENESS_OPTIONS
    ),
)
_BY_NAME: dict[str, Option[Any]] = {
    name: option for option in OPTIONS for name in (option.key, *option.aliases)
}


def find_option(key: str) -> Option[Any]:
    """The option named `key`, or of which `key` is an older name.

    Raises:
        OptionError: there is none; `fix` names the nearest.
    """
    option = _BY_NAME.get(key)
    if option is not None:
        return option
    near = difflib.get_close_matches(key, _BY_NAME, n=1, cutoff=0.6)
    raise OptionError(
        f"unknown option key=`{key}`",
        fix=f"did you mean `{near[0]}`?" if near else "see docs/options.md for all options",
    )


def current_key(key: str) -> str:
    """The key that `key` is an older name of; `key` itself if it is none."""
    option = _BY_NAME.get(key)
    return key if option is None else option.key


class Options:
    """The options of one job: checked texts, typed values, defaults for the rest. Immutable."""

    def __init__(self, texts: Mapping[str, str] | None = None) -> None:
        """Parse and check `texts`.

        Raises:
            OptionError: with all problems at once.
        """
        self._values, problems = _parse(texts or {})
        if len(problems) == 1:
            raise next(iter(problems.values()))
        if problems:
            lines = "\n".join(str(problem) for problem in problems.values())
            raise OptionError(f"{len(problems)} mistakes in the options:\n{lines}")

    @staticmethod
    def problems(texts: Mapping[str, str]) -> dict[str, OptionError]:
        """What is wrong with `texts`, by the key as the user wrote it; empty if nothing is."""
        return _parse(texts)[1]

    def get(self, option: Option[T]) -> T:
        """The value of `option`, in its unit."""
        value: T = self._values.get(option.key, option.default)
        return value

    def is_set(self, option: Option[Any]) -> bool:
        """True if the user set it, also if to the default."""
        return option.key in self._values

    def override(self, texts: Mapping[str, str]) -> Options:
        """These options with those of `texts` in their place."""
        return Options(
            {**self.explicit(), **{current_key(key): text for key, text in texts.items()}}
        )

    def explicit(self) -> dict[str, str]:
        """The texts of what the user set, under the current keys."""
        return {key: _BY_NAME[key].type.format(value) for key, value in self._values.items()}

    def effective(self) -> dict[str, str]:
        """The texts of everything with a value, set or default: what operators see."""
        defaults = {o.key: o.default_text() for o in OPTIONS if o.default is not None}
        return {**defaults, **self.explicit()}


def _parse(texts: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, OptionError]]:
    values: dict[str, Any] = {}
    written: dict[str, str] = {}
    problems: dict[str, OptionError] = {}
    for key, text in texts.items():
        try:
            option = find_option(key)
            if option.key in values:
                raise OptionError(
                    f"option is set twice key=`{option.key}` also_as=`{written[option.key]}`",
                    fix="keep one of them",
                )
            written[option.key] = key
            values[option.key] = _value(option, key, text)
        except OptionError as problem:
            problems[key] = problem
    for key, contradiction in _contradictions(values):
        problems.setdefault(written[key], contradiction)
    return values, problems


def _value(option: Option[T], key: str, text: object) -> T:
    if not isinstance(text, str):
        raise OptionError(
            f"option value must be text key=`{key}` value=`{text!r}`", fix=f'write "{text}"'
        )
    try:
        value: T = option.type.parse(text)
    except UsageError as error:
        raise OptionError(
            f"bad option value key=`{key}` value=`{text}`", fix=error.fix or error.message
        ) from None
    return value


def _contradictions(values: Mapping[str, Any]) -> Iterator[tuple[str, OptionError]]:
    """Options that are fine alone and wrong together, each with the key to blame."""
    interval = values.get(HEARTBEAT_INTERVAL.key, HEARTBEAT_INTERVAL.default)
    timeout = values.get(HEARTBEAT_TIMEOUT.key, HEARTBEAT_TIMEOUT.default)
    if timeout <= interval:
        blamed = HEARTBEAT_TIMEOUT if HEARTBEAT_TIMEOUT.key in values else HEARTBEAT_INTERVAL
        yield (
            blamed.key,
            OptionError(
                f"heartbeat timeout is not above the interval "
                f"interval=`{format_duration(interval)}` timeout=`{format_duration(timeout)}`",
                fix=f"raise {HEARTBEAT_TIMEOUT.key}, or lower {HEARTBEAT_INTERVAL.key}",
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
    yield from network_contradictions(values)
    yield from unaligned_contradictions(values)
    yield from backlog_contradictions(values)


def markdown() -> str:
    """The table of all options, for docs/options.md."""
    lines = [
        "# Options",
        "",
        "<!-- generated: python -m headgate.runtime.options > docs/options.md -->",
        "",
        "Set them with `hg.Job(..., options={...})`, under `spec.options` of a manifest, or with",
        "`headgate run -D key=value`. Unknown keys are refused. Durations and sizes need a unit",
        "(`10 s`, `32 kb`).",
        "",
        "| key | type | default | unit | meaning |",
        "|---|---|---|---|---|",
    ]
    for option in OPTIONS:
        aliases = "".join(f" Also `{alias}`." for alias in option.aliases)
        lines.append(
            f"| `{option.key}` | {option.type.name} | `{option.default_text()}` | {option.unit} "
            f"| {option.doc}{aliases} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
