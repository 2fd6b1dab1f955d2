"""Writers of one topic: records become messages, and the client sends them in the background."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Final

import pyarrow as pa

from ...errors import JobError
from ...operators.base import OperatorContext
from ...operators.elements import Batch, ColumnBatch
from ...operators.event_time import milliseconds
from ...operators.sink import SinkWriter
from ...state.snapshot import CommitPermit
from ..formats.format import Encode, Format, Values
from .client import ErrorListener, Reports, make_producer
from .security import without_secrets

SERVE_MS: Final = 500
"""Reports of delivery are looked at this often while no record comes."""
FLUSH_S: Final = 0.5
_SETTLE_S: Final = 0.005
"""A checkpoint looks this often whether its records have arrived."""
_ANY_PARTITION: Final = -1
"""The client chooses the partition."""
_LOOK_MS: Final = 5
"""Reports of delivery are looked at this often while no more records are wanted."""
FULL_SHARE: Final = 0.5
"""No more records are wanted while this share of the buffer waits, so that a batch still fits."""
_RECORD_BYTES: Final = 1_000
"""More than the client needs for a record beside its key and value, without headers."""


@dataclass(frozen=True)
class SinkSettings:
    """The arguments of `kafka_sink`, which documents them."""

    topic: str
    bootstrap: str
    format: Format
    metadata: Mapping[str, str]
    buffer_bytes: int
    properties: Mapping[str, str]
    transaction_timeout_ms: int
    on_lost: str
    transactions: str
    staged_bytes: int

    def __repr__(self) -> str:
        """Return the settings without secrets."""
        return f"SinkSettings({self.topic} of {self.bootstrap}, {without_secrets(self.properties)})"


@dataclass(frozen=True, slots=True)
class Messages:
    """Encoded records.

    Attributes:
        values: one per record.
        columns: by kind, the metadata of each record.
        nbytes: the size of values and keys.
    """

    values: Values
    columns: Mapping[str, list[Any]]
    nbytes: int


class KafkaWriter(SinkWriter):
    """Writes the records of one subtask."""

    def __init__(self, settings: SinkSettings, values: pa.Schema | None = None) -> None:
        """Make a writer.

        Args:
            settings: of the sink.
            values: the columns that become values; None: those of the first batch tell.
        """
        self._settings = settings
        self._values = values
        self._encode: Encode | None = None
        self._errors = ErrorListener()
        self._producer: Any = None
        self._failure = ""
        self._closed = False
        self._reports: Reports | None = None
        """Those of the records since the last barrier; None: there are none."""
        self._looks = 0
        """The number of times that the subtask has looked at reports."""
        self._record_bytes = 0.0
        """The mean size of the records of the last batch."""
        self._looking = False

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        settings = self._settings
        self._producer = make_producer(
            settings.bootstrap,
            settings.properties,
            f"headgate-{context.job_name}-{context.operator_name}",
            settings.buffer_bytes,
            self._errors,
        )
        context.timers.call_later(SERVE_MS, self._serve)

    def prepare(self) -> None:
        if self._values is not None:
            self._encode = self._settings.format.encoder(self._values, self._settings.topic)

    def _serve(self) -> None:
        """Look at reports of delivery, also while no record comes."""
        if not self._closed:
            self._look_at_reports()
            self.context.timers.call_later(SERVE_MS, self._serve)

    def _look_at_reports(self) -> None:
        """Let the client report records that have arrived or failed."""
        self._looks += 1
        if self._producer is not None:
            self._producer.poll(0)
        self._check()

    def backlogged(self) -> bool:
        """Return True while no more records are wanted, because half of the buffer waits."""
        producer = self._producer
        waiting = 0.0 if producer is None else len(producer) * self._record_bytes
        return waiting > self._settings.buffer_bytes * FULL_SHARE

    def _waits(self) -> bool:
        """Return True while more records, or those that are held, wait for reports of delivery."""
        return self.backlogged()

    def look_again(self) -> None:
        """Look at reports of delivery again and again while something waits for them."""
        if not self._looking and not self._closed and self._waits():
            self._looking = True
            self.context.timers.call_later(_LOOK_MS, self._look)

    def _look(self) -> None:
        self._looking = False
        if not self._closed:
            self._look_at_reports()
            self.look_again()

    def _encoded(self, batch: Batch) -> tuple[Values, pa.RecordBatch]:
        """Return the values of the messages, and the columns that have their metadata."""
        assert isinstance(batch, ColumnBatch)  # `needs_columns`
        given = batch.data
        rest = [name for name in given.schema.names if name not in self._settings.metadata.values()]
        wanted = given.select(rest)
        if self._encode is None or wanted.schema != self._values:
            self._values = wanted.schema
            self._encode = self._settings.format.encoder(self._values, self._settings.topic)
        return self._encode(wanted), given

    def _messages(self, batch: Batch) -> Messages:
        """Return the records of a batch, encoded."""
        values, given = self._encoded(batch)
        columns = {
            kind: fields_of(kind, given.column(column))
            for kind, column in self._settings.metadata.items()
        }
        sizes = sum(map(len, filter(None, values))) + sum(
            map(len, filter(None, columns.get("key", ())))
        )
        return Messages(values, columns, sizes)

    def write(self, batch: Batch) -> None:
        if not len(batch):
            return
        if self._reports is None:
            self._reports = Reports(self._errors)
        self._send(self._messages(batch), self._producer, self._reports)
        self._look_at_reports()
        self.look_again()

    def _send(self, messages: Messages, producer: Any, report: Callable[[Any, Any], None]) -> None:
        """Hand records to a producer, which calls `report` for those that fail."""
        values, columns = messages.values, messages.columns
        self._record_bytes = messages.nbytes / len(values)
        if columns.keys() <= {"key"}:
            keys = columns.get("key") or repeat(None, len(values))
            self._produce_keyed(producer, report, values, keys)
            return
        for row, value in enumerate(values):
            fields = {kind: found[row] for kind, found in columns.items() if found[row] is not None}
            self._produce(producer, report, value, fields)

    def _produce_keyed(
        self,
        producer: Any,
        report: Callable[[Any, Any], None],
        values: Values,
        keys: Iterable[Any],
    ) -> None:
        """Hand records over that are nothing but keys and values, the fast way."""
        produce, topic = producer.produce, self._settings.topic
        for value, key in zip(values, keys, strict=True):
            try:
                produce(topic, value, key, _ANY_PARTITION, report)
            except BufferError:
                self._produce(producer, report, value, {} if key is None else {"key": key})

    def _produce(
        self,
        producer: Any,
        report: Callable[[Any, Any], None],
        value: bytes | None,
        fields: Mapping[str, Any],
    ) -> None:
        """Hand one record over; wait while the client's buffer is full, as that of one large batch is."""
        while True:
            try:
                producer.produce(self._settings.topic, value=value, on_delivery=report, **fields)
                return
            except BufferError:
                self._check_size(value, fields)
                producer.poll(0.1)
                self._check()

    def _check_size(self, value: bytes | None, fields: Mapping[str, Any]) -> None:
        """Raise if a record cannot be buffered, however long it waits."""
        size = len(value or b"") + len(fields.get("key", b""))
        if size + _RECORD_BYTES > self._settings.buffer_bytes:
            raise JobError(
                f"a record is larger than the buffer of the sink topic=`{self._settings.topic}` "
                f"size_bytes=`{size}` buffer_bytes=`{self._settings.buffer_bytes}`",
                fix="give kafka_sink a larger buffer=",
            )

    def _fail(self, reason: str) -> None:
        self._failure = self._failure or reason

    def _check(self) -> None:
        """Raise if a record was not delivered, or none can be any more."""
        reason = self._failure or self._errors.undelivered or self._errors.fatal
        if reason:
            raise JobError(
                f"records were not delivered topic=`{self._settings.topic}` "
                f"bootstrap=`{self._settings.bootstrap}`: {reason}",
                fix="check the size limits of the topic (max.message.bytes), the right to WRITE, and that "
                "the brokers can be reached",
            )

    def roll(self, checkpoint_id: int) -> Callable[[], list[bytes]] | None:
        complete = self._complete()
        if complete is None:
            return None

        def settle() -> list[bytes]:
            self._settle(complete, self._producer, self._check)
            return []  # nothing is left to commit

        return settle

    def _complete(self) -> threading.Event | None:
        """Return what is set when all records since the last barrier are reported; None: there are none.

        Records that follow have reports of their own, so they need not wait for these.
        """
        reports, self._reports = self._reports, None
        return None if reports is None else reports.complete

    def _settle(self, complete: threading.Event, producer: Any, check: Callable[[], None]) -> None:
        """Wait until records of a producer are acknowledged, in a thread; `check` raises if one was not.

        While the subtask writes, it looks at reports itself. If this thread did so at the same time, both
        would wait for the interpreter's lock for each record that is reported.
        """
        while True:
            looks = self._looks
            if complete.wait(_SETTLE_S):
                check()
                return
            self._check_open()
            check()
            if looks == self._looks:
                producer.flush(_SETTLE_S)  # no records follow for which it is worth to wait

    def _check_open(self) -> None:
        """Raise if the writer was closed while its records were not settled."""
        if self._closed:
            raise JobError(f"the sink was closed topic=`{self._settings.topic}`")

    def commit(self, committables: list[bytes], permit: CommitPermit) -> None:
        return None

    def finish(self) -> Callable[[], None] | None:
        complete = self._complete()
        if complete is None:
            return None

        def settle() -> None:
            self._settle(complete, self._producer, self._check)

        return settle

    def close(self) -> None:
        """Drop what was not sent: if it is needed, it is written again."""
        self._closed = True
        if self._producer is not None:
            self._producer.purge()
            self._producer.poll(0)


def is_text(kind: pa.DataType) -> bool:
    return kind in (pa.string(), pa.large_string())


def is_bytes(kind: pa.DataType) -> bool:
    return kind in (pa.binary(), pa.large_binary())


def staged_column(kind: str, column: pa.Array) -> pa.Array:
    """Return a column of metadata in a form that needs no settings to become arguments of `produce`."""
    if kind == "timestamp":
        return pa.array(fields_of(kind, column), pa.int64())
    return column.cast(pa.large_binary()) if kind == "key" else column


def fields_of(kind: str, column: pa.Array) -> list[Any]:
    """Return the argument of `produce` for each row of a column; None: it has none."""
    if kind == "timestamp":
        times = milliseconds(column.fill_null(0)).tolist()
        valid = column.is_valid().to_pylist()
        return [time if there else None for time, there in zip(times, valid, strict=True)]
    found: list[Any] = column.to_pylist()
    if kind == "headers":
        return [
            None if row is None else [(each["name"], each["value"]) for each in row]
            for row in found
        ]
    return found
