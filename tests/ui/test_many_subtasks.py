"""Goal: the pages of a job with ten thousand subtasks hold no more than those of a small one can show."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
from playwright.async_api import Page, expect

from headgate.operators.clock import SystemClock
from headgate.runtime.control.job_client import PublishedEvent, Subscriber
from headgate.runtime.options.registry import Options
from headgate.runtime.rest.server import RestServer
from headgate.tests.rest.conftest import windows_job
from headgate.tests.ui.conftest import opened

PARALLELISM = 5_000
"""Of each of the two vertices."""
ELEMENTS_MAX = 5_000
"""The elements of a page: a browser lays these out in some ten milliseconds."""


class Multiplied:
    """The coordinator of a small job, whose answers are those of a job with many subtasks."""

    def __init__(self, clients: Any) -> None:
        self._clients = clients

    def view(self, verb: str, **arguments: Any) -> dict[str, Any]:
        found: dict[str, Any] = self._clients.view(verb, **arguments)
        if verb == "status":
            return multiplied(found)
        if verb == "subtasks":
            first = found["subtasks"][0]
            subtasks = [
                {**first, "index": index, "records_in": index} for index in range(PARALLELISM)
            ]
            return {**found, "subtasks": subtasks}
        return found

    async def ask(self, verb: str, arguments: dict[str, Any]) -> dict[str, Any]:
        return self.view(verb, **arguments)

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        unsubscribe: Callable[[], None] = self._clients.subscribe(MultipliedEvents(subscriber))
        return unsubscribe


class MultipliedEvents:
    """Passes the events of the small job on; those of its progress bring a status as well."""

    def __init__(self, subscriber: Subscriber) -> None:
        self._subscriber = subscriber

    def put(self, event: PublishedEvent) -> None:
        if event.kind == "progress":
            body = multiplied(json.loads(event.body))
            event = msgspec.structs.replace(event, body=json.dumps(body).encode())
        self._subscriber.put(event)

    def replayed(self) -> None:
        self._subscriber.replayed()

    def close(self) -> None:
        self._subscriber.close()


def multiplied(status: dict[str, Any]) -> dict[str, Any]:
    """Return the status of a small job as that of one with many subtasks."""
    first = status["workers"][0]
    workers = [{**first, "worker": f"w{number}"} for number in range(PARALLELISM // 4)]
    vertices = [{**each, "parallelism": PARALLELISM} for each in status["vertices"]]
    return {**status, "parallelism": PARALLELISM, "workers": workers, "vertices": vertices}


async def elements(page: Page) -> int:
    return int(await page.evaluate("() => document.querySelectorAll('*').length"))


def test_ten_thousand_subtasks(lab: Any) -> None:
    async def script(running: Any) -> None:
        await running.until("status", status="RUNNING")
        many = Multiplied(running.coordinator.clients)
        token = running.coordinator.server.token
        server = RestServer(many, token, Options({"rest.port": "0"}), SystemClock())
        await server.listen()
        try:
            async with opened(f"{server.url}/ui/#token={token}") as watched:
                page = watched.page
                graph = page.get_by_role("region", name="Graph of the job")
                await expect(graph).to_contain_text("× 5,000")
                assert await elements(page) < ELEMENTS_MAX
                await graph.get_by_role("link").nth(1).click()
                await expect(page.locator("main")).to_contain_text("rows 1 to 100 of 5000")
                assert await elements(page) < ELEMENTS_MAX
                table = page.get_by_role("table", name="Subtasks", exact=True)
                sort = table.get_by_role("button", name="Records in")
                await sort.click()
                first = table.locator("tbody tr").first
                await expect(first.locator("td").first).to_have_text("4999 (5000/5000)")
                await page.get_by_role("button", name="Next").click()
                await expect(first.locator("td").first).to_have_text("4899 (4900/5000)")
                assert await elements(page) < ELEMENTS_MAX
                assert await watched.accessible() == []
        finally:
            await server.close()

    lab.run(windows_job(lab), script, batches=2)
