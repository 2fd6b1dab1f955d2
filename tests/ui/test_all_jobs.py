"""Goal: `headgate ui` shows running and ended jobs of a machine and a storage, and each job's own page."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from playwright.async_api import expect

from headgate.tests.cli.conftest import Cli, cli, ticker
from headgate.tests.ui.conftest import opened

__all__ = ["cli", "ticker"]
IN_PROCESS = ("--cluster", "in-process")


def start_ui(cli: Cli, *arguments: str) -> tuple[Any, str, str]:
    """Start `headgate ui`; return the command, the link that it prints, and the token in it."""
    started = cli.start("ui", *arguments)
    link = started.wait_for("the web UI: ").partition("the web UI: ")[2]
    return started, link, link.partition("#token=")[2]


def test_requests_are_passed_on_with_the_token_of_the_job(cli: Cli, ticker: str) -> None:
    run = cli.start("run", ticker, *IN_PROCESS)
    run.wait_for("RUNNING")
    started, link, token = start_ui(cli, "--storage", "checkpoints")
    host = f"http://{urlsplit(link).netloc}"

    async def ask() -> None:
        shown = {"Authorization": f"Bearer {token}"}
        async with aiohttp.ClientSession(host) as session:
            for path in ("/v1/jobs", "/jobs/ticker/v1/job", "/stored/ticker/v1/job"):
                assert (await session.get(path)).status == 401
                wrong = {"Authorization": "Bearer wrong"}
                assert (await session.get(path, headers=wrong)).status == 401
            for path in ("/", "/ui", "/ui/"):
                sent_on = await session.get(path)
                assert sent_on.url.path == "/ui/jobs.html"
            assert (await session.get("/jobs/ticker/ui/main.js")).status == 200
            strange = {**shown, "Host": "evil.example"}
            assert (await session.get("/v1/jobs", headers=strange)).status == 421
            strange = {**shown, "Origin": "http://evil.example"}
            assert (await session.get("/v1/jobs", headers=strange)).status == 403
            listed = await (await session.get("/v1/jobs", headers=shown)).json()
            (row,) = listed["jobs"]  # found in both places, and shown once
            assert (row["name"], row["status"], row["path"]) == (
                "ticker",
                "RUNNING",
                "jobs/ticker/",
            )
            assert [each["run"] for each in row["runs"]] == [row["run"]]
            for place in ("jobs", "stored"):
                answer = await session.get(f"/{place}/ticker/v1/job", headers=shown)
                assert (answer.status, (await answer.json())["run"]) == (200, row["run"])
            taken = await session.post(
                "/jobs/ticker/v1/job/checkpoint", headers=shown, data=json.dumps({"triggerId": "a"})
            )
            assert taken.status == 202
            waited = await session.get("/jobs/ticker/v1/operations/a?wait_s=60", headers=shown)
            assert (await waited.json())["result"]["checkpoint"] == 1
            missing = await session.get("/jobs/other/v1/job", headers=shown)
            assert (missing.status, (await missing.json())["error"]) == (404, "JobNotFound")
            events = await session.get("/jobs/ticker/v1/job/events", headers=shown)
            async for line in events.content:
                if line == b"event: progress\n":
                    break
            events.close()

    asyncio.run(ask())
    started.interrupt()
    assert started.end()[0] == 0


def test_the_list_and_the_page_of_a_job(cli: Cli, ticker: str) -> None:
    run = cli.start("run", ticker, *IN_PROCESS)
    run.wait_for("RUNNING")
    started, link, token = start_ui(cli, "--storage", "checkpoints")

    async def look() -> None:
        async with opened(link) as watched:
            page = watched.page
            await expect(page.get_by_role("heading", name="Jobs", level=1)).to_be_visible()
            job = page.get_by_role("link", name="ticker")
            await expect(job).to_be_visible()
            assert token not in page.url
            assert await watched.accessible() == []
            await job.click()
            await expect(page.get_by_role("heading", name="Overview", level=2)).to_be_visible()
            assert token not in page.url
            assert urlsplit(page.url).path == "/jobs/ticker/ui/"
            await expect(page.locator(".chart")).to_have_count(2)
            await page.goto(link)
            await asyncio.to_thread(cli, "stop", "ticker")
            await asyncio.to_thread(run.end)
            jobs = page.get_by_role("table", name="Jobs", exact=True)
            await expect(jobs).to_contain_text("SUSPENDED")
            await expect(page.get_by_role("table", name="Runs of ticker")).to_contain_text(
                "SUSPENDED"
            )
            assert await page.get_by_role("link", name="ticker").count() == 0
            assert await watched.accessible() == []

    asyncio.run(look())
    started.interrupt()
    assert started.end()[0] == 0
