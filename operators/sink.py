"""The contract of sinks, and the operator that drives one.

Exactly-once by two-phase commit: the output of a writer up to a barrier is made durable but invisible
(*pre-commit*) in the asynchronous part of the snapshot; its *committables* are part of the checkpoint;
they are *committed* only with a permit, which exists only once the checkpoint is in the job log. After a
restore everything in the restored snapshot is committed first. So commits must be idempotent.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, Literal, TypeAlias, TypeVar

import msgspec
import pyarrow as pa

from ..errors import InternalError, PlanError, StateError, UsageError, check
from ..state.snapshot import CommitPermit, ItemsCut, RestoredState, StateSnapshot
from .base import Operator, OperatorContext
from .elements import Batch
from .suggestions import suggest

E = TypeVar("E", bound=Enum)


NAME_BYTES_MAX: Final = 256
"""The length of `SinkWriter.name_of`: every subtask is given the names of all of them at a restore."""
DISCARDED_COUNTER = "sink_discarded_transactions"
"""Counts what a writer discards that attempts before this one had begun and no checkpoint needs."""


DROPPED_FIX: Final = (
    "if this is a savepoint behind which its job went on, and failed before the next checkpoint was "
    "complete, the job has dropped what the savepoint had staged: begin with a newer savepoint, or with a "
    "checkpoint of the job"
)
"""The advice for a restore that finds neither pending nor visible what a writer had pre-committed."""
RETRY_PAUSES_S: Final = (1.0, 2.0, 5.0, 15.0, 60.0)
"""The pauses before something is repeated for which the target was away; the last one repeats."""


class Guarantee(Enum):
    """The guarantee of a sink: how often a record can appear in its output after failures."""

    EXACTLY_ONCE = "exactly_once"
    AT_LEAST_ONCE = "at_least_once"
    NONE = "none"


GuaranteeLike: TypeAlias = Literal["exactly_once", "at_least_once", "none"] | Guarantee


def parse_guarantee(text: GuaranteeLike) -> Guarantee:
    """Parse the guarantee that a user names.

    Raises:
        UsageError: there is none of that name.
    """
    return _named(Guarantee, text, "guarantee", ("guarantee", "guarantees"))


class IfExists(Enum):
    """The policy for a run that starts without state while its sink already holds output of earlier
    runs."""

    ERROR = "error"
    """Refuse to start: the output would be duplicated."""
    APPEND = "append"
    """Keep it, and write next to it."""
    OVERWRITE = "overwrite"
    """Delete it as soon as the run has committed output of its own."""


IfExistsLike: TypeAlias = Literal["error", "append", "overwrite"] | IfExists


def parse_if_exists(text: IfExistsLike) -> IfExists:
    """Parse the policy that a user names.

    Raises:
        UsageError: there is none of that name.
    """
    return _named(IfExists, text, "if_exists", ("policy", "policies"))


def _named(kind: type[E], given: object, argument: str, called: tuple[str, str]) -> E:
    """Return the member of `kind` that a user gives as itself or by its value.

    Args:
        argument: the name of the argument, for the error.
        called: the singular and the plural name of members, for the error.
    """
    if isinstance(given, kind):
        return given
    names = [member.value for member in kind]
    if given not in names:
        one, several = called
        raise UsageError(
            f"no such {one} {argument}=`{given}`", fix=suggest(str(given), names, several)
        )
    return kind(given)


@dataclass(frozen=True, slots=True)
class SinkRun:
    """A run that starts without state, as its coordinator describes it to a sink.

    Attributes:
        job: the name of the job.
        sink: the name of the sink's step.
        options: the options of the job.
        if_exists: the user's choice for this run; None: the sink's own setting applies.
        announce: publishes a line for the user to read.
    """

    job: str
    sink: str
    options: Mapping[str, str]
    if_exists: IfExists | None
    announce: Callable[[str], None]


@dataclass(frozen=True, slots=True)
class EpochOutput:
    """The committables of all writers of a sink for one checkpoint."""

    checkpoint_id: int
    committables: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class GlobalCommit:
    """The one commit of a sink for a completed checkpoint.

    Attributes:
        job: the name of the job.
        sink: the name of the sink's step.
        options: the options of the job.
        permit: proof that the checkpoint is durable.
        epochs: everything pre-committed for that checkpoint or before and perhaps not committed yet, in
            ascending order of checkpoints.
    """

    job: str
    sink: str
    options: Mapping[str, str]
    permit: CommitPermit
    epochs: tuple[EpochOutput, ...]


class OutputFile(msgspec.Struct, frozen=True, array_like=True):
    """A visible file, or another piece of output, of a sink."""

    name: str
    version: str
    """Differs for another file of the same name, and after a change of the same file."""


class SinkWriter:
    """Writes the records of one subtask."""

    def open(self, context: OperatorContext) -> None:
        """Open the writer; called first. Must not block, which is for `prepare`."""
        self.context = context

    def prepare(self) -> None:
        """Connect to the storage and clean up after dead attempts; called next, in a thread.

        `context.restored_checkpoint` and `.attempt` tell which leftovers are dead. It is followed
        by the commits of the restored checkpoint, then by the first write. Raising fails the
        attempt.
        """

    def name_of(self, committable: bytes) -> bytes:
        """Return a name of a committable of this writer, of at most `NAME_BYTES_MAX` bytes.

        For a sink that `names_committables`. Called in a thread. Names become part of the checkpoint.
        """
        raise NotImplementedError

    def restored(self, names: frozenset[bytes] | None) -> None:
        """Learn what the writers of all subtasks had pre-committed at the restored checkpoint.

        For a sink that `names_committables`. Called in a thread, behind `prepare` and before the commits
        of the restored checkpoint, and not at all by a run that begins without state. This subtask need
        not be the one that commits them. If it raises TargetAwayError it is called again, as `commit` is;
        any other error fails the attempt.

        Args:
            names: those of all committables that are perhaps not committed; None: the checkpoint has no
                names, because it was taken by a version of the sink that did not name them.
        """
        raise NotImplementedError

    def write(self, batch: Batch) -> None:
        """Write a batch; it becomes visible at once, or when committed, depending on the guarantee."""
        raise NotImplementedError

    def backlogged(self) -> bool:
        """Return True while too much waits to be written: that is the backpressure.

        The subtask then reads no records until a callback of `context.timers` has made this False.
        `write` may still be called, with records that are on their way.
        """
        return False

    def roll(self, checkpoint_id: int) -> Callable[[], list[bytes]] | None:
        """Close the open output at the barrier; return the pre-commit, a function run in a thread.

        That function makes everything written since the last roll durable and returns its
        committables (opaque; enough to commit after a crash, by another process). If it raises, the
        checkpoint is declined and the same function is called again for the next one, so it must be
        repeatable until it has succeeded once. None: nothing to commit.
        """
        return None

    def commit(self, committables: list[bytes], permit: CommitPermit) -> None:
        """Make pre-committed data visible. Idempotent; runs in a thread.

        What is visible already, by this attempt or one before, is passed over. Never called if the sink
        `commits_globally`.

        Raises:
            JobError: what was pre-committed is gone. A savepoint may have what a later attempt, which went
                on from an older checkpoint, has deleted. `DROPPED_FIX` says what to do then.
            TargetAwayError: the target does not answer at the moment; the call is repeated after a pause,
                with the same committables, as often as `sink.committer.retries` says. Any other error
                fails the attempt at once.
        """

    def on_checkpoint_complete(self, checkpoint_id: int) -> None:
        """Learn that a checkpoint is complete, also if this writer had nothing to commit for it.

        Called behind the commit of the checkpoint, for a sink that `commits_globally` as well; must not
        block. A call may be missing, because notices can be lost: the next one then stands for both.
        """

    def shows_output(self) -> bool:
        """Return True if a commit up to the last roll makes records visible that this attempt has written.

        It is False while a writer only holds back what it has written, such as to merge it first. Output of
        earlier runs that is replaced stays until then.
        """
        return True

    def finish(self) -> Callable[[], None] | None:
        """End the data: no write follows (the last roll and commit still do).

        Return blocking work as a function; it is run in a thread, and awaited.
        """
        return None

    def close(self) -> None:
        """Release resources, also after failures: drop what was never pre-committed."""


class Sink:
    """Description of a sink; picklable.

    Attributes:
        guarantees: the guarantees that it supports.
        guarantee: the guarantee that the job chose.
        needs_columns: True if it takes only column batches.
        extras: extras of headgate's installation that it needs (`operators/extras.py`).
        pickled: True if committables are pickled, so that a restore unpickles them.
        commits_globally: True if `commit_globally` makes the output of all writers visible, once per
            checkpoint, instead of each writer its own.
        names_committables: True if each writer learns at a restore what all writers had pre-committed, by
            the names that `SinkWriter.name_of` gives. It is of use where leftovers of dead attempts do
            not show by themselves whether a checkpoint has them.
        if_exists: the policy for the output of earlier runs, unless the run has its own.
        place: the location of the output, for messages; empty if it is not kept.
        uncommitted_ms_max: output that was not committed after this time is lost; None: it never is.
    """

    guarantees: frozenset[Guarantee] = frozenset({Guarantee.AT_LEAST_ONCE, Guarantee.NONE})
    guarantee: Guarantee = Guarantee.AT_LEAST_ONCE
    needs_columns: bool = False
    extras: tuple[str, ...] = ()
    pickled: bool = False
    commits_globally: bool = False
    names_committables: bool = False
    if_exists: IfExists = IfExists.ERROR
    place: str = ""
    uncommitted_ms_max: int | None = None

    def bind(self, schema: pa.Schema | None) -> None:
        """Bind the sink to the stream's schema at plan time; raise PlanError if it does not fit."""

    def writer(self) -> SinkWriter:
        """Return a new writer for one subtask."""
        raise NotImplementedError

    def commit_globally(self, commit: GlobalCommit) -> None:
        """Make the output of all writers for a completed checkpoint visible.

        For a sink that `commits_globally`. Called by the coordinator, in a thread, after each completed
        checkpoint for which a writer has returned committables, and before an attempt that restores such
        a checkpoint begins. No later checkpoint completes before this one is committed. The call is
        repeated after failures, perhaps by another process, and perhaps while a former coordinator, which
        does not know yet that it has been replaced, is in the same call. So it must be idempotent by
        itself: the target has to record, in the same atomic change, which checkpoint of which attempt was
        committed last. Checkpoint ids grow within a run of a job (`OperatorContext.run_id`), but a
        savepoint may have output of an attempt (`OperatorContext.attempt`) that later ones have not
        committed. Another run may use ids again.

        Raises:
            StorageError: the target does not answer at the moment; the call is repeated after a pause.
                Any other error fails the attempt.
        """
        raise NotImplementedError

    def check_output(self, run: SinkRun) -> None:
        """Check that a run that starts without state can write here.

        Called in the coordinator, in a thread, before anything is changed anywhere. May block.

        Raises:
            UsageError: it cannot.
        """

    def list_output(self, run: SinkRun) -> list[OutputFile] | None:
        """List the visible output of earlier runs of the same job and sink.

        Called when `check_output` is, and once more before the first writer is made. May block. The
        policy of the run, or else `if_exists`, decides what happens to the output. Writers of this
        run must not use the names that are listed.

        Returns:
            None if this kind of sink never keeps any.
        """
        return None

    def delete_output(self, run: SinkRun, files: list[OutputFile]) -> int:
        """Delete output that `list_output` found before this run; in a thread.

        It may be called again, in another process, after a crash. A missing file is no error, and
        one whose version has changed belongs to somebody else and must stay.

        Returns:
            The number of deleted files.

        Raises:
            StorageError: the storage does not respond, or does not allow it.
        """
        raise NotImplementedError

    def begin_output(self, run: SinkRun) -> None:
        """Prepare for a run that starts without state.

        Called after `check_output`, in a thread, and before the first writer is made. It is called
        again, in another process, if the coordinator dies in between.
        """

    def describe(self) -> str:
        """Return a short text for `explain`, such as `parquet(out/)`."""
        return type(self).__name__


