"""State of a subtask, not of a key: lists that are dealt out anew after a restore, broadcast maps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, Generic, TypeVar

import msgspec
import pyarrow as pa

from ..errors import StateError
from .codecs import Codec
from .evolution import ENCODING, check_compatible
from .keyed.identity import decode_token, encode_token, key_of, token
from .snapshot import ItemsCut, Redistribution, RestoredState, StateInfo, state_info
from .undo import UndoLog

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")


class OperatorListHandle(Generic[T]):
    """A list of this subtask. After a restore each element is in one subtask (split) or in all (union)."""

    def __init__(self, name: str, codec: Codec, redistribution: Redistribution) -> None:
        self.name = name
        self._codec = codec
        self._redistribution: Final = redistribution
        self._items: list[bytes] = []
        self.undo: UndoLog | None = None

    def get(self) -> list[T]:
        """The elements, as a new list."""
        return list(map(self._codec.decode, self._items))

    def add(self, value: T) -> None:
        """Append one element. Raises TypeError if it is not of the declared type."""
        self._items.append(self._codec.encode(value))
        if self.undo is not None:
            self.undo.note(lambda: self._items.__delitem__(-1))

    def update(self, values: Iterable[T]) -> None:
        """Replace all elements."""
        self._replace(list(map(self._codec.encode, values)))

    def clear(self) -> None:
        """Remove all elements."""
        self._replace([])

    def _replace(self, items: list[bytes]) -> None:
        before, self._items = self._items, items
        if self.undo is not None:
            self.undo.note(lambda: setattr(self, "_items", before))

    @property
    def info(self) -> StateInfo:
        """The declaration for the snapshot."""
        return _items_info(self.name, self._redistribution, [("value", self._codec)])

    def cut(self) -> ItemsCut:
        """The elements as they are now."""
        return ItemsCut(list(self._items), self._redistribution)

    def restore(self, state: RestoredState, operator: str) -> None:
        """Take over this subtask's share."""
        _check(state, self.info, operator)
        self._items = list(state.items.get(self.name, ()))


class BroadcastHandle(Generic[K, V]):
    """A map that is the same in all subtasks. `may_write` says whether it can be changed at the moment."""

    def __init__(self, name: str, codec: Codec, may_write: Callable[[], bool]) -> None:
        self.name = name
        self._codec = codec
        self._may_write = may_write
        self._entries: dict[Any, bytes] = {}
        self.undo: UndoLog | None = None

    def get(self, key: K, default: V | None = None) -> V | None:
        """The value of an entry, or `default`."""
        held = self._entries.get(token(key))
        return default if held is None else self._codec.decode(held)

    def put(self, key: K, value: V) -> None:
        """Set an entry."""
        self._check_writable()
        name, held = token(key), self._codec.encode(value)
        self._note(name)
        self._entries[name] = held

    def remove(self, key: K) -> None:
        """Remove an entry, if there."""
        self._check_writable()
        self._note(token(key))
        self._entries.pop(token(key), None)

    def clear(self) -> None:
        """Remove all entries."""
        self._check_writable()
        before, self._entries = self._entries, {}
        if self.undo is not None:
            self.undo.note(lambda: setattr(self, "_entries", before))

    def contains(self, key: K) -> bool:
        """True if there is such an entry."""
        return token(key) in self._entries

    def keys(self) -> Iterator[K]:
        """The keys of the entries as they are now."""
        return iter([key_of(found) for found in self._entries])

    def values(self) -> Iterator[V]:
        """The values of the entries as they are now."""
        return iter([self._codec.decode(held) for held in self._entries.values()])

    def items(self) -> Iterator[tuple[K, V]]:
        """The entries as they are now."""
        return zip(self.keys(), self.values(), strict=True)

    def _note(self, name: Any) -> None:
        if self.undo is not None:
            before = self._entries.get(name)
            self.undo.note(lambda: self._restore(name, before))

    def _restore(self, name: Any, before: bytes | None) -> None:
        if before is None:
            self._entries.pop(name, None)
        else:
            self._entries[name] = before

    def _check_writable(self) -> None:
        if not self._may_write():
            raise StateError(
                f"broadcast state is read-only while a keyed record is handled state=`{self.name}`",
                fix="every subtask must make the same changes, and keyed records differ between them",
            )

    @property
    def info(self) -> StateInfo:
        """The declaration for the snapshot."""
        return _items_info(self.name, "broadcast", [("value", self._codec)])

    def cut(self) -> ItemsCut:
        """The entries as they are now; held in memory, and small."""
        pairs = list(self._entries.items())

        def make() -> list[bytes]:
            return [msgspec.msgpack.encode((encode_token(key), held)) for key, held in pairs]

        return ItemsCut(make, "broadcast")

    def restore(self, state: RestoredState, operator: str) -> None:
        """Take over one copy of the map."""
        _check(state, self.info, operator)
        pairs = (_decode_pair(item) for item in state.items.get(self.name, ()))
        self._entries = {decode_token(key)[0]: held for key, held in pairs}


_decode_pair = msgspec.msgpack.Decoder(tuple[bytes, bytes]).decode


def _items_info(name: str, kind: str, columns: list[tuple[str, Codec]]) -> StateInfo:
    fields = []
    for column, codec in columns:
        metadata = None if codec.encoding is None else {ENCODING: codec.encoding}
        fields.append(pa.field(column, codec.type_, codec.nullable, metadata))
    return state_info(name, kind, pa.schema(fields))


def _check(state: RestoredState, info: StateInfo, operator: str) -> None:
    old = state.states.get(info.name)
    if old is not None:
        check_compatible(old, info, operator)
