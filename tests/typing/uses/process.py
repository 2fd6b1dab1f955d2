"""Process functions: state, timers, side outputs, two inputs."""

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import assert_type

import msgspec
import pyarrow as pa

import headgate as hg


class Page(msgspec.Struct):
    url: str
    n: int


class Sum:
    def create(self) -> int:
        return 0

    def add(self, accumulator: int, value: int) -> int:
        return accumulator + value

    def result(self, accumulator: int) -> float:
        return float(accumulator)


class States(hg.KeyedProcess[str, Page, int]):
    value = hg.ValueState[int](default=0, ttl="1d")
    urls = hg.ListState[str](ttl=timedelta(days=1))
    counts = hg.MapState[str, int]()
    most = hg.ReducingState[int](max, ttl=hg.StateTtl("1d"))
    sum = hg.AggregatingState[int, int, float](Sum())
    pending = hg.OperatorListState[str]("union")
    wrong_default = hg.ValueState[int](default="0")  # wrong
    wrong_ttl = hg.ValueState[int](ttl=60)  # wrong
    wrong_reduce = hg.ReducingState[int](lambda a: a)  # wrong
    wrong_aggregate = hg.AggregatingState[str, int, float](Sum())  # wrong
    wrong_way = hg.OperatorListState[str]("all")  # wrong

    def on_record(self, record: Page, ctx: hg.Context[str]) -> Iterator[int]:
        assert_type(self.value.get(), int)
        assert_type(self.urls.get(), list[str])
        assert_type(self.counts.get("a"), int | None)
        assert_type(self.sum.get(), float | None)
        self.value.set(record.n)
        self.value.set(record.url)  # wrong
        self.value.add(1)  # wrong
        self.urls.add(record.url)
        self.urls.add(record.n)  # wrong
        self.counts.put("a", 1)
        self.counts.put(1, 1)  # wrong
        self.counts["a"] = 1  # wrong
        self.most.add(record.n)
        self.most.set(record.n)  # wrong
        self.sum.add(1)
        self.sum.add("1")  # wrong
        yield self.value.get()


def assigns(function: States) -> None:
    function.value = 3  # wrong


class Timers(hg.KeyedProcess[str, Page, int]):
    odd = hg.SideOutput[str]()

    def on_record(self, record: Page, ctx: hg.Context[str]) -> Iterator[int]:
        assert_type(ctx.key, str)
        assert_type(ctx.timestamp, int | None)
        ctx.event_time.at(record.n, tag="t")
        ctx.event_time.at("1s")  # wrong
        ctx.event_time.at(1, "t")  # wrong
        ctx.event_time.after("1s")  # wrong
        ctx.processing_time.after("1s")
        ctx.processing_time.after(5)  # wrong
        ctx.processing_time.at(datetime.now())
        ctx.processing_time.cancel("t")
        ctx.processing_time.now = 5  # wrong
        ctx.emit(self.odd, record.url)
        ctx.emit(Timers.odd, record.url)
        ctx.emit(self.odd, record.n)  # wrong
        ctx.emit("odd", record.url)  # wrong
        ctx.for_each_key(self.odd, print)  # wrong
        yield record.n
        yield record.url  # wrong

    def on_timer(self, timer: hg.Timer, ctx: hg.Context[str]) -> Iterator[int]:
        yield timer.timestamp
        yield timer.tag  # wrong


class WrongRecord(hg.KeyedProcess[str, Page, int]):
    def on_record(self, record: str, ctx: hg.Context[str]) -> Iterator[int]:  # wrong
        yield 1


class WrongResult(hg.KeyedProcess[str, Page, int]):
    def on_record(self, record: Page, ctx: hg.Context[str]) -> int:  # wrong
        return 1


class WrongTimer(Timers):
    def on_timer(self, timer: int, ctx: hg.Context[str]) -> Iterator[int]:  # wrong
        yield 1


class Both(hg.CoProcess[str, Page, str, int]):
    def on_first(self, record: Page, ctx: hg.Context[str]) -> Iterator[int]:
        yield record.n

    def on_second(self, record: str, ctx: hg.Context[str]) -> None:
        return None


class WrongSecond(hg.CoProcess[str, Page, str, int]):
    def on_second(self, record: int, ctx: hg.Context[str]) -> None:  # wrong
        return None


class Rules(hg.BroadcastProcess[str, Page, str, int]):
    rules = hg.BroadcastState[str, int]()
    n = hg.ValueState[int](default=0)

    def on_broadcast(self, record: str, ctx: hg.BroadcastContext[str]) -> None:
        self.rules.put(record, 1)
        self.rules.put(record, "1")  # wrong
        ctx.for_each_key(self.n, lambda key, n: n.set(len(key)))
        ctx.for_each_key(self.n, lambda key, n: n.set(key))  # wrong


class Quiet(Rules):
    def on_broadcast(self, record: str, ctx: hg.Context[None]) -> None:
        return None


class Batches(hg.KeyedBatchProcess[str, Page, str]):
    n = hg.ValueState[int]()

    def on_batch(self, groups: hg.Groups[str], ctx: hg.Context[str]) -> Iterator[pa.RecordBatch]:
        for key, rows in groups:
            yield rows
            self.n.set(key)  # wrong


class Lengths(hg.Process[Page, int]):
    seen = hg.OperatorListState[int]()

    def on_record(self, record: Page, ctx: hg.Context[None]) -> Iterator[int]:
        yield record.n

    def finish(self, ctx: hg.BroadcastContext[None]) -> list[int]:
        return self.seen.get()


class WrongFinish(Lengths):
    def finish(self, ctx: hg.BroadcastContext[None]) -> list[str]:  # wrong
        return []


class Unkeyed(hg.CoProcess[None, Page, str, int]):
    pass


class Shared(hg.BroadcastProcess[None, int, str, int]):
    pass


def used(pages: hg.Stream[Page], texts: hg.Stream[str]) -> None:
    keyed, other = pages.key_with(lambda p: p.url), texts.key_with(lambda t: t)
    counted = keyed.process(Timers(), name="p")
    assert_type(counted, hg.Stream[int])
    assert_type(counted.side(Timers.odd), hg.Stream[str])
    assert_type(keyed.process(Batches(), name="b"), hg.Stream[str])
    assert_type(keyed.connect(other).process(Both(), name="c"), hg.Stream[int])
    assert_type(keyed.connect(texts.broadcast(name="r")).process(Rules(), name="e"), hg.Stream[int])
    lengths = pages.process(Lengths(), name="l")
    assert_type(lengths, hg.Stream[int])
    assert_type(pages.connect(texts).process(Unkeyed(), name="m"), hg.Stream[int])
    assert_type(lengths.connect(texts.broadcast()).process(Shared(), name="n"), hg.Stream[int])
    texts.process(Lengths(), name="o")  # wrong
    pages.connect(pages).process(Unkeyed(), name="p")  # wrong
    pages.connect(keyed)  # wrong
    counted.union(counted.side(Timers.odd))  # wrong
    keyed.process(Timers())  # wrong
    keyed.process(Timers, name="q")  # wrong
    keyed.process(print, name="r")  # wrong
    pages.process(Timers(), name="s")  # wrong
    other.process(Timers(), name="t")  # wrong
    other.connect(keyed).process(Both(), name="u")  # wrong
    keyed.process(Both(), name="v")  # wrong
    keyed.connect(texts)  # wrong
    keyed.connect(other).process(Both())  # wrong
    keyed.connect(other).process(Rules(), name="w")  # wrong
    keyed.connect(pages.broadcast()).process(Rules(), name="x")  # wrong
