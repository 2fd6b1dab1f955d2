"""Each split has its own event time; the subtask's is the least of them."""

from __future__ import annotations

import asyncio
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import headgate as hg
from headgate.connectors import collect, from_list, numbers
from headgate.connectors.files.source import files_source
from headgate.connectors.throttle import throttle
from headgate.operators.elements import WATERMARK_MIN, ObjectBatch
from headgate.operators.source import Source, SourceReader
from headgate.operators.splits import WHOLE, SourceSplits
from headgate.operators.watermarks.strategy import bounded_by
from headgate.testing.connectors import check_source, make_context

TICK_MS = 200


def test_the_slowest_split_decides(step):
    run = step()
    run.splits.opened("a")
    run.splits.opened("b")
    run.read("a", 1_000).wait(TICK_MS)
    assert run.watermarks == []
    run.read("b", 500).wait(TICK_MS)
    run.read("b", 2_000).wait(TICK_MS)
    assert run.watermarks == [499, 999]


def test_a_split_that_ends_is_not_waited_for(step):
    run = step()
    run.splits.opened("a")
    run.splits.opened("b")
    run.read("a", 1_000).read("b", 500, last=True).wait(TICK_MS)
    assert run.watermarks == [999]


def test_when_all_splits_have_ended_time_goes_to_the_furthest(step):
    """The reader may find others later; until then nothing would close the windows of what it has read."""
    run = step()
    run.splits.opened("a")
    run.splits.opened("b", queued=True)
    run.read("a", 1_000, last=True).wait(TICK_MS)
    assert run.watermarks == []  # the reader is on its way to the next
    run.read("b", 500, last=True).wait(TICK_MS)
    assert run.watermarks == [999]
    run.splits.opened("c")
    run.wait(TICK_MS).read("c", 3_000).wait(TICK_MS)
    assert run.watermarks == [999, 2_999]


def test_time_goes_to_a_split_that_has_ended_where_all_others_are_silent(step):
    run = step(idle_after_ms=1_000)
    run.splits.opened("a")
    run.splits.opened("b")
    run.read("b", 300).read("a", 1_000, last=True).wait(1_200)
    assert run.signals == [("watermark", 299), ("watermark", 999), ("idle", True)]


def test_a_split_ends_behind_its_last_batch(step):
    """A batch is handled in slices: none of them may be late because the split is read to its end."""
    run = step(options={"pipeline.auto-watermark-interval": "0 ms"})
    run.splits.opened("a")
    run.splits.opened("b")
    run.read("a", 9_000)
    run.splits.reading("b")
    run.splits.ended("b")
    run.operator.process(ObjectBatch([100]), 0)
    run.operator.process(ObjectBatch([200]), 0)
    assert run.watermarks == [99, 199]
    run.splits.batch_done()
    run.wait(TICK_MS).read("a", 9_000)
    assert run.watermarks == [99, 199, 8_999]


def test_a_queued_split_does_not_hold_time_until_it_is_being_read(step):
    run = step()
    run.splits.opened("a", queued=True)
    run.splits.opened("b", queued=True)
    run.read("a", 1_000).wait(TICK_MS)
    assert run.watermarks == [999]
    run.read("a", 2_000).wait(TICK_MS).read("a", 2_500, last=True)
    run.read("b", 500).wait(TICK_MS)
    assert run.watermarks == [999, 1_999]
    run.read("b", 3_000).wait(TICK_MS)
    assert run.watermarks == [999, 1_999, 2_999]


def test_splits_of_one_batch_each_let_time_go_on(step):
    """No tick finds one of them being read: it began and ended between two."""
    run = step()
    for name in "abcde":
        run.splits.opened(name, queued=True)
    run.read("a", 1_000, last=True).wait(TICK_MS).read("b", 2_000, last=True).wait(TICK_MS)
    assert run.watermarks == [999]  # of a: what follows b is not known
    run.read("c", 500, last=True).wait(TICK_MS).read("d", 3_000, last=True).wait(TICK_MS)
    assert run.watermarks == [999]  # from c to d, time was not past c
    run.read("e", 4_000).wait(TICK_MS)
    assert run.watermarks == [999, 3_999]


