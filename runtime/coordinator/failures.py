"""Failures of attempts: what they are, how often they were repeated, and what is remembered of them."""

from __future__ import annotations

import asyncio
import importlib
import logging
import pickle
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final, final

import msgspec
from msgspec.structs import replace

from ...errors import HeadgateError, InternalError, JobError, OptionError, UserCodeError
from ..control.messages import SubtaskFailed
from ..options.recovery import (
    EXCEPTION_HISTORY,
    FAILURE_ENRICHERS,
    SAME_FAILURE_MAX,
    SAME_RECORD_MAX,
)
from ..options.registry import Options
from ..plan import JobSpec
from ..protocol.failure_history import FailureEntry, FailureHistory, FailureRecord
from ..protocol.failures import FailureKind
from ..protocol.restart import PoisonCounter, RepeatCounter, RestartStrategy, restart_strategy

_log = logging.getLogger("headgate.job")
SILENT = "no heartbeat"
"""The beginning of the reason for losing a worker that stopped answering."""
ROOT_CAUSE_S = 0.2
"""A broken connection waits this long for the report that the worker behind it died."""
FAILURE_KINDS = {kind.value: kind for kind in FailureKind}
_OF_THE_PROGRAM: Final = (FailureKind.INTERNAL, FailureKind.JOB)
"""Kinds for which another attempt helps only if the failure depended on timing."""
LABELS_MAX: Final = 20
LABEL_TEXT_MAX: Final = 200
"""The number of characters of a label that are kept."""
Enricher = Callable[[dict[str, Any]], Mapping[str, str]]


@final
class Failure(msgspec.Struct, frozen=True):
    """A failure that ends an attempt, or some regions of it."""

    text: str
    where: str
    kind: FailureKind
    error: HeadgateError
    detail: str = ""
    worker: str = ""
    """The worker it happened on, if that is known."""

    def entry(self, now_ms: int) -> FailureEntry:
        """Return the failure as a line of the history."""
        return FailureEntry(
            time_ms=now_ms,
            kind=self.kind.value,
            where=self.where,
            worker=self.worker,
            text=self.text,
            detail=self.detail,
            category=self.kind.category.value,
        )


def failure_from(error: HeadgateError, where: str) -> Failure:
    """Return the failure that an error within the coordinator means."""
    return Failure(str(error), where, FailureKind.of(error), error, error.detail)


def failure_of_subtask(message: SubtaskFailed, worker_id: str) -> Failure:
    """Return the failure that a worker reported."""
    try:
        error = pickle.loads(message.error)
    except Exception:
        error = HeadgateError(message.text)
    where = message.task_name
    if message.index >= 0:
        where = f"{where} ({message.index})"
    kind = FAILURE_KINDS[message.kind]
    return Failure(message.text, where, kind, error, message.detail, worker_id)


def failure_of_worker(worker_id: str, reason: str) -> Failure:
    """Return the failure that the loss of a worker means."""
    text = f"worker lost: {reason}"
    silent = reason.startswith(SILENT)
    kind = FailureKind.HEARTBEAT_TIMEOUT if silent else FailureKind.WORKER_LOST
    return Failure(
        text, worker_id, kind, HeadgateError(f"{text} worker=`{worker_id}`"), worker=worker_id
    )


@final
class RepeatedFailures:
    """Recognises failures that happen again and again: because of one record, or because of a bug.

    Such a failure ends the job for good.
    """

    def __init__(self, failures_max: int | None, repeats_max: int) -> None:
        self._counter = None if failures_max is None else PoisonCounter(failures_max)
        self._repeats = RepeatCounter(repeats_max)

    def check(self, failure: Failure, now_ms: int, checkpoint: int) -> Failure:
        """Return the failure; as one that is not tried again, if the same has failed the job too often.

        Args:
            failure: the failure that ended the attempt.
            now_ms: the time, in ms since 1970.
            checkpoint: the newest completed checkpoint.
        """
        error = failure.error
        if failure.kind in _OF_THE_PROGRAM:
            return self._repeated(failure, checkpoint)
        if self._counter is None or not isinstance(error, UserCodeError):
            return failure
        count = self._counter.failed(error.step, error.record_id, now_ms)
        if count is None:
            return failure
        position = f"; the source had read up to {error.position}" if error.position else ""
        text = f"the same record failed the job {count} times{position}: {failure.text}"
        poison = UserCodeError(
            text,
            where=error.where,
            fix='correct the function, or let the step go on without such records: on_error="side_output"',
            detail=error.detail,
        )
        return replace(failure, text=text, kind=FailureKind.POISON, error=poison)

    def _repeated(self, failure: Failure, checkpoint: int) -> Failure:
        count = self._repeats.failed(failure.where, failure.text, checkpoint)
        if count is None:
            return failure
        text = f"the job failed the same way {count} times, without a checkpoint in between: {failure.text}"
        kind = JobError if failure.kind is FailureKind.JOB else InternalError
        error = kind(text, where=failure.error.where, fix=failure.error.fix)
        error.detail = failure.detail
        return replace(failure, text=text, kind=FailureKind.REPEATED, error=error)


