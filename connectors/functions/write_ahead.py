"""A function of the user as the second phase of a commit: checkpoints stage output, and it is written then.

The records of a subtask between two barriers are cut into parts, and each part becomes a committable, so it
is stored with the checkpoint. When the checkpoint is complete, the function is given the parts in order,
each with an identity that is fixed with its records. A part is given again when the function fails, and
after a crash in the middle of a commit, always with the same records and the same identity. So a function
that does nothing when it is given an identity again makes each record visible exactly once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import Any, Final

import cloudpickle
import msgspec
import pyarrow as pa

from ...errors import (
    CorruptError,
    HeadgateError,
    InternalError,
    JobError,
    StorageError,
    TargetAwayError,
    UsageError,
)
from ...operators.base import OperatorContext
from ...operators.elements import Batch, ColumnBatch, ObjectBatch
from ...operators.functions.user_code import is_own_cancellation, text_of, user_error, user_failures
from ...operators.origin import Origin, capture_origin
from ...operators.sink import (
    RETRY_PAUSES_S,
    Guarantee,
    GuaranteeLike,
    Sink,
    SinkWriter,
    parse_guarantee,
)
from ...state.snapshot import CommitPermit
from ..arguments import check_count, parse_bytes
from ..files.sink import tag_of
from .calling import Pieces
from .loop_thread import LoopThread, called
from .sink import OwnCopy, RecordsAs, argument_of, check_form, check_function, several

ROWS: Final = 1000
BUFFER: Final = "128mb"
RETRIES_OPTION: Final = "sink.committer.retries"
RETRIES: Final = 10
"""The default of the option."""
_TEXT_MAX: Final = 300


@dataclass(frozen=True, slots=True)
class Epoch:
    """The identity of some records that a write-ahead sink writes in one call.

    Attributes:
        id: a text that no other call of any run has. Every repeat of the call has it, with the same
            records in the same order.
        job: the name of the job.
        sink: the name of the sink's step.
        run: the name of the run that staged the records.
        checkpoint_id: the checkpoint that the records were staged for. It grows within a run.
        subtask: the subtask that staged them.
        part: the number of this call among those for this checkpoint and subtask, from 0.
    """

    id: str
    job: str
    sink: str
    run: str
    checkpoint_id: int
    subtask: int
    part: int


class _Staged(msgspec.Struct, frozen=True, array_like=True):
    """A committable: some records, and the identity they are written with.

    The names are those of the job that staged them. A savepoint may be restored by a job of another name,
    and the identity must stay the same then.
    """

    job: str
    sink: str
    run: str
    attempt: int
    checkpoint_id: int
    subtask: int
    part: int
    columns: bool
    """True if `data` is a stream of Arrow; otherwise it is a pickled list."""
    data: bytes


def _staged_data(batch: Batch) -> bytes:
    if not isinstance(batch, ColumnBatch):
        return bytes(cloudpickle.dumps(batch.records))
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(sink, batch.data.schema, options=options) as writer:
        writer.write_batch(batch.data)
    return bytes(sink.getvalue().to_pybytes())


def _batch_of(staged: _Staged) -> Batch:
    """Decode records. Raises CorruptError if that is impossible."""
    if not staged.columns:
        return ObjectBatch(cloudpickle.loads(staged.data))
    try:
        with pa.ipc.open_stream(staged.data) as reader:
            return ColumnBatch(reader.read_next_batch())
    except (pa.ArrowInvalid, StopIteration) as error:
        raise CorruptError(
            f"the output that checkpoint {staged.checkpoint_id} has staged cannot be read: {error}"
        ) from error


def _epoch_of(staged: _Staged) -> Epoch:
    numbers = (staged.attempt, staged.checkpoint_id, staged.subtask, staged.part)
    return Epoch(
        "-".join([tag_of(staged.job, staged.sink), staged.run, *map(str, numbers)]),
        staged.job,
        staged.sink,
        staged.run,
        staged.checkpoint_id,
        staged.subtask,
        staged.part,
    )


@dataclass(frozen=True, slots=True)
class WriteAheadSettings:
    """The settings of a sink.

    Attributes:
        rows: the most records of a call.
        buffer_bytes: the most bytes that a subtask may stage between two barriers.
        records: the form of the function's first argument.
    """

    rows: int
    buffer_bytes: int
    records: RecordsAs


class WriteAheadSink(Sink):
    """Calls a function with the records of completed checkpoints."""

    guarantees = frozenset({Guarantee.EXACTLY_ONCE, Guarantee.AT_LEAST_ONCE})

    def __init__(
        self,
        function: Callable[[Any, Epoch], Any],
        settings: WriteAheadSettings,
        guarantee: Guarantee,
        origin: Origin,
    ) -> None:
        self.function = function
        self.settings = settings
        self.guarantee = guarantee
        self._origin = origin
        self.needs_columns = settings.records == "arrow"

    def bind(self, schema: pa.Schema | None) -> None:
        self.pickled = schema is None

    def writer(self) -> SinkWriter:
        return WriteAheadWriter(self.function, self.settings, self._origin)

    def describe(self) -> str:
        name = getattr(self.function, "__name__", "function")
        return f"write_ahead({name}, {self.settings.rows} records a call)"


class WriteAheadWriter(SinkWriter):
    """Stages and writes the records of one subtask."""

    def __init__(
        self, function: Callable[..., Any], settings: WriteAheadSettings, origin: Origin
    ) -> None:
        self._settings = settings
        self._origin = origin
        self._function = OwnCopy(function, origin)
        self._pieces = Pieces(settings.rows)
        self._staged: list[tuple[bool, bytes]] = []
        self._bytes = 0
        self._thread: LoopThread | None = None
        self._closed = threading.Event()

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._retries = int(context.options.get(RETRIES_OPTION, RETRIES))
        self._thread = LoopThread(f"calls of {context.operator_name}")

    @property
    def _calls(self) -> LoopThread:
        if self._thread is None:
            raise InternalError("the sink is not open")
        return self._thread

    @property
    def function(self) -> Any:
        """This subtask's copy of the function."""
        return self._function.function

    def prepare(self) -> None:
        self._calls.call(self._function.open, self.context)

    def write(self, batch: Batch) -> None:
        if len(batch):
            self.check(batch)
        for piece in self._pieces.add(batch):
            self._stage(piece)

    def check(self, batch: Batch) -> None:
        """Raise DataError if some records can never be written, before a checkpoint has them.

        A checkpoint that has them can never be committed, and so the job could not go on from it.
        """

    def _stage(self, batch: Batch) -> None:
        """Encode records now, before anything can change them."""
        data = _staged_data(batch)
        self._staged.append((isinstance(batch, ColumnBatch), data))
        self._bytes += len(data)
        if self._bytes > self._settings.buffer_bytes:
            raise JobError(
                f"sink `{self.context.operator_name}` has more output between two checkpoints than its "
                f"buffer holds buffer_bytes=`{self._settings.buffer_bytes}`",
                where=str(self._origin),
                fix="take checkpoints more often, give the sink a larger buffer=, or use more subtasks",
            )

    def roll(self, checkpoint_id: int) -> Callable[[], list[bytes]] | None:
        if len(self._pieces):
            self._stage(self._pieces.take())
        parts, self._staged, self._bytes = self._staged, [], 0
        if not parts:
            return None
        context = self.context

        def committables() -> list[bytes]:
            return [
                msgspec.msgpack.encode(
                    _Staged(
                        context.job_name,
                        context.operator_name,
                        context.run_id,
                        context.attempt,
                        checkpoint_id,
                        context.subtask_index,
                        part,
                        columns,
                        data,
                    )
                )
                for part, (columns, data) in enumerate(parts)
            ]

        return committables

    def commit(self, committables: list[bytes], permit: CommitPermit) -> None:
        for each in committables:
            staged = msgspec.msgpack.decode(each, type=_Staged)
            self._write(staged, _epoch_of(staged))

    def _write(self, staged: _Staged, epoch: Epoch) -> None:
        """Call the function until it succeeds, as often as the option allows."""
        for tries in range(self._retries + 1):
            batch = _batch_of(staged)  # each time, because the function may change what it is given
            try:
                error = self._calls.submit(self._tried(batch, epoch)).result()
            except CancelledError as cancelled:
                raise JobError("the sink was closed while it wrote") from cancelled
            if error is None:
                return
            if isinstance(error, TargetAwayError):
                raise error  # the whole commit is repeated
            if isinstance(error, HeadgateError) and not isinstance(error, StorageError):
                raise error
            pause_s = RETRY_PAUSES_S[min(tries, len(RETRY_PAUSES_S) - 1)]
            if tries < self._retries:
                self.context.logger.warning(
                    "sink `%s` cannot write %s, and tries again in %g s: %s",
                    self.context.operator_name,
                    epoch.id,
                    pause_s,
                    text_of(error, _TEXT_MAX),
                )
            if tries == self._retries or self._closed.wait(pause_s):
                if isinstance(error, HeadgateError):
                    raise error
                step = self.context.operator_name
                raise user_error(step, self._origin, several(batch), error) from error

    async def _tried(self, batch: Batch, epoch: Epoch) -> BaseException | None:
        """Call the function once; return its failure."""
        argument = argument_of(batch, self._settings.records)
        try:
            await called(self.function, argument, epoch)
        except user_failures() as error:
            if is_own_cancellation(error):
                raise
            return error
        return None

    def finish(self) -> Callable[[], None]:
        def end() -> None:
            self._calls.call(self._function.finish)

        return end

    def close(self) -> None:
        self._closed.set()
        if self._thread is None:
            return
        try:
            self._thread.close(self._function.close)
        except Exception as error:
            self.context.logger.warning(
                "the sink `%s` was not closed: %s", self.context.operator_name, error
            )


