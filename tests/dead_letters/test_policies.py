"""Records whose function raises: the job fails, or they are dropped, or kept apart; of all steps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import headgate as hg
from headgate.connectors import collect, from_list
from headgate.errors import PlanError, UserCodeError
from headgate.testing import harness

T0 = datetime(2026, 3, 1, tzinfo=UTC)
COLUMNS = {"n": "int64", "at": "timestamp"}


def odd_only(n: int) -> int:
    if n % 2 == 0:
        raise ValueError(f"{n} is even")
    return n


def plain_map(stream: Any, **given: Any) -> Any:
    return stream.map(lambda r: {"n": odd_only(r.n)}, into={"n": "int64"}, name="step", **given)


def async_map(stream: Any, **given: Any) -> Any:
    async def function(r: Any) -> Any:
        await asyncio.sleep(0)
        return {"n": odd_only(r.n)}

    return stream.map(function, into={"n": "int64"}, name="step", **given)


def plain_filter(stream: Any, **given: Any) -> Any:
    return stream.filter(lambda r: odd_only(r.n) > 0, name="step", **given)


def async_filter(stream: Any, **given: Any) -> Any:
    async def function(r: Any) -> bool:
        return odd_only(r.n) > 0

    return stream.filter(function, name="step", **given)


def plain_flat_map(stream: Any, **given: Any) -> Any:
    def function(r: Any) -> Iterator[Any]:
        yield {"n": r.n}
        odd_only(r.n)

    return stream.flat_map(function, into={"n": "int64"}, name="step", **given)


def async_flat_map(stream: Any, **given: Any) -> Any:
    async def function(r: Any) -> Any:
        yield {"n": r.n}
        odd_only(r.n)

    return stream.flat_map(function, into={"n": "int64"}, name="step", **given)


def returning_flat_map(stream: Any, **given: Any) -> Any:
    async def function(r: Any) -> list[Any]:
        return [{"n": odd_only(r.n)}]

    return stream.flat_map(function, into={"n": "int64"}, name="step", **given)


def of_batch(batch: pa.RecordBatch) -> pa.RecordBatch:
    for n in batch.column("n").to_pylist():
        odd_only(n)
    return batch


async def of_batch_later(batch: pa.RecordBatch) -> pa.RecordBatch:
    await asyncio.sleep(0)
    return of_batch(batch)


def batches(stream: Any, **given: Any) -> Any:
    return stream.map_batches(of_batch, name="step", **given)


def async_batches(stream: Any, **given: Any) -> Any:
    return stream.map_batches(of_batch_later, name="step", **given)


def micro_batches(stream: Any, **given: Any) -> Any:
    return stream.map_batches(of_batch, rows=3, name="step", **given)


def async_micro_batches(stream: Any, **given: Any) -> Any:
    return stream.map_batches(of_batch_later, rows=3, name="step", **given)


def async_calls(stream: Any, **given: Any) -> Any:
    async def function(r: Any) -> Any:
        return {"n": odd_only(r.n)}

    return stream.map_async(function, into={"n": "int64"}, name="step", **given)


STEPS = [
    plain_map, async_map, plain_filter, async_filter, plain_flat_map, async_flat_map, returning_flat_map,
    batches, async_batches, micro_batches, async_micro_batches, async_calls,
]  # fmt: skip


def job_of(step: Callable[..., Any], schema: Any = COLUMNS, **given: Any) -> hg.Job:
    job = hg.Job("letters")
    job.checkpoint(every="1h", storage="never-made")
    stream = job.read(from_list([], schema=schema), name="in").event_time("at")
    step(stream, **given).write(collect(guarantee="exactly_once"), name="out")
    return job


def records(*numbers: int) -> list[dict[str, Any]]:
    return [{"n": n, "at": T0 + timedelta(seconds=n)} for n in numbers]


@pytest.mark.parametrize("step", STEPS)
def test_side_output(step: Any) -> None:
    with harness(job_of(step, on_error="side_output")) as h:
        h.push("in", *records(1, 2, 3, 4))
        h.push("in", *records(6, 7))
        h.advance_time("1s")
        h.checkpoint()
        assert [row["n"] for row in h.drain("out")] == [1, 3, 7]
        failed = h.drain("step.failed", as_batches=True)
        table = pa.Table.from_batches(failed)
        assert table.column("record").to_pylist() == records(2, 4, 6)
        assert table.column("error_type").to_pylist() == ["ValueError"] * 3
        assert table.column("error").to_pylist() == ["2 is even", "4 is even", "6 is even"]
        assert set(table.column("operator").to_pylist()) == {"step"}
        assert all("test_policies.py:" in origin for origin in table.column("origin").to_pylist())
        assert table.column("event_time").to_pylist() == [r["at"] for r in records(2, 4, 6)]


@pytest.mark.parametrize("step", STEPS)
def test_drop(step: Any) -> None:
    with harness(job_of(step, on_error="drop")) as h:
        h.push("in", *records(1, 2, 3, 4), *records(6, 7))
        h.end()
        assert [row["n"] for row in h.drain("out")] == [1, 3, 7]


@pytest.mark.parametrize("step", STEPS)
def test_fail(step: Any) -> None:
    message = "the function of `step` raised ValueError: [24] is even"
    with harness(job_of(step)) as h, pytest.raises(UserCodeError, match=message):
        push_to_the_end(h, *records(1, 2, 3, 4))


def push_to_the_end(h: Any, *pushed: Any) -> None:
    h.push("in", *pushed)
    h.advance_time("1s")
    h.end()


@pytest.mark.parametrize("step", STEPS)
def test_nothing_but_dead_letters(step: Any) -> None:
    with harness(job_of(step, on_error="side_output")) as h:
        h.push("in", *records(*range(0, 40, 2)))
        h.advance_time("1s")
        h.end()
        assert h.drain("out") == []
        assert len(h.drain("step.failed")) == 20


@pytest.mark.parametrize("step", STEPS)
def test_dead_letters_are_as_exactly_once_as_all_else(step: Any) -> None:
    job = hg.Job("letters")
    job.checkpoint(every="1h", storage="never-made")
    stream = job.read(from_list([], schema=COLUMNS), name="in").event_time("at")
    made = step(stream, on_error="side_output")
    made.write(collect(guarantee="exactly_once"), name="out")
    made.failed.write(collect(guarantee="exactly_once"), name="letters")
    with harness(job, parallelism=2) as h:
        for start in range(0, 40, 5):
            h.push("in", *records(*range(start, start + 5)))
            if start % 10 == 5:
                h.checkpoint()
            if start == 20:
                h.crash()
        h.crash()
        h.advance_time("1s")
        h.end()
        assert sorted(row["n"] for row in h.drain("out")) == list(range(1, 40, 2))
        letters = sorted(row["record"]["n"] for row in h.drain("letters"))
        assert letters == list(range(0, 40, 2))


class Flaky:
    """Fails the first times it is called for each record; what travels with the job is a copy."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.seen: dict[int, int] = {}

    def __call__(self, n: int) -> int:
        self.seen[n] = self.seen.get(n, 0) + 1
        if self.seen[n] <= self.failures:
            raise ConnectionError(f"call {self.seen[n]}")
        return n