def load_enrichers(text: str) -> list[Enricher]:
    """Return the functions that the option names.

    Raises:
        OptionError: one of them cannot be imported.
    """
    return [_load(name) for name in (part.strip() for part in text.split(",")) if name]


def _load(name: str) -> Enricher:
    module, _, function = name.partition(":")
    try:
        found: Enricher = getattr(importlib.import_module(module), function)
    except (Exception, SystemExit) as error:  # a module of the user can raise anything
        raise OptionError(
            f"no such failure enricher key=`{FAILURE_ENRICHERS.key}` value=`{name}`: {error}",
            fix="name a function that the coordinator can import: module:function",
        ) from error
    return found


@final
class FailureEnrichers:
    """Calls functions of the user that add labels to failures in the history.

    They run in a thread: nothing waits for what they look up, and none of them can fail the job.
    """

    def __init__(self, enrichers: Sequence[Enricher]) -> None:
        self._enrichers = enrichers
        self._under_way: set[asyncio.Task[None]] = set()

    def enrich(self, record: FailureRecord, entry: FailureEntry) -> None:
        """Add labels to a failure, as soon as they are known."""
        if self._enrichers:
            task = asyncio.get_running_loop().create_task(
                self._enrich(record, {**asdict(entry), "attempt": record.attempt}), name="enrichers"
            )
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)

    async def _enrich(self, record: FailureRecord, failure: dict[str, Any]) -> None:
        for enricher in self._enrichers:
            try:
                labels = dict(await asyncio.to_thread(enricher, dict(failure)))
            except Exception as error:
                _log.warning("a failure enricher raised %s: %s", type(error).__name__, error)
                continue
            for key, value in labels.items():
                if len(record.labels) < LABELS_MAX:
                    record.labels[str(key)[:LABEL_TEXT_MAX]] = str(value)[:LABEL_TEXT_MAX]

    async def close(self) -> None:
        """Wait for calls under way, but not for long: their threads cannot be stopped."""
        if self._under_way:
            await asyncio.wait(self._under_way, timeout=1.0)
        for task in self._under_way:
            task.cancel()


@final
class Failures:
    """The failures of a job under one coordinator, and what is decided about them."""

    def __init__(
        self,
        history: FailureHistory,
        strategy: RestartStrategy,
        repeated: RepeatedFailures,
        enrichers: FailureEnrichers,
    ) -> None:
        self.history = history
        self.strategy = strategy
        self.repeated = repeated
        self.enrichers = enrichers

    @classmethod
    def of(cls, spec: JobSpec, options: Options) -> Failures:
        """Return a new object with the settings of the job."""
        return cls(
            FailureHistory(options.get(EXCEPTION_HISTORY)),
            restart_strategy(spec.restart, random.Random().uniform),
            RepeatedFailures(options.get(SAME_RECORD_MAX), options.get(SAME_FAILURE_MAX)),
            FailureEnrichers(load_enrichers(options.get(FAILURE_ENRICHERS) or "")),
        )

    def record(
        self, entry: FailureEntry, attempt: int, silent_ms: int | None, *, merged: bool
    ) -> None:
        """Add a failure to the history.

        Args:
            entry: the failure.
            attempt: the attempt that it ended.
            silent_ms: for a lost worker, the time since its last sign of life.
            merged: it belongs to the failure before.
        """
        if merged:
            self.history.also(entry)
        else:
            self.enrichers.enrich(self.history.failed(entry, attempt, silent_ms), entry)