def stream_columns(schema: pa.Schema | None, output: str) -> pa.Schema:
    """Return the columns of a stream, for `Sink.bind`.

    Args:
        schema: of the stream.
        output: the name of what is made of the columns, a plural, for the error.

    Raises:
        PlanError: the stream is of Python objects.
    """
    if schema is None:
        raise PlanError(
            f"{output} are made of columns, and this stream is of Python objects",
            fix="add into=<a Struct class or schema> to the map before it",
        )
    return schema


class PendingOutput(msgspec.Struct):
    """Committables of one checkpoint, as stored in a snapshot."""

    checkpoint_id: int
    committables: list[bytes]
    sink: str = ""
    """The class of the sink that made them; empty in snapshots of the first versions."""
    since_ms: int = 0
    """When their barrier came, in ms since 1970; 0 in snapshots of the first versions."""


COMMITTABLES = "committables"
"""The state of a sink in a snapshot: items that `pending_output` decodes."""
NAMES: Final = "committable-names"
"""The state of a sink that `names_committables`: each item is a list of the names of one subtask's
committables. Each subtask is given all items.
"""


def pending_output(item: bytes) -> list[PendingOutput]:
    """Decode an item of the state `COMMITTABLES`."""
    found = msgspec.msgpack.decode(item, type=list[PendingOutput] | PendingOutput)
    # snapshots of the first versions have an item per checkpoint
    return found if isinstance(found, list) else [found]


