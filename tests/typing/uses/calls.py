"""Calls to the outside and loops: map_async, lookup, map_batches, iterate."""

from typing import Any, assert_type

import msgspec
import pyarrow as pa

import headgate as hg


class Page(msgspec.Struct):
    url: str
    n: int


class Owner(msgspec.Struct):
    owner: str


async def fetch(page: Page) -> str:
    return page.url


async def owner_of(url: str) -> Owner | None:
    return Owner(url)


def plain(page: Page) -> str:
    return page.url


def whole(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


def asyncs(pages: hg.Stream[Page], numbers: hg.Stream[int]) -> None:
    retry = hg.Retry(attempts=3, delay="100ms", factor=2, on_exception=(OSError,))
    assert_type(pages.map_async(fetch, name="a", timeout="1s", retry=retry), hg.Stream[str])
    assert_type(pages.key_by("url").map_async(fetch, name="b"), hg.Stream[str])
    pages.map_async(fetch, name="c", on_timeout="side_output", ordered=False)
    pages.map_async(fetch)  # wrong
    pages.map_async(plain, name="d")  # wrong
    numbers.map_async(fetch, name="e")  # wrong
    pages.key_by("url").map_async(plain, name="f")  # wrong
    pages.map_async(fetch, name="g", timeout=1)  # wrong
    pages.map_async(fetch, name="h", retry=3)  # wrong
    pages.map_async(fetch, name="i", on_timeout="ignore")  # wrong
    hg.Retry(attempts="3")  # wrong
    hg.Retry(delay=100)  # wrong
    hg.Retry(on_exception="OSError")  # wrong


def lookups(pages: hg.Stream[Page]) -> None:
    assert_type(pages.lookup("url", owner_of, into=Owner, name="a"), hg.Stream[Any])
    pages.lookup("url", owner_of, name="b")  # wrong
    pages.lookup("url", plain, into=Owner, name="c")  # wrong
    pages.lookup(7, owner_of, into=Owner, name="d")  # wrong
    owners = hg.static_table(hg.connectors.parquet_source("owners.parquet"), key="url")
    assert_type(pages.lookup("url", owners), hg.Stream[Any])
    pages.lookup("url", owners, how="inner", suffix="_owner", name="e")
    pages.lookup("url", owners, how="full")  # wrong
    pages.lookup("url", owners, into=Owner)  # wrong
    hg.static_table("owners.parquet", key="url")  # wrong
    hg.static_table(hg.connectors.numbers(), key="url")  # wrong


def batches(pages: hg.Stream[Page]) -> None:
    pages.map_batches(whole, rows=1_000, within="10ms")
    pages.map_batches("whole")  # wrong
    pages.map_batches(whole, within=10)  # wrong


def loops(pages: hg.Stream[Page], numbers: hg.Stream[int]) -> None:
    result = pages.iterate(lambda s: (s.filter("n > 0"), s.map(lambda p: p.n)), name="a")
    assert_type(result, hg.Stream[int])
    pages.iterate_rounds(lambda s: (s, s), name="b", max_rounds=10)
    pages.iterate(lambda s: s, name="c")  # wrong
    pages.iterate(lambda s: (numbers, s), name="d")  # wrong
    pages.iterate(lambda s: (s, s))  # wrong
    pages.iterate_rounds(lambda s: (s, s), name="e")  # wrong
