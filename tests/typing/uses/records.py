"""Functions of single records, expressions, event time, sources and sinks."""

from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from typing import assert_type

import msgspec

import headgate as hg


class Page(msgspec.Struct):
    url: str
    n: int


async def later(page: Page) -> int:
    return page.n


async def letters(page: Page) -> AsyncIterator[str]:
    for letter in page.url:
        yield letter


def halves(page: Page) -> Iterator[float]:
    yield page.n / 2


def of_text(text: str) -> int:
    return len(text)


def is_long(page: Page) -> bool:
    return page.n > 10


def maps(pages: hg.Stream[Page], numbers: hg.Stream[int]) -> None:
    assert_type(pages.map(lambda p: p.url), hg.Stream[str])
    assert_type(pages.map(later), hg.Stream[int])
    assert_type(pages.map(lambda p: {"url": p.url, "n": 1}, into=Page), hg.Stream[Page])
    assert_type(pages.map(lambda p: p.n, on_error="drop", max_in_flight=4), hg.Stream[int])
    pages.map(lambda p: p.nope)  # wrong
    pages.map(of_text)  # wrong
    pages.map("upper(url)")  # wrong
    pages.map(lambda p: p.url, max_in_flight="4")  # wrong
    pages.map(lambda p: p.url, on_error="ignore")  # wrong
    pages.map(lambda p: p.url, on_error=hg.OnError("drop", retries="3"))  # wrong
    numbers.union(pages.map(lambda p: p.url))  # wrong
    numbers.map(later)  # wrong


def flat_maps(pages: hg.Stream[Page]) -> None:
    assert_type(pages.flat_map(lambda p: [p.url]), hg.Stream[str])
    assert_type(pages.flat_map(halves), hg.Stream[float])
    assert_type(pages.flat_map(letters), hg.Stream[str])
    pages.flat_map(lambda p: p.n)  # wrong
    pages.flat_map(of_text)  # wrong


def filters(pages: hg.Stream[Page], numbers: hg.Stream[int]) -> None:
    assert_type(pages.filter("n > 3").filter(is_long), hg.Stream[Page])
    pages.filter(3)  # wrong
    pages.filter(lambda p: p.nope > 3)  # wrong
    numbers.filter(is_long)  # wrong
    pages.select("url", "n + 1 AS m")
    pages.select(lambda p: p.url)  # wrong


def unions(pages: hg.Stream[Page], numbers: hg.Stream[int]) -> None:
    assert_type(pages.union(pages, pages).rebalance(), hg.Stream[Page])
    pages.union(numbers)  # wrong


def times(pages: hg.Stream[Page]) -> None:
    pages.event_time("ts", max_out_of_order="1s", idle_after=timedelta(seconds=5))
    pages.event_time(lambda p: p.n, strategy=hg.WatermarkStrategy.bounded("1s"))
    pages.event_time(7)  # wrong
    pages.event_time("ts", max_out_of_order=10)  # wrong
    pages.event_time("ts", strategy="bounded")  # wrong


def ends(job: hg.Job, pages: hg.Stream[Page], numbers: hg.Stream[int]) -> None:
    assert_type(job.read(hg.connectors.from_list([1]), name="x"), hg.Stream[int])
    pages.write(hg.connectors.blackhole(), name="out")
    job.checkpoint("10s", "checkpoints")
    job.read(hg.connectors.from_list([1]))  # wrong
    job.read([1, 2], name="x")  # wrong
    pages.write(hg.connectors.blackhole())  # wrong
    pages.write(print, name="out")  # wrong
    pages.parallel("2")  # wrong
    job.checkpoint(every=10, storage="checkpoints")  # wrong
    job.checkpoint("10s")  # wrong
