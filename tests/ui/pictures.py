"""Draws the pictures of docs/ui.md: `make ui-pictures` looks at a job at rest and in trouble.

python -m headgate.tests.ui.pictures docs/images
"""

from __future__ import annotations

import asyncio
import io
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.async_api import Page, expect

from headgate.tests.cli.conftest import Cli
from headgate.tests.support.browser import browser

WATCHED_S = 45
"""How long the job runs in a state before it is drawn, so that curves and checkpoints show it."""
SEEN_MS_MAX = 180_000
SETTLED_S = 1
"""How long the answers of a view take to come."""
WIDTH, HEIGHT = 1280, 760
JOB = """
import time
from pathlib import Path

import headgate as hg
from headgate.connectors import blackhole, generator

BEGAN_MS = int(time.time() * 1000)
SCORING_S = {"slow": 0.0015, "slower": 0.02}  # a slow library


def visit(number):
    busiest = number % 10 < 6
    page = "home" if busiest else f"page-{number % 7}"
    late_ms = 60_000 if number % 900 == 899 else 0
    return {"page": page, "n": number, "at": BEGAN_MS + number - late_ms}


def best(one, other):
    pace = next((name for name in ("slower", "slow") if Path(name).exists()), None)
    time.sleep(SCORING_S[pace] if pace else 0.0002)
    trouble = Path("trouble")
    if trouble.exists():
        trouble.unlink()
        raise ValueError(f"no score for page {other['page']}")
    return max(one, other, key=lambda visit: visit["n"])


job = hg.Job("clicks", parallelism=2, options={"pipeline.max-parallelism": "128"})
job.checkpoint(every="5s", storage="checkpoints", timeout="20s", tolerable_failures=10)
job.restart(attempts=10, delay="15s")
visits = job.read(generator(function=visit, rate=1000, batch_rows=20), name="visits")
committed = hg.Queryable("best", committed=True)
by_page = visits.key_with(lambda visit: visit["page"])
scores = by_page.reduce(best, name="scores", queryable=committed)
scores.rebalance().write(blackhole(), name="out")
columns = {"page": "string", "n": "int64", "at": "int64"}
rows = visits.map(lambda visit: visit, into=columns, name="rows")
timed = rows.event_time("at", max_out_of_order="2s")
counts = timed.key_by("page").window(hg.tumbling("10s")).agg(visits=hg.count(), name="per-page")
counts.write(blackhole(), name="report")
"""


class Camera:
    """Draws views of one page into a directory."""

    def __init__(self, page: Page, target: Path) -> None:
        self.page = page
        self._target = target

    async def take(self, name: str, height: int = HEIGHT) -> None:
        """Draw the page as it is now, down to a height in pixels."""
        await self.page.mouse.move(0, 0)
        await self.page.set_viewport_size({"width": WIDTH, "height": height})
        await asyncio.sleep(SETTLED_S)
        taken = await self.page.screenshot(animations="disabled")
        with Image.open(io.BytesIO(taken)) as image:
            image.convert("RGB").save(self._target / f"ui-{name}.webp", lossless=True, method=6)

    async def show(self, view: str) -> None:
        """Go to a view by its link."""
        await self.page.get_by_role("navigation").get_by_role("link", name=view).click()
        await self.page.locator("main").blur()


async def draw(target: Path, directory: Path) -> None:
    """Run the job, and draw its states into the directory `target`."""
    cli = Cli(directory)
    cli.write("clicks.py", JOB)
    try:
        run = cli.start("run", "clicks.py", "--cluster", "in-process")
        await asyncio.to_thread(run.wait_for, "RUNNING")
        ui = cli.start("ui", "--storage", "checkpoints")
        link = (await asyncio.to_thread(ui.wait_for, "the web UI: ")).partition("UI: ")[2]
        async with browser() as chromium:
            context = await chromium.new_context(viewport={"width": WIDTH, "height": HEIGHT})
            page = await context.new_page()
            expect.set_options(timeout=SEEN_MS_MAX)
            page.set_default_timeout(SEEN_MS_MAX)
            await page.goto(link)
            await page.get_by_role("link", name="clicks").click()
            camera = Camera(page, target)
            await at_rest(camera)
            (directory / "slow").touch()
            await under_backpressure(camera)
            (directory / "slower").touch()
            await after_a_failed_checkpoint(camera)
            (directory / "trouble").touch()
            await during_a_restart(camera)
            for pace in ("slow", "slower"):
                (directory / pace).unlink()
            await after_the_restart(camera)
            await page.goto(link)
            await expect(page.get_by_role("link", name="clicks")).to_be_visible()
            await camera.take("jobs")
    finally:
        cli.close()