def retried(kind: str, failures: int, stream: Any, **given: Any) -> Any:
    flaky = Flaky(failures)

    def of_rows(batch: pa.RecordBatch) -> pa.RecordBatch:
        for n in batch.column("n").to_pylist():
            flaky(n)
        return batch

    async def later(record: Any) -> Any:
        return {"n": flaky(record.n)}

    async def of_rows_later(batch: pa.RecordBatch) -> pa.RecordBatch:
        return of_rows(batch)

    given = {"name": "step", **given}
    into = {"n": "int64"}
    if kind == "map":
        return stream.map(lambda r: {"n": flaky(r.n)}, into=into, **given)
    if kind == "async map":
        return stream.map(later, into=into, **given)
    if kind == "filter":
        return stream.filter(lambda r: flaky(r.n) > 0, **given)
    if kind == "flat_map":
        return stream.flat_map(lambda r: [{"n": flaky(r.n)}], into=into, **given)
    if kind == "map_async":
        return stream.map_async(later, into=into, **given)
    rows = {"rows": 1} if "micro" in kind else {}
    return stream.map_batches(of_rows_later if "async" in kind else of_rows, **rows, **given)


@pytest.mark.parametrize(
    "kind",
    [
        "map",
        "async map",
        "filter",
        "flat_map",
        "map_async",
        "batches",
        "async batches",
        "micro async",
    ],
)
def test_retries(kind: str) -> None:
    def enough(stream: Any, **given: Any) -> Any:
        return retried(kind, 2, stream, **given)

    for then in ("fail", "drop"):
        with harness(job_of(enough, on_error=hg.OnError(then, retries=2))) as h:
            h.push("in", *records(1))
            h.push("in", *records(3))
            h.end()
            assert [row["n"] for row in h.drain("out")] == [1, 3]
    with harness(job_of(enough, on_error=hg.OnError("side_output", retries=1))) as h:
        h.push("in", *records(1))
        h.end()
        assert h.drain("out") == []
        assert [row["error"] for row in h.drain("step.failed")] == ["call 2"]


