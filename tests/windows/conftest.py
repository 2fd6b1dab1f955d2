"""A harness that runs one operator: what went out, in order, and snapshots split and merged."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pytest

from headgate.operators.base import Operator
from headgate.tests.support.operators import Harness, Recorder, start_operator


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
        start_operator(operator, recorder, tables, index, parallelism)
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
