"""Entries of a state that was declared in another way, as the canonical table of then.

The old codec may be gone with the class it was made of. But what it wrote describes itself (msgpack), and
the old schema says what each field is; pickled values stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import msgspec
import pyarrow as pa

from ...errors import StateError
from ..codecs import ScalarCodec
from ..evolution import ENCODING
from ..plain import plain_of
from ..snapshot import StateInfo
from .base import TableSpec
from .canonical import VALUE_COLUMN, Rows
from .rocksdb_keys import Places, split_value


class StoredReader:
    """Reads entries under an old declaration; keys are those of now, as they never change."""

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
        """The canonical table of some entries."""
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
