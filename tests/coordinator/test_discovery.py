"""A coordinator looks for splits at intervals, in a thread, and without harm if a source fails."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from headgate.connectors import throttle
from headgate.operators.source import Source
from headgate.runtime.control.messages import SplitsOffered
from headgate.runtime.coordinator import discovery
from headgate.runtime.coordinator.discovery import SplitDiscovery
from headgate.runtime.options.registry import Options


class Listed(Source):
    """Its calls do what a list of functions does, and the last of them from then on."""

    discovers = True

    def __init__(self, *calls: Callable[[], list[bytes]]) -> None:
        self.calls = list(calls)
        self.known: list[dict[str, bytes]] = []
        self.threads: set[int] = set()
        self.option = ""

    def configure(self, options: Mapping[str, str]) -> Source:
        self.option = options["headgate.source.discovery-interval"]
        return self

    def discover(self, known: Mapping[str, bytes]) -> list[bytes]:
        self.known.append(dict(known))
        self.threads.add(threading.get_ident())
        call = self.calls[0]
        if len(self.calls) > 1:
            del self.calls[0]
        return call()

    def split_key(self, split: bytes) -> str:
        return split.decode()


class Looking:
    """A discovery under way, with what it sends and says."""

    def __init__(self, source: Source, **options: str) -> None:
        texts = {"headgate.source.discovery-interval": "1ms"}
        texts |= {f"headgate.source.{k.replace('_', '-')}": text for k, text in options.items()}
        self.sent: list[tuple[bytes, ...]] = []
        self.awaited: tuple[str, ...] = ()
        self.ended: list[str] = []
        self.said: list[str] = []
        self.news = asyncio.Event()
        env: Any = SimpleNamespace(options=Options(texts), publish=self._publish)
        head = SimpleNamespace(source=source, name="in")
        self._plan: Any = SimpleNamespace(vertices=[SimpleNamespace(id=3, head=head)])
        self.discovery = SplitDiscovery(env)

    def _publish(self, kind: str, text: str, **_: object) -> None:
        self.said.append(text)
        self.news.set()

    def _send(self, message: Any) -> None:
        assert isinstance(message, SplitsOffered)
        assert message.vertex == 3
        self.sent.append(tuple(message.splits.values()))
        self.awaited = message.awaited
        self.news.set()

    async def until(self, happened: Callable[[], bool]) -> None:
        while not happened():
            self.news.clear()
            await self.news.wait()

    def start(self) -> None:
        self.discovery.start(self._plan, self._send, lambda _: self.ended)


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 30))


def test_all_splits_are_offered_with_each_look() -> None:
    async def scenario() -> None:
        source = Listed(lambda: [b"a"], lambda: [b"a", b"b"])
        looking = Looking(throttle(source, 1e6))
        looking.start()
        await looking.until(lambda: len(looking.sent) == 3)
        await looking.discovery.stop()
        assert looking.sent == [(b"a",), (b"a", b"b"), (b"a", b"b")]
        assert looking.said == ["in: found 1 new splits: b"]
        assert source.known[:3] == [{}, {"a": b"a"}, {"a": b"a", "b": b"b"}]
        assert threading.get_ident() not in source.threads
        assert source.option == "1ms"

    run(scenario())


def test_a_look_that_fails_is_named_once_and_tried_again() -> None:
    def fails() -> list[bytes]:
        raise ValueError("no listing")

    async def scenario() -> None:
        looking = Looking(Listed(fails, fails, fails, lambda: [b"a"]))
        looking.start()
        await looking.until(lambda: bool(looking.sent))
        await looking.discovery.stop()
        (said,) = looking.said
        assert "in: new splits cannot be looked up" in said
        assert "ValueError: no listing" in said

    run(scenario())


def test_too_many_splits_are_not_handed_out() -> None:
    async def scenario() -> None:
        source = Listed(lambda: [b"a", b"b", b"c"], lambda: [b"a"])
        looking = Looking(source, discovered_splits_max="2")
        looking.start()
        await looking.until(lambda: bool(looking.sent))
        await looking.discovery.stop()
        assert looking.sent[0] == (b"a",)
        (said,) = looking.said
        assert "there are 3 splits, and 2 are allowed" in said

    run(scenario())


def test_a_slow_look_is_named_and_not_begun_a_second_time() -> None:
    async def scenario() -> None:
        goes_on = threading.Event()

        def slow() -> list[bytes]:
            goes_on.wait()
            return [b"a"]

        source = Listed(slow)
        looking = Looking(source, discovery_timeout="5ms")
        looking.start()
        await looking.until(lambda: bool(looking.said))
        assert "takes longer than 0.005 s" in looking.said[0]
        assert len(source.known) == 1
        goes_on.set()
        await looking.until(lambda: bool(looking.sent))
        await looking.discovery.stop()

    run(scenario())


def test_a_look_after_a_restart_waits_for_the_call_that_hangs() -> None:
    async def scenario() -> None:
        goes_on = threading.Event()
        calls: list[bool] = []

        def slow() -> list[bytes]:
            calls.append(goes_on.is_set())
            goes_on.wait()
            return [b"a"]

        looking = Looking(Listed(slow), discovery_timeout="5ms")
        try:
            for looks in (1, 2, 3):
                looking.start()
                if looks == 1:
                    await looking.until(lambda: bool(looking.said))
                await asyncio.sleep(0.02)
                await looking.discovery.stop()
            assert calls == [False]
            looking.start()
        finally:
            goes_on.set()
        await looking.until(lambda: bool(looking.sent))
        assert calls[:2] == [False, True]
        await looking.discovery.stop()

    run(scenario())


def test_nothing_is_looked_for_where_that_is_off_or_the_source_ends() -> None:
    async def scenario() -> None:
        ends = Listed(lambda: [b"a"])
        ends.bounded = True
        for looking in (
            Looking(ends),
            Looking(Listed(lambda: [b"a"]), discovery_interval="0ms"),
        ):
            looking.start()
            looking.discovery.look_now()
            await looking.discovery.stop()
            assert looking.sent == []

    run(scenario())


def test_restarted_subtasks_do_not_wait_for_the_interval() -> None:
    async def scenario() -> None:
        looking = Looking(Listed(lambda: [b"a"]), discovery_interval="1h")
        looking.start()
        await looking.until(lambda: len(looking.sent) == 1)
        looking.discovery.look_now()
        await looking.until(lambda: len(looking.sent) == 2)
        await looking.discovery.stop()

    run(scenario())


class Family(Listed):
    """The first byte of a child is the name of its parent."""

    splits_have_parents = True

    def split_parents(self, split: bytes) -> Sequence[str]:
        return [split[:1].decode()] if len(split) > 1 else []


def test_a_child_is_offered_when_its_parent_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without another look at the source."""
    monkeypatch.setattr(discovery, "_PARENTS_S", 0.01)

    async def scenario() -> None:
        source = throttle(Family(lambda: [b"a", b"a1", b"b"]), 1e6)
        looking = Looking(source, discovery_interval="1h")
        looking.start()
        await looking.until(lambda: len(looking.sent) == 2)
        assert looking.sent == [(b"a", b"b")] * 2
        assert looking.awaited == ("a",)
        looking.ended = ["a"]
        await looking.until(lambda: looking.sent[-1] == (b"a", b"a1", b"b"))
        await looking.discovery.stop()

    run(scenario())
