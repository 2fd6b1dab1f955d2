"""Filters and selects as one pass over a batch.

Only columns that are computed on enter Polars (crossing over costs about 10 µs each, and far more
for text); all others stay in Arrow and are only filtered. Columns that no later step reads are
dropped before filtering.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import msgspec
import pyarrow as pa

from ...errors import DataError
from ..base import Operator
from ..elements import Batch, ColumnBatch, Positions, Timestamps
from ..lazy_modules import pl
from ..rows import column_batch
from .arrow_expressions import arrow_condition, arrow_number
from .expressions import Column, result_type


class FilterStep(msgspec.Struct, frozen=True):
    """Keeps the records for which `predicate` is true (not false, not null)."""

    predicate: Column
    text: str


class SelectStep(msgspec.Struct, frozen=True):
    """Makes new columns from the record; errors call the step `verb`."""

    columns: tuple[Column, ...]
    text: str
    verb: str = "select"


Step: TypeAlias = FilterStep | SelectStep


def steps_schema(steps: Sequence[Step], schema: pa.Schema) -> pa.Schema:
    """Return the schema of the result for records of `schema`."""
    for step in steps:
        if isinstance(step, SelectStep):
            schema = pa.schema(
                [
                    schema.field(column.source).with_name(column.name)
                    if column.source is not None
                    else pa.field(column.name, result_type(column, schema))
                    for column in step.columns
                ]
            )
    return schema


def columns_read(steps: Sequence[Step]) -> tuple[frozenset[str], bool]:
    """Return the input columns that the steps read, and whether all others pass through."""
    reads: frozenset[str] = frozenset()
    for step in steps:
        if isinstance(step, SelectStep):
            return reads.union(*(column.reads for column in step.columns)), False
        reads |= step.predicate.reads
    return reads, True


class ExpressionSteps:
    """Filters and selects, checked at plan time and bound to the schema of their input."""

    def __init__(self, steps: Sequence[Step], schema: pa.Schema) -> None:
        self.steps = tuple(steps)
        self.input_schema = schema
        self.output_schema = steps_schema(steps, schema)
        self._stages = _bind(self.steps, schema)
        self._picked = _picked(self.steps)

    def __reduce__(self) -> tuple[Any, ...]:
        return ExpressionSteps, (self.steps, self.input_schema)

    def describe(self) -> str:
        """Describe the steps in order, for `explain`."""
        return "; ".join(step.text for step in self.steps)

    def apply(self, batch: ColumnBatch) -> ColumnBatch | None:
        """Return the records that pass the steps; None if there are none.

        Raises:
            DataError: a value has no result, such as text in a `CAST` to a number.
        """
        if self._picked is not None:
            return ColumnBatch(batch.data.select(self._picked), batch.timestamps, batch.positions)
        work = _Work(batch)
        for step, stage in zip(self.steps, self._stages, strict=True):
            try:
                if not stage.run(work):
                    return None
            except (
                pl.exceptions.PolarsError,
                pl.exceptions.PanicException,
                pa.ArrowException,
            ) as error:
                raise _no_result(step, error) from error
        return work.result()


def _no_result(step: Step, error: BaseException) -> DataError:
    """Return the error for a value for which an expression fails; a retry would fail again."""
    kind = "filter" if isinstance(step, FilterStep) else step.verb
    reason = str(error).strip().partition("\n")[0] or type(error).__name__
    return DataError(
        f"`{step.text}` in {kind} fails for a record: {reason}",
        fix="TRY_CAST makes null of a value that cannot be converted; or filter such records out before",
    )


class ExpressionOperator(Operator):
    """Runs `ExpressionSteps` on column batches."""

    def __init__(self, steps: ExpressionSteps) -> None:
        self._steps = steps

    def process(self, batch: Batch, input_index: int) -> None:
        if len(batch):
            result = self._steps.apply(column_batch(batch))
            if result is not None:
                self.output.emit(result)


class ExpressionFactory(msgspec.Struct, frozen=True):
    """Makes the operator; the optimiser uses its steps to merge neighbours."""

    steps: ExpressionSteps

    def __call__(self) -> ExpressionOperator:
        return ExpressionOperator(self.steps)


class _Work:
    """A batch in the course of the steps: columns as Arrow arrays, as Polars series, or both."""

    __slots__ = ("arrays", "positions", "rows", "series", "times")

    def __init__(self, batch: ColumnBatch) -> None:
        data = batch.data
        self.arrays: dict[str, pa.Array] = dict(zip(data.schema.names, data.columns, strict=True))
        self.series: dict[str, pl.Series] = {}
        self.rows = len(batch)
        self.times: Timestamps | None = batch.timestamps
        self.positions: Positions | None = batch.positions

    def frame(self, names: Iterable[str]) -> pl.DataFrame:
        series = self.series
        for name in names:
            if name not in series:
                series[name] = pl.Series(name, self.arrays[name])
        return pl.DataFrame([series[name] for name in names])

    def result(self) -> ColumnBatch:
        arrays = self.arrays
        data = pa.RecordBatch.from_arrays(list(arrays.values()), names=list(arrays))
        return ColumnBatch(data, self.times, self.positions)


class _Filter:
    """A filter step; `keep` are the columns read later, None for all."""

    def __init__(self, step: FilterStep, schema: pa.Schema, keep: frozenset[str] | None) -> None:
        self._reads = tuple(sorted(step.predicate.reads))
        self._expression = step.predicate.expression
        self._keep = keep
        tree = step.predicate.tree
        self._plain = None if tree is None else arrow_condition(tree, schema)
        self._always = None if self._reads else bool(pl.select(self._expression).item())

    def run(self, work: _Work) -> bool:
        if self._keep is not None:
            keep = self._keep.union(self._reads)
            work.arrays = {name: array for name, array in work.arrays.items() if name in keep}
        if self._always is not None:
            return self._always
        mask = self._mask(work)
        kept = mask.true_count
        if kept == work.rows:
            return True
        if kept == 0:
            return False
        if work.times is not None or work.positions is not None:
            plain = mask.fill_null(False) if mask.null_count else mask
            if work.times is not None:
                work.times = work.times[plain.to_numpy(zero_copy_only=False)]
            if work.positions is not None:
                work.positions = work.positions.of(plain)
        arrays = work.arrays
        if self._keep is not None:
            arrays = {name: array for name, array in arrays.items() if name in self._keep}
        if arrays:
            data = pa.RecordBatch.from_arrays(list(arrays.values()), names=list(arrays)).filter(
                mask
            )
            arrays = dict(zip(arrays, data.columns, strict=True))
        work.arrays, work.series, work.rows = arrays, {}, kept
        return True

    def _mask(self, work: _Work) -> pa.BooleanArray:
        if self._plain is not None:
            return self._plain(work.arrays)
        return work.frame(self._reads).select(self._expression).to_series().to_arrow()


class _Select:
    """A select step."""

    def __init__(self, step: SelectStep, schema: pa.Schema) -> None:
        target = steps_schema([step], schema)
        self._columns = [(column.name, column.source) for column in step.columns]
        computed = [column for column in step.columns if column.source is None]
        # Not by way of Python's types: a time may be beyond the years 1 to 9999.
        self._constants: dict[str, pa.Scalar] = {
            column.name: pl.select(column.expression)
            .to_series()
            .to_arrow()
            .cast(target.field(column.name).type)[0]
            for column in computed
            if not column.reads
        }
        varying = [column for column in computed if column.reads]
        self._types = {column.name: target.field(column.name).type for column in varying}
        numbers = {
            column.name: arrow_number(column.tree, schema, self._types[column.name])
            for column in varying
            if column.tree is not None
        }
        self._plain = {name: number for name, number in numbers.items() if number is not None}
        """The columns that Arrow computes; Polars computes the others."""
        others = [column for column in varying if column.name not in self._plain]
        self._reads = tuple(sorted(frozenset().union(*(column.reads for column in others))))
        self._expressions = [column.expression for column in others]

    def run(self, work: _Work) -> bool:
        made = {name: number(work.arrays) for name, number in self._plain.items()}
        series: dict[str, pl.Series] = {}
        if self._expressions:
            for column in work.frame(self._reads).select(self._expressions).get_columns():
                array = column.to_arrow()
                kind = self._types[column.name]
                made[column.name] = array if array.type == kind else array.cast(kind)
                series[column.name] = column
        for name, constant in self._constants.items():
            made[name] = pa.repeat(constant, work.rows)
        arrays = work.arrays
        work.arrays = {
            name: made[name] if source is None else arrays[source] for name, source in self._columns
        }
        work.series = series
        return True


def _bind(steps: tuple[Step, ...], schema: pa.Schema) -> list[_Filter | _Select]:
    """Bind the steps, with the columns that are still read after each."""
    stages: list[_Filter | _Select] = []
    for index, step in enumerate(steps):
        if isinstance(step, FilterStep):
            later, passes = columns_read(steps[index + 1 :])
            stages.append(_Filter(step, schema, None if passes else later))
        else:
            stages.append(_Select(step, schema))
            schema = steps_schema([step], schema)
    return stages


def _picked(steps: tuple[Step, ...]) -> list[str] | None:
    """Return the selected columns, if nothing else is done: pruning puts such steps before exchanges."""
    if len(steps) != 1 or not isinstance(steps[0], SelectStep):
        return None
    columns = steps[0].columns
    if any(column.source != column.name for column in columns):
        return None
    return [column.name for column in columns]
