"""A fleet of subtasks of one join: rows by key group, watermarks to all, chains of snapshots, rescales."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from headgate.operators.base import Operator
from headgate.operators.elements import WATERMARK_MAX, ColumnBatch
from headgate.runtime.task.state_restore import merge_chain
from headgate.state.hashing import hash_columns, key_groups_of
from headgate.state.keygroups import key_group_range
from headgate.state.snapshot import RestoredState, TableCut
from headgate.tests.support import operators
from headgate.tests.support.operators import operator_context

MAX_PARALLELISM = 8


@dataclass
class Recorder(operators.Recorder):
    """An output and metrics in one."""

    gauges: dict[str, Callable[[], float]] = field(default_factory=dict)

    def emit(self, batch: Any) -> None:
        assert len(batch)
        super().emit(batch)

    def gauge(self, name: str, read: Callable[[], float], labels: dict[str, str]) -> None:
        assert name == "join_rows_waiting"
        self.gauges[labels["side"]] = read

    def take(self, kind: str = "rows") -> list[tuple[Any, ...]]:
        """Rows that went out since the last call, as tuples, each with its time at the end."""
        for event, batch in self.events:
            if event == kind:
                assert batch.timestamps is not None
                if isinstance(batch, ColumnBatch):
                    batch.data.validate(full=True)
        found = self.rows(kind)
        self.events = [each for each in self.events if each[0] != kind]
        return found


class Pending:
    """A cut of one subtask, made when somebody asks."""

    def __init__(self, cuts: dict[str, TableCut], bases: dict[str, tuple[int, list[pa.Table]]]):
        self._cuts, self._bases = cuts, bases

    def make(self, full: bool) -> dict[str, tuple[int, list[pa.Table]]]:
        """Per table the number of the cut and its chain: base, then deltas."""
        made = {}
        for name, cut in self._cuts.items():
            since, chain = self._bases.get(name, (0, []))
            if full or not cut.epoch or not since:
                since, chain = 0, []
            table = cut.make(since or None)
            groups = table.column(0).to_pylist()
            assert table.schema.names[0] == "key_group"
            assert groups == sorted(groups)
            made[name] = (cut.epoch, [*chain, table])
        return made

    def discard(self) -> None:
        for cut in self._cuts.values():
            if cut.discard is not None:
                cut.discard()


class Fleet:
    """All subtasks of a join.

    Args:
        factory: makes an operator.
        keys: the key columns of each input.
        parallelism: how many subtasks.
        chains: per subtask and table what `snapshot` made, to begin with.
        same: the chains go on, as after a restore at the same parallelism.
    """

    def __init__(
        self,
        factory: Callable[[], Operator],
        keys: Sequence[Sequence[str]],
        parallelism: int = 1,
        chains: list[dict[str, tuple[int, list[pa.Table]]]] | None = None,
    ) -> None:
        self.factory, self.keys, self.parallelism = factory, keys, parallelism
        self.operators: list[Any] = []
        self.recorders: list[Recorder] = []
        self._bases: list[dict[str, tuple[int, list[pa.Table]]]] = [{} for _ in range(parallelism)]
        for index in range(parallelism):
            self._start(index)
        if chains is not None:
            self._restore(chains)

    def _start(self, index: int) -> None:
        recorder, operator = Recorder(), self.factory()
        operator.output = recorder
        operator.open(operator_context(index, self.parallelism, MAX_PARALLELISM, metrics=recorder))
        self.operators.append(operator)
        self.recorders.append(recorder)

    def _restore(self, chains: list[dict[str, tuple[int, list[pa.Table]]]]) -> None:
        merged: dict[str, list[pa.Table]] = {}
        infos = {info.name: info for info in self.operators[0].states()}
        for chain in chains:
            for name, (_, parts) in chain.items():
                merged.setdefault(name, []).append(merge_chain(parts, infos[name].keys))
        same = len(chains) == self.parallelism
        for index, operator in enumerate(self.operators):
            own = key_group_range(index, self.parallelism, MAX_PARALLELISM)
            tables = {}
            for name, parts in merged.items():
                filled = [part for part in parts if part.num_rows] or parts[:1]
                table = pa.concat_tables(filled, promote_options="permissive")
                groups = table.column(0).to_numpy()
                rows = np.flatnonzero((groups >= own.first) & (groups <= own.last))
                table = table.take(pa.array(rows[np.argsort(groups[rows], kind="stable")]))
                assert table.schema.names == infos[name].arrow_schema().names
                tables[name] = table
            operator.restore(RestoredState(tables=tables, states=infos))
            if same:
                # Restored state stands for cut 1.
                self._bases[index] = {n: (1, parts) for n, (_, parts) in chains[index].items()}

    def process(self, side: int, batch: ColumnBatch) -> None:
        hashes = hash_columns([batch.data.column(key) for key in self.keys[side]])
        groups = key_groups_of(hashes, MAX_PARALLELISM)
        owners = groups * self.parallelism // MAX_PARALLELISM
        for index, operator in enumerate(self.operators):
            rows = np.flatnonzero(owners == index)
            if rows.size:
                operator.process(batch.take(rows), side)

    def watermark(self, timestamp: int) -> None:
        for operator in self.operators:
            operator.on_watermark(timestamp)

    def cut(self) -> list[Pending]:
        """The synchronous part of a snapshot."""
        return [
            Pending(dict(operator.snapshot(1).tables), bases)
            for operator, bases in zip(self.operators, self._bases, strict=True)
        ]

    def complete(self, pending: list[Pending], full: bool = False) -> list[Any]:
        """The asynchronous part; the next cut builds on it."""
        chains = [each.make(full) for each in pending]
        self._bases = [dict(chain) for chain in chains]
        return chains

    def restored(self, chains: list[Any], parallelism: int) -> Fleet:
        return Fleet(self.factory, self.keys, parallelism, chains)

    def take(self, kind: str = "rows") -> list[tuple[Any, ...]]:
        return [row for recorder in self.recorders for row in recorder.take(kind)]

    def counter(self, name: str) -> int:
        return sum(recorder.counts.get(name, 0) for recorder in self.recorders)

    def gauge(self, side: str) -> float:
        """Return the number of rows of a side that wait."""
        return sum(recorder.gauges[side]() for recorder in self.recorders)


@dataclass
class Replayed:
    """The outcome of a history: all results, the late rows of both sides, and the fleet at the end."""

    fleet: Fleet
    out: list[tuple[Any, ...]] = field(default_factory=list)
    late: tuple[list[Any], list[Any]] = field(default_factory=lambda: ([], []))
    dropped: int = 0


def replay(running: Fleet, model: Any, history: list[Any], batch: Any, most: int = 99) -> Replayed:
    """Rows, watermarks, cuts made late or dropped, restores from base and deltas at any parallelism.

    Args:
        running: before anything came.
        model: goes along; `process` takes a row (key, time, number), `advance` a watermark.
        history: its events; those of rows say how many come in a batch, but for `most`.
        batch: makes one of a side's rows.
        most: rows of a batch.
    """
    found, pending, number, now = Replayed(running), None, 0, 0
    for kind, *what in [*history, ("restore", 2), ("end",)]:
        if kind == "rows":
            side, rows, size = what
            size = min(size, most)
            numbered = [(key, now + t, number + i) for i, (key, t) in enumerate(rows)]
            number += len(rows)
            for row in numbered:
                model.process(side, row)
            for low in range(0, len(rows), size):
                found.fleet.process(side, batch(side, numbered[low : low + size]))
        elif kind == "watermark":
            now += what[0]
            model.advance(now)
            found.fleet.watermark(now)
        elif kind == "cut":
            if pending is not None:
                if what[0]:
                    found.fleet.complete(pending)
                else:
                    for each in pending:
                        each.discard()
            pending = found.fleet.cut()
        elif kind == "restore":
            # A failure right behind the barrier: what was emitted before it stays.
            _collect(found)
            if pending is not None:
                found.fleet.complete(pending)
                pending = None
            found.fleet = found.fleet.restored(found.fleet.complete(found.fleet.cut()), what[0])
        else:
            model.advance(WATERMARK_MAX)
            found.fleet.watermark(WATERMARK_MAX)
            _collect(found)
    return found


def _collect(found: Replayed) -> None:
    found.out += found.fleet.take()
    found.dropped += found.fleet.counter("late_records")
    for side, tag in enumerate(("late", "late_other")):
        found.late[side].extend(found.fleet.take(tag))


@pytest.fixture(scope="session")
def fleet() -> type[Fleet]:
    return Fleet


@pytest.fixture(scope="session", name="replay")
def _replay() -> Callable[..., Replayed]:
    return replay


@pytest.fixture(params=["usual", "tight"])
def bounds(request: pytest.FixtureRequest) -> Any:
    """Run with the usual bounds, and with such that a few rows cross them all."""
    from headgate.operators.joins import (
        as_of,
        interval,
        matching,
        pane_rows,
        row_store,
        side,
        windowed,
    )
    from headgate.state.slots import epochs

    with pytest.MonkeyPatch.context() as patch:
        if request.param == "tight":
            patch.setattr(matching, "CHAIN_MAX", 2)
            patch.setattr(matching, "PAIRS_MAX", 3)
            patch.setattr(row_store, "PIECE_BYTES_MAX", 128)
            patch.setattr(pane_rows, "PIECE_ROWS_MAX", 3)
            patch.setattr(side, "DEAD_MIN", 1)
            patch.setattr(side, "FORGET_MIN", 1)
            patch.setattr(row_store, "TAIL_MIN", 2)
            patch.setattr(epochs, "MARK_ALL_FACTOR", 10**9)
            for module in (interval, windowed, as_of):
                patch.setattr(module, "EMIT_ROWS_MAX", 3)
        yield request.param
