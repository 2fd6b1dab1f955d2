"""finish, and notices of checkpoints: of function objects and process functions, in whole jobs."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

import headgate as hg
from headgate.connectors import collect, from_list, numbers, throttle
from headgate.connectors.rows import RowSplitReader
from headgate.errors import PlanError, UserCodeError
from headgate.runtime.job import runnable
from headgate.testing import harness

SAID: list[str] = []


@pytest.fixture(autouse=True)
def nothing_said() -> None:
    SAID.clear()


def say(text: str) -> None:
    sys.modules[__name__].SAID.append(text)  # this function may be a copy that came by value


class Row(msgspec.Struct):
    n: int
    at: int = 0


class Mapped:
    def __call__(self, row: Any) -> Row:
        return Row(row.n, row.at)

    def finish(self) -> list[Row]:
        return [Row(100)]


class Flat:
    def __call__(self, row: Any) -> list[Row]:
        return [Row(row.n, row.at)]

    def finish(self) -> Iterator[Row]:
        yield Row(100)


class Kept:
    def __call__(self, row: Any) -> bool:
        return bool(row.n < 10)

    def finish(self) -> list[Row]:
        return [Row(100)]


class Whole:
    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch

    def finish(self) -> pa.RecordBatch:
        return pa.RecordBatch.from_pylist([{"n": 100, "at": 0}])


class AsyncMapped:
    async def __call__(self, row: Any) -> Row:
        return Row(row.n, row.at)

    async def finish(self) -> list[Row]:
        return [Row(100)]


class AsyncFlat:
    async def __call__(self, row: Any) -> Any:
        yield Row(row.n, row.at)

    async def finish(self) -> Any:
        yield Row(100)


STEPS: dict[str, Any] = {
    "map": lambda s: s.map(Mapped(), into=Row),
    "map of objects": lambda s: s.map(Mapped()),
    "flat_map": lambda s: s.flat_map(Flat(), into=Row),
    "filter": lambda s: s.filter(Kept()),
    "map_batches": lambda s: s.map_batches(Whole()),
    "map_batches with rows": lambda s: s.map_batches(Whole(), rows=2, name="whole"),
    "async map": lambda s: s.map(AsyncMapped(), into=Row),
    "async flat_map": lambda s: s.flat_map(AsyncFlat(), into=Row),
    "map_async": lambda s: s.map_async(AsyncMapped(), name="ask", into=Row),
}


@pytest.mark.parametrize("kind", STEPS)
def test_results_of_finish_come_last(kind: str) -> None:
    job = hg.Job("j")
    stream = job.read(from_list([Row(1), Row(2), Row(3)], schema=Row), name="rows")
    STEPS[kind](stream).write(collect(guarantee="none"), name="out")
    with harness(job) as h:
        h.push("rows", Row(1), Row(2))
        h.end()
        found = [row["n"] if isinstance(row, dict) else row.n for row in h.drain("out")]
    assert found == [1, 2, 100]


@pytest.mark.parametrize("kind", [kind for kind in STEPS if kind != "map of objects"])
def test_results_of_finish_are_not_late_and_have_the_latest_event_time(kind: str) -> None:
    job = hg.Job("j", parallelism=2)
    stream = job.read(from_list([], schema=Row), name="rows").event_time("at")
    counted = STEPS[kind](stream.to_one()).key_by("n").window(hg.tumbling("10s"))
    counted.agg(c=hg.count(), name="count").write(collect(guarantee="none"), name="out")
    with harness(job) as h:
        h.push("rows", Row(1, 1_000), Row(2, 65_000))
        h.end()
        rows = [(row["n"], row["window_start"].minute) for row in h.drain("out")]
    assert sorted(rows) == [(1, 0), (2, 1), (100, 1)]


class Buffer(hg.Process[int, int]):
    """Sums what came, and says it at the end; each subtask its own share."""

    sums = hg.OperatorListState[int]()

    def on_record(self, record: int, ctx: hg.Context[None]) -> None:
        self.sums.update([sum(self.sums.get()) + record])

    def finish(self, ctx: hg.BroadcastContext[None]) -> Iterable[int]:
        return [sum(self.sums.get())]


def buffered(path: Path, parallelism: int, function: Any = None, **options: str) -> hg.Job:
    job = hg.Job("j", parallelism=parallelism, max_parallelism=8)
    job.checkpoint(every="1h", storage=str(path))
    job.restart(attempts=3, delay="1s")
    runnable(job).override({key.replace("__", "."): value for key, value in options.items()})
    numbers = job.read(from_list([], splits=3), name="numbers").rebalance()
    numbers.process(function or Buffer(), name="buffer").write(
        collect(guarantee="exactly_once"), name="out"
    )
    return job


UNALIGNED = {"execution__checkpointing__unaligned__enabled": "true"}


@pytest.mark.parametrize("parallelism", [1, 2, 3])
@pytest.mark.parametrize("options", [{}, UNALIGNED], ids=["aligned", "unaligned"])
def test_finish_sees_the_restored_state_and_emits_once(
    parallelism: int, options: dict[str, str], tmp_path: Path
) -> None:
    after = 1 if parallelism == 3 else 3 if parallelism == 1 else 4
    with harness(buffered(tmp_path, parallelism, **options)) as h:
        h.push("numbers", 1, 2, 3)
        h.checkpoint()
        h.push("numbers", 4)
        h.crash()
        h.push("numbers", 5)
        h.rescale(after)
        h.push("numbers", 6)
        assert h.drain("out") == []
        h.end()
        found = h.drain("out")
    assert sum(found) == 21
    assert len(found) == after


class FailsOnce(Buffer):
    def finish(self, ctx: hg.BroadcastContext[None]) -> Iterable[int]:
        say("finish")
        yield sum(self.sums.get())
        if len(sys.modules[__name__].SAID) == 1:
            raise ValueError("not yet")


def test_a_failure_in_finish_is_tried_again_and_nothing_comes_twice(lab: Any) -> None:
    sink = collect(guarantee="exactly_once")
    job = hg.Job("job")
    job.checkpoint(every="20ms", storage=str(lab.path))
    job.restart(attempts=3, delay="10ms")
    source = job.read(numbers(200, rate=2000, batch_rows=10), name="numbers")
    source.process(FailsOnce(), name="buffer").write(sink, name="out")
    ran = lab.run(job)
    assert ran.outcome.status == "FINISHED"
    assert sink.rows == [sum(range(200))]
    assert SAID == ["finish", "finish"]


class Bad:
    def __call__(self, row: Any) -> Row:
        return Row(row.n)

    def finish(self) -> Row:
        return Row(1)


def test_what_finish_raises_or_returns_wrongly_names_the_step() -> None:
    job = hg.Job("j")
    job.read(from_list([Row(1)], schema=Row), name="rows").map(Bad(), name="bad").write(
        collect(guarantee="none"), name="out"
    )
    with pytest.raises(UserCodeError, match="the function of `bad` returned one Row from finish"):
        job.run()


class PerKey(hg.KeyedProcess[str, Row, str]):
    total = hg.ValueState[int](default=0)
    ended = hg.SideOutput[str]()

    def on_record(self, record: Row, ctx: hg.Context[str]) -> None:
        self.total.set(self.total.get() + record.n)
        ctx.event_time.at(10_000)

    def on_timer(self, timer: hg.Timer, ctx: hg.Context[str]) -> list[str]:
        return [f"timer {ctx.key}"]

    def finish(self, ctx: hg.BroadcastContext[str]) -> list[str]:
        found: list[str] = []
        ctx.for_each_key(self.total, lambda key, total: found.append(f"{key}={total.get()}"))
        ctx.emit(self.ended, f"at {ctx.timestamp}")
        return sorted(found)


def test_finish_of_a_keyed_function_comes_behind_its_timers_and_visits_all_keys() -> None:
    job = hg.Job("j")
    rows = job.read(from_list([], schema=Row), name="rows").event_time("at")
    made = rows.key_with(lambda row: "ab"[row.n % 2]).process(PerKey(), name="per-key")
    made.write(collect(guarantee="none"), name="out")
    made.side(PerKey.ended).write(collect(guarantee="none"), name="ended")
    with harness(job) as h:
        h.push("rows", Row(1, 1_000), Row(2, 7_000), Row(3, 5_000))
        h.end()
        made_of = h.drain("out")
        assert sorted(made_of[:2]) == ["timer a", "timer b"]
        assert made_of[2:] == ["a=2", "b=4"]
        assert h.drain("ended") == ["at 7000"]


class Told:
    def __call__(self, row: Any) -> Any:
        return row

    def on_checkpoint_complete(self, checkpoint_id: int) -> None:
        say(f"map complete {checkpoint_id}")

    async def on_checkpoint_aborted(self, checkpoint_id: int) -> None:
        say(f"map aborted {checkpoint_id}")


class ToldProcess(hg.Process[int, int]):
    def on_record(self, record: int, ctx: hg.Context[None]) -> list[int]:
        return [record]

    def on_checkpoint_complete(self, checkpoint_id: int) -> None:
        say(f"process complete {checkpoint_id}")


def test_functions_are_told_of_completed_checkpoints_once_and_in_order(tmp_path: Path) -> None:
    job = hg.Job("j")
    job.checkpoint(every="1h", storage=str(tmp_path))
    numbers = job.read(from_list([]), name="numbers").map(Told(), name="told")
    numbers.process(ToldProcess(), name="process").write(collect(guarantee="none"), name="out")
    with harness(job) as h:
        first = h.checkpoint()
        h.push("numbers", 1)
        second = h.checkpoint()
        h.crash()
        h.push("numbers", 2)
        third = h.checkpoint()
        h.end()
    expected = [
        f"{kind} complete {n}" for n in (first, second, third) for kind in ("map", "process")
    ]
    assert SAID[: len(expected)] == expected
    assert len(set(SAID)) == len(SAID)


def test_drain_calls_finish_and_stop_does_not(lab: Any) -> None:
    def job_of() -> hg.Job:
        job = hg.Job("job", parallelism=2, max_parallelism=8)
        job.checkpoint(every="20ms", storage=str(lab.path))
        source = job.read(numbers(100_000, rate=1000, batch_rows=10), name="numbers")
        source.rebalance().process(Counts(), name="counts").write(sink, name="out")
        return job

    sink = collect(guarantee="exactly_once")

    async def stop(running: Any) -> None:
        await running.checkpoint()
        await running.request("stop")

    async def drain(running: Any) -> None:
        await running.checkpoint()
        await running.request("stop", drain=True)

    lab.run(job_of(), stop)
    assert sink.rows == []
    lab.run(job_of(), drain)
    assert len(sink.rows) == 2
    assert sum(sink.rows) > 0


def test_source_readers_are_told_too(
    lab: Any, faults: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    monkeypatch.setattr(
        RowSplitReader, "on_checkpoint_complete", lambda reader, number: told.append(number)
    )
    job = hg.Job("job")
    job.checkpoint(every="20ms", storage=str(lab.path))
    source = throttle(numbers(200, batch_rows=10), rate=1000)
    job.read(source, name="numbers").write(collect(guarantee="none"), name="out")
    ran = lab.run(job, faults.none(2))
    texts = [text.split() for text in ran.job.texts("checkpoint")]
    completed = {int(words[1]) for words in texts if words[2] == "completed"}
    assert told
    assert told == sorted(set(told))
    assert set(told) <= completed


class Counts(hg.Process[int, int]):
    n = hg.OperatorListState[int]()

    def on_record(self, record: int, ctx: hg.Context[None]) -> None:
        self.n.update([sum(self.n.get()) + 1])

    def finish(self, ctx: hg.BroadcastContext[None]) -> list[int]:
        return [sum(self.n.get())]


class LookUp:
    async def __call__(self, key: int) -> Any:
        return None

    def finish(self) -> list[int]:
        return []


def test_mistakes_are_found_at_plan_time() -> None:
    job = hg.Job("j")
    rows = job.read(from_list([Row(1)], schema=Row), name="rows")
    with pytest.raises(PlanError, match="finish of `LookUp` would never be called"):
        rows.lookup("n", LookUp(), into={"m": "long"}, name="look")

    class TakesTooMuch(Mapped):
        def finish(self, what: int) -> list[Row]:  # type: ignore[override]
            return []

    with pytest.raises(PlanError, match=r"finish of `TakesTooMuch` cannot be called.*what"):
        rows.map(TakesTooMuch())

    class AsyncFinish(hg.Process[int, int]):
        def on_record(self, record: int, ctx: hg.Context[None]) -> list[int]:
            return []

        async def finish(self, ctx: Any) -> Any:
            return []

    with pytest.raises(PlanError, match="finish must be a plain function"):
        rows.process(AsyncFinish(), name="p")


class Stuck:
    """No snapshot can be made of it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


