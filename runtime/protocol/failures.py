"""The reasons why checkpoints and jobs fail: a name and a sentence each, for logs, metrics and the CLI."""

from __future__ import annotations

from enum import Enum, unique

from ...errors import (
    BadRecordError,
    ClusterError,
    CorruptError,
    DataError,
    ExchangeError,
    FencedError,
    HeadgateError,
    JobError,
    SourceError,
    StateError,
    StorageError,
    UsageError,
    UserCodeError,
)
from .foreign import as_headgate_error


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
    STORAGE = "storage", "the checkpoint store or a file system refused or broke", True, _RESOURCE
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
