"""map_async: order, room, deadlines, retries."""

from __future__ import annotations

import asyncio
from typing import Any

import pyarrow as pa
import pytest

import headgate as hg
from headgate.errors import PlanError, UsageError, UserCodeError


def test_results_keep_the_order_of_the_records(bench: Any, world: Any) -> None:
    step = bench(world.source().map_async(world.service().ask, name="ask"))
    step.push([30, 10, 20]).advance(20)
    assert step.take() == []
    step.advance(10)
    assert step.take() == [300, 100, 200]


def test_results_leave_as_they_come(bench: Any, world: Any) -> None:
    step = bench(world.source().map_async(world.service().ask, ordered=False, name="ask"))
    step.push([30, 10, 20]).advance(20)
    assert step.take() == [100, 200]
    step.advance(10)
    assert step.take() == [300]


def test_unordered_results_never_cross_a_watermark(bench: Any, world: Any) -> None:
    step = bench(world.source().map_async(world.service().ask, ordered=False, name="ask"))
    step.push([40, 10], [1, 2]).watermark(2).push([30, 5], [3, 4]).watermark(4).push([1], [5])
    step.advance(39)
    assert step.events == [("main", 100)]
    step.advance(1)
    assert step.events == [
        ("main", 400), ("watermark", 2), ("main", 50), ("main", 300), ("watermark", 4), ("main", 10),
    ]  # fmt: skip


def test_idleness_keeps_its_place(bench: Any, world: Any) -> None:
    step = bench(world.source().map_async(world.service().ask, name="ask"))
    step.idle(True).idle(False)
    assert step.events == [("idle", True), ("idle", False)]
    step.push([10]).idle(True).advance(10)
    assert step.events == [("main", 100), ("idle", True)]


def test_event_times_stay_with_their_records(bench: Any, world: Any) -> None:
    step = bench(world.source().map_async(world.service().ask, ordered=False, name="ask"))
    step.push([30, 10], [7, 8]).advance(30)
    assert step.take_timed() == [(100, 8), (300, 7)]


@pytest.mark.parametrize("ordered", [True, False])
def test_no_more_records_are_taken_than_there_is_room_for(
    bench: Any, world: Any, ordered: bool
) -> None:
    service = world.service()
    stream = world.source().map_async(
        service.ask, max_in_flight=3, ordered=ordered, timeout="1h", name="ask"
    )
    step = bench(stream)
    (operator,) = step.operators
    assert not operator.full()
    step.push([50, 10])
    assert not operator.full()
    step.push([10, 10, 10, 10])
    assert operator.full()
    assert sorted(service.asked) == [10, 10, 50]
    step.advance(10)
    # In order, what waits for the first record takes up room as well.
    assert sorted(service.asked) == ([10, 10, 50] if ordered else [10, 10, 10, 10, 50])
    assert operator.full()
    step.advance(200)
    assert not operator.full()
    assert operator.settled()
    assert service.most == 3
    assert step.gauges["async_records_in_flight"]() == 0


def test_results_that_are_ready_at_once_are_one_batch(bench: Any, world: Any) -> None:
    step = bench(world.source().map_async(world.service(lambda n: 5).ask, name="ask"))
    step.push(list(range(100))).advance(5)
    assert step.take() == [n * 10 for n in range(100)]
    assert step.outputs[0].batches == 1


def test_time_that_is_up_fails_the_job(bench: Any, world: Any) -> None:
    stream = world.source().map_async(world.service().ask, timeout="20ms", name="ask")
    step = bench(stream).push([10, 21])
    with pytest.raises(UserCodeError) as caught:
        step.advance(20)
    text = str(caught.value)
    assert "a call of the function of `ask` timed out timeout=`20ms` record=`21`" in text
    assert "test_map_async.py" in text
    assert "timeout=" in caught.value.fix


def test_records_whose_time_is_up_are_a_stream(bench: Any, world: Any) -> None:
    service = world.service()
    stream = world.source().map_async(
        service.ask, timeout="20ms", on_timeout="side_output", name="ask"
    )
    assert stream.timed_out.name == "ask.timed_out"
    step = bench(stream)
    step.push([10, 30], [1, 2]).advance(5).push([15, 40], [3, 4]).advance(15)
    assert step.take_timed() == [(100, 1), (150, 3)]
    assert step.take_timed("timed_out") == [(30, 2)]
    assert service.cancelled == [30]
    step.advance(5)
    assert step.take_timed("timed_out") == [(40, 4)]
    assert step.counts["async_records_timed_out"] == 2


