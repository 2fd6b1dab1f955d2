"""The hybrid source: a history and then a live source, as one.

The splits of both are made before the job starts, those of the live source at a position that follows
from the splits of the history, if the user gives a function for it. So nothing has to be decided while
the job runs: the positions of its splits say how far each subtask is, and the reader keeps the order of
the two sources. A live split is not begun before the history is over in all subtasks. That is not part of
the state; it is found out again after a restore (`runtime/coordinator/sources.py`).
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import msgspec
import pyarrow as pa

from ..api.manifest.fields import REFERENCE, Field, Section, Table, TextKind
from ..api.manifest.references import resolve_function
from ..api.manifest.registry import SourceConnector, SourceSpec
from ..errors import UsageError
from ..operators.connections import check_connection
from ..operators.elements import Batch, ColumnBatch
from ..operators.event_time import check_time_column
from ..operators.functions.checks import check_plain, function_name
from ..operators.origin import capture_origin
from ..operators.source import (
    Record,
    Record_co,
    Source,
    SourceReader,
    SourceRun,
    decode_split,
)
from ..operators.splits import History
from ..operators.suggestions import suggest
from .forwarding import ForwardingReader

LiveFrom: TypeAlias = Callable[[int | None], Source]
"""Makes the live source from the highest event time of the history in ms, which is None without records."""


class _Split(msgspec.Struct):
    """A split of one of the two sources. `since` is the argument of the function that makes the live
    source.
    """

    split: bytes
    live: bool = False
    since: int | None = None


class HybridSource(Source[Record_co]):
    """Reads all of one source, and then another."""

    has_history = True

    def __init__(self, history: Source, live: Source | LiveFrom, time_column: str | None) -> None:
        self._history = history
        self._live = live
        self._time_column = time_column
        self._options: Mapping[str, str] = {}
        self._run: SourceRun | None = None
        self._columns: list[str] | None = None
        """The columns that are read of both; None: all."""
        self.needs_storage = history.needs_storage
        self.whole = history.schema
        """The columns of both sources, of which `schema` may be a part."""
        self.schema = history.schema
        self.row_type = history.row_type
        self.rejected_schema = history.rejected_schema
        self.extras = history.extras
        self.replays = history.replays
        self.needs_checkpoints = history.needs_checkpoints
        if isinstance(live, Source):
            self.replays = history.replays and live.replays
            self.needs_checkpoints = history.needs_checkpoints or live.needs_checkpoints
            self.extras += live.extras
            self.bounded = live.bounded
            self.whole = self.schema = _check_alike(history, live)
            self.row_type = history.row_type if history.row_type is live.row_type else None
            self.rejected_schema = history.rejected_schema or live.rejected_schema

    def configure(self, options: Mapping[str, str]) -> HybridSource:
        configured = self._with_history(self._history.configure(options))
        configured._options = options
        if isinstance(self._live, Source):
            configured._live = self._live.configure(options)
        return configured

    async def prepare(self, run: SourceRun) -> HybridSource:
        prepared = self._with_history(await self._history.prepare(run))
        prepared._run = run
        if isinstance(self._live, Source):
            prepared._live = await self._live.prepare(run)
        return prepared

    async def discard(self, run: SourceRun) -> None:
        await self._history.discard(run)

    def check_connection(self, options: Mapping[str, str]) -> str:
        """Check both sources; a live source that a function makes is not known before the history is."""
        parts = [self._history, *([self._live] if isinstance(self._live, Source) else [])]
        return ", then ".join(filter(None, (check_connection(part, options) for part in parts)))

    def splits(self, parallelism: int) -> list[bytes]:
        """Return the splits of the history, then those of the live source."""
        history = self._history.splits(parallelism)
        since = None
        if isinstance(self._live, Source):
            live = self._live
        else:
            assert self._time_column is not None  # `hybrid_source` has checked it
            since = self._history.latest(history, self._time_column)
            live = _prepared(self.live_from(since).configure(self._options), self._run)
        return [
            *(msgspec.msgpack.encode(_Split(split)) for split in history),
            *(
                msgspec.msgpack.encode(_Split(split, live=True, since=since))
                for split in live.splits(parallelism)
            ),
        ]

    def live_from(self, since: int | None) -> Source:
        """Return the live source with all its columns. The user's function is called each time."""
        if isinstance(self._live, Source):
            return self._live
        live = self._live(since)
        if not isinstance(live, Source):
            raise UsageError(
                f"the function of a live source returned no source "
                f"function=`{function_name(self._live)}` returned=`{type(live).__name__}`"
            )
        _check_live(live)
        if _check_alike(self._history, live) != self.whole:
            raise UsageError(
                "the live source allows nulls in columns in which the history has none: it is made by a "
                "function, so the history alone says what the columns are",
                fix="give both sources the same schema",
            )
        return live

    def narrow(self, source: Source) -> Source:
        """Return one of the two sources, narrowed to the columns that are read."""
        return source if self._columns is None else source.with_columns(self._columns)

    def reader(self) -> SourceReader:
        return HybridReader(self, self.narrow(self._history))

    def with_columns(self, columns: Sequence[str]) -> HybridSource:
        """Return a source that reads only these columns of both."""
        if self.whole is None:
            return self
        wanted = set(columns)
        # At least one column stays, the same one of both.
        kept = [field for field in self.whole if field.name in wanted] or [self.whole.field(0)]
        narrow = copy.copy(self)
        narrow._columns = [field.name for field in kept]
        narrow.schema = pa.schema(kept)
        narrow.row_type = self.row_type if len(kept) == len(self.whole) else None
        return narrow

    def describe(self) -> str:
        live = self._live
        then = (
            live.describe()
            if isinstance(live, Source)
            else f"{function_name(live)}(highest {self._time_column})"
        )
        return f"{self._history.describe()}, then {then}"

    def _with_history(self, history: Source) -> HybridSource:
        changed = copy.copy(self)
        changed._history = history
        return changed


