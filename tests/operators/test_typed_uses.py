"""Wrong uses of the API do not pass a type checker; right ones do, with the types one expects."""

from __future__ import annotations

import os
import re

import pytest

SOURCE = """
from collections.abc import Iterator
from datetime import datetime

import msgspec
import pyarrow as pa

from headgate.operators.aggregates import count
from headgate.operators.job_graph import JobGraph
from headgate.operators.process.batches import Groups, KeyedBatchProcess
from headgate.operators.process.context import BroadcastContext, Context, Timer
from headgate.operators.process.functions import BroadcastProcess, CoProcess, KeyedProcess
from headgate.operators.process.sides import SideOutput
from headgate.operators.sink import Sink
from headgate.operators.source import Source
from headgate.operators.stream import Stream
from headgate.operators.windows import tumbling
from headgate.state.descriptors import BroadcastState, ValueState


class Url(msgspec.Struct):
    url: str
    n: int


async def later(record: Url) -> int:
    return record.n


class Count(KeyedProcess[str, Url, int]):
    n = ValueState[int](default=0)
    odd = SideOutput[str]()

    def on_record(self, record: Url, ctx: Context[str]) -> Iterator[int]:
        ctx.emit(Count.odd, record.url)
        ctx.emit(self.odd, record.n)  # wrong
        ctx.event_time.at(record.n, tag="t")
        ctx.event_time.at("1s")  # wrong
        ctx.event_time.after("1s")  # wrong
        ctx.processing_time.after("1s")
        ctx.processing_time.after(5)  # wrong
        ctx.processing_time.at(datetime.now())
        ctx.processing_time.cancel("t")
        ctx.for_each_key(self.n, print)  # wrong
        yield self.n.get()

    def on_timer(self, timer: Timer, ctx: Context[str]) -> Iterator[int]:
        yield timer.timestamp
        yield timer.tag  # wrong


class Both(CoProcess[str, Url, str, int]):
    def on_first(self, record: Url, ctx: Context[str]) -> Iterator[int]:
        yield record.n

    def on_second(self, record: int, ctx: Context[str]) -> None:  # wrong
        return None


class Rules(BroadcastProcess[str, Url, str, int]):
    rules = BroadcastState[str, int]()
    n = ValueState[int](default=0)

    def on_broadcast(self, record: str, ctx: BroadcastContext[str]) -> None:
        self.rules.put(record, 1)
        ctx.for_each_key(self.n, lambda key, n: n.set(len(key)))
        ctx.for_each_key(self.n, lambda key, n: n.set(key))  # wrong


class Quiet(Rules):
    def on_broadcast(self, record: str, ctx: Context[None]) -> None:
        return None


class Batches(KeyedBatchProcess[str, Url, str]):
    n = ValueState[int]()

    def on_batch(self, groups: Groups[str], ctx: Context[str]) -> Iterator[pa.RecordBatch]:
        for key, rows in groups:
            yield rows
            self.n.set(key)  # wrong


def processed(urls: Stream[Url], texts: Stream[str]) -> None:
    keyed, other = urls.key_with(lambda r: r.url), texts.key_with(lambda t: t)
    counted = keyed.process(Count(), name="p")
    numbers: Stream[int] = counted
    odd: Stream[str] = counted.side(Count.odd)
    wrong_odd: Stream[int] = counted.side(Count.odd)  # wrong
    batches: Stream[str] = keyed.process(Batches(), name="b")
    other.process(Count(), name="q")  # wrong
    both: Stream[int] = keyed.connect(other).process(Both(), name="c")
    other.connect(keyed).process(Both(), name="d")  # wrong
    ruled: Stream[int] = keyed.connect(texts.broadcast(name="r")).process(Rules(), name="e")
    keyed.connect(urls.broadcast()).process(Rules(), name="f")  # wrong
    keyed.connect(texts)  # wrong
    keyed.connect(other).process(Rules(), name="g")  # wrong
    keyed.connect(other).process(Both())  # wrong


def right(job: JobGraph, source: Source, sink: Sink) -> None:
    read = job.read(source, name="x").event_time("ts", max_out_of_order="1s")
    urls: Stream[Url] = read.map(lambda r: r, into=Url)
    texts: Stream[str] = urls.map(lambda r: r.url)
    numbers: Stream[int] = urls.map(later)
    united: Stream[str] = texts.filter(lambda t: t > "a").union(texts).rebalance()
    flat: Stream[str] = urls.flat_map(lambda r: [r.url])
    last: Stream[Url] = urls.key_by("url").reduce(lambda a, b: b, name="r")
    counted = urls.key_by("url").window(tumbling("1m")).agg(n=count(), name="w", into=Url)
    counted.late.write(sink, name="late")
    urls.key_with(lambda r: r.url).reduce(lambda a, b: a, name="m")


def wrong(job: JobGraph, source: Source, sink: Sink, numbers: Stream[int]) -> None:
    job.read(source)  # wrong
    job.read(3, name="x")  # wrong
    numbers.write(sink)  # wrong
    numbers.write("x", name="y")  # wrong
    numbers.event_time("ts", max_out_of_order=10)  # wrong
    numbers.key_by("x").agg(n=count())  # wrong
    numbers.key_by("x").agg(n="count()", name="q")  # wrong
    numbers.key_by("x").reduce(lambda a: a, name="r")  # wrong
    numbers.map(lambda x: x.nope)  # wrong
    texts: Stream[str] = numbers.map(lambda x: x + 1)  # wrong
    numbers.filter(3)  # wrong
    numbers.window("1m")  # wrong
    job.checkpoint(every=10, storage="dir")  # wrong
"""


def test_wrong_uses_are_type_errors(tmp_path, request, monkeypatch):
    api = pytest.importorskip("mypy.api")
    root = request.config.rootpath
    # The package is the repository itself: mypy needs a directory that has it under its name.
    link = root / ".cache" / "src" / "headgate"
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.exists():
        link.symlink_to(os.path.join("..", ".."))
    monkeypatch.chdir(root)
    monkeypatch.setenv("MYPYPATH", str(link.parent))
    path = tmp_path / "uses.py"
    path.write_text(SOURCE)
    output, _, _ = api.run(["--strict", str(path)])
    found = {int(line) for line in re.findall(r"uses\.py:(\d+): error", output)}
    lines = SOURCE.splitlines()
    assert found == {number for number, text in enumerate(lines, 1) if text.endswith("# wrong")}, (
        output
    )
