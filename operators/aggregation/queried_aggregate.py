"""Aggregates per key that clients read: what is common to running aggregates and global windows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import cached_property
from typing import Any, Final

import numpy as np
import pyarrow as pa

from ...state.hashing import Hashes
from ...state.keyed.base import ABSENT
from ...state.keyed.keys import EncodedKeys, KeyShape, keys_of_columns
from ...state.queryable import CommittedPoints, KeyScan, NotKept
from ...state.slots.arrays import SlotArray
from ...state.slots.key_index import BatchKeys, KeyHasher
from ...state.snapshot import CommitPermit, KeptState
from ...state.values import Index
from ..base import OperatorContext
from ..queried_columns import Column, QueriedColumns, plain_column
from ..queries import old_values_max
from ..rollback import Kept, Rollback
from ..spilling_space import SpillingOperator
from .aggregates import AggregatePlan
from .expiring_group import ExpiringGroup
from .keyed_aggregate import Keeper, KeyedGroup
from .old_rows import OldRows
from .spilling_group import SpillingGroup

_ONE: Final[tuple[Hashes, None]] = np.zeros(1, np.uint64), None
"""The identity of the one key of records without keys."""


class QueriedAggregate(SpillingOperator):
    """Aggregates of each key, as they are and as of checkpoints.

    A subclass holds them: in `_in_memory`, unless there is `_spilling` or `_expiring`.

    Args:
        plan: keys and aggregates.
        committed: clients read them also as of checkpoints.
    """

    _hasher: KeyHasher
    _in_memory: KeyedGroup

    def __init__(self, plan: AggregatePlan, *, committed: bool) -> None:
        self._plan, self._committed = plan, committed
        self._points: CommittedPoints[OldRows] | None = None
        self._cuts = 0
        # The number of the cut since which a slot of `_in_memory` has an old value; 0: of none.
        self._kept_since = SlotArray(np.uint32)
        self._expiring: ExpiringGroup | None = None
        self._spilling: SpillingGroup | None = None
        self._rollback: Rollback[Any] = Rollback.off()

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        if self._committed:
            self._points = CommittedPoints(OldRows, old_values_max(context.options))

    @property
    def _group(self) -> KeyedGroup:
        """The group to which rows are added now; it changes with each `settle` and `advance`."""
        if self._expiring is not None:
            return self._expiring.group
        return self._in_memory if self._spilling is None else self._spilling.group

    def _open_kept(self) -> Kept:
        """Open a cut to which the aggregates in memory can go back; see `Rollback`."""
        grew = self._rollback.grew
        if self._expiring is not None:
            return self._expiring.keep(grew)
        return self._in_memory.keep(grew)

    @property
    def _keeper(self) -> Keeper | None:
        """The function that keeps the results of keys before rows are added; None: nothing is kept."""
        return self._keep if self._points is not None and self._points.newest is not None else None

    def _keep(self, keys: BatchKeys | None, slots: Index, fresh: Index) -> None:
        """Keep the results of keys that change for the first time since the newest cut; see `Keeper`."""
        points = self._points
        assert points is not None
        assert points.newest is not None
        group, count = self._group, len(self._plan.aggregates)
        expires = self._plan.ttl_ms is not None
        if group is self._in_memory:
            # Its slots stay those of their keys, so that most rows need no look into the index.
            self._kept_since.reserve(max(1, group.keys.size))
            rows = np.flatnonzero(self._kept_since.data.take(slots) != self._cuts)
            if not rows.size:
                return
            slots = slots[rows]
            self._kept_since.data[slots] = self._cuts
            if keys is not None:
                taken = [column.take(pa.array(rows)) for column in keys.columns]
                keys = BatchKeys(self._hasher, taken)

        def read(rows: Index) -> tuple[Index, list[pa.Array]]:
            at = slots[rows]
            owners = np.flatnonzero(~np.isin(at, fresh, assume_unique=True))
            at = at[owners]
            results = group.state.results(at)[:count]
            if expires:
                results.append(pa.array(group.state.last_numbers().take(at)))
            return owners, results

        if points.newest.keep(*(_ONE if keys is None else keys.lanes(None)), read):
            points.grew()

    def scan(self, state: str, checkpoint_id: int = 0) -> KeyScan:
        points, shape = self._points, self._key_shape
        ending = ExitStack()
        if checkpoint_id:
            if points is None:
                raise NotKept
            points.hold(checkpoint_id)
            ending.callback(points.release, checkpoint_id)
        if not self._plan.keys:
            return KeyScan(iter([[()]]), ending.close)
        # No key is ever removed, unless it has expired.
        if self._spilling is not None:
            found, close = self._spilling.keys_now()
            ending.callback(close)
        elif self._expiring is not None:
            found = self._expiring.keys_now()
        else:
            found = self._in_memory.keys.cut().pieces()
        names = list(shape.names)
        pieces = (shape.from_table(pa.Table.from_arrays(columns, names)) for columns in found)
        return KeyScan(pieces, ending.close)

    def query_many(self, state: str, keys: Sequence[Any], checkpoint_id: int = 0) -> Iterable[Any]:
        if self._spilling is not None or self._expiring is not None or not self._plan.keys:
            return super().query_many(state, keys, checkpoint_id)
        wanted, names = self._wanted(keys), tuple(self._plan.aggregates)
        if not checkpoint_id:
            places, results = self._present(wanted)
            return QueriedColumns(names, results, places, len(keys))
        parts, rest = self._parts_as_of(wanted, checkpoint_id)
        if len(rest):
            places, results = self._present(wanted.take(rest))
            parts.append((rest if places is None else rest[places], results))
        return QueriedColumns.joined(names, parts, len(keys))

    def _wanted(self, keys: Sequence[Any]) -> BatchKeys:
        """Return keys that are looked for."""
        if isinstance(keys, EncodedKeys) and keys.words is not None and self._has_int64_keys:
            return BatchKeys(self._hasher, (), keys.words)
        return BatchKeys(self._hasher, self._key_shape.to_arrays(keys))

    @cached_property
    def _has_int64_keys(self) -> bool:
        return self._hasher.dense and self._hasher.types[0] == pa.int64()

    def _present(self, wanted: BatchKeys) -> tuple[Index | None, list[Column]]:
        """Return the places of the keys that are in memory, None for all of them, and their results."""
        slots = self._in_memory.find_keys(wanted)
        places = None
        if slots.size and int(slots.min()) < 0:
            places = np.flatnonzero(slots >= 0)
            slots = slots[places]
        return places, self._in_memory.state.plain_results(slots)

    def _parts_as_of(
        self, wanted: BatchKeys, checkpoint_id: int
    ) -> tuple[list[tuple[Index, Sequence[Column]]], Index]:
        """Return what keys had that have changed since a checkpoint, by their places, and the places of
        the other keys.
        """
        if self._points is None:
            raise NotKept
        hashes, checks = wanted.lanes(None)
        rest, count = np.arange(len(hashes)), len(self._plan.aggregates)
        parts: list[tuple[Index, Sequence[Column]]] = []
        for old in self._points.since(checkpoint_id):
            known, found = old.find(hashes[rest], None if checks is None else checks[rest])
            parts += [(rest[at], list(map(plain_column, results[:count]))) for at, results in found]
            rest = np.delete(rest, known)
        return parts, rest

    def _named(self, results: list[pa.Array] | None) -> Any:
        """Return the results of one key as the value that clients read."""
        if results is None:
            return ABSENT
        names = self._plan.aggregates
        return {name: column[0].as_py() for name, column in zip(names, results, strict=False)}

    def query(self, state: str, key: Any, checkpoint_id: int = 0) -> Any:
        columns = self._key_shape.to_arrays([key])
        used_after = None
        if self._plan.ttl_ms is not None:
            used_after = self.context.clock.now_ms() - self._plan.ttl_ms
        if checkpoint_id:
            results = self._results_as_of(columns, used_after, checkpoint_id)
        else:
            results = self._results_of(columns, used_after)
        return self._named(results)

    @cached_property
    def _key_shape(self) -> KeyShape:
        return keys_of_columns(self._plan.key_fields)

    def _results_of(self, columns: list[pa.Array], used_after: int | None) -> list[pa.Array] | None:
        if self._spilling is not None:
            return self._spilling.results_of(columns, used_after)
        if self._expiring is not None:
            assert used_after is not None
            return self._expiring.results_of(columns, used_after)
        slots = self._in_memory.find(columns, None)
        return self._in_memory.state.results(slots) if slots.size else None

    def _results_as_of(
        self, columns: list[pa.Array], used_after: int | None, checkpoint_id: int
    ) -> list[pa.Array] | None:
        """Return the results that a key had at a checkpoint, unless it has expired since."""
        if self._points is None:
            raise NotKept
        lanes = self._hasher.identify(columns) if columns else _ONE
        for old in self._points.since(checkpoint_id):
            known, found = old.find(*lanes)
            for _, results in found:
                used = 0 if used_after is None else results[-1][0].as_py()
                return None if used_after is not None and used <= used_after else results
            if known.size:
                return None
        return self._results_of(columns, used_after)

    def on_checkpoint_complete(self, permit: CommitPermit) -> None:
        self._rollback.completed(permit.checkpoint_id)
        if self._points is not None:
            self._points.completed(permit.checkpoint_id)

    def drop_point(self, checkpoint_id: int) -> None:
        self._rollback.aborted(checkpoint_id)
        if self._points is not None:
            self._points.aborted(checkpoint_id)

    def keep(self) -> dict[str, KeptState]:
        return self._rollback.keep()

    def _note_cut(self, checkpoint_id: int) -> None:
        """Note that a snapshot is taken of the aggregates as they are now."""
        if self._points is not None:
            before = self._points.newest
            self._points.cut(checkpoint_id)
            assert self._points.newest is not None
            self._points.newest.expect_as_many(before)
            self._cuts += 1

    def _note_restored(self) -> None:
        """Note that the aggregates are those of the restored checkpoint."""
        if self._points is not None:
            self._points.restored(self.context.restored_checkpoint)
            self._cuts += 1