def test_splits_of_one_batch_each_hold_time_if_asked_for(step):
    run = step(wait_for_queued=True)
    for name in "abc":
        run.splits.opened(name, queued=True)
    run.read("a", 1_000, last=True).read("b", 2_000, last=True).read("c", 100).wait(TICK_MS)
    assert run.watermarks == [99]


def test_a_queued_split_holds_time_if_asked_for_and_is_not_silent(step):
    run = step(idle_after_ms=1_000, wait_for_queued=True)
    run.splits.opened("a", queued=True)
    run.splits.opened("b", queued=True)
    for time in range(0, 5_000, 500):
        run.read("a", time).wait(500)
    assert run.signals == []
    run.read("a", 5_000, last=True).read("b", 100).wait(TICK_MS)
    assert run.signals == [("watermark", 99)]


def test_a_subtask_whose_reader_brings_nothing_is_idle_though_splits_are_queued(step):
    run = step(idle_after_ms=1_000, wait_for_queued=True)
    run.splits.opened("a", queued=True)
    run.splits.opened("b", queued=True)
    run.read("a", 100).wait(1_200)
    assert run.signals == [("idle", True)]
    run.read("a", 200)
    assert run.events[-2:] == [("idle", False), ("records", [200])]


def test_a_silent_split_leaves_and_comes_back(step):
    run = step(idle_after_ms=1_000)
    run.splits.opened("a")
    run.splits.opened("b")
    run.read("b", 100)
    for time in range(200, 1_601, 200):
        run.read("a", time).wait(TICK_MS)
    assert run.signals[-1] == ("watermark", 1_599)
    run.read("b", 1_700).read("a", 3_000).wait(TICK_MS)
    assert run.signals[-1] == ("watermark", 1_699)


def test_a_split_that_comes_back_behind_holds_time_where_it_is(step):
    run = step(idle_after_ms=1_000)
    run.splits.opened("a")
    run.splits.opened("b")
    for time in range(0, 2_000, 200):
        run.read("a", time).wait(TICK_MS)
    run.read("b", 5).read("a", 9_000).wait(TICK_MS)
    assert run.watermarks[-1] == 1_799
    run.read("b", 5_000).wait(TICK_MS)
    assert run.watermarks[-1] == 4_999


def test_when_all_splits_fall_silent_time_goes_to_the_furthest(step):
    run = step(idle_after_ms=1_000)
    run.splits.opened("a")
    run.splits.opened("b")
    run.read("a", 1_000).read("b", 300).wait(1_200)
    assert run.signals == [("watermark", 299), ("watermark", 999), ("idle", True)]


def test_what_waits_while_the_chain_works_on_another_split_is_not_silent(step):
    run = step(idle_after_ms=1_000)
    run.splits.opened("a")
    run.splits.opened("b")
    run.read("b", 100)
    emit, run.operator.output = run.emit, run

    def slowly(batch):
        run.clock.ms += 5_000
        emit(batch)

    run.emit = slowly
    run.read("a", 9_000)
    run.wait(TICK_MS)
    assert run.signals == [("watermark", 99)]


def test_records_behind_backpressure_are_not_silence_of_their_split(step):
    run = step(idle_after_ms=1_000)
    run.splits.opened("a")
    run.splits.opened("b")
    run.read("a", 9_000).read("b", 100)
    run.held_s += 5
    run.wait(5_000)
    assert run.signals == [("watermark", 99)]


def test_a_split_that_appears_later_holds_time_without_moving_it_back(step):
    run = step()
    run.splits.opened("a")
    run.read("a", 1_000).wait(TICK_MS)
    run.splits.opened("b")
    run.read("a", 2_000).wait(TICK_MS)
    run.read("b", 500).wait(TICK_MS)
    assert run.watermarks == [999]
    run.read("b", 1_500).wait(TICK_MS)
    assert run.watermarks == [999, 1_499]


def test_a_reader_that_tells_nothing_has_one_split(step):
    run = step()
    run.read(WHOLE, 1_000).read(WHOLE, 500).wait(TICK_MS)
    assert run.watermarks == [999]


