"""The operator's copy of the objects of one kind, over an API server that a test plays."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

pytest.importorskip("kubernetes_asyncio", reason="pip install 'headgate[k8s]'")

from headgate.k8s.operator.api import ApiError
from headgate.k8s.operator.informer import OPTIONAL_RETRY_S, Informer
from headgate.k8s.operator.kinds import KINDS, POD, Kind
from headgate.k8s.operator.metrics import Metrics


def pod(name: str, version: int, **labels: str) -> dict[str, Any]:
    """A pod as the API server shows it."""
    metadata = {"namespace": "n", "name": name, "resourceVersion": str(version), "labels": labels}
    return {"kind": "Pod", "metadata": metadata}


def event(kind: str, made: dict[str, Any]) -> dict[str, Any]:
    """One line of a watch."""
    return {"type": kind, "object": made}


class Server:
    """Answers lists and watches with what the test has put down, and then waits for ever."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []
        self.done = asyncio.Event()
        self.before_lines: Callable[[], None] = lambda: None

    async def list(self, kind: Kind, namespace: str) -> tuple[list[dict[str, Any]], str]:
        self.asked.append("list")
        items, version = self._next()
        return items, version

    async def watch(
        self, kind: Kind, namespace: str, version: str
    ) -> AsyncIterator[dict[str, Any]]:
        self.asked.append(f"watch from {version}")
        if not self.answers:
            self.done.set()
            await asyncio.Event().wait()
        for line in self._next():
            self.before_lines()
            yield line

    def _next(self) -> Any:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


class Watch:
    """An informer with a clock of its own, run until the server has no more to say."""

    def __init__(self, *answers: Any) -> None:
        self.now = 100.0
        self.changed: list[str] = []
        self.server = Server(*answers)
        self.informer = Informer(
            self.server, POD, "", self._note, lambda: self.now, lambda _: asyncio.sleep(0)
        )

    def _note(self, made: dict[str, Any]) -> None:
        self.changed.append(made["metadata"]["name"])

    async def run(self) -> None:
        task = asyncio.create_task(self.informer.run())
        await asyncio.wait_for(self.server.done.wait(), 60)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    def names(self) -> set[str]:
        return {made["metadata"]["name"] for made in self.informer}


def test_a_version_that_is_too_old_lists_again_and_reports_what_has_gone() -> None:
    async def main() -> None:
        watch = Watch(
            ([pod("a", 1), pod("b", 2)], "2"),
            [event("ADDED", pod("c", 3))],
            ApiError(410, "Expired"),
            ([pod("b", 2), pod("c", 7)], "9"),
        )
        await watch.run()
        assert watch.server.asked == [
            "list",
            "watch from 2",
            "watch from 3",
            "list",
            "watch from 9",
        ]
        assert watch.names() == {"b", "c"}
        assert watch.changed == ["a", "b", "c", "a", "c"]

    asyncio.run(main())


def test_other_errors_are_tried_again() -> None:
    async def main() -> None:
        watch = Watch(ApiError(503, "busy"), ApiError(500, "busy"), ([pod("a", 1)], "1"))
        await watch.run()
        assert watch.names() == {"a"}

    asyncio.run(main())


def test_an_event_does_not_undo_a_newer_write_of_our_own() -> None:
    async def main() -> None:
        watch = Watch(([pod("a", 1)], "1"))
        await watch.run()
        watch.informer.put(pod("a", 5, mine="yes"))
        watch.server.answers = [([pod("a", 5, mine="yes")], "5"), [event("MODIFIED", pod("a", 3))]]
        watch.server.done.clear()
        await watch.run()
        assert watch.informer.get("n", "a") == pod("a", 5, mine="yes")

    asyncio.run(main())


def test_a_write_whose_answer_comes_behind_the_deletion_brings_nothing_back() -> None:
    """The operator would wait for ever for such an object to go."""

    async def main() -> None:
        watch = Watch(
            ([pod("a", 1)], "1"), [event("MODIFIED", pod("a", 2)), event("DELETED", pod("a", 3))]
        )
        await watch.run()
        watch.informer.put(pod("a", 2))
        assert watch.names() == set()
        watch.informer.put(pod("a", 4))  # made again
        assert watch.names() == {"a"}

    asyncio.run(main())