def test_a_function_gives_the_result_when_time_is_up(bench: Any, world: Any) -> None:
    stream = world.source().map_async(
        world.service().ask, timeout="20ms", on_timeout=lambda n: -n, name="ask"
    )
    step = bench(stream).push([10, 30, 15], [1, 2, 3]).advance(20)
    assert step.take_timed() == [(100, 1), (-30, 2), (150, 3)]
    assert step.counts["async_records_timed_out"] == 1


def test_the_first_to_come_wins(bench: Any, world: Any) -> None:
    """A call that will not be cancelled ends after its deadline: its result is not wanted any more."""

    async def stubborn(n: int) -> int:
        try:
            await asyncio.sleep(1)
        except asyncio.CancelledError:
            await asyncio.sleep(0.5)
        return n

    async def failing(n: int) -> int:
        try:
            await asyncio.sleep(1)
        except asyncio.CancelledError:
            raise ValueError("too late") from None
        return n

    for function in (stubborn, failing):
        stream = world.source().map_async(
            function, timeout="100ms", on_timeout="side_output", name="ask"
        )
        step = bench(stream).push([1]).advance(5_000)
        assert step.take() == []
        assert step.take("timed_out") == [1]


def test_the_deadline_of_a_record_begins_with_its_call(bench: Any, world: Any) -> None:
    stream = world.source().map_async(
        world.service().ask, max_in_flight=1, timeout="20ms", name="ask"
    )
    assert bench(stream).push([15, 15, 15]).advance(45).take() == [150, 150, 150]


def test_what_is_raised_fails_the_job_with_the_record(bench: Any, world: Any) -> None:
    async def bad(n: int) -> float:
        await asyncio.sleep(0.01)
        return 1 / n

    async def cancels(n: int) -> None:
        raise asyncio.CancelledError

    for function, what in ((bad, "ZeroDivisionError: "), (cancels, "CancelledError")):
        step = bench(world.source().map_async(function, name="ask"))
        with pytest.raises(UserCodeError, match=f"the function of `ask` raised {what}.*record=`0`"):
            step.push([0]).advance(10)


def test_columns_in_and_out(bench: Any, world: Any) -> None:
    async def double(row: Any) -> dict[str, Any]:
        await asyncio.sleep(row.n / 1000)
        return {"n": row.n, "twice": row.n * 2}

    source = world.source({"n": "int64", "other": "string"})
    stream = source.map_async(double, into={"n": "int64", "twice": "int64"}, name="ask")
    assert stream.schema.names == ["n", "twice"]
    step = bench(stream)
    step.push_columns(pa.record_batch({"n": [20, 10], "other": ["a", "b"]}), [1, 2]).advance(20)
    assert step.take_timed() == [({"n": 20, "twice": 40}, 1), ({"n": 10, "twice": 20}, 2)]


def test_a_result_that_does_not_fit_fails_the_job(bench: Any, world: Any) -> None:
    async def wrong(n: int) -> dict[str, Any]:
        return {"n": "text" if n == 2 else n}

    stream = world.source().map_async(wrong, into={"n": "int64"}, name="ask")
    with pytest.raises(UserCodeError, match="for column `n` of type int64 record=`2`"):
        bench(stream).push([1, 2, 3])


class Flaky:
    """Fails this number of times for each record, then answers."""

    def __init__(self, failures: int, error: type[Exception] = ConnectionError) -> None:
        self.failures, self.error = failures, error
        self.calls: dict[int, list[float]] = {}

    async def __call__(self, n: int) -> int:
        times = self.calls.setdefault(n, [])
        times.append(round(asyncio.get_running_loop().time() * 1000))
        if len(times) <= self.failures:
            raise self.error(f"no answer for {n}")
        return n


@pytest.mark.parametrize(
    ("retry", "expected"),
    [
        (hg.Retry(attempts=4, delay="100ms"), [0, 100, 200, 300]),
        (hg.Retry(attempts=4, delay="100ms", factor=2), [0, 100, 300, 700]),
        (hg.Retry(attempts=4, delay="100ms", factor=10, longest="300ms"), [0, 100, 400, 700]),
    ],
)
def test_delays_between_attempts(bench: Any, world: Any, retry: Any, expected: list[int]) -> None:
    flaky = Flaky(3)
    step = bench(world.source().map_async(flaky, retry=retry, name="ask")).push([7]).advance(2_000)
    assert step.take() == [7]
    assert flaky.calls[7] == expected
    assert step.counts["async_calls_retried"] == 3


