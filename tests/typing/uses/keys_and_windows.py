"""Keys, running aggregates, windows, joins, patterns."""

from collections.abc import Iterable
from typing import Any, assert_type

import msgspec

import headgate as hg


class Page(msgspec.Struct):
    url: str
    n: int


class PerUrl(msgspec.Struct):
    url: str
    n: int


class Total(hg.AggregateFunction[Page, int, float]):
    def create(self) -> int:
        return 0

    def add(self, accumulator: int, value: Page) -> int:
        return accumulator + value.n

    def result(self, accumulator: int) -> float:
        return accumulator / 1_000


class WrongTotal(hg.AggregateFunction[Page, int, float]):
    def create(self) -> str:  # wrong
        return ""


class Whole(hg.WindowProcess[str, Page, str]):
    seen = hg.per_window(hg.ValueState[int](default=0))

    def on_window(
        self, key: str, window: hg.Window, records: list[Page], ctx: hg.WindowContext[str]
    ) -> Iterable[str]:
        self.seen.set(len(records))
        self.seen.set(key)  # wrong
        yield f"{key} {window.start}"


class Big(hg.Trigger[Page]):
    def on_element(
        self, record: Page, timestamp: int, window: hg.Window, ctx: hg.TriggerContext
    ) -> hg.TriggerResult:
        return hg.TriggerResult.FIRE if record.n > 9 else hg.TriggerResult.CONTINUE


class WrongBig(hg.Trigger[Page]):
    def clear(self, window: str, ctx: hg.TriggerContext) -> None:  # wrong
        return None


def keys(pages: hg.Stream[Page]) -> None:
    assert_type(pages.key_by("url", "n"), hg.KeyedStream[Page])
    assert_type(pages.key_with(lambda p: p.url), hg.KeyedStream[Page])
    pages.key_by(lambda p: p.url)  # wrong
    pages.key_by(1)  # wrong
    pages.key_with("url")  # wrong
    pages.key_with(lambda p: [p.url])  # wrong
    pages.key_with(lambda p: p.nope)  # wrong


def reduces(pages: hg.Stream[Page]) -> None:
    keyed = pages.key_by("url")
    assert_type(keyed.reduce(lambda a, b: a, name="r"), hg.Stream[Page])
    keyed.reduce(lambda a, b: a)  # wrong
    keyed.reduce(lambda a: a, name="r")  # wrong
    keyed.reduce(lambda a, b: a.n + b.n, name="r")  # wrong


def aggregates(pages: hg.Stream[Page]) -> None:
    keyed = pages.key_by("url")
    keyed.agg(n=hg.count(), worst=hg.quantile("n", 0.99), name="a")
    keyed.window(hg.tumbling("1m")).agg(n=hg.count(), name="b", into=PerUrl)
    keyed.agg(n=hg.count())  # wrong
    keyed.agg(n="count()", name="c")  # wrong
    keyed.agg(hg.count(), name="d")  # wrong
    hg.sum()  # wrong
    hg.quantile("n", "0.99")  # wrong
    hg.max_by("url")  # wrong
    hg.collect("n", limit="all")  # wrong
    hg.top_n("url", 3, by="n", ascending=True)
    hg.top_n("url", by="n")  # wrong
    hg.top_n("url", "3", by="n")  # wrong
    hg.top_n("url", 3, "n")  # wrong


def windows(pages: hg.Stream[Page]) -> None:
    keyed = pages.key_by("url")
    hg.sliding("10m", every="1m", allowed_lateness="5s")
    assert_type(keyed.window(hg.session("1m")).process(Whole(), name="a"), hg.Stream[str])
    keyed.window(hg.tumbling("1m"), trigger=Big()).reduce(lambda a, b: a, name="b")
    keyed.window(hg.count_window(10)).aggregate(Total(), name="c")
    hg.tumbling(60)  # wrong
    hg.tumbling("1m", time="wall")  # wrong
    hg.sliding("10m")  # wrong
    hg.count_window("10")  # wrong
    keyed.window("1m")  # wrong
    keyed.window(hg.tumbling("1m"), trigger="count")  # wrong
    keyed.window(hg.tumbling("1m"), trigger=Big()).agg(n=hg.count(), name="d")  # wrong
    keyed.window(hg.tumbling("1m")).reduce(lambda a, b: a.n, name="e")  # wrong
    keyed.window(hg.tumbling("1m")).aggregate(Total, name="f")  # wrong
    keyed.window(hg.tumbling("1m")).aggregate(Total())  # wrong
    texts = pages.map(lambda p: p.url).key_with(lambda t: t)
    texts.window(hg.tumbling("1m")).aggregate(Total(), name="g")  # wrong
    texts.window(hg.tumbling("1m")).process(Whole(), name="h")  # wrong
    texts.window(hg.tumbling("1m"), trigger=Big())  # wrong


def joins(pages: hg.Stream[Page], others: hg.Stream[Page]) -> None:
    left, right = pages.key_by("url"), others.key_by("url")
    left.join(right, within=("-1m", "0s"), how="left", name="a")
    left.join_as_of(right, name="b", suffix="_then")
    left.window(hg.tumbling("1m")).join(right, name="c")
    left.window(hg.tumbling("1m")).co_group(right, lambda key, ours, theirs: [key], name="d")
    left.join(others, within=("-1m", "0s"), name="e")  # wrong
    left.join(right, within="1m", name="f")  # wrong
    left.join(right, name="g")  # wrong
    left.join(right, within=("-1m", "0s"))  # wrong
    left.join(right, within=("-1m", "0s"), how="outer", name="h")  # wrong
    left.join_as_of(right, how="full", name="i")  # wrong
    left.window(hg.tumbling("1m")).join(others, name="j")  # wrong
    left.window(hg.tumbling("1m")).co_group(right, lambda key, ours: [key], name="k")  # wrong


def patterns(pages: hg.Stream[Page]) -> None:
    keyed = pages.key_by("url")
    pattern: hg.cep.Pattern[Page] = hg.cep.begin("a").where(lambda p: p.n > 3).next("b")
    alarms = keyed.match(pattern, name="m", select=lambda found: found["a"][0].n)
    assert_type(alarms, hg.Stream[int])
    assert_type(keyed.match(pattern, name="n"), hg.Stream[hg.cep.Match[Page]])
    pattern.where(lambda p, before: p.n > before["a"][0].n).one_or_more().within("1m")
    pattern.where(3)  # wrong
    pattern.where(lambda p: p.nope)  # wrong
    pattern.where(lambda p, before: before["a"][0].nope)  # wrong
    pattern.next(3)  # wrong
    pattern.times("2")  # wrong
    pattern.within(60)  # wrong
    pattern.within("1m", between="all")  # wrong
    hg.cep.begin("a", after_match="skip")  # wrong
    keyed.match(pattern)  # wrong
    keyed.match("a b", name="o")  # wrong
    keyed.match(pattern, name="p", select=lambda found: found["a"].n)  # wrong
    texts = pages.map(lambda p: p.url).key_with(lambda t: t)
    texts.match(pattern, name="q")  # wrong


def sides(pages: hg.Stream[Page]) -> None:
    counted = pages.key_by("url").window(hg.tumbling("1m")).agg(n=hg.count(), name="w")
    assert_type(counted.late, hg.Stream[Any])
    assert_type(pages.failed, hg.Stream[Any])
    counted.side(3)  # wrong