class HybridReader(ForwardingReader):
    """The reader of the history until that has ended, and then, as soon as it may go on, that of the live
    source.
    """

    def __init__(self, source: HybridSource, history: Source) -> None:
        super().__init__(history.reader())
        self._source = source
        self._live: _Split | None = None
        """One of the splits that are being read; None: they belong to the history."""
        self._waiting: list[_Split] = []
        """The live splits that have not been begun."""

    def add_splits(self, splits: Sequence[bytes]) -> None:
        added = [_decoded(split) for split in splits]
        self._waiting = [each for each in added if each.live]
        self._reader.add_splits([each.split for each in added if not each.live])
        self.context.splits.history = History.BEING_READ
        self._look()

    def _look(self) -> None:
        """Note the end of the history. Event time sees the effects of `poll` before a live split opens."""
        splits = self.context.splits
        if splits.history is History.BEING_READ and self._reader.finished:
            splits.history = History.OVER if self._waiting else History.NONE

    def poll(self) -> Batch | None:
        splits = self.context.splits
        if splits.history is History.OVER:
            if splits.may_go_live:
                self._go_live()
            return None
        batch = super().poll()
        self._look()
        schema = self._source.schema
        if isinstance(batch, ColumnBatch) and batch.data.schema != schema:
            columns = batch.data.columns  # the same columns; only their nullability may differ
            data = pa.RecordBatch.from_arrays(columns, schema=schema)
            return ColumnBatch(data, batch.timestamps, batch.positions)
        return batch

    def _go_live(self) -> None:
        begun = self._waiting
        source = self._source.narrow(self._source.live_from(begun[0].since))
        self._reader.close()
        self._reader = source.reader()
        self.can_pause_splits = self.context.splits.can_pause = self._reader.can_pause_splits
        self._reader.open(self.context, self.reject)
        self._reader.add_splits([each.split for each in begun])
        self._live, self._waiting = begun[0], []
        self.context.splits.history = History.NONE

    async def wait(self) -> None:
        splits = self.context.splits
        if splits.history is not History.OVER:
            await self._reader.wait()
        elif not splits.may_go_live:
            await (
                asyncio.get_running_loop().create_future()
            )  # the subtask cancels this when the reader may go on

    @property
    def finished(self) -> bool:
        return not self._waiting and self._reader.finished

    def snapshot(self) -> list[bytes]:
        kind = self._live or _Split(b"")
        being_read = [
            _Split(position, live=kind.live, since=kind.since)
            for position in self._reader.snapshot()
        ]
        return [msgspec.msgpack.encode(each) for each in [*being_read, *self._waiting]]