def test_the_last_attempt_counts(bench: Any, world: Any) -> None:
    stream = world.source().map_async(Flaky(3), retry=hg.Retry(attempts=3), name="ask")
    with pytest.raises(UserCodeError, match="ConnectionError: no answer for 7"):
        bench(stream).push([7]).advance(2_000)


@pytest.mark.parametrize(
    "wanted", [ConnectionError, (ConnectionError, OSError), lambda e: "no answer" in str(e)]
)
def test_only_some_exceptions_are_worth_another_call(bench: Any, world: Any, wanted: Any) -> None:
    retry = hg.Retry(on_exception=wanted)
    assert bench(world.source().map_async(Flaky(1), retry=retry, name="a")).push([7]).advance(
        2_000
    ).take() == [7]

    async def other(n: int) -> int:
        raise ValueError("nonsense")

    with pytest.raises(UserCodeError, match="ValueError: nonsense"):
        bench(world.source().map_async(other, retry=retry, name="a")).push([7])


def test_some_results_are_worth_another_call(bench: Any, world: Any) -> None:
    answers = iter([None, None, 5, None, None, None])

    async def ask(n: int) -> Any:
        return next(answers)

    retry = hg.Retry(attempts=3, on_result=lambda result: result is None)
    step = bench(world.source().map_async(ask, retry=retry, name="ask"))
    assert step.push([1]).advance(1_000).take() == [5]
    assert step.push([2]).advance(1_000).take() == [None]


def test_the_timeout_is_for_all_attempts(bench: Any, world: Any) -> None:
    flaky = Flaky(9)

    async def slow(n: int) -> int:
        await asyncio.sleep(0.06)
        return await flaky(n)

    stream = world.source().map_async(
        slow, timeout="250ms", retry=hg.Retry(attempts=3), on_timeout="side_output", name="ask"
    )
    step = bench(stream).push([1]).advance(1_000)
    assert flaky.calls[1] == [60, 220]
    assert step.take("timed_out") == [1]


def test_the_end_of_the_input_waits_for_all_calls(bench: Any, world: Any) -> None:
    stream = world.source().map_async(world.service().ask, max_in_flight=2, name="ask")
    step = bench(stream).push([500, 400, 300], [1, 2, 3])
    assert not step.operators[0].settled()
    step.end()
    assert [record for _, record in step.events][:3] == [5000, 4000, 3000]


def test_a_barrier_sends_nothing_by_itself(bench: Any, world: Any) -> None:
    """Completed calls leave when their mail runs: there is none behind a savepoint that stops the job."""
    step = bench(world.source().map_async(world.service().ask, name="ask"))
    (operator,) = step.operators
    step.push([5, 50])
    operator.context.timers.call_later = lambda delay_ms, callback: None
    step.advance(10).restart()
    assert step.take() == []
    assert step.advance(100).take() == [50, 500]


def test_deadlines_of_calls_that_have_ended_are_forgotten(bench: Any, world: Any) -> None:
    stream = world.source().map_async(
        world.service().ask, ordered=False, timeout="1h", on_timeout="side_output", name="ask"
    )
    step = bench(stream).push([3_600_001])
    for _ in range(50):
        step.push([1] * 20).advance(1)
    assert len(step.operators[0]._deadlines) < 150
    assert step.take() == [10] * 1_000
    step.advance(3_600_000)
    assert step.take("timed_out") == [3_600_001]


@pytest.mark.parametrize("ordered", [True, False])
def test_watermarks_do_not_pile_up_behind_a_slow_call(
    bench: Any, world: Any, ordered: bool
) -> None:
    step = bench(world.source().map_async(world.service().ask, ordered=ordered, name="ask"))
    step.push([50], [1])
    for timestamp in range(1, 20):
        step.watermark(timestamp)
    step.idle(True).idle(False).push([60], [30])
    for timestamp in range(20, 31):
        step.watermark(timestamp)
    step.advance(100)
    assert step.events == [
        ("main", 500), ("watermark", 19), ("idle", True), ("idle", False), ("main", 600), ("watermark", 30),
    ]  # fmt: skip