def test_splits_in_the_order_of_time_may_count_as_one(step):
    run = step(per_split=False)
    run.splits.opened("a", queued=True)
    run.splits.opened("b", queued=True)
    run.read("a", 1_000).wait(TICK_MS).read("b", 2_000).wait(TICK_MS)
    assert run.watermarks == [999, 1_999]


BATCHES = st.lists(st.lists(st.integers(0, 1_000), min_size=1, max_size=3), max_size=5)


@given(st.lists(BATCHES, min_size=1, max_size=4), st.booleans(), st.integers(0, 40), st.randoms())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_equals_the_model_in_whatever_order_splits_are_read(step, splits, in_turn, bound, random):
    """No record is late that keeps the promise of its own split; and time goes as far as it may."""
    run = step(bounded_by(bound), wait_for_queued=True)
    for number in range(len(splits)):
        run.splits.opened(f"split {number}", queued=not in_turn)
    left = {number: list(batches) for number, batches in enumerate(splits)}
    latest = dict.fromkeys(left, WATERMARK_MIN)
    reached = []
    while left:
        number = random.choice(list(left)) if in_turn else min(left)
        if not left[number]:
            del left[number]
            run.read(f"split {number}", last=True)
        else:
            times = left[number].pop(0)
            for time in times:
                if time >= latest[number] - bound:
                    assert not run.watermarks or time > run.watermarks[-1]
                latest[number] = max(latest[number], time)
            run.read(f"split {number}", *times)
        run.wait(TICK_MS)
        slowest = min(latest[other] for other in left) if left else max(latest.values())
        if slowest > WATERMARK_MIN and slowest - bound - 1 > max(reached, default=WATERMARK_MIN):
            reached.append(slowest - bound - 1)
        assert run.watermarks == reached


class Listener:
    def __init__(self):
        self.told = []

    def split_opened(self, split, queued):
        self.told.append(("opened", split, queued))

    def split_ended(self, split):
        self.told.append(("ended", split))

    def limit_announced(self, group, limit):
        self.told.append((group, limit))


def test_a_listener_that_comes_late_learns_of_all_splits():
    splits, listener = SourceSplits(), Listener()
    splits.opened("a", queued=True)
    splits.opened("b", queued=True)
    splits.reading("a")
    splits.listen(listener)
    assert listener.told == [("opened", "a", False), ("opened", "b", True)]


async def told(source, splits_of=1):
    """Return the reports of a reader that is read to its end, and each batch's split and rows."""
    context, listener = make_context(), Listener()
    context.splits.listen(listener)
    reader = source.reader()
    reader.open(context, lambda batch: None)
    reader.add_splits(source.splits(splits_of))
    reads = []
    while not reader.finished:
        batch = reader.poll()
        if batch is not None:
            reads.append((context.splits.current, len(batch)))
        context.splits.batch_done()
        if batch is None and not reader.finished:
            await reader.wait()
    reader.close()
    return listener.told, reads


def check_told(source, queued):
    """Everything that is opened ends, each split behind its last batch, and every batch has its split."""
    tellings, reads = asyncio.run(told(source))
    opened = [each for each in tellings if each[0] == "opened"]
    assert len({name for _, name, _ in opened}) == len(opened) > 1
    assert all(each[2] is queued for each in opened)
    assert Counter(each[1] for each in tellings if each[0] == "ended") == Counter(
        name for _, name, _ in opened
    )
    assert {split for split, _ in reads} <= {name for _, name, _ in opened}
    return reads


def test_lists_tell_of_their_splits():
    reads = check_told(from_list(list(range(7)), splits=3, batch_rows=2), queued=True)
    assert reads == [("split 0", 2), ("split 0", 1), ("split 1", 2), ("split 2", 2)]


