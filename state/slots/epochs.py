"""Consistent cuts of arrays by slot, whose cost at the barrier does not grow with the state.

Each slot has the number (epoch) of the table's next cut at the time of its last change. To take a cut is
to note how many slots there are and to count the epoch up. Until a thread has read what it needs from the
arrays, which go on changing under it, the cut is *open*: before a slot is changed for the first time
since the cut, its old values and old epoch are put into the cut's undo log. The thread reads first, then
closes the cut, then lays the log over what it read: a change that it saw was logged before. This is
multi-version reading in which versions are kept only while they may be read. The same epochs tell which
slots changed between two cuts, so that a delta needs no marks of its own.

A cut that is *kept* stays open until a later checkpoint is complete. Nobody reads it. If the subtask is
cancelled, its log is laid over the arrays themselves, which then are those of the cut.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from ..hashing import distinct
from ..values import Array, Index
from .arrays import ObjectArray, SlotArray, entries_of

Field: TypeAlias = SlotArray | ObjectArray
"""An array of values by slot that belongs to a state."""
Which: TypeAlias = Index | slice
RESTORED_EPOCH = 1
"""The epoch of rows that were restored; what changes afterwards belongs to cut 2."""
MARK_ALL_FACTOR = 4
"""A table this many times smaller than a batch is marked as changed as a whole, which is one short fill."""
LOOK_BYTES = 1 << 20
"""The memory of kept logs is looked at once in this many bytes of old values."""
_ARRAY_BYTES = 112
"""The memory of an array without its entries."""
_OBJECT_BYTES = 56
"""Roughly the memory of a Python object that only a log has."""


class TableEpoch:
    """Counts the cuts of one table, which may consist of several groups of slots.

    Attributes:
        current: the number of the next cut, which is the epoch of present changes.
        lock: held while values go into undo logs, and while a cut is closed.
    """

    def __init__(self) -> None:
        self.current = 1
        self.lock = threading.Lock()

    def restored(self) -> None:
        """Note that the table was restored: its state then stands for cut 1."""
        self.current = RESTORED_EPOCH + 1

    def cut(self) -> int:
        """Count a cut and return its number."""
        self.current += 1
        return self.current - 1


class _Undo(msgspec.Struct, frozen=True):
    """The values of some distinct slots before they changed."""

    slots: Index
    epochs: npt.NDArray[np.uint32]
    values: dict[Field, Array]

    @property
    def nbytes(self) -> int:
        """Roughly the memory that it takes."""
        size = self.slots.nbytes + self.epochs.nbytes + (2 + len(self.values)) * _ARRAY_BYTES
        for values in self.values.values():
            size += values.nbytes + _OBJECT_BYTES * len(values) * (values.dtype == object)
        return size


@dataclass(slots=True, eq=False)
class _OpenCut:
    """A cut of one group of slots, and the values of those that have changed since.

    Attributes:
        epoch: the number of the cut.
        size: the number of slots at the cut.
    """

    epoch: int
    size: int
    _owner: ChangedSlots
    _fields: list[Field]
    _log: list[_Undo] = field(default_factory=list, init=False)

    def close(self) -> None:
        """Close the cut: the values of slots that change from now on are not noted."""
        with self._owner.table.lock:
            if self in self._owner.cuts:
                self._owner.cuts.remove(self)

    def add(self, undo: _Undo) -> None:
        """Note values that are about to change, except those that have already changed since the cut."""
        mine = undo.epochs <= self.epoch
        mine &= undo.slots < self.size
        if mine.all():
            self._log.append(undo)
        elif mine.any():
            values = {one: values[mine] for one, values in undo.values.items()}
            self._log.append(_Undo(undo.slots[mine], undo.epochs[mine], values))


@dataclass(slots=True, eq=False)
class SlotCut(_OpenCut):
    """The values of one group of slots at a cut. `slots`, `values` and `close` run in any one thread."""

    _epochs: Array
    _data: list[Array | list[Any]]

    def slots(self, since: int | None) -> Which:
        """Return the slots that had changed after cut number `since`, ascending; None: all slots."""
        if since is None:
            return slice(0, self.size)
        epochs = self._epochs[: self.size].copy()
        with self._owner.table.lock:
            log = list(self._log)
        for undo in log:
            epochs[undo.slots] = undo.epochs
        return np.flatnonzero(epochs > since)

    def values(self, which: Which) -> list[Array]:
        """Return the values of these slots (see `slots`), one array per field. Closes the cut."""
        found = [entries_of(data, which) for data in self._data]
        self.close()
        for undo in self._log:
            if isinstance(which, slice):
                here, at = np.ones(len(undo.slots), np.bool_), undo.slots
            else:
                at = np.searchsorted(which, undo.slots)
                here = which.take(at, mode="clip") == undo.slots if which.size else at > 0
            for values, one in zip(found, self._fields, strict=True):
                values[at[here]] = undo.values[one][here]
        self._log.clear()
        return found


@dataclass(slots=True, eq=False)
class KeptSlots(_OpenCut):
    """A cut to which a group of slots can go back."""

    grew: Callable[[], None]
    """Called now and then while old values come."""
    nbytes: int = field(default=0, init=False)
    """Roughly the memory of the old values."""

    def add(self, undo: _Undo) -> None:
        before = len(self._log)
        # Zero arguments would not do: slots=True makes a new class of this one.
        _OpenCut.add(self, undo)
        self.nbytes += sum(added.nbytes for added in self._log[before:])

    def go_back(self) -> None:
        """Let the slots have the values that they had at the cut; later ones are as if they were new.

        Fields that came after the cut are left alone. Nothing else may read or write the slots.
        """
        self.close()
        known = set(self._fields)
        for undo in self._log:
            for one, values in undo.values.items():
                if one in known:
                    one.put(undo.slots, values)
        for one in self._fields:
            one.empty_from(self.size)
        self._log.clear()


class ChangedSlots:
    """The epochs in which the slots of one group changed, and the open cuts of the group.

    `fields` returns the fields that the state consists of at the moment. A field that a cut knows stays
    among them while the cut is open.
    """

    def __init__(self, table: TableEpoch, fields: Callable[[], list[Field]]) -> None:
        self.table = table
        self._fields = fields
        self.cuts: list[SlotCut | KeptSlots] = []
        """The open cuts, oldest first."""
        self._epochs = SlotArray(np.uint32)
        self._logged = 0

    def touch(self, slots: Index, size: int) -> None:
        """Note that `slots`, which may repeat, are about to change; there are `size` slots now."""
        self._epochs.reserve(size)
        which: Which = slots
        if size * MARK_ALL_FACTOR <= len(slots):
            which = slice(0, size)
        if self.cuts:
            with self.table.lock:
                if self.cuts:
                    self._keep(np.arange(size) if isinstance(which, slice) else slots, size)
        self._epochs.data[which] = self.table.current
        if self._logged >= LOOK_BYTES:
            self._logged = 0
            for cut in self.cuts[-1:]:
                if isinstance(cut, KeptSlots):
                    cut.grew()

    def first_changes(self, slots: Index, size: int, known: int) -> Index:
        """Return the slots that `touch` would mark for the first time since the last cut, each once.

        Slots from `known` on are new, and not among them.
        """
        slots = np.arange(known) if size * MARK_ALL_FACTOR <= len(slots) else slots[slots < known]
        return distinct(slots[self._epochs.data.take(slots) < self.table.current])

    def mark(self, slots: Which, size: int, epochs: Any) -> None:
        """Set the epochs of slots that are new."""
        self._epochs.reserve(size)
        self._epochs.data[slots] = epochs

    def epochs_of(self, slots: Index) -> npt.NDArray[np.uint32]:
        """Return the epoch of each slot's last change."""
        return self._epochs.data.take(slots)

    def cut(self, epoch: int, size: int) -> SlotCut:
        """Open cut number `epoch`, which the table has just counted."""
        fields = self._fields()
        data = [one.data for one in fields]
        cut = SlotCut(epoch, size, self, fields, self._epochs.data, data)
        with self.table.lock:
            self.cuts.append(cut)
        return cut

    def keep(self, size: int, grew: Callable[[], None]) -> KeptSlots:
        """Open a cut to which the slots can go back: that which the table has just counted."""
        cut = KeptSlots(self.table.current - 1, size, self, self._fields(), grew)
        with self.table.lock:
            self.cuts.append(cut)
        return cut

    @property
    def nbytes(self) -> int:
        """Memory in use."""
        return self._epochs.nbytes

    @property
    def memory(self) -> Array:
        """The array of the epochs."""
        return self._epochs.data

    @property
    def entry_bytes(self) -> int:
        """Memory for one slot."""
        return self._epochs.data.itemsize

    def _keep(self, slots: Index, size: int) -> None:
        """Put the values of slots that have not changed since the latest cut into the undo logs.

        There are `size` slots now.
        """
        latest, epochs = self.cuts[-1], self._epochs.data
        if size > latest.size:
            slots = slots[slots < latest.size]
        before = epochs.take(slots)
        untouched = np.flatnonzero(before <= latest.epoch)
        if not untouched.size:
            return
        slots, before = slots.take(untouched), before.take(untouched)
        # Choose one row of each slot by a claim in the epochs, which are about to be written anyway. A
        # thread that reads a claim corrects it by the log.
        claims = np.arange(len(slots), dtype=np.uint32)
        epochs[slots] = claims
        won = epochs.take(slots) == claims
        slots, before = slots[won], before[won]
        undo = _Undo(slots, before, {one: entries_of(one.data, slots) for one in self._fields()})
        for cut in self.cuts:
            cut.add(undo)
        self._logged += undo.nbytes
