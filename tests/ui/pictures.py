"""Draws the pictures of docs/ui.md: `make ui-pictures` runs a job in trouble, and looks at it in a browser.

python -m headgate.tests.ui.pictures docs/images
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

from playwright.async_api import Page, expect

from headgate.tests.cli.conftest import Cli
from headgate.tests.support.browser import browser

WATCHED_S = 60
"""How much time the curves show."""
JOB = """
import time
from pathlib import Path

import headgate as hg
from headgate.connectors import blackhole, generator


def visit(number):
    busiest = number % 10 < 6
    return {"page": "home" if busiest else f"page-{number % 7}", "n": number}


def best(one, other):
    time.sleep(0.001)  # a slow library
    trouble = Path("trouble")
    if trouble.exists():
        trouble.unlink()
        raise ValueError(f"no score for page {other['page']}")
    return max(one, other, key=lambda visit: visit["n"])


job = hg.Job("clicks", parallelism=2, options={"pipeline.max-parallelism": "128"})
job.checkpoint(every="5s", storage="checkpoints")
job.restart(attempts=10, delay="3s")
visits = job.read(generator(function=visit, rate=2000, batch_rows=20), name="visits")
scores = visits.key_with(lambda visit: visit["page"]).reduce(best, name="scores")
scores.rebalance().write(blackhole(), name="out")
"""


async def draw(target: Path, directory: Path) -> None:
    """Run the job, and draw each view into the directory `target`."""
    cli = Cli(directory)
    cli.write("clicks.py", JOB)
    try:
        run = cli.start("run", "clicks.py", "--cluster", "in-process")
        await asyncio.to_thread(run.wait_for, "RUNNING")
        ui = cli.start("ui", "--storage", "checkpoints")
        link = (await asyncio.to_thread(ui.wait_for, "the web UI: ")).partition("UI: ")[2]
        await asyncio.sleep(WATCHED_S)
        async with browser() as chromium:
            context = await chromium.new_context(viewport={"width": 1280, "height": 760})
            page = await context.new_page()
            expect.set_options(timeout=120_000)
            page.set_default_timeout(120_000)
            await page.goto(link)
            await expect(page.get_by_role("link", name="clicks")).to_be_visible()
            await page.screenshot(path=target / "ui-jobs.png")
            await page.get_by_role("link", name="clicks").click()
            await expect(page.get_by_text("holds others up")).to_be_visible()
            await take(page, target, "overview")
            await page.emulate_media(color_scheme="dark")
            await page.screenshot(path=target / "ui-overview-dark.png")
            await page.emulate_media(color_scheme="light")
            await page.get_by_role("link", name="Look at its subtasks").first.click()
            await take(page, target, "step")
            await page.get_by_role("link", name="Checkpoints").click()
            await expect(page.get_by_role("table", name="The last checkpoints")).to_be_visible()
            await page.screenshot(path=target / "ui-checkpoints.png")
            (directory / "trouble").touch()
            await page.get_by_role("link", name="Failures").click()
            await expect(page.get_by_text("RESTARTING")).to_be_visible()
            await expect(page.locator("article")).to_contain_text("Ran again")
            await page.screenshot(path=target / "ui-failures.png")
            await page.get_by_role("link", name="Logs").click()
            await expect(page.locator(".lines-of-log > li").first).to_be_visible()
            await page.screenshot(path=target / "ui-logs.png")
            await page.get_by_role("link", name="Actions").click()
            await page.get_by_role("button", name="Rescale …").click()
            await expect(page.get_by_role("dialog")).to_be_visible()
            await page.screenshot(path=target / "ui-actions.png")
    finally:
        cli.close()


async def take(page: Page, target: Path, name: str) -> None:
    """Draw a view with curves, once it has them."""
    await expect(page.locator(".chart").first).to_be_visible()
    await page.screenshot(path=target / f"ui-{name}.png", full_page=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        asyncio.run(draw(Path(sys.argv[1]).resolve(), Path(name)))
