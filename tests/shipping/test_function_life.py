"""open and close of function objects, and objects per worker: when they are called, and how often."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pyarrow as pa
import pytest

import headgate as hg
from headgate.connectors import collect, from_list, function_sink
from headgate.errors import HeadgateError, PlanError, UserCodeError
from headgate.operators.base import OperatorContext
from headgate.operators.functions.per_worker import worker_begins, worker_ends
from headgate.tests.support.threads import begun

# Jobs run in this process, so this list is that of their functions.
SAID: list[str] = []


@pytest.fixture(autouse=True)
def nothing_said() -> None:
    SAID.clear()


def say(text: str) -> None:
    sys.modules[__name__].SAID.append(text)  # this function may be a copy that came by value


class Number(msgspec.Struct):
    n: int


class Opened:
    """Says what is called; the lock would not go through a pickle, nor be copied."""

    def open(self, ctx: OperatorContext) -> None:
        self.lock = threading.Lock()
        say(f"open {ctx.operator_name} {ctx.subtask_index}")

    def close(self) -> None:
        say("close")

    def check(self, value: Any) -> Any:
        with self.lock:
            return value


class Mapped(Opened):
    def __call__(self, row: Any) -> Any:
        return self.check(Number(row.n))


class Kept(Opened):
    def __call__(self, row: Any) -> bool:
        return bool(self.check(True))


class Flat(Opened):
    def __call__(self, row: Any) -> list[Number]:
        return [self.check(Number(row.n))]


class Batched(Opened):
    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return self.check(batch)


class Written(Opened):
    def __call__(self, row: Any) -> None:
        self.check(row)


class Awaited(Opened):
    async def open(self, ctx: OperatorContext) -> None:  # type: ignore[override]
        await asyncio.sleep(0)
        super().open(ctx)

    async def close(self) -> None:  # type: ignore[override]
        await asyncio.sleep(0)
        super().close()


class AsyncMapped(Awaited):
    async def __call__(self, row: Any) -> Any:
        return self.check(Number(row.n))


class AsyncKept(Awaited):
    async def __call__(self, row: Any) -> bool:
        return bool(self.check(True))


class AsyncFlat(Awaited):
    async def __call__(self, row: Any) -> Any:
        yield self.check(Number(row.n))


class AsyncBatched(Awaited):
    async def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return self.check(batch)


class LookedUp(Awaited):
    async def __call__(self, key: int) -> Any:
        return self.check({"m": key})


STEPS: dict[str, Callable[[Any], Any]] = {
    "map": lambda s: s.map(Mapped(), into=Number, name="step"),
    "filter": lambda s: s.filter(Kept(), name="step"),
    "flat_map": lambda s: s.flat_map(Flat(), into=Number, name="step"),
    "map_batches": lambda s: s.map_batches(Batched(), name="step"),
    "map_batches of rows": lambda s: s.map_batches(Batched(), rows=2, name="step"),
    "async map": lambda s: s.map(AsyncMapped(), into=Number, name="step"),
    "async filter": lambda s: s.filter(AsyncKept(), name="step"),
    "async flat_map": lambda s: s.flat_map(AsyncFlat(), into=Number, name="step"),
    "async map_batches": lambda s: s.map_batches(AsyncBatched(), name="step"),
    "async map_batches of rows": lambda s: s.map_batches(AsyncBatched(), rows=2, name="step"),
    "map_async": lambda s: s.map_async(AsyncMapped(), into=Number, name="step"),
    "map_async by key": lambda s: s.key_by("n").map_async(AsyncMapped(), into=Number, name="step"),
    "lookup": lambda s: s.lookup("n", LookedUp(), into={"m": pa.int64()}, name="step").select("n"),
    "flat_map that drops": lambda s: s.flat_map(Flat(), into=Number, name="step", on_error="drop"),
}


def numbers(job: hg.Job) -> Any:
    rows = [{"n": n} for n in range(5)]
    return job.read(from_list(rows, schema={"n": pa.int64()}), name="in").rebalance()


@pytest.mark.parametrize("name", STEPS)
def test_each_subtask_opens_and_closes_its_own_copy(name: str) -> None:
    job = hg.Job("lives", parallelism=2)
    out = collect(guarantee="none")
    STEPS[name](numbers(job)).write(out, name="out")
    job.run()
    assert sorted(row["n"] for row in out.rows) == list(range(5))
    assert sorted(SAID) == ["close", "close", "open step 0", "open step 1"]


def test_a_sink_function_has_a_life_too() -> None:
    job = hg.Job("lives", parallelism=2)
    numbers(job).write(function_sink(Written(), guarantee="none"), name="step")
    job.run()
    assert sorted(SAID) == ["close", "close", "open step 0", "open step 1"]


class FailsToOpen(Mapped):
    def open(self, ctx: OperatorContext) -> None:
        raise ConnectionError("nobody is there")


def test_an_open_that_raises_names_the_step_and_is_not_closed() -> None:
    job = hg.Job("lives")
    job.restart(0)
    numbers(job).map(FailsToOpen(), into=Number, name="step").write(
        collect(guarantee="none"), name="out"
    )
    with pytest.raises(HeadgateError) as failed:
        job.run()
    assert "the function of `step` raised ConnectionError: nobody is there" in str(failed.value)
    assert SAID == []


class FailsOnce(Mapped):
    def __call__(self, row: Any) -> Any:
        if "close" not in sys.modules[__name__].SAID:
            raise ValueError("not yet")
        return row


def test_a_failed_attempt_closes_what_it_opened() -> None:
    job = hg.Job("lives")
    job.restart(1, "0s")
    numbers(job).map(lambda row: Number(row.n)).map(FailsOnce(), name="step").write(
        collect(guarantee="none"), name="out"
    )
    job.run()
    assert SAID == ["open step 0", "close", "open step 0", "close"]


class WrongOpen(Mapped):
    def open(self) -> None:  # type: ignore[override]
        pass


def test_an_open_that_cannot_be_called_is_refused_at_once() -> None:
    with pytest.raises(PlanError, match="open of `WrongOpen` cannot be called: too many") as error:
        numbers(hg.Job("lives")).map(WrongOpen())
    assert "def open(self, ctx)" in error.value.fix


class AsyncWritten(Awaited):
    def __call__(self, row: Any) -> None:
        pass


def test_a_plain_sink_function_cannot_await_its_open() -> None:
    with pytest.raises(PlanError, match="open of `AsyncWritten` is a coroutine function"):
        function_sink(AsyncWritten())


# per_worker


class Connection:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        say("made")

    def ask(self, n: int) -> int:
        with self.lock:
            return n

    async def aclose(self) -> None:
        await asyncio.sleep(0)
        say("closed")


connection = hg.per_worker(Connection)


def ask(row: Any) -> Number:
    return Number(connection().ask(row.n))


async def ask_async(row: Any) -> Number:
    return Number(connection().ask(row.n))


def test_all_functions_of_a_process_share_the_object_and_its_end_closes_it() -> None:
    for _ in range(2):  # a second run in the same process has an object of its own
        SAID.clear()
        job = hg.Job("shares", parallelism=2)
        out = collect(guarantee="none")
        stream = numbers(job).map(ask, into=Number, name="a").rebalance()
        stream.map_async(ask_async, into=Number, name="b").write(out, name="out")
        job.run()
        assert len(out.rows) == 5
        assert SAID == ["made", "closed"]


def test_nobody_used_it() -> None:
    job = hg.Job("shares")
    numbers(job).filter("n < 0").map(ask, into=Number, name="a").write(
        collect(guarantee="none"), name="out"
    )
    job.run()
    assert SAID == []


def test_the_last_worker_of_a_process_closes_it(caplog: pytest.LogCaptureFixture) -> None:
    class Breaks:
        def close(self) -> None:
            say("closed")
            raise ValueError("the other side went first")

    handle = hg.per_worker(Breaks)
    first, second = object(), object()
    worker_begins(first)
    worker_begins(second)
    assert handle() is handle()
    asyncio.run(worker_ends(first))
    assert SAID == []
    asyncio.run(worker_ends(second))
    assert SAID == ["closed"]
    assert "ValueError: the other side went first" in caplog.text


def test_many_threads_make_one_object() -> None:
    all_there = threading.Barrier(8)

    def use() -> object:
        all_there.wait()
        return connection()

    making = [begun(use) for _ in range(8)]
    made = [each.result() for each in making]
    assert len(set(map(id, made))) == 1
    assert SAID == ["made"]
    worker = object()
    worker_begins(worker)
    asyncio.run(worker_ends(worker))


def test_a_handle_that_is_not_called_says_so() -> None:
    with pytest.raises(AttributeError, match=r"call it first, as in handle\(\)\.ask"):
        connection.ask(1)  # type: ignore[attr-defined]


@pytest.mark.parametrize("factory", [3, lambda n: n, ask_async])
def test_a_factory_that_cannot_be_called_is_refused(factory: Any) -> None:
    with pytest.raises(PlanError, match="per_worker"):
        hg.per_worker(factory)


def test_what_the_factory_raises_is_an_error_of_the_step() -> None:
    def refuses() -> Connection:
        raise ConnectionError("nobody is there")

    handle = hg.per_worker(refuses)
    job = hg.Job("shares")
    job.restart(0)
    numbers(job).map(lambda row: handle().ask(row.n), name="step").write(
        collect(guarantee="none"), name="out"
    )
    with pytest.raises(UserCodeError, match="function of `step` raised ConnectionError: nobody"):
        job.run()
