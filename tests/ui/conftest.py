"""A page of the web UI in a real browser, beside a job that runs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
from aiohttp import web
from playwright.async_api import ConsoleMessage, Page, Request, expect

import headgate as hg
from headgate.tests.rest.conftest import serving, with_api
from headgate.tests.support import browser as browsers
from headgate.tests.support.npm import axe_script

__all__ = ["with_api"]
SEEN_MS_MAX = 60_000
"""How long a page may take to show what is expected, on a slow machine."""


class Watched:
    """A page, and everything that went wrong in it."""

    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        self.host = urlsplit(url).netloc
        self.problems: list[str] = []
        self.refused_on_purpose = False
        page.on("console", self._said)
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("request", self._requested)

    def _said(self, message: ConsoleMessage) -> None:
        # Violations of the content security policy are errors of the console.
        if message.type in ("error", "warning") and not self.refused_on_purpose:
            self.problems.append(message.text)

    def _requested(self, request: Request) -> None:
        parts = urlsplit(request.url)
        if parts.scheme in ("http", "https", "ws", "wss") and parts.netloc != self.host:
            self.problems.append(f"a request to another host: {request.url}")
        if "token" in parts.query or "token" in parts.path:
            self.problems.append(f"a token in an address: {request.url}")

    async def accessible(self) -> list[str]:
        """Return what axe-core finds wrong with the page as it is now, in light and in dark."""
        found = []
        for scheme in ("light", "dark"):
            await self.page.emulate_media(color_scheme=scheme)
            if not await self.page.evaluate("() => 'axe' in window"):
                # By the debugger's protocol, so the page's policy holds for all that the page itself does.
                await self.page.evaluate(axe_script().read_text())
            result = await self.page.evaluate(
                "() => axe.run(document, {resultTypes: ['violations']})"
            )
            found += [
                f"{scheme}: {each['id']}: {each['help']}: {node['html'][:200]}"
                for each in result["violations"]
                for node in each["nodes"]
            ]
        return found


@asynccontextmanager
async def opened(url: str, **options: Any) -> AsyncIterator[Watched]:
    """Open a page of the web UI; at the end of the block nothing may have gone wrong in it."""
    async with browsers.browser() as browser:
        context = await browser.new_context(viewport={"width": 1280, "height": 800}, **options)
        watched = Watched(await context.new_page(), url)
        watched.page.set_default_timeout(SEEN_MS_MAX)
        expect.set_options(timeout=SEEN_MS_MAX)
        await watched.page.goto(url)
        yield watched
        assert watched.problems == []


@asynccontextmanager
async def behind_prefix(url: str, prefix: str) -> AsyncIterator[str]:
    """Serve what is at `url` below a prefix of another port, as an ingress does."""
    async with aiohttp.ClientSession(auto_decompress=False) as session:

        async def pass_on(request: web.Request) -> web.StreamResponse:
            target = url + request.path_qs.removeprefix(prefix)
            headers = {k: v for k, v in request.headers.items() if k in ("Authorization", "Accept")}
            async with session.get(target, headers=headers, allow_redirects=False) as found:
                kept = {k: v for k, v in found.headers.items() if k not in ("Transfer-Encoding",)}
                response = web.StreamResponse(status=found.status, headers=kept)
                await response.prepare(request)
                async for chunk in found.content.iter_any():
                    await response.write(chunk)
                return response

        app = web.Application()
        app.router.add_get(prefix + "/{path:.*}", pass_on)
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}{prefix}"
        finally:
            await runner.cleanup()


@pytest.fixture
def beside(lab: Any) -> Callable[..., Any]:
    """Runs a script with a page of the job, while the job runs."""

    def run(job: hg.Job, script: Callable[[Watched, Any], Awaitable[None]], **options: Any) -> Any:
        async def with_page(running: Any) -> None:
            async with serving(running) as api:
                await running.until("status", status="RUNNING")
                async with opened(f"{api.url}/ui/#token={api.token}") as watched:
                    await script(watched, api)

        return lab.run(job, with_page, **options)

    return run
