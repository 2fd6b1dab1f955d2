"""A harness that runs one operator: what went out, in order, and snapshots split and merged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa
import pytest

from headgate.operators.base import Operator
from headgate.operators.elements import Batch
from headgate.state.snapshot import RestoredState
from headgate.tests.support.operators import Recorder, checked_tables, operator_context, rows_of


@dataclass
class Harness:
    """One subtask of an operator."""

    operator: Operator
    output: Recorder

    def process(self, batch: Batch) -> None:
        self.operator.process(batch, 0)

    def watermark(self, timestamp: int) -> None:
        self.operator.on_watermark(timestamp)

    def tables(self) -> dict[str, pa.Table]:
        """The snapshot, its tables made at once; checks their promised form."""
        snapshot = self.operator.snapshot(1)
        assert snapshot is not None
        return checked_tables(snapshot.tables)


@pytest.fixture(scope="session")
def start() -> Callable[..., Harness]:
    """Starts subtask `index` of `parallelism`, restored from `tables` cut to its key groups."""

    def start_(
        operator: Operator,
        tables: dict[str, pa.Table] | None = None,
        index: int = 0,
        parallelism: int = 1,
    ) -> Harness:
        recorder = Recorder()
        operator.output = recorder
        context = operator_context(index, parallelism, metrics=recorder)
        operator.open(context)
        if tables is not None:
            operator.restore(RestoredState(tables=rows_of(context.key_groups, tables)))
        return Harness(operator, recorder)

    return start_


@pytest.fixture(autouse=True, scope="module", params=[None, 0, 3], ids=["few", "own", "mixed"])
def small_rows(request):
    """Run every test with windows in the shared table, in tables of their own, and in both."""
    from headgate.operators.windows import tumbling

    before = tumbling.SMALL_ROWS
    if request.param is not None:
        tumbling.SMALL_ROWS = request.param
    yield
    tumbling.SMALL_ROWS = before