def write_ahead_sink(
    function: Callable[[Any, Epoch], Any],
    *,
    guarantee: GuaranteeLike,
    rows: int = ROWS,
    buffer: str | int = BUFFER,
    records: RecordsAs = "list",
) -> WriteAheadSink:
    """Return a sink that stages records in the checkpoints of the job, and calls `function(records, epoch)`
    with them when their checkpoint is complete.

    With a function that may be repeated, the output is exactly-once. Each call has an identity, `epoch.id`,
    which no other call has, and a repeated call has the same records in the same order. A subtask makes its
    calls one after the other, in the order of its records. Flink's counterpart is GenericWriteAheadSink.

    A call that raises is repeated after pauses of 1 s to 1 min, as often as the option
    `sink.committer.retries` says; then the attempt fails, and the next one begins with that call. Until it
    succeeds the subtask takes no further records. A `headgate.errors.JobError` fails the attempt at once.

    Args:
        function: a plain or an `async def` function. It may be an object with `open(ctx)`, `finish()` and
            `close()`, which are called for a copy in each subtask, in the same thread as the function.
        guarantee: `exactly_once`, if a repeated call changes nothing; if not, `at_least_once`.
        rows: the most records of a call. The last call of a checkpoint may have fewer.
        buffer: the most bytes that a subtask stages between two checkpoints, compressed. They are kept in
            memory; more fail the job.
        records: `list`, or `arrow` for a `pyarrow.RecordBatch`.

    Raises:
        UsageError: an argument is wrong.
    """
    origin = capture_origin()
    kind = "write_ahead_sink"
    check_function(kind, function, ("the records", "the epoch"), origin, may_await=True)
    check_form(records)
    check_count("rows", rows, 1)
    buffer_bytes = parse_bytes("buffer", buffer)
    made = parse_guarantee(guarantee)
    if made not in WriteAheadSink.guarantees:
        raise UsageError(
            "write_ahead_sink writes what checkpoints have staged, so it cannot be guarantee=`none`",
            fix="use function_sink, which needs no checkpoints",
        )
    return WriteAheadSink(function, WriteAheadSettings(rows, buffer_bytes, records), made, origin)