def _decoded(split: bytes) -> _Split:
    return decode_split(split, _Split, "hybrid source")


def hybrid_source(
    history: Source[Record],
    live: Source[Record] | Callable[[int | None], Source[Record]],
    *,
    time_column: str | None = None,
) -> HybridSource[Record]:
    """Return a source that reads a history to its end, and then goes on with a live source.

    No subtask begins with the live source before all have read their part of the history. Until then the
    source is in a backlog: see `execution.checkpointing.interval-during-backlog`.

    Args:
        history: a bounded source, such as `spark_source` or `parquet_source`.
        live: the source that follows, with the same columns; or a function that takes the highest event
            time of the history, in ms since 1970, rounded down (None: it has no records), and returns the
            source. The function is called when the splits are made, before the job starts, and by each
            subtask that goes live: for the same time it must make the same source.
        time_column: the column of the history whose highest value is given to the function: a timestamp,
            a date, or int64 milliseconds.

    Raises:
        UsageError: the two do not fit together.
    """
    if not isinstance(history, Source):
        raise UsageError(f"the history is not a source history=`{type(history).__name__}`")
    if history.has_history:
        raise UsageError("a hybrid source cannot be the history of another one")
    if not history.bounded:
        raise UsageError(
            f"the history has no end, so the live source would never begin "
            f"history=`{history.describe()}`",
            fix="give it an end, such as a number of rows; or read both as sources of their own, and "
            "merge them with union",
        )
    if not isinstance(live, Source):
        check_plain(live, "the live source", capture_origin())
        _check_time_column(history, time_column)
    elif time_column is None:
        _check_live(live)
    else:
        raise UsageError(
            f"the end of the history is not asked for time_column=`{time_column}`",
            fix="leave time_column out, or give a function that makes the live source",
        )
    return HybridSource(history, live, time_column)


def _check_live(live: Source) -> None:
    if live.has_history:
        raise UsageError("a hybrid source cannot be the live source of another one")
    if live.stop_after_idle_ms is not None:
        raise UsageError(
            f"a part of a hybrid source cannot end when it is idle live=`{live.describe()}`",
            fix="put stop_after_idle around the hybrid source",
        )
    if live.splits_end:
        raise UsageError(
            f"a hybrid source does not look for further splits live=`{live.describe()}`",
            fix="read it alone: it begins with what is there, and goes on with what is new",
        )
    if live.needs_storage:
        raise UsageError(
            f"a source that keeps data in the job's storage cannot be the live one "
            f"live=`{live.describe()}`",
            fix="make it a part of the history",
        )


def _check_time_column(history: Source, column: str | None) -> None:
    if history.schema is None:
        raise UsageError(
            "the end of a history of Python objects is not known",
            fix="give the history a schema; or give the live source itself instead of a function",
        )
    if column is None or column not in history.schema.names:
        raise UsageError(
            f"the live source begins where the history ends, and the history has no such column "
            f"time_column=`{column}`",
            fix=suggest(column or "", history.schema.names, "columns"),
        )
    check_time_column(column, history.schema.field(column).type, str(capture_origin()))


