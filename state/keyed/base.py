"""The interface of keyed state with access by single keys, which each backend implements.

A backend belongs to one operator subtask and holds one table per state. Before the user's function sees a
record, the operator sets the current key; all access then goes to the entries of that key and of the
current namespace. All methods run in the subtask's mailbox; only the content of cuts is read in threads.

Values go in and come out as Python objects. A table hands out a fresh object for every value that can be
changed in place, so in no backend does a change without `put` become state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol, final

from ...errors import StateError
from ..queryable import CommittedPoints
from ..snapshot import FilesCut, KeptState, RestoredState, TableCut
from ..values import Index
from .canonical import TableSpec
from .keys import KeyShape, Token


@final
class Absent:
    """The type of `ABSENT`."""

    def __repr__(self) -> str:
        return "ABSENT"


ABSENT: Final = Absent()
"""The result of a table for a key that has no value. None is a value."""


@final
class _NoKey:
    """Stands in a cursor that is at no key. What a table does with it raises; with a key that costs
    nothing.
    """

    def __index__(self) -> int:
        raise no_current_key()

    def __hash__(self) -> int:
        raise no_current_key()


def no_current_key() -> StateError:
    """Return the error for an access to state while there is no current key."""
    return StateError(
        "keyed state was used without a current key",
        fix="use it in on_record, where the key is that of the record",
    )


NO_KEY: Final = _NoKey()


@final
class Cursor:
    """The current key, as the tables of one backend need it for each access.

    Attributes:
        token: the token of the key; in memory together with that of the namespace, where there is one.
        place: where the entries of the key are, in the form of the backend.
    """

    __slots__ = ("place", "token")
    token: Any
    place: Any

    def __init__(self) -> None:
        self.clear()

    @property
    def is_set(self) -> bool:
        """True if there is a current key."""
        return self.token is not NO_KEY

    def clear(self) -> None:
        """Let there be no current key."""
        self.token = self.place = NO_KEY


class ValueTable(ABC):
    """One value per (key, namespace). With a TTL, values are pairs (value, last use in ms)."""

    @abstractmethod
    def get(self) -> Any:
        """Return the value of the current key and namespace, or `ABSENT`."""

    def handle(self, default: Any) -> Any:
        """Return a handle (`handles.py`) of the table's own with which an access is one call, and which
        can do what `ValueHandle` can; None: there is none.

        Args:
            default: the value of a key without one.
        """
        return None

    @abstractmethod
    def put(self, value: Any) -> None:
        """Set the value. Raises TypeError if it is not of the declared type."""

    @abstractmethod
    def delete(self) -> None:
        """Remove the value if there is one."""

    @abstractmethod
    def sweep(self, limit: int, dead_until: int) -> int:
        """Look at up to `limit` further values of any key, in turn, and remove those last used at or
        before `dead_until` (ms). Return how many were removed. Only for tables with a TTL.
        """


class EntryTable(ABC):
    """Any number of entries per (key, namespace), each under an entry key; values as in `ValueTable`.

    Entry keys are compared in the same way as keys of state (`keys.py`).
    """

    @abstractmethod
    def get(self, entry: Any) -> Any:
        """Return the value of one entry, or `ABSENT`."""

    @abstractmethod
    def put(self, entry: Any, value: Any) -> None:
        """Set one entry. Raises TypeError if the value is not of the declared type."""

    @abstractmethod
    def delete(self, entry: Any) -> None:
        """Remove one entry if it is there."""

    @abstractmethod
    def entries(self) -> Iterator[tuple[Any, Any]]:
        """Return entry keys and values as they are at this call; later changes are not seen while
        iterating.

        Entries of a list come in the order of position, those of a map in no particular order.
        """

    @abstractmethod
    def last(self) -> int:
        """Return the greatest position of a list that is in use, -1 if there is none."""

    @abstractmethod
    def empty(self) -> bool:
        """Return True if the current key and namespace have no entries."""

    @abstractmethod
    def clear(self) -> None:
        """Remove all entries of the current key and namespace."""

    @abstractmethod
    def sweep(self, limit: int, dead_until: int) -> int:
        """As in `ValueTable`, entry by entry."""


class Tables(Protocol):
    """The tables of states, as handles need them."""

    specs: dict[str, TableSpec]

    def value_table(self, name: str) -> ValueTable:
        """Return the table of a state with one value per key."""
        ...

    def entry_table(self, name: str) -> EntryTable:
        """Return the table of a list or map state."""
        ...


class KeyWalk(ABC):
    """Goes over the keys of one table once, while the table changes."""

    @abstractmethod
    def next_piece(self) -> list[tuple[Hashable, Any]] | None:
        """Return some keys that are in the table now, each as `KeyedBackend.current_key` and as the
        user's key; None: all have been passed.
        """

    @abstractmethod
    def passed(self, current_key: Hashable) -> bool:
        """Return True if the place of a key has been passed, whether or not the key was there."""

    @abstractmethod
    def key(self, current_key: Hashable) -> Any:
        """Return the user's key."""