async def at_rest(camera: Camera) -> None:
    """Draw each view while all is well."""
    page = camera.page
    await expect(page.locator(".chart").first).to_be_visible()
    await asyncio.sleep(WATCHED_S)
    await camera.take("overview-rest", 920)
    await page.emulate_media(color_scheme="dark")
    await camera.take("overview-dark")
    await page.emulate_media(color_scheme="light")
    await page.get_by_role("cell", name="scores").get_by_role("link").click()
    await expect(page.locator(".chart").first).to_be_visible()
    await camera.take("step-rest", 1150)
    await camera.show("Checkpoints")
    await expect(page.get_by_role("table", name="The last checkpoints")).to_be_visible()
    await camera.take("checkpoints-rest")
    await camera.show("Lost records")
    await expect(page.get_by_role("table", name="Samples of dropped records")).to_be_visible()
    await camera.take("lost-rest")
    await camera.show("State")
    await page.get_by_label("Keys", exact=True).select_option("all keys")
    await page.get_by_label("Level", exact=True).select_option("committed")
    await page.get_by_role("button", name="Ask", exact=True).click()
    await expect(page.get_by_role("table", name="Rows of the state")).to_be_visible()
    await camera.take("state-rest", 900)
    await camera.show("Settings")
    await expect(page.get_by_label("Plan", exact=True)).to_be_visible()
    await camera.take("settings-rest", 900)
    await camera.show("Actions")
    await page.get_by_role("button", name="Rescale …").click()
    await expect(page.get_by_role("dialog")).to_be_visible()
    await camera.take("actions-rest")
    await page.keyboard.press("Escape")


async def under_backpressure(camera: Camera) -> None:
    """Draw the three clicks that say why the job is slow."""
    page = camera.page
    await camera.show("Overview")
    await expect(page.get_by_text("holds others up")).to_be_visible()
    await asyncio.sleep(WATCHED_S)
    await camera.take("overview-backpressure", 1020)
    await page.get_by_role("link", name="Look at its subtasks").first.click()
    await page.get_by_role("button", name="Look for 5 s").click()
    await expect(page.get_by_role("region", name="Flame graph")).to_be_visible()
    await camera.take("step-backpressure", 1440)
    await camera.show("Checkpoints")
    await camera.take("checkpoints-backpressure")


async def after_a_failed_checkpoint(camera: Camera) -> None:
    """Draw what says that a checkpoint failed, and why."""
    page = camera.page
    await camera.show("Overview")
    await expect(page.get_by_role("status").get_by_text("checkpoint failed")).to_be_visible()
    await camera.take("overview-failed-checkpoint")
    await camera.show("Checkpoints")
    await expect(page.get_by_role("table", name="The last checkpoints")).to_be_visible()
    await camera.take("checkpoints-failed")


async def during_a_restart(camera: Camera) -> None:
    """Draw the job while it waits for its restart."""
    page = camera.page
    await expect(page.get_by_role("banner").get_by_text("RESTARTING")).to_be_visible()
    await camera.show("Overview")
    await camera.take("overview-restart")
    await camera.show("Failures")
    await expect(page.locator("article")).to_be_visible()
    await camera.take("failures-restart")


async def after_the_restart(camera: Camera) -> None:
    """Draw what a restart leaves behind."""
    page = camera.page
    await expect(page.locator("article")).to_contain_text("Ran again")
    await asyncio.sleep(5)
    await camera.take("failures-after")
    await camera.show("Logs")
    await expect(page.locator(".lines-of-log > li").first).to_be_visible()
    await camera.take("logs-after")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        asyncio.run(draw(Path(sys.argv[1]).resolve(), Path(name)))
