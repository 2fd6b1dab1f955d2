"""Every error headgate raises, in one tree.

    HeadgateError
    ├── UsageError          the job, manifest, option or call is wrong; nothing was started
    │   ├── PlanError         the job graph cannot run as written
    │   ├── ManifestErrors    one or more located mistakes in a YAML manifest
    │   ├── OptionError       an unknown option key or a value that does not parse
    │   └── StateNotFound     the job has no queryable state of that name
    ├── JobError            a running job failed
    │   ├── UserCodeError     the user's function raised; the cause is its exception
    │   ├── BadRecordError    an input record could not be read and the policy is `fail`
    │   ├── DataError         records do not fit what a step can do, and never will
    │   ├── ClusterError      the cluster gave no worker
    │   ├── SourceError       what a source reads could not be made
    │   ├── JobNotFound       no running job answers to that name
    │   ├── JobNotReady       the job starts or restarts: the same request will do later
    │   └── ScanOver          a scan of state cannot go on, and has to begin again
    ├── StorageError        the checkpoint store or a file system refused or broke
    │   ├── FencedError       a newer coordinator owns the job; this one must stop
    │   ├── TargetAwayError   the target of a sink does not answer; its commit is repeated
    │   └── MissingFileError  a state file is not there
    ├── StateError          a snapshot cannot be restored into this job
    │   └── CorruptError      what is stored is not what was written
    ├── ExchangeError       a channel broke, or a frame was lost or repeated
    └── InternalError       a promise of headgate itself was broken: our bug

Each message says what happened; `where` says where (the user's line, or file:line of a manifest) and
`fix` says what to do. All survive pickling, because they cross process borders.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class HeadgateError(Exception):
    """Base of all errors: a message, where it happened, and what to do about it."""

    detail: str = ""
    """A traceback or other text beyond the message."""

    def __init__(self, message: str, *, where: str = "", fix: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        self.fix = fix

    def __str__(self) -> str:
        lines = [self.message]
        if self.where:
            lines.append(f"  at {self.where}")
        if self.fix:
            lines.append(f"  {self.fix}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, self.__dict__.copy())


def _rebuild(
    kind: type[HeadgateError], args: tuple[Any, ...], attributes: dict[str, Any]
) -> HeadgateError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(attributes)
    return error


class UsageError(HeadgateError):
    """The job or the call is wrong; nothing was started."""


class PlanError(UsageError):
    """The job graph cannot run as written."""


class OptionError(UsageError):
    """An unknown option key, or a value that does not parse."""


class ManifestErrors(UsageError):
    """All mistakes of one manifest, each with its file:line."""

    def __init__(self, problems: Sequence[HeadgateError]) -> None:
        count = len(problems)
        super().__init__(f"{count} {'mistake' if count == 1 else 'mistakes'} in the manifest")
        self.problems = list(problems)

    def __str__(self) -> str:
        return "\n".join([f"{self.message}:", *(str(problem) for problem in self.problems)])


class JobError(HeadgateError):
    """A running job failed."""


class UserCodeError(JobError):
    """A user's function raised; `__cause__` is lost over process borders, so `detail` holds its text.

    `step` is whose function, `record_id` is equal for equal records (empty: unknown), and `position` says
    how far the source had read (empty: behind an exchange that is unknown).
    """

    def __init__(
        self,
        message: str,
        *,
        where: str = "",
        fix: str = "",
        detail: str = "",
        step: str = "",
        record_id: str = "",
    ) -> None:
        super().__init__(message, where=where, fix=fix)
        self.detail = detail
        self.step = step
        self.record_id = record_id
        self.position = ""


class UserTraceback(Exception):
    """The `__cause__` of the UserCodeError that ends a job: the traceback of the user's code, as text."""

    def __str__(self) -> str:
        return "\n" + str(self.args[0]).rstrip()


class BadRecordError(JobError):
    """An input record could not be read and the source's policy is `fail`."""


class DataError(JobError):
    """Records do not fit what a step can do: a sum beyond its type, say. It would happen again."""


class ClusterError(JobError):
    """The cluster gave no worker, or one that did not come up."""


class SourceError(JobError):
    """What a source reads could not be made; `detail` holds what there is to say beyond the message."""

    def __init__(self, message: str, *, where: str = "", fix: str = "", detail: str = "") -> None:
        super().__init__(message, where=where, fix=fix)
        self.detail = detail


class JobNotFound(JobError):
    """No running job answers to that name."""


class StateNotFound(UsageError):
    """No step of the job has a queryable state of that name."""


class JobNotReady(JobError):
    """The job starts or restarts, and cannot do it just now: the same request will do later."""


class ScanOver(JobError):
    """A scan of state cannot go on: its checkpoint is gone, or the job has restarted. Begin again."""


class StorageError(HeadgateError):
    """The checkpoint store or a file system refused or broke."""


class FencedError(StorageError):
    """A newer coordinator owns the job; this one must stop at once."""


class TargetAwayError(StorageError):
    """The target of a sink does not answer at the moment, so its commit is repeated after a pause."""


class MissingFileError(StorageError):
    """A state file is not there: no number of retries brings it back."""


class StateError(HeadgateError):
    """A snapshot cannot be restored into this job."""


class CorruptError(StateError):
    """What is stored is not what was written: trying again gives the same bytes."""


class ExchangeError(HeadgateError):
    """A channel broke, or a frame was lost or repeated."""


class InternalError(HeadgateError):
    """A promise of headgate itself was broken: please report it."""


def check(condition: object, message: str, **context: object) -> None:
    """Assert an invariant of the control plane, also under `python -O`.

    Raises:
        InternalError: the condition is false; the message ends with the context as key=`value`.
    """
    if not condition:
        details = " ".join(f"{key}=`{value}`" for key, value in context.items())
        raise InternalError(f"{message} {details}".strip())
