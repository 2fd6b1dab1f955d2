"""The reasons why checkpoints and jobs fail, and the kind of every exception.

Each reason has a name and a sentence, for logs, metrics and the CLI.

An exception that leaves a subtask, a deployment or the coordinator without having been turned into
a `HeadgateError` is classified by its type and by the frames of its traceback:

| the exception | becomes | its failure kind |
|---|---|---|
| any, with a frame of the user's modules | `UserCodeError` | `user_code` |
| `ImportError` | `UserCodeError` | `user_code` |
| `ConnectionError` | `ExchangeError` | `exchange` |
| another `OSError` | `StorageError` | `storage` |
| `MemoryError`, or one that Arrow, Polars or NumPy define | `JobError` | `job` |
| any other | `InternalError` | `internal` |
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from enum import Enum, unique
from typing import Final

from ...errors import (
    BadRecordError,
    ClusterError,
    CorruptError,
    DataError,
    ExchangeError,
    FencedError,
    HeadgateError,
    InternalError,
    JobError,
    SourceError,
    StateError,
    StorageError,
    UsageError,
    UserCodeError,
)
from ...operators.functions.user_code import TEXT_MAX, text_of, traceback_text
from ...operators.origin import is_own_module

_COLUMNS: Final = frozenset({"numpy", "polars", "pyarrow"})
"""The packages whose own exceptions mean that a step could not process its columns."""
_LIBRARIES: Final = (
    _COLUMNS
    | sys.stdlib_module_names
    | frozenset(
        {
            "aiobotocore",
            "aiohttp",
            "boto3",
            "botocore",
            "cloudpickle",
            "msgspec",
            "prometheus_client",
        }
    )
    | frozenset(
        {"py4j", "pyspark", "ray", "rich", "rocksdict", "typer", "uvloop", "xxhash", "yaml"}
    )
)
"""The packages that headgate itself calls: their frames are not the user's."""


def as_headgate_error(error: BaseException, what: str, where: str = "") -> HeadgateError:
    """Return the error itself if it is headgate's own, else one of the type in the module's table.

    Args:
        error: the exception.
        what: the beginning of the message: what failed.
        where: the user's line, or the name of the step.
    """
    if isinstance(error, HeadgateError):
        return error
    message = f"{what}: {type(error).__name__}: {text_of(error, TEXT_MAX)}"
    judged = _type_of(error)(message, where=where)
    judged.detail = traceback_text(error)
    return judged


def _type_of(error: BaseException) -> type[HeadgateError]:
    if isinstance(error, ImportError) or any(map(_is_users, _modules(error))):
        return UserCodeError
    if isinstance(error, ConnectionError):
        return ExchangeError
    if isinstance(error, OSError):
        return StorageError
    package = type(error).__module__.partition(".")[0]
    # A panic of Polars is defined in a module of its own.
    if isinstance(error, MemoryError) or package in _COLUMNS or package == "pyo3_runtime":
        return JobError
    return InternalError


def _modules(error: BaseException) -> Iterator[str]:
    """Yield the modules of the traceback's frames."""
    at = error.__traceback__
    while at is not None:
        yield str(at.tb_frame.f_globals.get("__name__", ""))
        at = at.tb_next


def _is_users(module: str) -> bool:
    return not is_own_module(module) and module.partition(".")[0] not in _LIBRARIES


@unique
class CheckpointFailure(Enum):
    """The reason why a checkpoint did not complete, or was not even started.

    The value is the name on the wire and in metrics. Only those with `counts` count towards
    `tolerable_failures`: they mean that this job cannot take checkpoints, while the others mean
    that something else interfered.
    """

    sentence: str
    counts: bool

    EXPIRED = "expired", "not every subtask acknowledged before the timeout", True
    IO = "io", "the checkpoint store refused or broke", True
    ASYNC_EXCEPTION = "async_exception", "writing the snapshot of a subtask failed", True
    FINALIZE_FAILURE = "finalize_failure", "the completed checkpoint could not be published", True

    SUBSUMED = "subsumed", "a newer checkpoint took its place", False
    CANCEL_MARKER = "cancel_marker", "a subtask upstream gave the checkpoint up", False
    NOT_ALL_RUNNING = "not_all_running", "not all subtasks of the job are running", False
    TOO_MANY_REQUESTS = "too_many_requests", "too many checkpoint requests are waiting", False
    STOPPING = "stopping", "the job is already taking its last checkpoint", False
    JOB_FAILED = "job_failed", "the job failed while the checkpoint was under way", False

    def __new__(cls, name: str, sentence: str, counts: bool) -> CheckpointFailure:
        member = object.__new__(cls)
        member._value_ = name
        member.sentence = sentence
        member.counts = counts
        return member

    def __str__(self) -> str:
        return str(self.value)


