"""Restores a RocksDB from the files of a checkpoint, at any parallelism.

The old database with most key groups in common is taken over as it is and clipped to the own range, if
all its files are here. From the others the own key groups are copied in sorted files, without going
through the memory of the database. If the declaration of a state has changed, all values are read,
adapted and written again.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow as pa
from rocksdict import Rdict

from ...errors import CorruptError, StateError
from ..codecs import ScalarCodec
from ..evolution import ENCODING, check_compatible
from ..forms import plain_of
from ..keyed.canonical import VALUE_COLUMN, Rows, TableSpec, restored_rows
from ..keygroups import KeyGroupRange
from ..snapshot import RestoredFiles, RestoredState, StateInfo
from .cut import META_VERSION, ROWS_PER_TABLE, DatabaseMeta
from .database import Database, Loader, Span, apply_changes, link, without_log
from .layout import Places, bounds_of, entries_from, split_value


class StoredReader:
    """Reads entries under an old declaration of the values. Keys never change, so their declaration is
    the present one.
    """

    def __init__(self, spec: TableSpec, old: StateInfo, max_parallelism: int) -> None:
        schema = old.arrow_schema()
        if schema is None:
            raise StateError(f"it is not known how state `{spec.name}` was stored")
        self._field = schema.field(VALUE_COLUMN)
        self._layout = replace(
            spec.layout, value=ScalarCodec(bytes), with_ttl=old.ttl_ms is not None
        )
        self._places = Places(spec.layout)
        self._max_parallelism = max_parallelism

    def table(self, entries: Iterable[tuple[bytes, bytes]]) -> pa.Table:
        """Return the canonical table of some entries."""
        layout, rows = self._layout, Rows()
        for key, data in entries:
            encoded, last_used = split_value(data, layout.with_ttl)
            address, namespace = self._places.address(key)
            rows.keys.append(address)
            rows.values.append(encoded)
            if layout.with_ttl:
                rows.last_used.append(last_used)
            if layout.namespaced:
                rows.namespaces.append(namespace)
            if layout.entry is not None:
                rows.entries.append(self._places.entry(key, self._places.address_end(key)))
        table = layout.table(rows, self._max_parallelism)
        index = table.schema.get_field_index(VALUE_COLUMN)
        return table.set_column(index, self._field, self._column(table.column(index)))

    def _column(self, encoded: pa.ChunkedArray) -> pa.Array:
        field = self._field
        if ENCODING in (field.metadata or {}):
            return encoded.combine_chunks()
        plain = plain_of(field.type)
        values = [plain(msgspec.msgpack.decode(data)) for data in encoded.to_pylist()]
        return pa.array(values, field.type)


_CHANGES: Final = msgspec.msgpack.Decoder(list[tuple[bytes, bytes | None]])


class StoredDatabase:
    """A database as one subtask left it in a checkpoint.

    Args:
        groups: the key groups of the restoring subtask.
    """

    def __init__(self, restored: RestoredFiles, groups: KeyGroupRange) -> None:
        self.meta = _decoded(restored.meta)
        self.written = KeyGroupRange(restored.first_key_group, restored.last_key_group)
        self.shared = KeyGroupRange(
            max(groups.first, self.written.first), min(groups.last, self.written.last)
        )
        self._files = restored.files
        needed = [file.id for file in self.meta.files if self._needs(file.id)]
        missing = [id_ for id_ in [*needed, self.meta.undo] if id_ and id_ not in self._files]
        if missing:
            raise StateError(
                f"a file of a RocksDB was not restored file=`{missing[0]}` missing=`{len(missing)}`",
                fix="restore from another checkpoint or savepoint",
            )

    def _needs(self, id_: str) -> bool:
        file = next(file for file in self.meta.files if file.id == id_)
        return KeyGroupRange(file.first_key_group, file.last_key_group).overlaps(self.shared)

    @property
    def complete(self) -> bool:
        """True if all files are here, including those without own key groups."""
        return all(file.id in self._files for file in self.meta.files)

    @property
    def ids(self) -> dict[str, str]:
        """The ids of its files by name."""
        return {file.name: file.id for file in self.meta.files}

    def lay_out(self, directory: Path) -> None:
        """Put all files that are here into a directory."""
        for file in self.meta.files:
            if file.id in self._files:
                link(self._files[file.id], directory / file.name)
        for name, data in self.meta.private.items():
            (directory / name).write_bytes(data)

    def changes(self) -> list[tuple[bytes, bytes | None]]:
        """Return the values to put back: the files also contain writes from after the cut."""
        if not self.meta.undo:
            return []
        return _CHANGES.decode(self._files[self.meta.undo].read_bytes())

    def entries(self, directory: Path, options: Any) -> Iterator[tuple[bytes, bytes]]:
        """Yield the entries of own key groups, read from a temporary copy in `directory`."""
        directory.mkdir()
        try:
            self.lay_out(directory)
            old = Rdict(str(directory), options)
            try:
                apply_changes(old, self.changes(), without_log())
                yield from Span(old, *bounds_of(self.shared))
            finally:
                old.close()
        finally:
            shutil.rmtree(directory, ignore_errors=True)


def _decoded(data: bytes) -> DatabaseMeta:
    try:
        meta = msgspec.msgpack.decode(data, type=DatabaseMeta)
    except msgspec.MsgspecError as error:
        raise CorruptError(f"the list of files of a RocksDB is damaged reason=`{error}`") from error
    if meta.version != META_VERSION:
        raise StateError(
            f"the list of files of a RocksDB has a format this version does not know "
            f"found=`{meta.version}` expected=`{META_VERSION}`",
            fix="use the version of headgate that wrote it, or one that is newer",
        )
    return meta


class Restorer:
    """Restores the database of one state."""

    def __init__(
        self, spec: TableSpec, database: Database, max_parallelism: int, now_ms: int
    ) -> None:
        self._spec, self._database = spec, database
        self._max_parallelism, self._now_ms = max_parallelism, now_ms

    def restore(self, state: RestoredState) -> None:
        """Take over the state from files, from a canonical table, or from both: of some old subtasks
        the one, of others the other.
        """
        name = self._spec.name
        groups = self._database.groups
        stored = [StoredDatabase(files, groups) for files in state.files.get(name, ())]
        stored = sorted(
            (one for one in stored if len(one.shared)), key=lambda one: one.written.first
        )
        old = state.states.get(name, self._spec.info)
        if stored:
            check_compatible(old, self._spec.info)
            if _stored_alike(old, self._spec.info):
                self._take_over(stored)
            else:
                self._write_anew(stored, old)
        rows = restored_rows(self._spec, state, self._now_ms)
        if rows is not None:
            loader = Loader(self._database)
            loader.add(self._entries(rows))
            loader.finish()

    def _take_over(self, stored: Sequence[StoredDatabase]) -> None:
        database = self._database
        base = max(
            (one for one in stored if one.complete), key=lambda one: len(one.shared), default=None
        )
        if base is not None:
            database.replace(base.lay_out, base.ids)
            database.apply(base.changes())
            if base.shared != base.written:
                database.clip()
        loader = Loader(database)
        for one in stored:
            if one is not base:
                loader.add(self._entries_of(one))
        loader.finish()

    def _write_anew(self, stored: Sequence[StoredDatabase], old: StateInfo) -> None:
        reader = StoredReader(self._spec, old, self._max_parallelism)
        loader = Loader(self._database)
        for one in stored:
            for entries in _pieces(self._entries_of(one)):
                piece = RestoredState(
                    tables={self._spec.name: reader.table(entries)}, states={self._spec.name: old}
                )
                rows = restored_rows(self._spec, piece, self._now_ms)
                assert rows is not None
                loader.add(self._entries(rows))
        loader.finish()

    def _entries_of(self, one: StoredDatabase) -> Iterator[tuple[bytes, bytes]]:
        """Return the entries, read from a copy beside the own database."""
        directory = self._database.directory
        beside = directory.with_name(f"{directory.name}-old-{one.written.first}")
        return one.entries(beside, self._database.options(copy=True))

    def _entries(self, rows: Rows) -> Iterator[tuple[bytes, bytes]]:
        try:
            return entries_from(rows, self._spec.layout, self._max_parallelism)
        except TypeError as error:
            raise StateError(
                f"state `{self._spec.name}` cannot take over a restored value: {error}",
                fix="let migrate= return values of the declared type",
            ) from error


def _stored_alike(old: StateInfo, new: StateInfo) -> bool:
    """Return True if both declarations encode values as the same bytes."""
    before, after = old.arrow_schema(), new.arrow_schema()
    assert after is not None
    same = before is not None and before.equals(after, check_metadata=True)
    return same and old.version == new.version


def _pieces(entries: Iterator[tuple[bytes, bytes]]) -> Iterator[list[tuple[bytes, bytes]]]:
    piece: list[Any] = []
    for entry in entries:
        piece.append(entry)
        if len(piece) == ROWS_PER_TABLE:
            yield piece
            piece = []
    if piece:
        yield piece
