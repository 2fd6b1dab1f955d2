"""Loops in the harness: watermarks, waiting, rounds, what a checkpoint keeps, other parallelisms."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

import headgate as hg
from headgate.connectors import collect, from_list
from headgate.errors import UserCodeError
from headgate.testing import harness


def count_down(stream: Any) -> tuple[Any, Any]:
    less = stream.map(lambda n: n - 1)
    return less.filter(lambda n: n > 0), less


def plain_job(**given: Any) -> hg.Job:
    job = hg.Job("loop", max_parallelism=12)
    job.checkpoint(every="1h", storage="never-made")
    stream = job.read(from_list([]), name="in").iterate(count_down, name="loop", **given)
    stream.write(collect(guarantee="exactly_once"), name="out")
    return job


@pytest.mark.parametrize("parallelism", [1, 3])
def test_records_go_round_and_the_job_ends(parallelism: int) -> None:
    with harness(plain_job(), parallelism=parallelism) as h:
        h.push("in", 3, 1)
        h.push("in", 2)
        assert sorted(h.pending("out")) == [0, 0, 0, 1, 1, 2]
        h.end()
        assert sorted(h.drain("out")) == [0, 0, 0, 1, 1, 2]


def test_an_empty_loop_ends() -> None:
    with harness(plain_job(), parallelism=2) as h:
        h.end()
        assert h.drain("out") == []


def test_a_loop_goes_on_after_a_crash_and_at_another_parallelism() -> None:
    with harness(plain_job(), parallelism=2) as h:
        h.push("in", 2)
        h.checkpoint()
        h.push("in", 3)
        h.crash()
        assert sorted(h.drain("out")) == [0, 1]
        assert sorted(h.pending("out")) == [0, 1, 2]
        h.rescale(3)
        h.push("in", 1)
        h.end()
        assert sorted(h.drain("out")) == [0, 0, 1, 2]


class Fired(hg.KeyedProcess[Any, Any, Any]):
    """Sends each record back once less, when event time has come to it; tells when that was."""

    def on_record(self, record: Any, ctx: hg.Context[Any]) -> None:
        ctx.event_time.at(record[1], tag=repr(record))

    def on_timer(self, timer: hg.Timer, ctx: hg.Context[Any]) -> Iterator[Any]:
        key, when, left = eval(timer.tag)
        yield (key, when, left - 1)


def timed_job() -> hg.Job:
    job = hg.Job("timed")
    job.checkpoint(every="1h", storage="never-made")

    def body(stream: Any) -> tuple[Any, Any]:
        fired = stream.key_with(lambda r: r[0]).process(Fired(), name="fired")
        return fired.filter(lambda r: r[2] > 0), fired

    (
        job.read(from_list([]), name="in")
        .event_time(lambda r: r[1])
        .iterate(body, name="loop")
        .write(collect(guarantee="exactly_once"), name="out")
    )
    return job


def test_time_in_a_loop_is_that_of_its_input() -> None:
    """Feedback does not advance time, and is late where it is: its timer waits for the next watermark."""
    with harness(timed_job(), parallelism=2) as h:
        h.push("in", ("a", 100, 3), ("b", 200, 1))
        assert h.pending("out") == []
        h.advance_watermark("in", 150)
        assert h.pending("out") == [("a", 100, 2)]
        h.advance_watermark("in", 160)
        assert sorted(h.pending("out")) == [("a", 100, 1), ("a", 100, 2)]
        h.advance_watermark("in", 250)
        assert sorted(h.pending("out"))[3:] == [("b", 200, 0)]


def test_the_end_of_time_fires_timers_in_the_loop_and_what_they_send_back_goes_round() -> None:
    with harness(timed_job(), parallelism=2) as h:
        h.push("in", ("a", 100, 3))
        h.end()
        assert sorted(h.drain("out")) == [("a", 100, 0), ("a", 100, 1), ("a", 100, 2)]


def test_a_wait_keeps_the_loop_open_for_timers_by_the_clock() -> None:
    with harness(later_job(wait="5s")) as h:
        h.push("in", 2)
        h.end("in")
        h.advance_time("3s")
        h.advance_time("3s")
        h.advance_time("30s")
        assert sorted(h.drain("out")) == [0, 1]


def test_without_a_wait_the_loop_ends_as_soon_as_it_is_at_rest() -> None:
    with harness(later_job(wait="0s")) as h:
        h.push("in", 2)
        h.end("in")
        h.advance_time("30s")
        assert h.drain("out") == []


async def ask(n: int) -> int:
    await asyncio.sleep(n)
    return n - 1


@pytest.mark.parametrize("chained", [False, True])
def test_calls_under_way_are_waited_for(chained: bool) -> None:
    """A probe waits for results that are still to come, and calls outlive a crash in the middle."""
    job = hg.Job("asking")
    job.checkpoint(every="1h", storage="never-made")

    def body(stream: Any) -> tuple[Any, Any]:
        asked = stream if chained else stream.rebalance()
        less = asked.map_async(ask, name="ask", timeout="1m")
        return less.filter(lambda n: n > 0), less

    job.read(from_list([]), name="in").iterate(body, name="loop").write(
        collect(guarantee="exactly_once"), name="out"
    )
    with harness(job, parallelism=2) as h:
        h.push("in", 3, 1)
        h.advance_time("1s")
        h.checkpoint()
        assert h.drain("out") == []
        h.crash()
        h.advance_time("1s")
        h.end()
        for _ in range(10):
            h.advance_time("1s")
        assert sorted(h.drain("out")) == [0, 0, 1, 2]


class Later(hg.KeyedProcess[int, int, int]):
    """Passes a record on three seconds later."""

    def on_record(self, record: int, ctx: hg.Context[int]) -> None:
        ctx.processing_time.after("3s", tag=str(record - 1))

    def on_timer(self, timer: hg.Timer, ctx: hg.Context[int]) -> Iterator[int]:
        yield int(timer.tag)


def later_job(wait: str) -> hg.Job:
    job = hg.Job("later")
    job.checkpoint(every="1h", storage="never-made")

    def body(stream: Any) -> tuple[Any, Any]:
        later = stream.key_with(lambda n: n).process(Later(), name="later")
        return later.filter(lambda n: n > 0), later

    job.read(from_list([]), name="in").iterate(body, name="loop", wait=wait).write(
        collect(guarantee="exactly_once"), name="out"
    )
    return job


# --- rounds ------------------------------------------------------------------------------------


class Sums(hg.KeyedProcess[str, Any, Any]):
    """Sums what a key gets in a round, and says so when the round is over."""

    sums = hg.MapState[str, int]()

    def on_record(self, record: Any, ctx: hg.Context[str]) -> None:
        number = str(ctx.timestamp)
        self.sums.put(number, (self.sums.get(number) or 0) + record[1])
        ctx.event_time.at(int(number), tag=number)

    def on_timer(self, timer: hg.Timer, ctx: hg.Context[str]) -> Iterator[Any]:
        total = self.sums.get(timer.tag)
        self.sums.remove(timer.tag)
        yield (ctx.key, total, int(timer.tag))


def rounds_job(max_rounds: int = 100, **given: Any) -> hg.Job:
    """Each round the keys that got something give half of it to the key before and half to themselves."""
    job = hg.Job("rounds", max_parallelism=12)
    job.checkpoint(every="1h", storage="never-made")

    def body(stream: Any) -> tuple[Any, Any]:
        sums = stream.key_with(lambda r: r[0]).process(Sums(), name="sums")
        return sums.flat_map(shares), sums

    job.read(from_list([]), name="in").iterate_rounds(
        body, name="loop", max_rounds=max_rounds, **given
    ).write(collect(guarantee="exactly_once"), name="out")
    return job


def shares(record: Any) -> list[Any]:
    key, total, _ = record
    half = total // 2
    return [(key, half), (chr(ord(key) - 1), half)] if half and key > "a" else []


def reference(records: list[Any], max_rounds: int = 100, at_least: int = 0) -> list[Any]:
    found, number = [], 0
    while records and number < max_rounds:
        sums: dict[str, int] = {}
        for key, amount in records:
            sums[key] = sums.get(key, 0) + amount
        found += [(key, total, number) for key, total in sums.items()]
        records = [each for it in found if it[2] == number for each in shares(it)]
        if not any(amount >= at_least for _, amount in records):
            break
        number += 1
    return sorted(found)


START = [("d", 40), ("c", 9), ("d", 24), ("b", 100)]


@pytest.mark.parametrize("parallelism", [1, 2, 4])
def test_rounds_are_rounds(parallelism: int) -> None:
    with harness(rounds_job(), parallelism=parallelism) as h:
        for record in START:
            h.push("in", record)
        assert h.pending("out") == []
        h.end()
        found = sorted(h.drain("out"))
        assert found == reference(START)
        assert max(number for _, _, number in found) > 3


@pytest.mark.parametrize("most", [1, 2])
def test_rounds_are_bounded(most: int) -> None:
    with harness(rounds_job(max_rounds=most), parallelism=2) as h:
        h.push("in", *START)
        h.end()
        assert sorted(h.drain("out")) == reference(START, max_rounds=most)


def test_a_criterion_ends_rounds() -> None:
    with harness(rounds_job(while_any=lambda r: r[1] >= 8), parallelism=2) as h:
        h.push("in", *START)
        h.end()
        found = sorted(h.drain("out"))
        assert found == reference(START, at_least=8)
        assert len(found) < len(reference(START))


class Rest(msgspec.Struct, frozen=True):
    id: int
    left: int


def test_columns_go_in_rounds_and_a_criterion_is_an_expression() -> None:
    job = hg.Job("columns")
    job.checkpoint(every="1h", storage="never-made")

    def body(stream: Any) -> tuple[Any, Any]:
        less = stream.select("id", "left - 1 AS left")
        return less.filter("left > 0"), less

    job.read(from_list([], schema=Rest), name="in").iterate_rounds(
        body, name="loop", max_rounds=100, while_any="left > 2"
    ).write(collect(guarantee="exactly_once"), name="out")
    with harness(job, parallelism=2) as h:
        h.push("in", Rest(1, 5), Rest(2, 2))
        h.end()
        found = sorted((row["id"], row["left"]) for row in h.drain("out"))
        assert found == [(1, 2), (1, 3), (1, 4), (2, 0), (2, 1)]


@pytest.mark.parametrize("after", [1, 3])
def test_what_came_back_in_the_first_round_is_in_the_checkpoint(after: int) -> None:
    """Round 0 lasts as long as the input; its feedback waits in the head, and outlives a crash there."""
    job = hg.Job("waiting", max_parallelism=12)
    job.checkpoint(every="1h", storage="never-made")
    job.read(from_list([]), name="in").iterate_rounds(
        count_down, name="loop", max_rounds=100
    ).write(collect(guarantee="exactly_once"), name="out")
    with harness(job, parallelism=2) as h:
        h.push("in", 3, 2)
        h.push("in", 4)
        h.checkpoint()
        assert sorted(h.drain("out")) == [1, 2, 3]
        h.crash()
        h.rescale(after)
        h.push("in", 2)
        h.end()
        assert sorted(h.drain("out")) == [0, 0, 0, 0, 1, 1, 1, 2]


def test_a_condition_that_fails_names_the_line() -> None:
    with harness(rounds_job(while_any=lambda r: r[7])) as h:
        h.push("in", *START)
        with pytest.raises(UserCodeError, match="function of `loop` raised IndexError"):
            h.end()


def test_rounds_are_event_time_for_windows() -> None:
    """A window of one millisecond is one round."""
    job = hg.Job("windows")
    job.checkpoint(every="1h", storage="never-made")

    def body(stream: Any) -> tuple[Any, Any]:
        less = stream.select("id", "left - 1 AS left")
        counts = less.key_by("id").window(hg.tumbling("1ms")).agg(n=hg.count(), name="counts")
        return less.filter("left > 0"), counts

    job.read(from_list([], schema=Rest), name="in").iterate_rounds(
        body, name="loop", max_rounds=100
    ).write(collect(guarantee="exactly_once"), name="out")
    with harness(job, parallelism=2) as h:
        h.push("in", Rest(1, 3), Rest(1, 1), Rest(2, 2))
        h.end()
        start = datetime(1970, 1, 1, tzinfo=UTC)
        found = sorted(
            (row["id"], (row["window_start"] - start) // timedelta(milliseconds=1), row["n"])
            for row in h.drain("out")
        )
        assert found == [(1, 0, 2), (1, 1, 1), (1, 2, 1), (2, 0, 1), (2, 1, 1)]
