"""The interface of keyed state with access by single keys: what each backend implements.

A backend belongs to one operator subtask and holds one table per state. Before the user's function sees
a record, the operator sets the current key; all access then goes to the entries of that key and of the
current namespace. All methods run in the subtask's mailbox; only what a cut promises runs in threads.

Values go in and come out as Python objects. A table hands out a fresh object for every value that can be
changed in place, so that a change without `put` is never state, in any backend.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Final, Protocol, final

from ..snapshot import FilesCut, RestoredState, TableCut
from .canonical import TableSpec
from .keys import KeyShape


@final
class Absent:
    """The type of `ABSENT`."""

    def __repr__(self) -> str:
        return "ABSENT"


ABSENT: Final = Absent()
"""The result of a table for a key that has no value; None is a value."""


class ValueTable(ABC):
    """One value per (key, namespace). With a TTL, values are pairs (value, last use in ms)."""

    @abstractmethod
    def get(self) -> Any:
        """The value of the current key and namespace, or `ABSENT`."""

    @abstractmethod
    def put(self, value: Any) -> None:
        """Set it. Raises TypeError if the value is not of the declared type."""

    @abstractmethod
    def delete(self) -> None:
        """Remove it, if there."""

    @abstractmethod
    def sweep(self, limit: int, dead_until: int) -> int:
        """Look at up to `limit` further values of any key, in turn, and remove those last used at or
        before `dead_until` (ms). Only for tables with a TTL. Returns how many were removed.
        """


class EntryTable(ABC):
    """Any number of entries per (key, namespace), each under an entry key; values as in `ValueTable`.

    Entry keys are compared as keys of state are (`keys.py`).
    """

    @abstractmethod
    def get(self, entry: Any) -> Any:
        """The value of one entry, or `ABSENT`."""

    @abstractmethod
    def put(self, entry: Any, value: Any) -> None:
        """Set one entry. Raises TypeError if the value is not of the declared type."""

    @abstractmethod
    def delete(self, entry: Any) -> None:
        """Remove one entry, if there."""

    @abstractmethod
    def entries(self) -> Iterator[tuple[Any, Any]]:
        """Entry keys and values as they are at this call; changes before and while iterating are not seen.

        Those of a list in the order of position; those of a map in no promised order.
        """

    @abstractmethod
    def last(self) -> int:
        """The greatest position of a list that is in use, -1 if none."""

    @abstractmethod
    def empty(self) -> bool:
        """True if the current key and namespace have no entries."""

    @abstractmethod
    def clear(self) -> None:
        """Remove all entries of the current key and namespace."""

    @abstractmethod
    def sweep(self, limit: int, dead_until: int) -> int:
        """As in `ValueTable`, entry by entry."""


class Tables(Protocol):
    """Where handles find the tables of their states."""

    specs: dict[str, TableSpec]

    def value_table(self, name: str) -> ValueTable:
        """The table of a state with one value per key."""
        ...

    def entry_table(self, name: str) -> EntryTable:
        """The table of a list or map state."""
        ...


class KeyedBackend(ABC):
    """All keyed state of one operator subtask.

    Args:
        keys: what the keys are, and how they lie in columns.
        specs: the states, by name.
        max_parallelism: the number of key groups.
    """

    needs_key_groups: ClassVar[bool] = False
    """True if `set_key` must be told the key group."""

    def __init__(
        self, keys: KeyShape, specs: Mapping[str, TableSpec], max_parallelism: int
    ) -> None:
        self.keys = keys
        self.specs = dict(specs)
        self.max_parallelism = max_parallelism

    @abstractmethod
    def value_table(self, name: str) -> ValueTable:
        """The table of a state with one value per key."""

    @abstractmethod
    def entry_table(self, name: str) -> EntryTable:
        """The table of a list or map state."""

    @abstractmethod
    def set_key(self, key: Any, key_group: int = -1) -> None:
        """All access goes to this key from now on. Raises StateError if the value cannot be a key."""

    @abstractmethod
    def set_namespace(self, namespace: Any) -> None:
        """All access goes to this namespace from now on: None, the default, or what can be a key."""

    @abstractmethod
    def clear_key(self) -> None:
        """There is no current key: the next access to a table raises StateError."""

    @abstractmethod
    def addresses(self, name: str) -> Iterator[tuple[Any, Any]]:
        """The (key, namespace) pairs that have something in a table, in no promised order.

        The state may be changed while iterating; keys that come or go meanwhile may be seen or not.
        """

    @abstractmethod
    def snapshot(self, dead_until: Mapping[str, int]) -> dict[str, TableCut | FilesCut]:
        """A consistent cut of each table, at a cost that does not grow with the state.

        Full tables leave out what was last used at or before `dead_until[name]` (ms); deltas need not.
        """

    @abstractmethod
    def restore(self, state: RestoredState, now_ms: int) -> None:
        """Take over restored state; called once, before any access.

        Tables are adapted to their spec (`canonical.restored_rows`); values that had no TTL before count
        as last used at `now_ms`. Raises StateError if a state cannot be adapted.
        """

    @abstractmethod
    def close(self) -> None:
        """Release resources; must not raise."""
