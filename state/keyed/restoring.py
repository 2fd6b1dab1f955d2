"""Restored tables as rows of what is declared now."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa

from ...errors import HeadgateError, StateError
from ..evolution import LAST_USED_COLUMN, adapt, check_compatible, is_declared_later
from ..snapshot import RestoredState, StateInfo
from .base import TableSpec
from .canonical import VALUE_COLUMN, Rows


def restored_rows(spec: TableSpec, state: RestoredState, now_ms: int) -> Rows | None:
    """The rows of a restored table under its present declaration; None if there is none.

    Args:
        spec: what is declared now.
        state: all restored state of the operator.
        now_ms: the last use of values that had no TTL when they were stored.

    Raises:
        StateError: the stored state cannot be loaded; names the state and both types.
    """
    table = state.tables.get(spec.name)
    if table is None:
        return None
    old = state.states.get(spec.name)
    if old is not None:
        check_compatible(old, spec.info)
    migrated = old is not None and old.version != spec.version
    declared_later = old is not None and not migrated and is_declared_later(old, spec.info)
    target = spec.layout.schema()
    if migrated or declared_later or spec.layout.value.adapts:
        index = target.get_field_index(VALUE_COLUMN)
        target = target.set(index, table.schema.field(VALUE_COLUMN))
    adapted = adapt(table, target, {LAST_USED_COLUMN: now_ms} if spec.ttl_ms is not None else None)
    try:
        if migrated:
            assert old is not None
            return _migrated(spec, adapted, old)
        if declared_later:
            assert old is not None
            return _unpickled(spec, adapted, old)
        return spec.layout.rows(adapted)
    except StateError as error:
        raise StateError(f"state `{spec.name}`: {error.message}", fix=error.fix) from error


def is_reshaped(spec: TableSpec, state: RestoredState) -> bool:
    """True if deltas in the present shape cannot be merged with the stored table."""
    old = state.states.get(spec.name)
    stored = state.tables[spec.name].schema if old is None else old.arrow_schema()
    other_version = old is not None and old.version != spec.version
    if other_version or stored is None or not stored.equals(spec.layout.schema()):
        return True
    return old is not None and is_declared_later(old, spec.info)


def _migrated(spec: TableSpec, table: pa.Table, old: StateInfo) -> Rows:
    migrate = spec.migrate
    if migrate is None:
        raise StateError(
            f"it is of version {old.version}, and version {spec.version} is declared without migrate=",
            fix="give migrate=, a function of the old value and its version",
        )
    schema = old.arrow_schema()
    assert schema is not None
    plain = spec.layout.plain_values(table, schema.field(VALUE_COLUMN))
    values = [_call(migrate, value, old.version) for value in plain]
    return spec.layout.rows(table, values)


def _unpickled(spec: TableSpec, table: pa.Table, old: StateInfo) -> Rows:
    """The rows of a state that was pickled, and has got a declared type since."""
    schema = old.arrow_schema()
    assert schema is not None
    values = spec.layout.plain_values(table, schema.field(VALUE_COLUMN))
    for value in values:
        try:
            spec.layout.value.hold(value)
        except (TypeError, ValueError) as error:
            raise StateError(
                f"a value that was pickled is not of the type that is declared now: {error}",
                fix="declare a type that all stored values have; or raise version= and give migrate=, "
                "which turns old values into new ones",
            ) from error
    return spec.layout.rows(table, values)


def _call(migrate: Callable[[Any, int], Any], value: Any, version: int) -> Any:
    try:
        return migrate(value, version)
    except HeadgateError:
        raise
    except Exception as error:
        raise StateError(
            f"migrate= raised {type(error).__name__}: {error} value=`{value!r:.200}` version=`{version}`"
        ) from error
