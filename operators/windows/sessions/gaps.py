"""The session gap of each record of a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias, cast

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from ....errors import DataError, PlanError
from ...expressions.expressions import Column, check_select, result_type, show
from .window import GAP_MS_MAX, SessionWindow

Milliseconds: TypeAlias = npt.NDArray[np.int64]
_COLUMN = "headgate_gap"


@dataclass(frozen=True)
class FixedGap:
    """The same gap for all records."""

    ms: int
    reads: frozenset[str] = frozenset()

    def of(self, data: pa.RecordBatch) -> int | Milliseconds:
        """Return the gap in ms: one for all rows, or one for each."""
        return self.ms


@dataclass(frozen=True)
class ColumnGap:
    """A gap from an expression over the columns, checked at plan time."""

    column: Column
    text: str
    step: str

    @property
    def reads(self) -> frozenset[str]:
        """The columns that it reads."""
        return self.column.reads

    def of(self, data: pa.RecordBatch) -> int | Milliseconds:
        """Return the gap of each row in ms.

        Raises:
            DataError: null, not above 0, or too long.
        """
        array = self._evaluate(data)
        if pa.types.is_duration(array.type):
            array = array.cast(pa.duration("ms"), safe=False).cast(pa.int64())
        array = array.cast(pa.int64())
        if array.null_count:
            self._refuse(data, int(np.argmax(array.is_null().to_numpy(zero_copy_only=False))), None)
        gaps: Milliseconds = array.to_numpy()
        wrong = (gaps <= 0) | (gaps > GAP_MS_MAX)
        if wrong.any():
            at = int(np.argmax(wrong))
            self._refuse(data, at, int(gaps[at]))
        return gaps

    def _evaluate(self, data: pa.RecordBatch) -> pa.Array:
        if self.column.source is not None:
            return data.column(self.column.source)
        frame = cast(pl.DataFrame, pl.from_arrow(data.select(sorted(self.column.reads))))
        series = frame.select(self.column.expression).to_series()
        array = series.to_arrow()
        return pc.cast(array, array.type)

    def _refuse(self, data: pa.RecordBatch, row: int, gap: int | None) -> None:
        record = data.slice(row, 1).to_pylist()[0]
        raise DataError(
            f"the gap of a session must be above 0 ms gap_ms=`{gap}` expression=`{self.text}` "
            f"step=`{self.step}` record=`{record!r}`",
            fix="filter such records out before, or give them a gap: coalesce(gap, 1000)",
        )


def bound_gap(
    window: SessionWindow, schema: pa.Schema, step: str, where: str
) -> FixedGap | ColumnGap:
    """Return the gap of a session over records of `schema`.

    Raises:
        PlanError: a function, an expression that does not fit the columns, or one that is not of
            whole milliseconds or durations.
    """
    if window.gap_ms is not None:
        return FixedGap(window.gap_ms)
    gap = window.gap
    if not isinstance(gap, str | pl.Expr):
        raise PlanError(
            "the gap of a session is a function, and columns have no records to call it with",
            where=where,
            fix='write it as an expression, such as hg.session("gap_ms"), or use .reduce, .aggregate or '
            ".process",
        )
    text = show(gap)
    named: str | pl.Expr = gap
    if isinstance(gap, str) and gap not in schema.names:
        named = f"{gap} AS {_COLUMN}"
    columns = check_select([named], schema, "the gap of session", where)
    kind = result_type(columns[0], schema) if len(columns) == 1 else pa.null()
    if not (pa.types.is_integer(kind) or pa.types.is_duration(kind)):
        raise PlanError(
            f"the gap of a session is `{text}`, of type {kind}",
            where=where,
            fix="give whole milliseconds, such as CAST(seconds * 1000 AS BIGINT), or a duration",
        )
    return ColumnGap(columns[0], text, step)
