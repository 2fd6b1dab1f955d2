"""Rows of a user as rows of a state: of its types, with the key group that each key belongs to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa

from ...errors import StateError
from ...operators.lazy_modules import pl
from ...state.evolution import LAST_USED_COLUMN, is_widening
from ...state.keyed.keys import TEXT_MAX, encode_key
from ...state.snapshot import KEY_GROUP_COLUMN, StateInfo
from .keys import KEY_TEXT, is_opaque, key_groups, whole_groups
from .snapshot import hash_columns_of

SUBTASK_COLUMN: Final = "subtask_"
"""Beside placed rows: whose they are. No column of a state is called like that."""


@dataclass(frozen=True, slots=True)
class Placing:
    """One state that is written into a new savepoint.

    Attributes:
        operator: its operator.
        info: what the state is.
        max_parallelism: the number of key groups.
        parallelism: of the operator: how many files there will be.
        now_ms: the last use of rows that do not say it, ms since 1970 UTC.
    """

    operator: str
    info: StateInfo
    max_parallelism: int
    parallelism: int
    now_ms: int

    @property
    def schema(self) -> pa.Schema:
        """The columns of the state's table.

        Raises:
            StateError: the state has no table that could be written.
        """
        schema = self.info.arrow_schema()
        if schema is None or KEY_GROUP_COLUMN not in schema.names:
            raise StateError(
                f"only state per key can be written {self._text} kind=`{self.info.kind}`",
                fix="leave it as it is in the base, or remove it",
            )
        if self._hashed is None:
            raise StateError(
                f"where rows of this kind belong does not follow from their columns {self._text} "
                f"kind=`{self.info.kind}`",
                fix="leave it as it is in the base, or remove it",
            )
        return schema

    @property
    def _hashed(self) -> tuple[str, ...] | None:
        return hash_columns_of(self.info.kind, self.info.keys)

    @property
    def _text(self) -> str:
        return f"operator=`{self.operator}` state=`{self.info.name}`"

    def check_columns(self, given: pa.Schema, known_as: pa.Schema) -> None:
        """Raise StateError unless rows with the columns `given` can be rows of the state.

        Args:
            given: what the user has.
            known_as: the state's columns, of the types that they have where the user's rows come from.
        """
        optional = {KEY_GROUP_COLUMN, KEY_TEXT, LAST_USED_COLUMN}
        opaque = is_opaque(self._hashed or (), self.schema)
        problems = []
        for name in given.names:
            if name not in known_as.names:
                problems.append(f"`{name}` is no column of the state")
        for field in known_as:
            if field.name not in given.names:
                if field.name not in optional:
                    problems.append(f"`{field.name}` ({field.type}) is missing")
                continue
            was = given.field(field.name).type
            fits = was == field.type or is_widening(was, field.type) or pa.types.is_null(was)
            if not fits and not (opaque and field.name == "key"):
                problems.append(f"`{field.name}` is {was}, and {field.type} in the state")
        if problems:
            raise StateError(
                f"the rows do not fit the state {self._text}: " + "; ".join(problems),
                fix="select and cast: "
                + ", ".join(f"{f.name} {f.type}" for f in known_as if f.name not in optional),
            )

    def place(self, rows: pa.Table) -> pa.Table:
        """Rows in the state's types, with their key groups, and a last column with their subtasks.

        Raises:
            StateError: a value does not fit its column, or null is not allowed there.
        """
        schema, opaque = self.schema, is_opaque(self._hashed or (), self.schema)
        if opaque:
            rows = _encoded_keys(rows)
        columns = {f.name: self._column(rows, f) for f in schema if f.name != KEY_GROUP_COLUMN}
        table = pa.table(columns)
        hashed = self._hashed
        assert hashed is not None
        groups = key_groups(table, hashed, self.max_parallelism, opaque=opaque)
        subtasks = groups.astype(np.int64) * self.parallelism // self.max_parallelism
        columns = {KEY_GROUP_COLUMN: pa.array(groups, pa.int32()), **columns}
        placed = pa.Table.from_arrays([columns[name] for name in schema.names], schema=schema)
        return placed.append_column(SUBTASK_COLUMN, pa.array(subtasks, pa.int32()))

    def _column(self, rows: pa.Table, field: pa.Field) -> pa.Array:
        if field.name not in rows.column_names:
            if field.name == LAST_USED_COLUMN:
                now = pa.scalar(self.now_ms, pa.int64()).cast(field.type)
                return pa.repeat(now, rows.num_rows)
            return pa.nulls(rows.num_rows, field.type)
        column = rows.column(field.name).combine_chunks()
        try:
            column = column.cast(field.type)
        except pa.ArrowException as error:
            raise StateError(
                f"a value does not fit the state {self._text} column=`{field.name}` "
                f"type=`{field.type}` cause=`{error}`"
            ) from error
        if not field.nullable and column.null_count:
            raise StateError(
                f"null is no value of the state {self._text} column=`{field.name}`",
                fix="leave such rows out",
            )
        return column

    def checked(self, tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
        """Rows of one subtask, sorted by key group, each key once.

        Raises:
            StateError: a key occurs twice.
        """
        keys = list(self.info.keys)
        for table in whole_groups(table for table in tables if table.num_rows):
            frame = pl.from_arrow(table.select(keys)) if keys else None
            assert frame is None or isinstance(frame, pl.DataFrame)
            if frame is not None and (twice := frame.is_duplicated()).any():
                example = frame.filter(twice).row(0, named=True)
                raise StateError(
                    f"there are several rows of one key {self._text} key=`{example}`",
                    fix="group or deduplicate the rows first",
                )
            yield table


def _encoded_keys(rows: pa.Table) -> pa.Table:
    """Keys of no declared type as they are stored: a column of another type than bytes holds the keys."""
    index = rows.schema.get_field_index("key")
    if pa.types.is_binary(rows.schema.field(index).type):
        return rows
    keys = rows.column(index).to_pylist()
    if KEY_TEXT in rows.column_names:
        rows = rows.drop_columns([KEY_TEXT])
    texts = pa.array([repr(key)[:TEXT_MAX] for key in keys], pa.string())
    rows = rows.set_column(index, "key", pa.array(map(encode_key, keys), pa.binary()))
    return rows.append_column(KEY_TEXT, texts)