@unique
class FailureCategory(Enum):
    """The categories of failures, by who can do something about them."""

    USER = "user"
    """The author of the job."""
    DATA = "data"
    """The producer of the records."""
    RESOURCE = "resource"
    """The operator of the machines, the network and the storage."""
    SYSTEM = "system"
    """The makers of headgate."""


_USER, _DATA = FailureCategory.USER, FailureCategory.DATA
_RESOURCE, _SYSTEM = FailureCategory.RESOURCE, FailureCategory.SYSTEM


@unique
class FailureKind(Enum):
    """The reason why an attempt ended. Only a `recoverable` one may be followed by another attempt."""

    sentence: str
    recoverable: bool
    category: FailureCategory

    USER_CODE = "user_code", "a user's function raised", True, _USER
    JOB = "job", "a step could not go on", True, _USER
    BAD_RECORD = "bad_record", "a record could not be read, and would be bad again", False, _DATA
    DATA = "data", "records do not fit what a step can do, and never will", False, _DATA
    SOURCE = "source", "what a source reads could not be made", True, _USER
    REPEATED = "repeated", "the job failed the same way again and again", False, _SYSTEM
    POISON = "poison", "the same record failed the job again and again", False, _DATA
    EXCHANGE = "exchange", "a channel between subtasks broke", True, _RESOURCE
    STORAGE = "storage", "the checkpoint store, files or a sink's target failed", True, _RESOURCE
    CORRUPT = "corrupt", "what is stored is not what was written", False, _RESOURCE
    STATE = "state", "the snapshot cannot be restored into this job", False, _USER
    USAGE = "usage", "the job is wrong as written", False, _USER
    CLUSTER = "cluster", "the cluster gave no worker", True, _RESOURCE
    WORKER_LOST = "worker_lost", "a worker process died", True, _RESOURCE
    HEARTBEAT_TIMEOUT = "heartbeat_timeout", "a worker stopped answering", True, _RESOURCE
    STUCK = "stuck", "a call did not return in time", True, _USER
    STALLED = "stalled", "nothing moved any more, though there was something to do", True, _SYSTEM
    RECOVERY_STALLED = "recovery_stalled", "the recovery made no progress", True, _RESOURCE
    CHECKPOINTS = "checkpoints", "too many checkpoints in a row failed", True, _RESOURCE
    STOP = "stop", "the last checkpoint of a stopping job failed", True, _RESOURCE
    TAKEOVERS = "takeovers", "one coordinator after the other died", False, _RESOURCE
    SUPERSEDED = "superseded", "a newer coordinator owns the job", False, _SYSTEM
    INTERNAL = "internal", "a promise of headgate itself was broken", True, _SYSTEM

    def __new__(
        cls, name: str, sentence: str, recoverable: bool, category: FailureCategory
    ) -> FailureKind:
        member = object.__new__(cls)
        member._value_ = name
        member.sentence = sentence
        member.recoverable = recoverable
        member.category = category
        return member

    def __str__(self) -> str:
        return str(self.value)

    @classmethod
    def of(cls, error: BaseException) -> FailureKind:
        """Return the kind of an error; `as_headgate_error` classifies one that is not headgate's own."""
        ours = as_headgate_error(error, "a step failed")
        return next((kind for type_, kind in _KINDS if isinstance(ours, type_)), cls.INTERNAL)


# More special types come first.
_KINDS: tuple[tuple[type[HeadgateError], FailureKind], ...] = (
    (UserCodeError, FailureKind.USER_CODE),
    (BadRecordError, FailureKind.BAD_RECORD),
    (SourceError, FailureKind.SOURCE),
    (DataError, FailureKind.DATA),
    (ClusterError, FailureKind.CLUSTER),
    (JobError, FailureKind.JOB),
    (ExchangeError, FailureKind.EXCHANGE),
    (FencedError, FailureKind.SUPERSEDED),
    (StorageError, FailureKind.STORAGE),
    (CorruptError, FailureKind.CORRUPT),
    (StateError, FailureKind.STATE),
    (UsageError, FailureKind.USAGE),
)
