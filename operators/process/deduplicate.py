"""Deduplication: process functions that keep the first record of each key.

What has been seen is one flag per key. A flag with a time to live is forgotten that long after the
record that set it, so that the next record of its key is a first one again.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import pyarrow as pa

from ...state.keyed.descriptors import ValueState
from ...state.keyed.ttl import StateTtl
from .batches import Groups, KeyedBatchProcess
from .context import Context
from .functions import KeyedProcess


class FirstRows(KeyedBatchProcess[Any, Any, Any]):
    """Keeps the first row of each key."""

    seen = ValueState[bool]()

    def on_batch(self, groups: Groups[Any], ctx: Context[Any]) -> Iterable[pa.RecordBatch]:
        for _, rows in groups:
            if self.seen.get() is None:
                self.seen.set(True)
                yield rows.slice(0, 1)


class FirstRecords(KeyedProcess[Any, Any, Any]):
    """Keeps the first record of each key, for keys that are made by a function."""

    seen = ValueState[bool]()

    def on_record(self, record: Any, ctx: Context[Any]) -> Iterable[Any]:
        if self.seen.get() is None:
            self.seen.set(True)
            yield record


def first_of_each_key(
    *, columns: bool, ttl: str | timedelta | StateTtl | None
) -> FirstRows | FirstRecords:
    """Return the function for rows whose key is made of columns, or for other records.

    Args:
        columns: the records are columns, and so is the key.
        ttl: how long a key is remembered; None: for good.
    """
    base = FirstRows if columns else FirstRecords
    # State is declared in a class, so a time to live of its own needs a class of its own.
    made: FirstRows | FirstRecords = type(
        base.__name__, (base,), {"seen": ValueState[bool](ttl=ttl, name="seen")}
    )()
    return made
