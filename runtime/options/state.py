"""Where state is kept, and how checkpoints and savepoints of it are taken, stored and restored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...errors import OptionError
from ...operators.durations import format_duration
from .types import Boolean, Choice, Duration, Integer, Number, Option, Ratio, Size, Text

STATE_BACKEND = Option[str](
    "state.backend.type",
    Choice(("hashmap", "rocksdb"), (("memory", "hashmap"),)),
    "hashmap",
    "Where keyed state lies: in memory (`hashmap`, also `memory`), or on local disk (`rocksdb`).",
    ("state.backend",),
)
MANAGED_MEMORY = Option[int](
    "taskmanager.memory.managed.size",
    Size(at_least=1 << 20),
    256 << 20,
    "Memory of one worker process for state that lies on disk; all subtasks share it.",
)
ROCKSDB_WRITE_BUFFER_RATIO = Option[float](
    "state.backend.rocksdb.memory.write-buffer-ratio",
    Ratio(),
    0.5,
    "The part of `taskmanager.memory.managed.size` for what is not yet in files; the rest caches reads.",
)
ROCKSDB_WRITE_BUFFER_SIZE = Option[int](
    "state.backend.rocksdb.writebuffer.size",
    Size(at_least=64 << 10),
    64 << 20,
    "The memory in which one state of one subtask collects changes before it writes a file.",
)
ROCKSDB_WRITE_BUFFERS = Option[int](
    "state.backend.rocksdb.writebuffer.count",
    Integer(at_least=2, at_most=100, unit="buffers"),
    2,
    "Write buffers of one state, the one being filled included, before writes wait.",
)
ROCKSDB_THREADS = Option[int](
    "state.backend.rocksdb.thread.num",
    Integer(at_least=1, at_most=1000, unit="threads"),
    2,
    "Threads of a worker that write and merge files.",
)
ROCKSDB_OPEN_FILES = Option[int](
    "state.backend.rocksdb.files.open",
    Integer(at_least=16, at_most=1_000_000, unit="files"),
    512,
    "Files that one state of one subtask keeps open.",
)
ROCKSDB_BLOCK_SIZE = Option[int](
    "state.backend.rocksdb.block.blocksize",
    Size(at_least=1 << 10),
    4 << 10,
    "How much is read from a file at a time.",
)
ROCKSDB_HELD_VALUES_MAX = Option[int](
    "headgate.state.rocksdb.held-values-max",
    Size(at_least=64 << 10),
    64 << 20,
    "Memory of one worker process for single values of the keys that were used last, beside "
    "`taskmanager.memory.managed.size`; all states share it. A change is written to RocksDB later.",
)
ALLOW_PICKLE = Option[bool](
    "headgate.state.allow-pickle",
    Boolean(),
    True,
    "false: nothing in checkpoints and savepoints is unpickled. Jobs with state of no declared type are "
    "refused, and so are checkpoints and savepoints that hold pickled state.",
)
CHECKPOINT_INTERVAL = Option[int | None](
    "execution.checkpointing.interval",
    Duration(at_least_ms=10),
    None,
    "Time between the starts of periodic checkpoints; unset: no periodic checkpoints.",
)
CHECKPOINT_INTERVAL_BACKLOG = Option[int | None](
    "execution.checkpointing.interval-during-backlog",
    Duration(),
    None,
    "The interval while a source reads a backlog, such as the history of a hybrid source; at least "
    "`execution.checkpointing.interval`, or `0s`: no periodic checkpoints meanwhile. Unset: the same.",
)
CHECKPOINT_TIMEOUT = Option[int](
    "execution.checkpointing.timeout",
    Duration(at_least_ms=10),
    600_000,
    "A checkpoint that is not complete after this time is aborted.",
)
CHECKPOINT_MIN_PAUSE = Option[int](
    "execution.checkpointing.min-pause",
    Duration(),
    0,
    "Least time from the end of a checkpoint to the start of the next; above 0 at most one runs.",
)
CHECKPOINT_MAX_CONCURRENT = Option[int](
    "execution.checkpointing.max-concurrent-checkpoints",
    Integer(at_least=1, at_most=1000, unit="checkpoints"),
    1,
    "How many checkpoints may be under way at once.",
)
CHECKPOINT_MODE = Option[str](
    "execution.checkpointing.mode",
    Choice(("EXACTLY_ONCE", "AT_LEAST_ONCE")),
    "EXACTLY_ONCE",
    "AT_LEAST_ONCE: no input waits for the barriers of others; after a failure records may count twice.",
)
UNALIGNED = Option[bool](
    "execution.checkpointing.unaligned.enabled",
    Boolean(),
    False,
    "Barriers overtake records in queues, which become part of the checkpoint. For jobs under "
    "backpressure. Needs EXACTLY_ONCE, and one checkpoint at a time.",
    aliases=("execution.checkpointing.unaligned",),
)
ALIGNED_TIMEOUT = Option[int](
    "execution.checkpointing.aligned-checkpoint-timeout",
    Duration(),
    0,
    "With unaligned checkpoints: barriers stay in line until the checkpoint is this old, and overtake "
    "from then on; 0: they overtake at once.",
)
UNALIGNED_FORCED = Option[bool](
    "execution.checkpointing.unaligned.forced",
    Boolean(),
    False,
    "Barriers also overtake records on their way through a partitioner of the job's own; it must then "
    "choose by the record alone.",
)
CHECKPOINT_HISTORY = Option[int](
    "web.checkpoints.history",
    Integer(at_least=1, at_most=10_000, unit="checkpoints"),
    10,
    "The number of ended checkpoints whose statistics are kept, for `headgate checkpoints`.",
)
COMMITTER_RETRIES = Option[int](
    "sink.committer.retries",
    Integer(unit="retries"),
    10,
    "How often a commit of a sink is tried again, after pauses of 1 s to 1 min, while its target does not "
    "answer; and a call of a `write_ahead_sink` that raised. Then the attempt fails. Until it succeeds, no "
    "further checkpoint completes.",
)
CHECKPOINT_TOLERABLE_FAILURES = Option[int](
    "execution.checkpointing.tolerable-failed-checkpoints",
    Integer(unit="checkpoints"),
    0,
    "How many checkpoints in a row may fail before the job does.",
)
CHECKPOINT_RETAINED = Option[int](
    "execution.checkpointing.num-retained",
    Integer(at_least=1, at_most=10_000, unit="checkpoints"),
    1,
    "How many completed checkpoints are kept.",
    ("state.checkpoints.num-retained",),
)
CHECKPOINT_RETENTION = Option[str](
    "execution.checkpointing.externalized-checkpoint-retention",
    Choice(("RETAIN_ON_CANCELLATION", "DELETE_ON_CANCELLATION", "NO_EXTERNALIZED_CHECKPOINTS")),
    "RETAIN_ON_CANCELLATION",
    "What happens to the last checkpoint when a job is cancelled. Unlike Flink's, the default keeps it: "
    "state must not vanish because a flag was forgotten.",
)
CHECKPOINT_INCREMENTAL = Option[bool](
    "execution.checkpointing.incremental",
    Boolean(),
    True,
    "Write only what changed since the last completed checkpoint. Unlike Flink's, the default is true: "
    "every backend can do it here, and the length of a chain is bounded.",
    ("state.backend.incremental",),
)
CHECKPOINT_DIR = Option[str | None](
    "execution.checkpointing.dir",
    Text(),
    None,
    "Where checkpoints go: a directory or `s3://bucket/prefix`. Required for checkpoints.",
    ("state.checkpoints.dir",),
)
CHECKPOINT_INLINE = Option[int](
    "execution.checkpointing.data-inline-threshold",
    Size(at_least=0),
    20 * 1024,
    "State of a subtask up to this size lies in the checkpoint's entry of the job log instead of a file.",
    ("state.storage.fs.memory-threshold", "state.backend.fs.memory-threshold"),
)
DELTA_CHAIN_MAX = Option[int](
    "headgate.checkpoint.delta-chain-max",
    Integer(at_least=1, at_most=1000, unit="files"),
    20,
    "How many files a table of a subtask may consist of, with the deltas of incremental checkpoints; "
    "more make for smaller checkpoints and slower restores.",
)
GATHER_DELAY = Option[int](
    "headgate.checkpoint.gather-delay",
    Duration(),
    200,
    "The longest time for which a subtask's part of a checkpoint waits for those of the other subtasks of "
    "its worker, so that their small state goes into one object, and their acknowledgements into one "
    "message; 0: nothing waits. A checkpoint needs all of them.",
)
FILE_MERGING = Option[bool](
    "execution.checkpointing.file-merging.enabled",
    Boolean(),
    True,
    "Small state of all subtasks of a worker goes into one object for each checkpoint, instead of one "
    "for each table and subtask.",
)
SEGMENT_SIZE_MAX = Option[int](
    "execution.checkpointing.file-merging.max-file-size",
    Size(at_least=1 << 10, at_most=1 << 30),
    32 << 20,
    "The most state that waits in a worker's memory to be written into such objects; more state gets "
    "objects of its own.",
)
SEGMENT_PIECE_MAX = Option[int](
    "headgate.checkpoint.file-merging.piece-max",
    Size(at_least=1, at_most=64 << 20),
    4 << 20,
    "A table of a subtask, or what changed in it, that is larger gets an object of its own, so that large "
    "state is written in parallel.",
)
SPACE_AMPLIFICATION_MAX = Option[float](
    "execution.checkpointing.file-merging.max-space-amplification",
    Number(1, 1_000_000),
    2.0,
    "The most bytes of such an object for each byte of it that the newest checkpoint needs. When there "
    "are more, the next checkpoint writes what it needs of it anew.",
)
TRANSFERS_MAX = Option[int](
    "headgate.checkpoint.transfers-max",
    Integer(at_least=1, at_most=1000, unit="files"),
    8,
    "State files that a worker writes or reads at once.",
)
LOCAL_DIRS = Option[str | None](
    "io.tmp.dirs",
    Text(),
    None,
    "Local directories for temporary files and for state larger than memory, separated by commas; "
    "unset: the system's.",
)
SAVEPOINT_DIR = Option[str | None](
    "execution.checkpointing.savepoint-dir",
    Text(),
    None,
    "Where savepoints go if the request does not say: a directory or `s3://bucket/prefix`.",
    ("state.savepoints.dir",),
)
RECOVERY_PATH = Option[str | None](
    "execution.state-recovery.path",
    Text(),
    None,
    "The state that a new run begins with: a savepoint, or the directory of a job's checkpoints (the "
    "newest, or number 7 with `@7` behind it).",
    ("execution.savepoint.path",),
)
RECOVERY_CLAIM_MODE = Option[str](
    "execution.state-recovery.claim-mode",
    Choice(("NO_CLAIM", "CLAIM"), (("no-claim", "NO_CLAIM"),)),
    "NO_CLAIM",
    "`CLAIM`: the savepoint is deleted once the run has a checkpoint of its own. `NO_CLAIM`: it is never "
    "touched.",
    ("execution.savepoint-restore-mode",),
)
RECOVERY_IGNORE_UNCLAIMED = Option[bool](
    "execution.state-recovery.ignore-unclaimed-state",
    Boolean(),
    False,
    "Drop restored state that no operator of the job claims, instead of refusing to start.",
    ("execution.savepoint.ignore-unclaimed-state",),
)
RECOVERY_ACCEPT_CHANGES = Option[str | None](
    "execution.state-recovery.accept-changes",
    Text(),
    None,
    "Names of steps, separated by commas, that keep their restored state although they compute "
    "something else now, such as the sum of another column. Without it such a start is refused.",
)
WITHOUT_CHANNEL_STATE = Option[int](
    "execution.state-recovery.without-channel-state.checkpoint-id",
    Integer(at_least=-1, unit="checkpoint"),
    -1,
    "Restore this unaligned checkpoint without the records that were on their way: they are lost.",
)
RESTORE_FALLBACK = Option[bool](
    "headgate.restore.fallback",
    Boolean(),
    False,
    "If state of the newest checkpoint is corrupt or missing, restore the one before. Output that sinks "
    "have committed between the two is written again.",
)

S3_ENDPOINT = Option[str | None](
    "s3.endpoint", Text(), None, "Address of the S3 service; unset: that of the region."
)
S3_REGION = Option[str | None](
    "s3.region",
    Text(),
    None,
    "Region of the S3 service; unset: from the environment.",
    ("s3.endpoint.region",),
)
S3_PATH_STYLE = Option[bool | None](
    "s3.path-style-access",
    Boolean(),
    None,
    "Put the bucket into the path instead of the host name (MinIO and other S3-alikes); none: if "
    "`s3.endpoint` is set.",
    ("s3.path.style.access",),
)
S3_CONNECTIONS_MAX = Option[int](
    "s3.connection.maximum",
    Integer(at_least=1, at_most=10_000, unit="connections"),
    32,
    "How many connections to S3 each client keeps open. A process has one client for checkpoints, and one "
    "for the files that sinks write. The reader of files has a pool of its own.",
)
S3_CONNECT_TIMEOUT = Option[int](
    "s3.connection.establish.timeout",
    Duration(at_least_ms=1),
    10_000,
    "How long a connection to S3 may take to be established. Then the request is tried again.",
)
S3_TIMEOUT = Option[int](
    "s3.connection.timeout",
    Duration(at_least_ms=1),
    30_000,
    "How long S3 may be silent while its answer is due. Then the request is tried again.",
)
S3_ATTEMPTS_MAX = Option[int](
    "s3.attempts.maximum",
    Integer(at_least=1, at_most=1_000, unit="attempts"),
    8,
    "How often a request to S3 is made, the first time included, while its errors may pass: a connection "
    "that breaks, a time-out, a server that is busy. The pauses in between grow, to 5 s for checkpoints "
    "and 20 s for the files of connectors.",
)
S3_UPLOAD_PARTS_MAX = Option[int](
    "s3.fast.upload.active.blocks",
    Integer(at_least=1, at_most=1_000, unit="parts"),
    4,
    "How many parts of one file, of 8 MB each, are uploaded at once for a checkpoint, or may wait for "
    "their upload in a sink before the sink holds its records back. Each is in memory.",
)
S3_ENTROPY_KEY = Option[str | None](
    "s3.entropy.key",
    Text(),
    None,
    "A text in the address of checkpoints on S3, such as `_entropy_`, that is replaced by characters that "
    "differ from file to file in the keys of state files, and left out in all other keys.",
)
S3_ENTROPY_LENGTH = Option[int](
    "s3.entropy.length",
    Integer(at_least=1, at_most=16, unit="characters"),
    4,
    "How many characters replace `s3.entropy.key`. Neither may change while checkpoints are kept.",
)
S3_ENCRYPTION = Option[str](
    "s3.sse.type",
    Choice(("none", "sse-s3", "sse-kms"), (("aes256", "sse-s3"), ("aws:kms", "sse-kms"))),
    "none",
    "How S3 is asked to encrypt checkpoints and the files of file sinks: with its own keys, or with one of "
    "AWS KMS. None: as the bucket says.",
)
S3_ENCRYPTION_KEY = Option[str | None](
    "s3.sse.kms.key-id",
    Text(),
    None,
    "The key of AWS KMS for `s3.sse.type: sse-kms`; unset: that of the account for S3.",
)
S3_ROLE = Option[str | None](
    "s3.assume-role.arn",
    Text(),
    None,
    "The ARN of a role that the clients of checkpoints and of file connectors assume, with the credentials "
    "of the environment.",
)
S3_ROLE_EXTERNAL_ID = Option[str | None](
    "s3.assume-role.external-id",
    Text(),
    None,
    "The external id that the role wants.",
)
S3_ROLE_SESSION = Option[str](
    "s3.assume-role.session-name",
    Text(),
    "headgate",
    "The name of the sessions of the role, which is in the logs of AWS.",
)
PROBE_RACES = Option[int](
    "headgate.storage.probe.races",
    Integer(at_least=0, at_most=10_000, unit="objects"),
    32,
    "How many objects two writers try to create at once when a job starts on S3: a store that gives one of "
    "them to both is refused. 0: that is not tried.",
)
PROBE_TIMEOUT = Option[int](
    "headgate.storage.probe.timeout",
    Duration(),
    5_000,
    "No more of these tries begin after this time; how many there were is logged.",
)


def contradictions(values: Mapping[str, Any]) -> Iterator[tuple[str, OptionError]]:
    """Options of this module that are fine alone and wrong together, each with the key to blame."""
    yield from _unaligned_contradictions(values)
    yield from _backlog_contradictions(values)


def _unaligned_contradictions(values: Mapping[str, Any]) -> Iterator[tuple[str, OptionError]]:
    """Yield the options that contradict unaligned checkpoints, each with the key to blame."""
    if not values.get(UNALIGNED.key, UNALIGNED.default):
        return
    if values.get(CHECKPOINT_MODE.key, CHECKPOINT_MODE.default) != "EXACTLY_ONCE":
        yield (
            UNALIGNED.key,
            OptionError(
                f"unaligned checkpoints are exactly-once {CHECKPOINT_MODE.key}=`AT_LEAST_ONCE`",
                fix=f"set {UNALIGNED.key} to false, or {CHECKPOINT_MODE.key} to EXACTLY_ONCE",
            ),
        )
    concurrent = values.get(CHECKPOINT_MAX_CONCURRENT.key, CHECKPOINT_MAX_CONCURRENT.default)
    if concurrent > 1:
        yield (
            CHECKPOINT_MAX_CONCURRENT.key,
            OptionError(
                f"unaligned checkpoints are taken one at a time "
                f"{CHECKPOINT_MAX_CONCURRENT.key}=`{concurrent}`",
                fix=f"set it to 1, or {UNALIGNED.key} to false",
            ),
        )


def _backlog_contradictions(values: Mapping[str, Any]) -> Iterator[tuple[str, OptionError]]:
    """Yield the option by which checkpoints would be more frequent in a backlog."""
    normal = values.get(CHECKPOINT_INTERVAL.key)
    in_backlog = values.get(CHECKPOINT_INTERVAL_BACKLOG.key)
    if normal is not None and in_backlog and in_backlog < normal:
        yield (
            CHECKPOINT_INTERVAL_BACKLOG.key,
            OptionError(
                f"checkpoints would be more frequent in a backlog than without one "
                f"{CHECKPOINT_INTERVAL.key}=`{format_duration(normal)}`",
                fix="raise it to that or above, or set it to 0s for no checkpoints",
            ),
        )
