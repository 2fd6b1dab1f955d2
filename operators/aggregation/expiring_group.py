"""Aggregates per key in memory, of keys that expire.

Keys lie in *generations*, each of them a `KeyedGroup`. Rows are added to the newest one only. A key that
is new there is looked up in the older ones, and its state moves into the newest, unless it has expired.
A new generation begins before the first key of the newest one can have expired. So every key in the
newest generation is alive, and time needs a look only when a key moves. A generation whose keys have all
expired or moved is dropped as a whole: no key is ever removed from an index, and no batch waits for a
scan of all keys. The price is memory: a key that is used all the time leaves behind what it was in up to
three older generations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ...errors import InternalError
from ...state.evolution import LAST_USED_COLUMN, LAST_USED_TYPE
from ...state.slots.epochs import RESTORED_EPOCH, TableEpoch
from ...state.slots.key_index import KeyCut, KeyHasher, plain_column
from ...state.values import Array, Index
from .aggregate_tables import CutPart
from .aggregates import AggregatePlan
from .keyed_aggregate import KeptGroup, KeptGroups, KeyedGroup, Rows

_PER_LIFE: Final = 2
"""The generations that begin within one time to live."""


def generation_ms(ttl_ms: int) -> int:
    """Return how long a generation takes rows."""
    return max(1, ttl_ms // _PER_LIFE)


class _Generation:
    """An older generation. Its rows do not change any more; they move away.

    Attributes:
        group: the keys, and their state.
        left: the number of keys that have not moved.
        moved: for each slot the number of the table's first cut without the row; 0: none is without it.
    """

    def __init__(self, group: KeyedGroup, moved: npt.NDArray[np.uint32] | None = None) -> None:
        self.group = group
        self._used = group.state.last_numbers()
        self._latest = int(self._used.max())
        self.moved = np.zeros(group.keys.size, np.uint32) if moved is None else moved
        self.left = int(np.count_nonzero(self.moved == 0))

    def is_over(self, dead_until: int) -> bool:
        """Return True if no row counts any more."""
        return not self.left or self._latest <= dead_until

    def move(self, slots: Index, epoch: int) -> None:
        """Note that rows have moved before cut number `epoch`, or have expired."""
        self.moved[slots] = epoch
        self.left -= len(slots)

    def here(self, slots: Index) -> npt.NDArray[np.bool_]:
        """Return a mask of the slots whose rows have not moved; -1: no slot."""
        here: npt.NDArray[np.bool_] = self.moved.take(slots, mode="clip") == 0
        return here & (slots >= 0)

    def keys(self) -> tuple[KeyCut, Index]:
        """Return the keys, and the slots whose rows have not moved."""
        return self.group.keys.cut(), np.flatnonzero(self.moved == 0)

    def alive(self, slots: Index, dead_until: int) -> npt.NDArray[np.bool_]:
        """Return a mask of the slots that were used after `dead_until`."""
        alive: npt.NDArray[np.bool_] = self._used.take(slots) > dead_until
        return alive

    def cut(self, epoch: int, dead_until: int) -> CutPart:
        """Open cut number `epoch`, which leaves out rows that have moved or expired."""
        size, moved, used = self.group.keys.size, self.moved, self._used

        def alive(which: Rows) -> Rows:
            slots = np.arange(size) if isinstance(which, slice) else which
            gone = moved.take(slots)
            # Rows that moved since the cut are still of this generation in it.
            kept: Index = slots[((gone == 0) | (gone > epoch)) & (used.take(slots) > dead_until)]
            return kept

        return CutPart(self.group.cut(epoch), alive=alive)


class KeptGenerations(KeptGroups):
    """A cut to which keys that expire can go back.

    Args:
        groups: those of the generations, newest first.
        moved: of the older ones, see `_Generation`; it goes on changing.
        since: the time at which the newest generation began, ms.
        epoch: the number of the cut.
        has: see `KeptGroups`.
    """

    def __init__(
        self,
        groups: Sequence[KeptGroup],
        moved: Sequence[npt.NDArray[np.uint32]],
        since: int,
        epoch: int,
        has: Callable[[int, KeyedGroup], bool],
    ) -> None:
        super().__init__(dict(enumerate(groups)), has)
        self.moved, self.since, self.epoch = moved, since, epoch


class ExpiringGroup:
    """The keys and aggregates of one running aggregate.

    Args:
        plan: with a time to live.
        hasher: of the keys; not dense.
        epoch: of the table.
    """

    def __init__(self, plan: AggregatePlan, hasher: KeyHasher, epoch: TableEpoch) -> None:
        if plan.ttl_ms is None or hasher.dense:
            raise InternalError(
                "keys that expire need a time to live, and are found by their hashes"
            )
        self._plan, self._hasher, self._epoch = plan, hasher, epoch
        self._ttl_ms, self._names = plan.ttl_ms, plan.state_schema.names[1 + len(plan.keys) :]
        self.group = self._new_group()
        """The newest generation, to which rows are added until the next `advance`."""
        self._since = 0
        self._now = 0
        self._older: list[_Generation] = []  # newest first
        self._dropped: list[Array] = []  # the memory of generations, freed one array at a time

    def _new_group(self) -> KeyedGroup:
        return KeyedGroup(self._plan, self._hasher, self._epoch, self._load)

    @property
    def _dead_until(self) -> int:
        return self._now - self._ttl_ms

    @property
    def keys(self) -> int:
        """The number of keys in memory, some of which may have expired."""
        return self.group.keys.size + sum(one.left for one in self._older)

    def advance(self, now: int) -> None:
        """Let the machine's time be `now` (ms): before a batch, and now and then without one."""
        self._now = now
        if self._dropped:
            self._dropped.pop()
        if not self.group.keys.size:
            self._since = now
        elif now - self._since >= generation_ms(self._ttl_ms):
            self._older.insert(0, _Generation(self.group))
            self.group, self._since = self._new_group(), now
        for one in [one for one in self._older if one.is_over(self._dead_until)]:
            self._older.remove(one)
            if not one.group.busy:
                # Returning hundreds of MB to the system takes long.
                self._dropped += one.group.memory()

    def _load(self, columns: list[pa.Array]) -> tuple[Index, pa.Table] | None:
        """Move the state of keys that are new in the newest generation; see `keyed_aggregate.Loader`."""
        if not self._older:
            return None
        hashes, checks = self._hasher.identify(columns)
        rest = np.arange(len(hashes))
        places: list[Index] = []
        tables: list[pa.Table] = []
        for one in self._older:
            some = None if checks is None else checks[rest]
            slots = one.group.keys.find(hashes[rest], some).astype(np.intp)
            here = one.here(slots)
            found = slots[here]
            if not found.size:
                continue
            alive = one.alive(found, self._dead_until)
            living = found[alive]
            if living.size:
                places.append(rest[here][alive])
                columns_ = one.group.state.columns(living)
                tables.append(pa.Table.from_arrays(columns_, names=self._names))
            one.move(found, self._epoch.current)
            rest = rest[~here]
            if not rest.size:
                break
        if not places:
            return None
        positions = np.concatenate(places)
        order = np.argsort(positions)
        return positions[order], pa.concat_tables(tables).take(pa.array(order))

    def results_of(self, columns: list[pa.Array], used_after: int) -> list[pa.Array] | None:
        """Return the results of one key, which was used after that time (ms); None: it has none."""
        slots = self.group.find(columns, used_after)
        if slots.size:
            return self.group.state.results(slots)
        for one in self._older:
            slots = one.group.find(columns, used_after)
            slots = slots[one.here(slots)]
            if slots.size:
                return one.group.state.results(slots)
        return None

    def keys_now(self) -> Iterator[list[pa.Array]]:
        """Return the keys that there are now, in pieces; some may have expired."""
        cuts = [one.keys() for one in self._older]
        return chain(self.group.keys.cut().pieces(), *(cut.pieces(left) for cut, left in cuts))

    def cut(self, epoch: int) -> Sequence[CutPart]:
        """Open cut number `epoch`, which the table has just counted."""
        parts = [CutPart(self.group.cut(epoch))]
        parts += [one.cut(epoch, self._dead_until) for one in self._older]
        return parts

    def load(self, table: pa.Table) -> None:
        """Restore the rows of a snapshot that have not expired; only into an empty group."""
        if not table.num_rows:
            return
        group = self._new_group()
        group.load(self._plan, self._hasher, table)
        self._older.append(_Generation(group))

    def keep(self, grew: Callable[[], None]) -> KeptGenerations:
        """Open a cut to which the keys can go back: that which the table has just counted.

        `grew` is called now and then while old values come.
        """
        return KeptGenerations(
            [group.keep(grew) for group in self._groups()],
            [one.moved for one in self._older],
            self._since,
            self._epoch.current - 1,
            lambda _, group: any(group is mine for mine in self._groups()),
        )

    def _groups(self) -> list[KeyedGroup]:
        return [self.group, *(one.group for one in self._older)]

    def go_back(self, kept: KeptGenerations) -> None:
        """Take over the keys of another one, as they were at a cut; only into an empty group."""
        newest, *older = kept.groups.values()
        self.group, self._since = newest.go_back(self._epoch, self._load), kept.since
        for group, moved in zip(older, kept.moved, strict=True):
            # What has moved since is here again, and what moved before is missing in all cuts to come.
            gone = np.where(
                (moved > 0) & (moved <= kept.epoch), np.uint32(RESTORED_EPOCH), np.uint32(0)
            )
            self._older.append(_Generation(group.go_back(self._epoch), gone))

    def close(self) -> None:
        """Release the memory."""
        self._older.clear()
        self._dropped.clear()


def living_rows(table: pa.Table, now: int, ttl_ms: int) -> pa.Table:
    """Return the restored rows that have not expired. Without a last use it is `now` (ms)."""
    if LAST_USED_COLUMN not in table.column_names:
        used = pa.array(np.full(table.num_rows, now)).cast(LAST_USED_TYPE)
        return table.append_column(LAST_USED_COLUMN, used)
    column = plain_column(table.column(LAST_USED_COLUMN)).cast(pa.int64()).fill_null(now)
    index = table.column_names.index(LAST_USED_COLUMN)
    used = column.cast(LAST_USED_TYPE)
    table = table.set_column(index, LAST_USED_COLUMN, used)
    return table.filter(pa.array(column.to_numpy() > now - ttl_ms))
