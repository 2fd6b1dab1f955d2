"""Only the columns that a process function reads become Python objects, and nobody can tell."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

import headgate as hg
from headgate.api.job_definition import WrittenJob
from headgate.connectors import collect, generator, sequence
from headgate.errors import UserCodeError


class Prices(hg.KeyedProcess[int, Any, Any]):
    """Reads one column; what fails goes aside as a whole record."""

    def on_record(self, record: Any, ctx: hg.Context[int]) -> Any:
        return [(ctx.key, 12 // record.price)]


def _run(by: Any, on_error: Any = None) -> tuple[list[Any], list[Any]]:
    job = hg.Job("j", parallelism=1)
    columns = {"key": sequence(), "price": sequence(), "other": sequence()}
    rows = job.read(generator(columns, rows=4), name="rows")
    keyed = rows.key_by("key") if isinstance(by, str) else rows.key_with(by)
    extra = {} if on_error is None else {"on_error": on_error}
    made = keyed.process(Prices(), name="prices", **extra)
    out, failed = collect(guarantee="none"), collect(guarantee="none")
    made.write(out, name="out")
    if on_error is not None:
        made.failed.write(failed, name="failed")
    job.run()
    return sorted(out.rows), failed.rows


def test_the_key_function_reads_other_columns_than_the_function() -> None:
    found, _ = _run(lambda row: row.other + row.price, "side_output")
    assert found == [(2, 12), (4, 6), (6, 4)]


def test_a_failed_record_has_all_its_columns() -> None:
    found, failed = _run("key", "side_output")
    assert found == [(1, 12), (2, 6), (3, 4)]
    (letter,) = failed
    assert "other" in str(letter)


def _third_raises(row: Any) -> int:
    return next(iter([row.key] if row.key < 2 else []))


def test_stop_iteration_of_a_key_function_names_the_record() -> None:
    """Inside `map` it would look like the end of the records."""
    with pytest.raises(UserCodeError, match=r"raised StopIteration record="):
        _run(_third_raises)


class Seen(hg.KeyedProcess[Any, Any, Any]):
    """Counts the records of a key, and forgets them when its time has come."""

    seen = hg.ValueState[int](default=0)

    def on_record(self, record: Any, ctx: hg.Context[Any]) -> Any:
        self.seen.set(self.seen.get() + 1)
        ctx.event_time.at(0 if ctx.key == 1 else 50)
        return [(ctx.key, self.seen.get())]

    def on_timer(self, timer: hg.Timer, ctx: hg.Context[Any]) -> Any:
        self.seen.clear()


SMALL = [0, 1, 250, 251, 2**61 - 2]
"""Ints that are their own hashes."""


@pytest.mark.parametrize(
    "keys",
    [SMALL, [*SMALL, 2**61 - 1, 2**61, 2**63 - 1], [*SMALL, -1, -2, -251, -(2**63)], [1, None, -1]],
    ids=["small", "large", "negative", "null"],
)
def test_keys_of_a_column_are_those_of_timers_and_queries(steps: Any, keys: list[Any]) -> None:
    """A batch has its keys as numbers, a timer and a query have a single one as an object."""
    rows = WrittenJob("test").read(generator({"k": sequence(), "n": sequence()}), name="in")
    step = steps(rows.event_time("n").key_by("k").process(Seen(), name="p"))
    (operator,) = step.operators
    batch = pa.record_batch({"k": pa.array([*keys, *keys], pa.int64()), "n": range(2 * len(keys))})
    step.push_columns(batch, list(range(2 * len(keys))))
    assert [operator.query("seen", key) for key in keys] == [2] * len(keys)
    step.watermark(10)
    step.push_columns(batch, list(range(2 * len(keys))))
    assert [operator.query("seen", key) for key in keys] == [2 if key == 1 else 4 for key in keys]