def test_functions_are_told_of_checkpoints_that_will_never_complete(lab: Any) -> None:
    job = hg.Job("job")
    job.checkpoint(every="20ms", storage=str(lab.path), tolerable_failures=1000)
    source = job.read(throttle(numbers(100, batch_rows=10), rate=500), name="numbers")
    told = source.map(Told(), name="told")
    told.map(lambda n: Stuck()).key_with(lambda stuck: 0).reduce(
        lambda a, b: a, name="stuck"
    ).write(collect(guarantee="none"), name="out")

    async def wait(running: Any) -> None:
        await running.until("checkpoint", status="FAILED")
        await running.request("cancel")

    lab.run(job, wait)
    assert any(text.startswith("map aborted ") for text in SAID)


class Windowed(hg.WindowProcess[str, Row, str]):
    def on_window(
        self, key: str, window: hg.Window, records: list[Row], ctx: hg.WindowContext[str]
    ) -> list[str]:
        return [f"{key} {len(records)}"]

    def finish(self, ctx: hg.BroadcastContext[str]) -> list[str]:
        return ["end"]


def test_finish_of_a_window_function_comes_behind_the_last_window() -> None:
    job = hg.Job("j")
    rows = job.read(from_list([], schema=Row), name="rows").event_time("at")
    windows = rows.key_with(lambda row: "a").window(hg.tumbling("10s"))
    windows.process(Windowed(), name="windows").write(collect(guarantee="none"), name="out")
    with harness(job) as h:
        h.push("rows", Row(1, 1_000), Row(2, 65_000))
        h.end()
        assert h.drain("out") == ["a 1", "a 1", "end"]