class KeyedBackend(ABC):
    """All keyed state of one operator subtask.

    Args:
        keys: the types of the keys, and their columns.
        specs: the states, by name.
        max_parallelism: the number of key groups.
    """

    points: Sequence[CommittedPoints[Any]] = ()
    """The checkpoints to which tables can go back. Their owner tells them of cuts and outcomes."""
    cursor: Cursor
    """The current key. Only loops over `places` set it from outside."""

    def __init__(
        self, keys: KeyShape, specs: Mapping[str, TableSpec], max_parallelism: int
    ) -> None:
        self.keys = keys
        self.specs = dict(specs)
        self.max_parallelism = max_parallelism

    @property
    def needs_key_groups(self) -> bool:
        """True if `set_key` and `places` need key groups at the moment."""
        return False

    @abstractmethod
    def value_table(self, name: str) -> ValueTable:
        """Return the table of a state with one value per key."""

    @abstractmethod
    def entry_table(self, name: str) -> EntryTable:
        """Return the table of a list or map state."""

    @abstractmethod
    def set_key(self, key: Any, key_group: int = -1) -> None:
        """Make this the current key of all access. Raises StateError if the value cannot be a key."""

    @abstractmethod
    def places(
        self, keys: Sequence[Any], key_groups: Sequence[int], numbers: Index | None = None
    ) -> tuple[Iterable[Token], Iterable[Any]]:
        """Return the tokens and the places of keys, for a loop that makes them the current one in turn.

        `numbers` are the same keys once more, where all of them are ints that fit int64, and are at hand
        in that form.

        The loop takes both in step and stores them in the `cursor`, which costs less than a call per key:

            for cursor.token, cursor.place in zip(*backend.places(keys, key_groups), strict=True):

        The backend may read and write values whenever the next ones are taken. No other method that sets
        or unsets the current key may be called meanwhile, and no table with namespaces may be used;
        `clear_key` comes after it.
        """

    @property
    @abstractmethod
    def current_key(self) -> Hashable:
        """The current key, in a form that is equal for equal keys of this backend only."""

    @abstractmethod
    def set_namespace(self, namespace: Any) -> None:
        """Make this the current namespace of all access: None, which is the default, or a value that can
        be a key.
        """

    @abstractmethod
    def clear_key(self) -> None:
        """Unset the current key: the next access to a table raises StateError."""

    @abstractmethod
    def addresses(self, name: str) -> Iterator[tuple[Any, Any]]:
        """Return the (key, namespace) pairs that have something in a table, in no particular order.

        The state may be changed while iterating; keys that come or go meanwhile may be seen or not.
        """

    @abstractmethod
    def walk(self, name: str) -> KeyWalk:
        """Return a walk over the keys of a table that has no namespaces."""

    @abstractmethod
    def snapshot(self, dead_until: Mapping[str, int]) -> dict[str, TableCut | FilesCut]:
        """Return a consistent cut of each table, at a cost that does not grow with the state.

        Full tables leave out entries that were last used at or before `dead_until[name]` (ms); deltas
        need not.
        """

    @abstractmethod
    def restore(self, state: RestoredState, now_ms: int) -> None:
        """Take over restored state. It is called once, before any access.

        Tables are adapted to their spec (`canonical.restored_rows`); values that had no TTL before count
        as last used at `now_ms`. Raises StateError if a state cannot be adapted.
        """

    def keep(self) -> dict[str, KeptState]:
        """Take the states out that can go back to a checkpoint; nothing is called after it but `close`."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Release resources; must not raise."""


def in_other_files(name: str) -> StateError:
    """Return the error for state in memory whose stored form are the files of RocksDB."""
    return StateError(
        f"state `{name}` lies in files of another state backend found=`rocksdb` expected=`hashmap`",
        fix="keep state.backend.type, or change it with a savepoint in canonical format",
    )