@pytest.mark.parametrize("step", ["map", "map_async", "flat_map"])
def test_a_result_that_does_not_fit_is_a_failure_as_well(step: str) -> None:
    def wrong(r: Any) -> Any:
        return {"n": r.n if r.n != 2 else "two"}

    async def wrong_later(r: Any) -> Any:
        return wrong(r)

    def made(stream: Any, **given: Any) -> Any:
        if step == "map":
            return stream.map(wrong, into={"n": "int64"}, name="step", **given)
        if step == "map_async":
            return stream.map_async(wrong_later, into={"n": "int64"}, name="step", **given)
        return stream.flat_map(
            lambda r: [{"n": 0}, wrong(r)], into={"n": "int64"}, name="step", **given
        )

    with harness(job_of(made, on_error="side_output")) as h:
        h.push("in", *records(1, 2, 3))
        h.end()
        found = [row["n"] for row in h.drain("out")]
        assert found == ([0, 1, 0, 3] if step == "flat_map" else [1, 3])
        (letter,) = h.drain("step.failed")
        assert letter["record"]["n"] == 2
        assert "returned a str for column `n` of type int64" in letter["error"]


def test_objects_become_objects() -> None:
    job = hg.Job("objects")
    made = job.read(from_list([]), name="in").map(odd_only, name="step", on_error="side_output")
    made.write(collect(guarantee="none"), name="out")
    with harness(job) as h:
        h.push("in", 1, 2)
        (letter,) = h.drain("step.failed")
        assert isinstance(letter, hg.FailedRecord)
        assert (letter.record, letter.error_type, letter.error) == (2, "ValueError", "2 is even")
        assert letter.operator == "step"
        assert letter.event_time is None
        assert h.drain("out") == [1]


def test_exceptions_of_other_modules_are_named_in_full() -> None:
    def fails(n: int) -> None:
        raise asyncio.InvalidStateError("x" * 3_000)

    job = hg.Job("objects")
    job.read(from_list([]), name="in").map(fails, name="step", on_error="side_output").write(
        collect(guarantee="none"), name="out"
    )
    with harness(job) as h:
        h.push("in", 1)
        (letter,) = h.drain("step.failed")
        assert letter.error_type == "asyncio.exceptions.InvalidStateError"
        assert len(letter.error) == 2_000