def kind_of(sink: Sink) -> str:
    """Return the class that a sink has derived from `Sink`, by which a snapshot names it."""
    kinds = type(sink).__mro__
    return kinds[max(kinds.index(Sink) - 1, 0)].__qualname__


def check_kind(sink: str, kind: str, pending: PendingOutput) -> None:
    """Check that uncommitted output is of the sink that is to commit it.

    Args:
        sink: the name of the sink's step.
        kind: see `kind_of`.
        pending: the output.

    Raises:
        StateError: a sink of another kind wrote it.
    """
    if not pending.sink or not pending.committables or pending.sink == kind:
        return
    raise StateError(
        f"sink `{sink}` is a {kind} now, and was a {pending.sink} when "
        f"checkpoint {pending.checkpoint_id} was taken: it cannot commit what that one had written",
        fix="give the new sink another name, and keep the old one in the job until it has stopped with "
        "a savepoint; or allow non-restored state, which gives up what was not committed",
    )


def epochs_of(name: str, sink: Sink, items: Sequence[bytes]) -> tuple[EpochOutput, ...]:
    """Return what all writers of a sink had pre-committed, and perhaps not committed, at a checkpoint.

    Args:
        name: the name of the sink's step.
        sink: the sink, which `commits_globally`.
        items: the items of the state `COMMITTABLES` of all its subtasks.

    Raises:
        StateError: a sink of another kind wrote it.
    """
    kind, found = kind_of(sink), dict[int, list[bytes]]()
    for item in items:
        for pending in pending_output(item):
            check_kind(name, kind, pending)
            if pending.committables:
                found.setdefault(pending.checkpoint_id, []).extend(pending.committables)
    return tuple(EpochOutput(id_, tuple(values)) for id_, values in sorted(found.items()))


