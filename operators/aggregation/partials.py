"""Partial results: aggregates of some records of a key, which another operator adds to those of others.

A batch of them has the keys, `PARTIAL_ROWS` with the number of records in each row, and the state columns
of the aggregates, as in a snapshot; `count()` needs none beside that number. What takes them tells
batches of records and of partial results apart by that column, so both may come on one channel.

Only aggregates have partial results whose sums do not depend on the order of records: counts, sums
and averages of integers, and the least and greatest of what lies in memory as a number.
"""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa

from ...errors import StateError
from ...state.values import PARTIAL_ROWS, Values, values_of
from .aggregates import Aggregate, AggregatePlan


def adds_partials(plan: AggregatePlan) -> bool:
    """Return True if all aggregates of a plan can be computed from partial results, exactly."""
    return plan.ttl_ms is None and all(spec.new().adds_partials for spec in plan.specs)


def partial_plan(plan: AggregatePlan) -> AggregatePlan:
    """Return the plan of the partial results for `plan`: their state columns are its `partial_fields`."""
    values = {name: one for name, one in plan.aggregates.items() if one.columns}
    return replace(plan, aggregates={PARTIAL_ROWS: Aggregate("count"), **values}, added=())


def are_partial(data: pa.RecordBatch) -> bool:
    """Return True for partial results, False for records."""
    return bool(data.schema.get_field_index(PARTIAL_ROWS) >= 0)


def records_in(data: pa.RecordBatch) -> int:
    """Return the number of records in partial results."""
    return int(data.column(PARTIAL_ROWS).to_numpy().sum())


def partial_values(plan: AggregatePlan, data: pa.RecordBatch) -> dict[str, Values]:
    """Return the columns of partial results.

    Raises:
        StateError: they were made for other aggregates, before the job was changed.
    """
    names = [field.name for field in plan.partial_fields]
    for name in names:
        if data.schema.get_field_index(name) < 0:
            raise StateError(
                f"the checkpoint holds partial results that were on their way here, and this aggregate "
                f"is new column=`{name}`",
                where=plan.where,
                fix="let the old job take a savepoint, which holds no such results, and start from it",
            )
    return {name: values_of(data.column(name)) for name in names}