def _check_alike(history: Source, live: Source) -> pa.Schema | None:
    """Return the columns of both. A column allows nulls if it does so in one of them."""
    ours, theirs = history.rejected_schema, live.rejected_schema
    if ours is not None and theirs is not None and ours != theirs:
        raise UsageError("history and live source reject records in different forms")
    ours, theirs = history.schema, live.schema
    if ours is None and theirs is None:
        return None
    if ours is None or theirs is None:
        raise UsageError(
            "one of history and live source has columns, the other Python objects",
            fix="give both the same schema",
        )
    if ours.names != theirs.names or ours.types != theirs.types:
        columns = [{f"{field.name}: {field.type}" for field in each} for each in (ours, theirs)]
        odd = sorted(columns[0] ^ columns[1]) or ours.names
        raise UsageError(
            f"history and live source have different columns, or have them in a different order "
            f"columns=`{', '.join(odd)}`",
            fix="give both the same schema",
        )
    nullable = [a.nullable or b.nullable for a, b in zip(ours, theirs, strict=True)]
    return pa.schema([a.with_nullable(n) for a, n in zip(ours, nullable, strict=True)])


def _prepared(source: Source, run: SourceRun | None) -> Source:
    """Return a live source from a function, ready for `splits`. It must have nothing to prepare."""
    if run is None:
        return source
    preparing = source.prepare(run)
    try:
        preparing.send(None)
    except StopIteration as done:
        prepared: Source = done.value
        return prepared
    preparing.close()
    raise UsageError(
        f"a live source that has to be prepared cannot be made by a function "
        f"live=`{source.describe()}`",
        fix="give the source itself",
    )


def hybrid_connector(others: Mapping[str, SourceConnector]) -> SourceConnector:
    """Return the connector `hybrid` of these connectors."""
    fields = {name: Field(each.fields, f"read with {name}") for name, each in others.items()}

    def make(values: Mapping[str, Any], spec: SourceSpec) -> Source:
        if ("live" in values) == ("liveFunction" in values):
            raise UsageError(
                "hybrid needs either live or liveFunction",
                fix="live: {generator: ...}, or another source; or liveFunction: module:function",
            )
        history = _part("history", values["history"], spec, others)
        live: Any = (
            _part("live", values["live"], spec, others)
            if "live" in values
            else resolve_function(values["liveFunction"])
        )
        return hybrid_source(history, live, time_column=values.get("timeColumn"))

    return SourceConnector(
        Section(
            "hybrid",
            {
                "history": Field(
                    Section("history", fields), "what is read first: a source with an end", True
                ),
                "live": Field(Section("live", fields), "what is read then: another source"),
                "liveFunction": Field(
                    REFERENCE,
                    "instead: a function of the highest event time of the history, in ms since 1970, "
                    "that returns the source, `module:function`",
                ),
                "timeColumn": Field(
                    TextKind(), "with liveFunction: the column it is the highest of"
                ),
            },
        ),
        make,
        bad_records=True,
    )


def _part(
    what: str, table: Table, spec: SourceSpec, others: Mapping[str, SourceConnector]
) -> Source:
    """Return the source in `history` or `live`. The fields beside `hybrid` hold for both."""
    chosen = table.present(list(others))
    if len(chosen) != 1:
        raise UsageError(
            f"{what} needs exactly one source found=`{', '.join(chosen)}`",
            fix=f"one of: {', '.join(others)}",
        )
    connector = others[chosen[0]]
    if spec.schema is None and connector.schema == "required":
        raise UsageError(
            f"{what} has no schema source=`{chosen[0]}`",
            fix="schema: {column: type, ...}, beside hybrid",
        )
    fields = table.values[chosen[0]].values
    # Generated rows define their columns themselves; these are compared later.
    takes_schema = connector.schema != "refused" and not {"fields", "function"} & fields.keys()
    own = replace(
        spec,
        schema=spec.schema if takes_schema else None,
        on_bad_record=spec.on_bad_record if connector.bad_records else None,
    )
    return connector.make(fields, own)
