"""Goal: each view shows what the REST API answers, to everyone, by keyboard and in both themes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Page, expect

import headgate as hg
from headgate.connectors import blackhole, from_list
from headgate.errors import JobNotReady
from headgate.runtime.observe.logs import tapped
from headgate.runtime.options.execution import PRE_AGGREGATION
from headgate.runtime.rest.answers import CheckpointCommand
from headgate.runtime.rest.state_answers import QueryAnswer
from headgate.state.hashing import hash_key, key_group_of
from headgate.tests.cli.conftest import cli
from headgate.tests.rest.conftest import serving, windows_job
from headgate.tests.rest.test_timers import Reminds
from headgate.tests.ui.conftest import behind_prefix, opened

__all__ = ["cli"]
USERS = [f"{team}-{number:02}" for team in ("red", "blue") for number in range(60)]
TOKEN = "a-token-of-this-test-0123456789"
SLOW_JOB = """
import time

import headgate as hg
from headgate.connectors import blackhole, generator


def visit(number):
    return {"page": "home" if number % 10 < 6 else f"page-{number % 7}", "n": number}


def slow_library(one, other):
    time.sleep(0.002)
    return other


job = hg.Job("clicks", parallelism=2, options={"pipeline.max-parallelism": "128"})
visits = job.read(generator(function=visit, rate=2000, batch_rows=20), name="visits")
scores = visits.key_with(lambda visit: visit["page"]).reduce(slow_library, name="scores")
scores.write(blackhole(), name="out")
"""


async def show(page: Page, view: str, title: str) -> None:
    """Go to a view by its link, and wait for it."""
    await page.get_by_role("navigation").get_by_role("link", name=view).click()
    await expect(page.get_by_role("heading", name=title, level=2)).to_be_visible()


async def rows(page: Page, table: str) -> list[list[str]]:
    """Return the cells of a table, once it has rows."""
    body = page.get_by_role("table", name=table, exact=True).locator("tbody tr")
    await expect(body.first).to_be_visible()
    return [
        [" ".join(text.split()) for text in await row.locator("td").all_inner_texts()]
        for row in await body.all()
    ]


async def until_known(api: Any, state: str, key: str) -> QueryAnswer:
    """Wait until a state has a key, and return what it has."""
    async with api.client() as client:
        while True:
            with contextlib.suppress(JobNotReady):
                told: QueryAnswer = await client.query(state, key)
                if told.found:
                    return told
            await asyncio.sleep(0.01)


def test_each_view_shows_what_the_api_answers(lab: Any, beside: Any) -> None:
    async def script(watched: Any, api: Any) -> None:
        page = watched.page
        async with api.client() as client:
            await client.carry_out(CheckpointCommand(trigger_id="first"))
            told = await client.status()
            config = await client.config()
            (checkpoint,) = (await client.checkpoints()).history
        await expect(page.get_by_role("heading", name="clicks", level=1)).to_be_visible()
        assert "token" not in page.url
        assert await watched.accessible() == []
        shown = await rows(page, "Steps of the job")
        assert [row[0] for row in shown] == [each.name for each in told.vertices]
        assert [row[1] for row in shown] == [str(each.parallelism) for each in told.vertices]
        # The sources are held, so the figures stand.
        await expect(page.get_by_role("cell", name="20", exact=True)).to_have_count(3)
        graph = page.get_by_role("region", name="Graph of the job")
        assert await graph.get_by_role("link").count() == len(told.vertices)
        await expect(graph).to_contain_text("hash(user)")

        await expect(page.locator(".chart")).to_have_count(2)
        chart = page.get_by_role("img", name="Busy, mean of the subtasks")
        for vertex in told.vertices:
            await expect(chart).to_have_accessible_name(re.compile(re.escape(vertex.name)))

        await graph.get_by_role("link").nth(1).click()
        await expect(page.get_by_role("heading", name="windows -> out", level=2)).to_be_visible()
        shown = await rows(page, "Subtasks")
        assert [row[0] for row in shown] == ["0 (1/2)", "1 (2/2)"]
        assert {row[1] for row in shown} == {each.worker for each in told.workers}
        assert sum(int(row[2]) for row in shown) == 20
        await page.get_by_role("button", name="Look for 5 s").click()
        await expect(page.locator("main")).to_contain_text("The subtask did not run in this time.")
        await page.get_by_label("what it waits for").check()
        flames = page.get_by_role("region", name="Flame graph")
        await expect(flames).to_contain_text("100 % Subtask._run (headgate/runtime/task/subtask.py")
        await expect(flames.get_by_role("img")).to_have_accessible_name(
            re.compile("samples of waiting")
        )
        assert await watched.accessible() == []

        await show(page, "Checkpoints", "Checkpoints")
        (row,) = await rows(page, "The last checkpoints")
        assert row[:2] == [str(checkpoint.id), checkpoint.status]
        assert checkpoint.explanation[1:].replace("`", "") in row[-1]
        await expect(page.locator(".verdict")).to_contain_text("Checkpoint 1 took")
        await page.get_by_role("link", name="1", exact=True).click()
        assert len(await rows(page, "Subtasks of the checkpoint")) == checkpoint.num_subtasks
        assert await watched.accessible() == []

        await show(page, "Failures", "Failures and restarts")
        await expect(page.locator("main")).to_contain_text("Nothing has failed")
        await show(page, "Lost records", "Lost records")
        await expect(page.locator("main")).to_contain_text("No step has dropped a record")

        await show(page, "Settings", "Settings")
        await page.get_by_label("with defaults").check()
        await page.get_by_label("Name contains").fill("headgate.rest.")
        shown = await rows(page, "Options in effect")
        wanted = {key: each for key, each in config.options.items() if "headgate.rest." in key}
        assert {row[0]: row[1] for row in shown} == {k: each.value for k, each in wanted.items()}
        await expect(page.get_by_label("Plan", exact=True)).to_contain_text("hash(user)")
        assert await watched.accessible() == []

    # Otherwise the windows would take fewer rows than there are records, and when is chance.
    one_by_one = {PRE_AGGREGATION.key: "false"}
    beside(windows_job(lab, **one_by_one), script, batches=2)


def test_an_operation_by_keyboard_alone(lab: Any, beside: Any) -> None:
    async def script(watched: Any, api: Any) -> None:
        page = watched.page
        await expect(page.get_by_role("heading", name="Overview", level=2)).to_be_visible()
        await page.keyboard.press("Tab")
        await expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
        await reach(page, "Actions")
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("heading", name="Actions", level=2)).to_be_visible()
        await expect(page.locator("main")).to_be_focused()

        await reach(page, "Stop …")
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("dialog")).to_be_visible()
        assert await watched.accessible() == []
        await page.keyboard.press("Escape")
        await expect(page.get_by_role("dialog")).to_have_count(0)

        await page.locator("main").focus()
        await reach(page, "Take a checkpoint …")
        await page.keyboard.press("Enter")
        await reach(page, "Take a checkpoint")
        await page.keyboard.press("Enter")
        await expect(page.get_by_text("COMPLETED")).to_be_visible()
        (row,) = await rows(page, "Operations")
        async with api.client() as client:
            (done,) = await client.operations()
        assert (row[0], row[-1]) == (done.verb, done.trigger_id) == ("checkpoint", done.trigger_id)
        assert await watched.accessible() == []

    beside(windows_job(lab), script, batches=2)


def test_behind_a_prefix_with_a_link_to_grafana(lab: Any) -> None:
    grafana = "https://grafana.invalid/d/job?var-job={job}"

    async def script(running: Any) -> None:
        async with serving(running) as api:
            await running.until("status", status="RUNNING")
            async with (
                behind_prefix(api.url, "/team/jobs/clicks") as url,
                opened(f"{url}/ui#token={api.token}") as watched,
            ):
                page = watched.page
                await expect(page.get_by_role("heading", name="Overview", level=2)).to_be_visible()
                await expect(page.locator(".chart")).to_have_count(2)
                await show(page, "Logs", "Logs")
                await show(page, "Settings", "Settings")
                await expect(page.get_by_label("Plan", exact=True)).to_contain_text("hash(user)")
                link = page.get_by_role("link", name="Grafana")
                address = "https://grafana.invalid/d/job?var-job=clicks"
                await expect(link).to_have_attribute("href", address)
                assert await watched.accessible() == []

    lab.run(windows_job(lab, **{"headgate.rest.grafana-url": grafana}), script, batches=2)


def test_timers_hot_key_groups_and_event_time_of_a_step(lab: Any, beside: Any) -> None:
    job = hg.Job("reminds", parallelism=2)
    records = [("hot" if number % 10 else f"user-{number}", number) for number in range(100)]
    (
        job.read(from_list(records), name="in", parallelism=1)
        .event_time(lambda record: record[1], max_out_of_order="0s")
        .key_with(lambda record: record[0])
        .process(Reminds(), name="reminds")
        .write(blackhole(), name="out")
    )

    async def script(watched: Any, api: Any) -> None:
        page = watched.page
        graph = page.get_by_role("region", name="Graph of the job")
        await graph.get_by_role("link", name="reminds").click()
        (group, _, of_step, of_subtask) = (await rows(page, "Hot key groups"))[0]
        assert group == str(key_group_of(hash_key("hot"), 128))
        assert of_step == "90 %"
        assert int(of_subtask.removesuffix(" %")) >= 90
        await expect(page.locator("main .figures")).to_contain_text(
            "Timers 22", use_inner_text=True
        )
        header = page.get_by_role("table", name="Subtasks", exact=True).locator("thead")
        titles = [text.strip() for text in await header.locator("th").all_inner_texts()]
        shown = await rows(page, "Subtasks")
        assert sum(int(row[titles.index("Timers")]) for row in shown) == 22
        # The step that makes the watermarks is in the vertex before this one.
        (row,) = await rows(page, "Event time")
        assert row[0] == "event_time"
        assert await watched.accessible() == []

    beside(job, script)


def test_the_log_is_followed_and_searched(lab: Any, beside: Any) -> None:
    async def script(watched: Any, api: Any) -> None:
        page = watched.page
        await expect(page.get_by_role("heading", name="Overview", level=2)).to_be_visible()
        log = logging.getLogger("headgate.test")
        with tapped(api.job.coordinator.keep_line):
            log.warning("the disk is slow", extra={"worker": "w7", "subtask": 3})
            await show(page, "Logs", "Logs")
            lines = page.locator(".lines-of-log > li")
            # A busy machine may have the job warn of something as well.
            slow = lines.filter(has_text="the disk is slow")
            await expect(slow).to_contain_text("w7 headgate.test subtask 3", use_inner_text=True)
            try:
                raise ValueError("the end of it")
            except ValueError:
                log.exception("it is broken")
            broken = lines.filter(has_text="it is broken")
            await expect(broken).to_be_visible()  # without a click
        ours = lines.filter(has_text=re.compile("the disk is slow|it is broken"))
        newest_first = [re.compile("it is broken"), re.compile("the disk is slow")]
        await expect(ours).to_have_text(newest_first)
        await broken.get_by_text("Traceback", exact=True).click()
        await expect(broken.locator("pre")).to_contain_text("ValueError: the end of it")
        assert await watched.accessible() == []
        await page.get_by_label("At least").select_option("ERROR")
        await expect(ours).to_have_text(newest_first[:1])
        await page.get_by_label("At least").select_option("WARNING")
        await page.get_by_label("Contains").fill("W7")
        await expect(lines).to_have_count(1)
        await expect(lines).to_contain_text("the disk is slow")
        join = """both => import('./logs.js').then(logs => logs.followed(...both))"""
        old, new = ({"kept": 1, "lines": [{"number": n, "level": "INFO"}]} for n in (1, 2))
        assert await page.evaluate(join, [old, new]) == new
        both = {"kept": 2, "lines": [*old["lines"], *new["lines"]]}
        assert await page.evaluate(join, [old, {**new, "kept": 2}]) == both

    beside(windows_job(lab), script, batches=2)


def test_curves_go_on_from_what_the_page_has(lab: Any, beside: Any) -> None:
    def answer(at_ms: list[int], vertex: int = 0) -> dict[str, Any]:
        flow = [float(at) for at in at_ms]
        figures = {"records_in_per_second": flow, "busy": [at // 1000 for at in at_ms]}
        found = {"vertex": vertex, "name": "v", **figures}
        return {"span_ms": 3000, "at_ms": at_ms, "vertices": [found]}

    async def script(watched: Any, api: Any) -> None:
        join = "both => import('./curves.js').then(curves => curves.joined(...both))"
        first, more = answer([1000, 2000, 3000]), answer([4000, 5000])
        assert await watched.page.evaluate(join, [None, first]) == first
        assert await watched.page.evaluate(join, [first, more]) == answer([3000, 4000, 5000])
        assert await watched.page.evaluate(join, [first, answer([])]) == answer([1000, 2000, 3000])
        other = answer([4000], vertex=1)
        assert await watched.page.evaluate(join, [first, other]) == other

    beside(windows_job(lab), script, batches=2)


def test_a_state_is_asked_for_a_key(lab: Any, beside: Any) -> None:
    options = {"headgate.queries.timeout": "60s", "headgate.queries.scan-idle": "10m"}
    job = hg.Job("totals", parallelism=2, options=options)
    rows_ = from_list([{"user": "a b/ü", "n": 3}], schema={"user": "string", "n": "int64"})
    stream = job.read(rows_, name="in")
    by_user = stream.key_by("user")
    totals = hg.Queryable("totals", committed=True)
    by_user.agg(n=hg.sum("n"), name="sums", queryable=totals).write(blackhole(), name="out")
    by_both = stream.key_by("user", "n").agg(times=hg.count(), name="both", queryable="times")
    by_both.write(blackhole(), name="out-2")

    async def script(watched: Any, api: Any) -> None:
        page = watched.page
        told = await until_known(api, "totals", "a b/ü")
        await expect(page.get_by_role("heading", name="Overview", level=2)).to_be_visible()
        await show(page, "State", "State")
        listed = await rows(page, "Queryable states")
        assert [row[0] for row in listed] == ["totals", "times"]
        assert listed[1][3] == "user: str, n: int"
        await page.get_by_label("State", exact=True).select_option("totals")
        await page.get_by_label("Key", exact=True).fill("a b/ü")
        await page.keyboard.press("Enter")
        await expect(page.get_by_label("Value", exact=True)).to_contain_text('"n": 3')
        await page.get_by_label("Level", exact=True).select_option("committed")
        assert await watched.accessible() == []
        await page.get_by_label("Level", exact=True).select_option("live")
        main = page.locator("main")
        await expect(main.locator("dl")).to_contain_text(
            f"Key group {told.key_group}", use_inner_text=True
        )
        assert await watched.accessible() == []
        await page.get_by_label("Key", exact=True).fill("nobody")
        await page.get_by_role("button", name="Ask", exact=True).click()
        await expect(main).to_contain_text("nothing for this key")
        watched.refused_on_purpose = True  # browsers report a 400 as an error
        await page.get_by_label("State", exact=True).select_option("times")
        await page.get_by_role("button", name="Ask", exact=True).click()
        await expect(page.get_by_role("alert")).to_contain_text("times")
        assert await watched.accessible() == []

    beside(job, script)


async def reach(page: Page, name: str) -> None:
    """Press Tab until the link or button of this name has the focus."""
    seen = []
    for _ in range(60):
        await page.keyboard.press("Tab")
        seen.append(await page.evaluate("() => document.activeElement.textContent.trim()"))
        if seen[-1] == name:
            return
    pytest.fail(f"{name} is not among {seen}")


def test_the_page_asks_for_the_token_and_reads_well_when_enlarged(lab: Any) -> None:
    async def script(running: Any) -> None:
        async with serving(running) as api:
            await running.until("status", status="RUNNING")
            async with opened(f"{api.url}/ui") as watched:
                page = watched.page
                field = page.get_by_label("Token of the job")
                await expect(field).to_be_visible()
                assert await watched.accessible() == []
                watched.refused_on_purpose = True  # browsers report a 401 as an error
                await field.fill("wrong")
                await page.keyboard.press("Enter")
                await expect(page.get_by_role("alert")).to_contain_text("token is missing or wrong")
                watched.refused_on_purpose = False
                await page.get_by_label("Token of the job").fill(api.token)
                await page.get_by_role("button", name="Continue").click()
                await expect(page.get_by_role("heading", name="Overview")).to_be_visible()
                await page.reload()
                await expect(page.get_by_role("heading", name="Overview")).to_be_visible()
                # At 200 % a window of 1280 pixels has room for 640: only tables may be wider.
                await page.set_viewport_size({"width": 640, "height": 400})
                for view in (
                    "",
                    "vertex/1",
                    "checkpoints",
                    "lost",
                    "logs",
                    "state",
                    "settings",
                    "actions",
                ):
                    await page.evaluate("view => { location.hash = `#/${view}`; }", view)
                    await expect(page.get_by_role("heading", level=2)).to_be_visible()
                    over = "() => document.documentElement.scrollWidth - innerWidth"
                    assert (view, await page.evaluate(over) <= 0) == (view, True)

    lab.run(windows_job(lab), script, batches=2)


def test_a_failure_and_lost_records(lab: Any, beside: Any, tmp_path: Path) -> None:
    failed = tmp_path / "failed"

    def fail_once(row: Any) -> bool:
        if not failed.exists():
            failed.touch()
            raise ValueError("this record is bad")
        return True

    def is_even(row: Any) -> bool:
        if row.n == 7:
            raise ValueError("seven")
        return bool(row.n % 2 == 0)

    job = hg.Job("clicks", parallelism=1, options={"headgate.rest.lost-values": "true"})
    job.restart(attempts=3, delay="10ms")
    (
        job.read(from_list([{"n": n} for n in range(10)], schema={"n": "int64"}), name="events")
        .filter(fail_once, name="fail_once")
        .filter(is_even, name="is_even", on_error="drop")
        .write(blackhole(), name="out")
    )

    async def script(watched: Any, api: Any) -> None:
        page = watched.page
        await expect(page.get_by_role("heading", name="Overview", level=2)).to_be_visible()
        await show(page, "Failures", "Failures and restarts")
        article = page.locator("article")
        await expect(article).to_contain_text("Ran again")
        async with api.client() as client:
            (failure,) = (await client.exceptions()).exceptions
        assert failure.down_ms is not None
        await expect(article).to_contain_text(f"attempt {failure.attempt % 65536}")
        line = article.locator(".user-line")
        await expect(line).to_contain_text("in fail_once")
        await expect(line).to_contain_text('raise ValueError("this record is bad")')
        await article.get_by_text("Traceback", exact=True).click()
        await expect(article.locator("details pre")).to_contain_text("Traceback")
        assert await watched.accessible() == []

        await show(page, "Lost records", "Lost records")
        ((step, count, why, fix),) = await rows(page, "Dropped records")
        assert (step, count) == ("is_even", "1")
        assert why == "1 records that its function raised for"
        assert ".failed" in fix
        (sample,) = await rows(page, "Samples of dropped records")
        assert sample[:2] == ["is_even", "failed"]
        assert sample[-2:] == ["ValueError: seven", "{'n': 7}"]
        assert await watched.accessible() == []

    beside(job, script)


async def keys(page: Page) -> list[str]:
    return [row[0] for row in await rows(page, "Rows of the state")]


def test_a_state_is_read_in_pages(lab: Any, beside: Any) -> None:
    options = {"headgate.queries.timeout": "60s", "headgate.queries.scan-idle": "10m"}
    job = hg.Job("totals", parallelism=2, options=options)
    records = [{"user": user, "n": len(user)} for user in USERS]
    stream = job.read(from_list(records, schema={"user": "string", "n": "int64"}), name="in")
    sums = stream.key_by("user").agg(n=hg.sum("n"), name="sums", queryable="totals")
    sums.write(blackhole(), name="out")
    last = stream.key_with(lambda row: row.user).reduce(
        lambda one, other: other, name="last", queryable="untyped"
    )
    last.write(blackhole(), name="out-2")

    async def script(watched: Any, api: Any) -> None:
        page = watched.page
        for user in USERS:
            await until_known(api, "totals", user)
        await expect(page.get_by_role("heading", name="Overview", level=2)).to_be_visible()
        await show(page, "State", "State")
        await page.get_by_label("State", exact=True).select_option("totals")
        what = page.get_by_label("Keys", exact=True)
        ask = page.get_by_role("button", name="Ask", exact=True)
        following = page.get_by_role("button", name="Next page")

        await what.select_option("all keys")
        await ask.click()
        await expect(page.get_by_text("rows 1 to 50")).to_be_visible()
        assert await watched.accessible() == []
        seen = [await keys(page)]
        await following.click()
        await expect(page.get_by_text("rows 51 to 100")).to_be_visible()
        seen.append(await keys(page))
        await following.click()
        await expect(page.get_by_text("rows 101 to 120, the last ones")).to_be_visible()
        seen.append(await keys(page))
        await expect(following).to_be_disabled()
        assert sorted(key for part in seen for key in part) == sorted(USERS)
        await page.get_by_role("button", name="Previous page").click()
        await expect(page.get_by_text("rows 51 to 100")).to_be_visible()
        assert await keys(page) == seen[1]

        await what.select_option("a range")
        await page.get_by_label("From", exact=True).fill("blue-58")
        await page.get_by_label("To", exact=True).fill("red-01")
        await ask.click()
        await expect(page.get_by_text("rows 1 to 3, the last ones")).to_be_visible()
        assert sorted(await keys(page)) == ["blue-58", "blue-59", "red-00"]

        await what.select_option("with a prefix")
        await page.get_by_label("Prefix", exact=True).fill("red-5")
        await page.keyboard.press("Enter")
        await expect(page.get_by_text("rows 1 to 10, the last ones")).to_be_visible()
        shown = {row[0]: row[1] for row in await rows(page, "Rows of the state")}
        assert shown == {user: '{"n":6}' for user in USERS if user.startswith("red-5")}
        await page.get_by_label("Prefix", exact=True).fill("green")
        await ask.click()
        await expect(page.locator("main")).to_contain_text("There are no such keys")
        assert await watched.accessible() == []

        # Keys of no declared type have no order.
        await page.get_by_label("State", exact=True).select_option("untyped")
        assert [text.strip() for text in await what.locator("option").all_inner_texts()] == [
            "one key",
            "all keys",
        ]

    beside(job, script)


def test_three_clicks_from_a_slow_job_to_the_function(cli: Any) -> None:
    cli.write("clicks.py", SLOW_JOB)
    (cli.directory / "token").write_text(TOKEN)
    token = f"headgate.control.token-file={cli.directory / 'token'}"
    run = cli.start("run", "clicks.py", "--cluster", "in-process", "-D", "rest.port=0", "-D", token)
    run.wait_for("RUNNING")
    (job,) = json.loads(cli("list", "--json").stdout)

    async def look() -> None:
        async with opened(f"{job['rest']}/ui/#token={TOKEN}") as watched:
            await walk(watched.page)
            assert await watched.accessible() == []

    asyncio.run(look())


async def walk(page: Page) -> None:
    """Take the three clicks, each for what the page says at that moment."""
    reason = re.compile("visits is backpressured .* because of scores .* of the records")
    await expect(page.locator(".verdict p").filter(has_text=reason)).to_be_visible()
    await page.get_by_role("link", name="Look at its subtasks").first.click()

    await expect(page.get_by_role("heading", name="scores", level=2)).to_be_visible()
    ((_, hot_subtask, *_),) = await rows(page, "Hot key groups")
    await expect(page.get_by_label("Subtask (0 to 1)")).to_have_value(hot_subtask)
    await page.get_by_role("button", name="Look for 5 s").click()

    flames = page.get_by_role("region", name="Flame graph")
    await expect(flames.locator(".flame", has_text="slow_library (").first).to_be_visible()
    await page.get_by_role("button", name="Busy").click()
    shown = await rows(page, "Subtasks")
    assert [row[0][0] for row in shown] == [hot_subtask, str(1 - int(hot_subtask))]