def test_a_batch_function_is_called_for_ever_smaller_parts() -> None:
    job = hg.Job("parts")
    sizes = job.read(from_list([], schema={"n": "int64"}), name="in").map_batches(
        lambda batch: of_batch(batch).append_column("rows", pa.array([len(batch)] * len(batch))),
        into={"n": "int64", "rows": "int64"},
        name="step",
        on_error="side_output",
    )
    sizes.write(collect(guarantee="none"), name="out")
    with harness(job) as h:
        h.push("in", *[{"n": n} for n in (1, 3, 5, 7, 9, 11, 13, 2)])
        assert [row["rows"] for row in h.drain("out")] == [4, 4, 4, 4, 2, 2, 1]
        assert [row["record"] for row in h.drain("step.failed")] == [{"n": 2}]


def test_a_batch_function_that_breaks_its_promise_fails_the_job() -> None:
    job = hg.Job("parts")
    stream = job.read(from_list([], schema={"n": "int64"}), name="in")
    stream.map_batches(lambda batch: batch.to_pylist(), name="step", on_error="drop").write(
        collect(guarantee="none"), name="out"
    )
    message = "returned a list, not a pyarrow.RecordBatch"
    with harness(job) as h, pytest.raises(UserCodeError, match=message):
        push_to_the_end(h, {"n": 1})


def test_columns_nobody_else_reads_are_in_dead_letters() -> None:
    """The job reads only columns that are used: with dead letters all are."""
    job = hg.Job("wide")
    schema = {"n": "int64", "other": "string", "more": "double"}
    made = job.read(from_list([], schema=schema), name="in").map(
        lambda r: {"n": odd_only(r.n)}, into={"n": "int64"}, name="step", on_error="side_output"
    )
    made.write(collect(guarantee="none"), name="out")
    made.failed.write(collect(guarantee="none"), name="letters")
    with harness(job) as h:
        h.push("in", {"n": 2, "other": "x", "more": 0.5})
        assert [row["record"] for row in h.drain("letters")] == [
            {"n": 2, "other": "x", "more": 0.5}
        ]


def test_dead_letters_are_a_stream_of_columns() -> None:
    job = hg.Job("columns")
    made = plain_map(
        job.read(from_list([], schema=COLUMNS), name="in").event_time("at"), on_error="side_output"
    )
    schema = made.failed.schema
    said = ["error_type", "error", "operator", "origin", "event_time", "source", "split", "offset"]
    assert schema.names == ["record", *said]
    assert schema.field("record").type.field("n").type == pa.int64()
    again = made.failed.map_batches(
        lambda batch: pa.record_batch({"n": pc.struct_field(batch.column("record"), "n")}),
        into={"n": "int64"},
    )
    made.write(collect(guarantee="none"), name="out")
    again.write(collect(guarantee="none"), name="again")
    with harness(job) as h:
        h.push("in", *records(1, 2))
        assert h.drain("again") == [{"n": 2}]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("skip", "not a policy for errors on_error=`skip`"),
        (3, "not a policy for errors on_error=`int`"),
        (hg.OnError("nothing"), "not a policy for errors on_error=`nothing`"),  # type: ignore[arg-type]
        (hg.OnError("drop", retries=True), "retries of an OnError must be"),
    ],
)
@pytest.mark.parametrize("step", [plain_map, plain_filter, plain_flat_map, batches, async_calls])
def test_mistakes(step: Any, given: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message) as caught:
        job_of(step, on_error=given)
    assert "test_policies.py" in caught.value.where


def test_expressions_have_no_policy() -> None:
    stream = hg.Job("x").read(from_list([], schema=COLUMNS), name="in")
    with pytest.raises(PlanError, match="on_error= is for functions"):
        stream.filter("n > 0", on_error="drop")


def test_without_a_policy_there_is_no_stream_of_failures() -> None:
    stream = hg.Job("x").read(from_list([], schema=COLUMNS), name="in")
    with pytest.raises(PlanError, match="`step` has no side output `failed`"):
        _ = plain_map(stream, on_error="drop").failed