def test_generated_rows_tell_of_their_splits_also_throttled():
    reads = check_told(numbers(10, batch_rows=4, splits=2), queued=False)
    assert reads == [("split 0", 4), ("split 1", 4), ("split 0", 2)]
    assert check_told(throttle(numbers(10, batch_rows=4, splits=2), 1e9), queued=False) == reads


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_files_tell_of_their_splits(tmp_path, kind):
    for name in "ab":
        if kind == "csv":
            (tmp_path / f"{name}.csv").write_text("n\n" + "1\n" * 10)
        else:
            pq.write_table(
                pa.table({"n": [1] * 10}), tmp_path / f"{name}.parquet", row_group_size=5
            )
    source = files_source(
        str(tmp_path), format=kind, schema={"n": "int64"}, batch_rows=2, split_bytes=10
    )
    reads = check_told(source, queued=True)
    assert sum(rows for _, rows in reads) == 20
    assert reads[0][0].startswith(str(tmp_path / f"a.{kind}"))


def test_paused_splits_of_generated_rows_wait_and_go_on():
    source = numbers(8, batch_rows=2, splits=2)
    reader = source.reader()
    context = make_context()
    reader.open(context, lambda batch: None)
    reader.add_splits(source.splits(1))
    assert reader.can_pause_splits
    reader.pause_splits(frozenset({"split 0"}))
    first = [reader.poll().records for _ in range(2)]
    assert reader.poll() is None
    assert not reader.finished
    reader.pause_splits(frozenset())
    assert [*first, reader.poll().records, reader.poll().records] == [
        [2, 3],
        [6, 7],
        [0, 1],
        [4, 5],
    ]


def windows_of(times, **event_time):
    """Records per window of 10 ms, and late ones, of a job that reads two splits one after the other."""
    job = hg.Job("splits", options={"pipeline.auto-watermark-interval": "0 ms"})
    records = [{"k": "a", "at": time} for time in times]
    source = from_list(records, schema={"k": "string", "at": "int64"}, splits=2, batch_rows=1)
    out, late = collect(guarantee="none"), collect(guarantee="none")
    counts = (
        job.read(source, name="in")
        .event_time("at", **event_time)
        .key_by("k")
        .window(hg.tumbling("10ms"))
        .agg(n=hg.count(), name="counts")
    )
    counts.write(out, name="out")
    counts.late.write(late, name="late")
    job.run()
    windows = sorted((row["window_start"].microsecond // 1_000, row["n"]) for row in out.rows)
    return windows, len(late.rows)


def test_a_job_that_reads_splits_one_after_the_other_waits_for_all_of_them():
    times = [time for at in range(0, 40, 5) for time in (at, at)]  # the same in both splits
    everything = ([(0, 4), (10, 4), (20, 4), (30, 4)], 0)
    assert windows_of(times, wait_for_queued=True) == windows_of(times) == everything
    behind = ([(0, 2), (10, 2), (20, 2), (30, 4)], 6)
    assert windows_of(times, wait_for_queued=False) == behind
    assert windows_of(times, per_split=False) == behind


class Careless(Source):
    """Tells of its splits, and makes one mistake."""

    bounded = True

    def __init__(self, mistake):
        self.mistake = mistake

    def splits(self, parallelism):
        return [b"2"]

    def reader(self):
        return CarelessReader(self.mistake)


class CarelessReader(SourceReader):
    left = 0

    def __init__(self, mistake):
        self.mistake = mistake

    def add_splits(self, splits):
        for split in splits:
            self.left = int(split)
            self.context.splits.opened("a")
            if self.mistake == "opened twice":
                self.context.splits.opened("a")

    def poll(self):
        if not self.left:
            return None
        self.left -= 1
        if self.mistake != "not open":
            self.context.splits.reading("a")
        if not self.left and self.mistake != "are open":
            self.context.splits.ended("a")
            if self.mistake == "without being open":
                self.context.splits.ended("a")
        return ObjectBatch([self.left])

    @property
    def finished(self):
        return not self.left

    def snapshot(self):
        return [str(self.left).encode()] if self.left else []


@pytest.mark.parametrize("mistake", ["opened twice", "without being open", "not open", "are open"])
def test_the_conformance_check_finds_readers_that_tell_wrong(mistake):
    with pytest.raises(AssertionError, match=mistake):
        asyncio.run(check_source(Careless(mistake)))


def test_the_conformance_check_passes_readers_that_tell_right():
    asyncio.run(check_source(Careless("none")))