class _Ledger:
    """The output that a writer has rolled or prepared, and not yet committed; shared with I/O threads.

    A roll stays here until its pre-commit succeeded, so an aborted or declined checkpoint loses
    nothing: the next one prepares what it left behind.
    """

    def __init__(self, sink: str) -> None:
        self._sink = sink
        self._rolled: dict[int, Callable[[], list[bytes]]] = {}
        self._prepared: dict[int, list[bytes]] = {}
        self._since_ms: dict[int, int] = {}
        """When the barrier of each of these checkpoints came, also if it came in an earlier attempt."""
        self._lock = threading.Lock()
        self._preparing = threading.Lock()

    def rolled(self, checkpoint_id: int, precommit: Callable[[], list[bytes]], now_ms: int) -> None:
        """Add a roll: a writer closed its output up to the barrier of `checkpoint_id`, at `now_ms`."""
        with self._lock:
            self._rolled[checkpoint_id] = precommit
            self._since_ms[checkpoint_id] = now_ms

    def add(self, checkpoint_id: int, committables: list[bytes], since_ms: int) -> None:
        """Add committables of a restored snapshot."""
        with self._lock:
            self._prepared.setdefault(checkpoint_id, []).extend(committables)
            known_ms = self._since_ms.get(checkpoint_id, since_ms)
            self._since_ms[checkpoint_id] = min(known_ms, since_ms)

    def prepare(self, checkpoint_id: int) -> list[PendingOutput]:
        """Pre-commit all rolls up to `checkpoint_id`; return everything prepared up to it.

        In a thread.
        """
        with self._preparing:
            with self._lock:
                due = sorted(id_ for id_ in self._rolled if id_ <= checkpoint_id)
            for id_ in due:
                committables = self._rolled[id_]()
                with self._lock:
                    del self._rolled[id_]
                    if committables:
                        self._prepared[id_] = committables
                    else:
                        del self._since_ms[id_]
            with self._lock:
                held = sorted(self._prepared.items())
                return [
                    PendingOutput(id_, values, self._sink, self._since_ms[id_])
                    for id_, values in held
                    if id_ <= checkpoint_id
                ]

    def due(self, checkpoint_id: int) -> list[bytes]:
        """Return the committables of all checkpoints up to `checkpoint_id`, in order."""
        with self._lock:
            due = sorted(id_ for id_ in self._prepared if id_ <= checkpoint_id)
            return [value for id_ in due for value in self._prepared[id_]]

    def committed(self, checkpoint_id: int) -> None:
        """Forget the committables of all checkpoints up to `checkpoint_id`.

        Not before they are visible: a later checkpoint may be written, and complete, meanwhile, and a
        process that dies in the middle of the commit leaves the rest to the one that restores it.
        """
        with self._lock:
            for id_ in [id_ for id_ in self._prepared if id_ <= checkpoint_id]:
                del self._prepared[id_]
                del self._since_ms[id_]

    @property
    def pending(self) -> int:
        """Committables that are prepared and not committed."""
        with self._lock:
            return sum(map(len, self._prepared.values()))

    def waiting_s(self, now_ms: int, *, prepared: bool) -> float:
        """How long ago the oldest barrier came whose output is not committed; 0: there is none.

        Args:
            now_ms: the time now.
            prepared: only of output that is prepared.
        """
        with self._lock:
            since = [
                ms for id_, ms in self._since_ms.items() if not prepared or id_ in self._prepared
            ]
        return max(0, now_ms - min(since)) / 1000 if since else 0.0