def test_closing_cancels_also_what_went_on_after_its_time(bench: Any, world: Any) -> None:
    cancelled: list[int] = []

    async def stubborn(n: int) -> None:
        for number in range(2):
            try:
                await asyncio.sleep(10)
            except asyncio.CancelledError:
                cancelled.append(number)

    stream = world.source().map_async(
        stubborn, timeout="100ms", on_timeout="side_output", name="ask"
    )
    step = bench(stream).push([1]).advance(200)
    assert step.take("timed_out") == [1]
    assert cancelled == [0]
    step.close()
    assert cancelled == [0, 1]


def test_closing_cancels_all_calls(bench: Any, world: Any) -> None:
    service = world.service()
    step = bench(world.source().map_async(service.ask, max_in_flight=2, name="ask"))
    step.push([10, 20, 30]).close()
    assert sorted(service.cancelled) == [10, 20]
    assert step.take() == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": ""}, "async step has no name"),
        ({"max_in_flight": 0}, "max_in_flight must be a whole number of at least 1"),
        ({"timeout": "0s"}, "timeout of map_async must be positive"),
        ({"timeout": 2}, "needs a unit"),
        ({"on_timeout": "drop"}, "not a policy for timeouts on_timeout=`drop`"),
        ({"on_error": "ignore"}, "not a policy for errors on_error=`ignore`"),
        ({"on_error": hg.OnError("drop", retries=-1)}, "retries of an OnError must be"),
        ({"retry": 3}, "retry= needs a Retry, got `int`"),
        ({"retry": hg.Retry(attempts=0)}, "attempts of a Retry must be"),
        ({"retry": hg.Retry(factor=0.5)}, "factor of a Retry must be at least 1"),
        ({"retry": hg.Retry(on_exception=3)}, "on_exception of a Retry needs a function"),
        ({"retry": hg.Retry(on_exception=(int,))}, "needs classes of exceptions"),
        (
            {"retry": hg.Retry(), "on_error": hg.OnError("drop", retries=1)},
            "both retry= and the retries of on_error=",
        ),
        ({"retry": hg.Retry(attempts=4, delay="1s")}, "the delays before attempt 3 leave no time"),
    ],
)
def test_mistakes_are_found_at_their_line(world: Any, given: dict[str, Any], message: str) -> None:
    given = {"name": "ask", **given}
    with pytest.raises(UsageError, match=message) as caught:
        world.source().map_async(world.service().ask, **given)
    assert "test_map_async.py" in caught.value.where


def test_the_function_must_be_a_coroutine_function(world: Any) -> None:
    async def yields(n: int) -> Any:
        yield n

    with pytest.raises(PlanError, match="this one is not async"):
        world.source().map_async(lambda n: n, name="ask")
    with pytest.raises(PlanError, match="this one yields"):
        world.source().map_async(yields, name="ask")


def test_there_are_side_outputs_only_where_asked_for(world: Any) -> None:
    stream = world.source().map_async(world.service().ask, name="ask")
    with pytest.raises(PlanError, match="`ask` has no side output `timed_out`"):
        _ = stream.timed_out
    with pytest.raises(PlanError, match="`ask` has no side output `failed`"):
        _ = stream.failed


@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize("raises", [True, False])
def test_what_nobody_wants_any_more_is_not_called_again(
    bench: Any, world: Any, closed: bool, raises: bool
) -> None:
    """A client that makes an error of its own, or an answer, of the cancellation of a call."""
    asked: list[int] = []

    async def ask(n: int) -> str:
        asked.append(n)
        try:
            await asyncio.sleep(1)
        except asyncio.CancelledError:
            if raises:
                raise ConnectionError("closed") from None
        return "nothing"

    retry = hg.Retry(attempts=5, delay="1ms", on_result=lambda result: result == "nothing")
    stream = world.source().map_async(
        ask, timeout="20ms", retry=retry, on_timeout="side_output", name="ask"
    )
    step = bench(stream).push([1])
    if closed:
        step.close()
    step.advance(500)
    assert asked == [1]
    assert step.take("timed_out") == ([] if closed else [1])


def test_any_number_of_attempts_without_delay(world: Any) -> None:
    """Nothing is counted one by one while the job is written."""
    retry = hg.Retry(attempts=10**12, delay="0s")
    world.source().map_async(world.service().ask, retry=retry, name="ask")