class Batches(hg.KeyedBatchProcess[int, Row, Row]):
    total = hg.ValueState[int](default=0)

    def on_batch(self, groups: hg.Groups[int], ctx: hg.Context[int]) -> Iterator[pa.RecordBatch]:
        for _, rows in groups:
            self.total.set(self.total.get() + rows.num_rows)
            yield rows.slice(0, 0)

    def finish(self, ctx: hg.BroadcastContext[int]) -> list[pa.RecordBatch]:
        found: list[dict[str, int]] = []
        ctx.for_each_key(self.total, lambda key, n: found.append({"n": key, "at": n.get()}))
        return [pa.RecordBatch.from_pylist(sorted(found, key=str))]


@pytest.mark.parametrize("timed", [False, True])
def test_finish_of_a_function_of_batches_makes_batches(timed: bool) -> None:
    job = hg.Job("j")
    rows = job.read(from_list([], schema=Row), name="rows")
    rows = rows.event_time("at") if timed else rows
    made = rows.key_by("n").process(Batches(), name="batches")
    made.write(collect(guarantee="none"), name="out")
    with harness(job) as h:
        h.push("rows", Row(1, 1), Row(2, 2), Row(1, 3))
        h.end()
        assert [(row.n, row.at) for row in h.drain("out")] == [(1, 2), (2, 1)]
