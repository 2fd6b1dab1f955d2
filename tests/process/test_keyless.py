"""Process functions without keys: state of the subtask, two inputs, broadcast state, and refusals."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import headgate as hg
from headgate.connectors import collect, from_list
from headgate.errors import PlanError
from headgate.testing import harness


class Row(msgspec.Struct, frozen=True):
    n: int
    at: int = 0


class Distinct(hg.Process[int, str]):
    """Says each number once for each subtask; odd ones go aside."""

    seen = hg.OperatorListState[int]()
    starts = hg.OperatorListState[str]("union")
    odd = hg.SideOutput[int]()

    def open(self, ctx: Any) -> None:
        if not self.starts.get():
            self.starts.add("began")

    def on_record(self, record: int, ctx: hg.Context[None]) -> Iterator[str]:
        assert ctx.key is None
        if record % 2:
            ctx.emit(self.odd, record)
        elif record not in self.seen.get():
            self.seen.add(record)
            yield f"new {record}"


def distinct(path: Path, parallelism: int) -> hg.Job:
    job = hg.Job("j", parallelism=parallelism, max_parallelism=8)
    job.checkpoint(every="1h", storage=str(path))
    made = job.read(from_list([]), name="numbers").to_one().process(Distinct(), name="distinct")
    made.write(collect(guarantee="exactly_once"), name="out")
    made.side(Distinct.odd).write(collect(guarantee="exactly_once"), name="odd")
    return job


def test_state_of_the_subtask_comes_back_after_a_crash(tmp_path: Path) -> None:
    with harness(distinct(tmp_path, 1)) as h:
        h.push("numbers", 2, 4, 3)
        h.checkpoint()
        h.push("numbers", 6)
        h.crash()
        h.push("numbers", 2, 6, 8)
        h.end()
        assert h.drain("out") == ["new 2", "new 4", "new 6", "new 8"]
        assert h.drain("odd") == [3]


class Shares(hg.Process[int, str]):
    mine = hg.OperatorListState[int]()
    all_ = hg.OperatorListState[int]("union")

    def on_record(self, record: int, ctx: hg.Context[None]) -> None:
        self.mine.add(record)
        self.all_.add(record)

    def finish(self, ctx: hg.BroadcastContext[None]) -> list[str]:
        return [f"mine {sorted(self.mine.get())}", f"all {len(self.all_.get())}"]


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 2), (2, 1)])
def test_a_rescale_deals_split_state_out_and_gives_union_state_to_all(
    before: int, after: int, tmp_path: Path
) -> None:
    job = hg.Job("j", parallelism=before, max_parallelism=8)
    job.checkpoint(every="1h", storage=str(tmp_path))
    numbers = job.read(from_list([], splits=4), name="numbers").rebalance()
    numbers.process(Shares(), name="shares").write(collect(guarantee="exactly_once"), name="out")
    with harness(job) as h:
        h.push("numbers", *range(9))
        h.checkpoint()
        h.rescale(after)
        h.end()
        rows = h.drain("out")
    lists = [msgspec.json.decode(row[5:]) for row in rows if row.startswith("mine")]
    assert len(lists) == after
    assert sorted(n for each in lists for n in each) == list(range(9))
    assert [row for row in rows if row.startswith("all")] == ["all 9"] * after


class Both(hg.CoProcess[None, int, str, str]):
    names = hg.OperatorListState[str]()

    def on_first(self, record: int, ctx: hg.Context[None]) -> list[str]:
        return [f"{record} {','.join(sorted(self.names.get()))}"]

    def on_second(self, record: str, ctx: hg.Context[None]) -> None:
        self.names.add(record)


def test_two_streams_without_keys(tmp_path: Path) -> None:
    job = hg.Job("j")
    job.checkpoint(every="1h", storage=str(tmp_path))
    numbers = job.read(from_list([]), name="numbers")
    both = numbers.connect(job.read(from_list([]), name="names")).process(Both(), name="both")
    both.write(collect(guarantee="exactly_once"), name="out")
    with harness(job) as h:
        h.push("names", "a", "b")
        h.push("numbers", 1)
        h.checkpoint()
        h.crash()
        h.push("names", "c")
        h.push("numbers", 2)
        h.end()
        assert h.drain("out") == ["1 a,b", "2 a,b,c"]


class Limits(hg.BroadcastProcess[None, Row, int, str]):
    limits = hg.BroadcastState[str, int]()

    def on_record(self, record: Row, ctx: hg.Context[None]) -> list[str]:
        limit = self.limits.get("limit")
        return [f"{record.n} at {ctx.timestamp}"] if limit is not None and record.n > limit else []

    def on_broadcast(self, record: int, ctx: hg.BroadcastContext[None]) -> None:
        self.limits.put("limit", record)


@pytest.mark.parametrize("parallelism", [1, 3])
def test_a_stream_without_keys_and_a_broadcast_one(parallelism: int, tmp_path: Path) -> None:
    job = hg.Job("j", parallelism=parallelism, max_parallelism=8)
    job.checkpoint(every="1h", storage=str(tmp_path))
    rows = job.read(from_list([], schema=Row), name="rows").event_time("at")
    limits = job.read(from_list([]), name="limits").event_time(lambda limit: 0).broadcast()
    made = rows.rebalance().connect(limits).process(Limits(), name="limited")
    made.write(collect(guarantee="exactly_once"), name="out")
    with harness(job) as h:
        h.push("limits", 5)
        h.push("rows", Row(4, 1), Row(6, 2))
        h.checkpoint()
        h.crash()
        h.rescale(2)
        h.push("rows", Row(5, 3), Row(7, 4))
        h.end()
        assert sorted(h.drain("out")) == ["6 at 2", "7 at 4"]


def test_columns_and_failed_records() -> None:
    class Doubled(hg.Process[Row, Row]):
        seen = hg.OperatorListState[int]()

        def on_record(self, record: Row, ctx: hg.Context[None]) -> list[Row]:
            self.seen.add(record.n)
            if record.n == 2:
                raise ValueError("two")
            return [Row(len(self.seen.get()), record.at)]

    job = hg.Job("j")
    rows = job.read(from_list([], schema=Row), name="rows")
    made = rows.process(Doubled(), name="doubled", into=Row, on_error="side_output")
    made.write(collect(guarantee="none"), name="out")
    made.failed.write(collect(guarantee="none"), name="failed")
    with harness(job) as h:
        h.push("rows", Row(1), Row(2), Row(3))
        h.end()
        assert [row.n for row in h.drain("out")] == [1, 2]  # what failed left nothing in the state
        assert len(h.drain("failed")) == 1


class WithKeyedState(hg.Process[int, int]):
    total = hg.ValueState[int]()

    def on_record(self, record: int, ctx: hg.Context[None]) -> list[int]:
        return []


class WithTimer(hg.Process[int, int]):
    def on_record(self, record: int, ctx: hg.Context[None]) -> list[int]:
        return []

    def on_timer(self, timer: hg.Timer, ctx: hg.Context[None]) -> list[int]:
        return []


class Keyed(hg.KeyedProcess[int, int, int]):
    def on_record(self, record: int, ctx: hg.Context[int]) -> list[int]:
        return []


class InMap:
    total = hg.ValueState[int]()

    def __call__(self, record: Any) -> Any:
        return record


class InBatches(InMap):
    pass


def test_what_needs_a_key_is_refused_with_the_way_out() -> None:
    job = hg.Job("j")
    numbers = job.read(from_list([1]), name="numbers")
    rows = job.read(from_list([Row(1)], schema=Row), name="rows")
    with pytest.raises(PlanError, match=r"`WithKeyedState.total` is state per key.*state=`total`"):
        numbers.process(WithKeyedState(), name="p")
    with pytest.raises(PlanError, match="has on_timer, and timers belong to keys") as caught:
        numbers.process(WithTimer(), name="p")
    assert "key_with(lambda record: 0)" in str(caught.value)
    assert "test_keyless.py" in str(caught.value)
    with pytest.raises(PlanError, match="needs a Process here, got `Keyed`") as caught:
        numbers.process(Keyed(), name="p")  # type: ignore[arg-type]
    assert "call .key_by(...) or .key_with(...) before it" in str(caught.value)
    with pytest.raises(PlanError, match="needs a KeyedProcess here, got `Shares`"):
        numbers.key_with(lambda n: n).process(Shares(), name="p")  # type: ignore[arg-type]

    class ByName(hg.CoProcess[str, int, int, int]):
        def on_first(self, record: int, ctx: hg.Context[str]) -> list[int]:
            return []

        on_second = on_first

    with pytest.raises(
        PlanError, match="`ByName` has keys of type str, and the stream has no keys"
    ):
        numbers.connect(numbers).process(ByName(), name="p")
    with pytest.raises(PlanError, match="on both streams, or on none"):
        numbers.connect(numbers.key_with(lambda n: n))  # type: ignore[call-overload]
    for add in (
        lambda: numbers.map(InMap()),
        lambda: numbers.flat_map(InMap()),
        lambda: numbers.filter(InMap()),
        lambda: rows.map_batches(InBatches()),
    ):
        with pytest.raises(PlanError, match=r"`In\w+.total` declares state") as caught:
            add()
        assert "hg.Process" in str(caught.value)
        assert ".process(...)" in str(caught.value)