class SinkOperator(Operator):
    """Runs a writer, keeps its committables until a permit arrives, and commits them in order."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._kind = kind_of(sink)
        self._ledger = _Ledger(self._kind)
        self._writer: SinkWriter | None = None
        self._untold: Callable[[], None] | None = None
        """Tells the writer the names of the restored checkpoint; None: it knows them, or needs none."""
        self._took_records = False

    @property
    def writer(self) -> SinkWriter:
        """The writer, which exists from `open` on."""
        if self._writer is None:
            raise InternalError("the sink is not open")
        return self._writer

    def open(self, context: OperatorContext) -> Awaitable[None] | None:
        super().open(context)
        self._writer = self._sink.writer()
        self._writer.open(context)
        self._register_metrics(context)
        return context.run_in_thread(self._writer.prepare)

    def _register_metrics(self, context: OperatorContext) -> None:
        metrics, ledger, now_ms = context.metrics, self._ledger, context.clock.now_ms
        self._commits = metrics.counter("sink_commits")
        self._commit_errors = metrics.counter("sink_commit_errors")
        self._commit_seconds = metrics.histogram("sink_commit_seconds")
        metrics.counter(DISCARDED_COUNTER)
        metrics.gauge("sink_pending_transactions", lambda: ledger.pending)
        metrics.gauge(
            "sink_uncommitted_seconds", lambda: ledger.waiting_s(now_ms(), prepared=False)
        )
        metrics.gauge("sink_prepared_seconds", lambda: ledger.waiting_s(now_ms(), prepared=True))

    def restore(self, state: RestoredState) -> Awaitable[None] | None:
        """Commit what the restored checkpoint had pre-committed; the restore itself is the permit.

        If the sink commits globally, the coordinator has done that already.
        """
        restored = self.context.restored_checkpoint
        for item in state.items.get(COMMITTABLES, []):
            for pending in pending_output(item):
                check_kind(self.context.operator_name, self._kind, pending)
                since_ms = pending.since_ms or self.context.clock.now_ms()
                self._ledger.add(pending.checkpoint_id, pending.committables, since_ms)
        check(restored > 0, "a restore without a checkpoint", operator=self.context.operator_name)
        permit = CommitPermit(self.context.job_name, 0, restored)
        if not self._sink.names_committables:
            return self._commit(permit)
        lists = state.items.get(NAMES)
        names = None
        if lists is not None:
            decoded = (msgspec.msgpack.decode(each, type=list[bytes]) for each in lists)
            names = frozenset(name for each in decoded for name in each)
        writer = self.writer
        self._untold = lambda: writer.restored(names)
        return self._tell(self._untold, permit)

    async def _tell(self, untold: Callable[[], None], permit: CommitPermit) -> None:
        """Tell the writer the names of the restored checkpoint, and commit that."""
        await self.context.run_in_thread(untold)
        self._untold = None
        committing = self._commit(permit)
        if committing is not None:
            await committing

    def pickled_states(self) -> Sequence[str]:
        return [COMMITTABLES] if self._sink.pickled else []

    def process(self, batch: Batch, input_index: int) -> None:
        self.writer.write(batch)
        self._took_records = self._took_records or len(batch) > 0

    @property
    def wrote(self) -> bool:
        """Whether the sink has taken records in this attempt, of which commits make some visible."""
        return self._took_records and self.writer.shows_output()

    def backlogged(self) -> bool:
        """Return True while its subtask shall read no records."""
        return self.writer.backlogged()

    def snapshot(self, checkpoint_id: int) -> StateSnapshot | None:
        precommit = self.writer.roll(checkpoint_id)
        if precommit is not None:
            self._ledger.rolled(checkpoint_id, precommit, self.context.clock.now_ms())
        ledger = self._ledger

        def make_items() -> list[bytes]:
            # One item, so that at another parallelism one subtask commits all of it, in order.
            prepared = ledger.prepare(checkpoint_id)
            return [msgspec.msgpack.encode(prepared)] if prepared else []

        items = {COMMITTABLES: ItemsCut(make_items)}
        if self._sink.names_committables:
            items[NAMES] = ItemsCut(lambda: [self._names(checkpoint_id)], "union")
        return StateSnapshot(items=items)

    def _names(self, checkpoint_id: int) -> bytes:
        """Return the names of everything that is prepared and not committed; in a thread.

        An empty list tells a restore that there was nothing. What is committed between this and the
        encoding of the committables may be named although it is not among them, or the other way round;
        that does no harm, as nothing that is committed is left over.
        """
        names = [
            self.writer.name_of(committable)
            for pending in self._ledger.prepare(checkpoint_id)
            for committable in pending.committables
        ]
        longest = max(map(len, names), default=0)
        check(longest <= NAME_BYTES_MAX, "the name of a committable is too long", bytes=longest)
        return msgspec.msgpack.encode(names)

    def on_checkpoint_complete(self, permit: CommitPermit) -> Awaitable[None] | None:
        """Commit everything up to the permit's checkpoint, in a thread.

        Also called after a commit that failed because the target was away, then for the same checkpoint,
        and if it was away when the restored writer was told the names.
        """
        if self._untold is not None:
            committing: Awaitable[None] | None = self._tell(self._untold, permit)
        else:
            committing = self._commit(permit)
        if committing is not None:
            return self._completed(committing, permit.checkpoint_id)
        self.writer.on_checkpoint_complete(permit.checkpoint_id)
        return None

    async def _completed(self, committing: Awaitable[None], checkpoint_id: int) -> None:
        await committing
        self.writer.on_checkpoint_complete(checkpoint_id)

    def _commit(self, permit: CommitPermit) -> Awaitable[None] | None:
        ledger, writer = self._ledger, self.writer
        if self._sink.commits_globally:
            # The entry in the job log, which the permit stands for, has the committables; the coordinator
            # commits them before it writes another.
            ledger.committed(permit.checkpoint_id)
            return None
        due = ledger.due(permit.checkpoint_id)
        if not due:
            return None
        monotonic = self.context.clock.monotonic

        def commit() -> None:
            began = monotonic()
            try:
                writer.commit(due, permit)
            except Exception:
                self._commit_errors.inc()
                raise
            ledger.committed(permit.checkpoint_id)
            self._commits.inc()
            self._commit_seconds.observe(monotonic() - began)

        return self.context.run_in_thread(commit)

    def finish(self) -> Awaitable[None] | None:
        rest = self.writer.finish()
        return None if rest is None else self.context.run_in_thread(rest)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