def test_bookmarks_count_as_word_from_the_api_server() -> None:
    """A quiet cluster must not look like a watch that has died."""

    async def main() -> None:
        watch = Watch(([pod("a", 1)], "1"), [event("BOOKMARK", pod("a", 8))])
        watch.server.before_lines = lambda: setattr(watch, "now", 400.0)
        metrics = Metrics()
        metrics.watch_kind(POD.name, lambda: watch.informer.heard_s)
        name = b'headgate_operator_watch_last_event_timestamp_seconds{resource="Pod"} '
        assert name + b"100.0" in metrics.text()
        await watch.run()
        assert name + b"400.0" in metrics.text()
        assert watch.changed == ["a"]
        assert watch.server.asked == ["list", "watch from 1", "watch from 8"]

    asyncio.run(main())


class TestOptionalKinds:
    """RayClusters, which exist only where KubeRay is installed."""

    def watch(self, *answers: Any) -> tuple[Watch, list[str]]:
        watch, appeared = Watch(*answers), []
        watch.informer = Informer(
            watch.server,
            KINDS["RayCluster"],
            "",
            watch._note,
            lambda: watch.now,
            lambda _: asyncio.sleep(0),
            lambda: appeared.append("now"),
        )
        return watch, appeared

    def test_it_is_told_once_why_one_is_missing(self, caplog: pytest.LogCaptureFixture) -> None:
        async def main() -> None:
            watch, appeared = self.watch(*[ApiError(404, "no such resource")] * 5, ([], "1"))
            with caplog.at_level("INFO"):
                await watch.run()
            said = [each.message for each in caplog.records]
            assert said == [
                "rayclusters are not watched: no such resource",
                "rayclusters are watched again",
            ]
            assert appeared == ["now"]
            assert (watch.informer.missing, watch.informer.trouble) == (False, "")

        asyncio.run(main())

    def test_another_reason_is_told_again(self, caplog: pytest.LogCaptureFixture) -> None:
        async def main() -> None:
            refused = [ApiError(404, "not defined"), ApiError(403, "forbidden")]
            watch, _ = self.watch(*refused, ([], "1"))
            with caplog.at_level("WARNING"):
                await watch.run()
            assert [each.message for each in caplog.records] == [
                "rayclusters are not watched: not defined",
                "rayclusters are not watched: forbidden",
            ]

        asyncio.run(main())

    def test_its_objects_are_forgotten_and_all_else_goes_on(self) -> None:
        async def main() -> None:
            watch, _ = self.watch(([pod("a", 1)], "1"), ApiError(410, ""), ApiError(404, "gone"))
            pauses: list[float] = []

            async def sleep(seconds: float) -> None:
                pauses.append(seconds)
                if len(pauses) == 2:
                    watch.server.done.set()
                    await asyncio.Event().wait()

            watch.informer._sleep = sleep
            await watch.run()
            assert watch.changed == ["a", "a"]
            assert watch.informer.synced.is_set()
            assert (watch.informer.missing, watch.informer.trouble) == (True, "gone")
            assert pauses == [0.0, OPTIONAL_RETRY_S]

        asyncio.run(main())


def pauses_of(*answers: Any) -> list[float]:
    """The pauses of an informer that gets these answers."""

    async def main() -> list[float]:
        watch, pauses = Watch(*answers), []

        async def sleep(seconds: float) -> None:
            pauses.append(seconds)

        watch.informer._sleep = sleep
        await watch.run()
        return pauses

    return asyncio.run(main())


def test_a_version_that_is_always_too_old_is_not_asked_for_without_a_pause() -> None:
    listed, old = ([pod("a", 1)], "1"), ApiError(410, "Expired")
    first, *more = pauses_of(*[listed, old] * 6, ([], "1"))
    assert first == 0
    assert all(each > 0 for each in more)
    assert more[-1] > 4


def test_a_watch_that_always_fails_is_left_alone_for_longer_each_time() -> None:
    """Also if each list before it works."""
    listed, refused = ([pod("a", 1)], "1"), ApiError(500, "no")
    pauses = pauses_of(*[listed, refused] * 8, ([], "1"))
    assert pauses[0] <= 1
    assert pauses[-1] >= 15


def test_the_server_says_how_long_it_wants_to_be_left_alone() -> None:
    busy = ApiError(429, "busy", retry_after_s=12)
    assert pauses_of(busy, ([], "1")) == [12]
    for_ever = ApiError(429, "busy", retry_after_s=9999)
    assert pauses_of(for_ever, ([], "1")) == [30]


def test_a_trouble_is_told_until_it_is_over() -> None:
    async def main() -> None:
        watch = Watch(ApiError(503, "busy"), ([pod("a", 1)], "1"))
        seen: list[str] = []

        async def sleep(seconds: float) -> None:
            seen.append(watch.informer.trouble)

        watch.informer._sleep = sleep
        await watch.run()
        assert seen == ["busy"]
        assert watch.informer.trouble == ""

    asyncio.run(main())
