"""A real Prometheus over a running job: each panel and each alert must have something to show."""

from __future__ import annotations

import asyncio
import os
from math import isnan
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

import headgate as hg
from headgate.connectors import (
    Crash,
    Pause,
    blackhole,
    csv_sink,
    from_list,
    generator,
    json_source,
    numbers,
    sequence,
)
from headgate.k8s.monitoring.boards import BOARDS, OPERATOR_BOARD
from headgate.k8s.monitoring.evaluate import Watched, filled, table, watched
from headgate.tests.support import dashboards
from headgate.tests.support.held import PacedByCompletion
from headgate.tests.support.prometheus import Prometheus, serving

INTERVAL = "5s"
PATIENCE_S = 300.0


def make_job(path: Path) -> hg.Job:
    """One of everything that dashboards show. It restarts once, and never ends."""
    lines = path / "lines.json"
    lines.write_text('{"id": 1}\nnonsense\n{"id": 2}\n' * 20)
    job = hg.Job(
        "shown",
        parallelism=2,
        labels={"team": "search"},
        options={
            "metrics.port": "0",
            "metrics.latency.interval": "100ms",
            "pipeline.auto-watermark-interval": "50ms",
        },
    )
    job.checkpoint(every="200ms", storage=str(path / "checkpoints"))
    job.restart(attempts=3, delay="10ms")
    ticks = job.read(numbers(rate=500), name="ticks")
    timed = ticks.map(lambda n: {"n": n, "at": n}, into={"n": "int64", "at": "int64"}, name="rows")
    counts = (
        timed.event_time("at", max_out_of_order="0s", name="times")
        .key_by("n")
        .window(hg.tumbling("1s"))
        .agg(rows=hg.count(), name="seconds")
    )
    counts.write(blackhole(), name="nowhere")
    ticks.map_async(echo, name="asked").write(blackhole(), name="answers")
    fields = {"n": sequence()}
    job.read(generator(fields, rate=200), name="made").write(
        csv_sink(str(path / "out"), guarantee="exactly_once"), name="files"
    )
    source = json_source(str(lines), {"id": "int64"}, on_bad_record="drop")
    job.read(source, name="lines").write(blackhole(), name="read lines")
    # The crash comes behind a completed checkpoint, so that there is one to restore.
    once = PacedByCompletion(from_list([1, 2, Crash(), Pause("1h")], batch_rows=1), 2)
    job.read(once, name="once").write(blackhole(), name="crashes")
    late = [{"k": "a", "ts": ts} for ts in (100_000, 200_000, 5)]
    (
        job.read(
            from_list([*late, Pause("1h")], schema={"k": "string", "ts": "int64"}, batch_rows=1),
            name="events",
        )
        .event_time("ts", max_out_of_order="0s", name="late times")
        .key_by("k")
        .window(hg.tumbling("1m"))
        .agg(n=hg.count(), name="windows")
        .write(blackhole(), name="window results")
    )
    return job


async def echo(record: Any) -> Any:
    await asyncio.sleep(0.001)
    return record


def silent(prometheus: Prometheus) -> tuple[list[str], list[tuple[Watched, list[Any]]]]:
    """Expressions without a series though a job runs, and all rows."""
    rows = []
    for each in watched():
        expression = filled(each.expression, namespace=".*", job_name="shown", interval=INTERVAL)
        rows.append((each, prometheus.query(expression)))
    empty = [
        f"{each.where}: {each.expression}"
        for each, found in rows
        if not each.needs and all(isnan(float(one["value"][1])) for one in found)
    ]
    return empty, rows


def test_each_panel_and_each_alert_has_something_to_show(watch: Any, tmp_path: Path) -> None:
    pictures = dashboards.wanted()
    shown: dict[str, list[dashboards.Series]] = {}

    async def script(job: Any) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await job.until(lambda s: s.value("job_restarts_total") == 1)
        (endpoint,) = (await job.status())["metrics"]
        target = urlsplit(endpoint["url"]).netloc
        server = serving(tmp_path / "prometheus", [target], every="1s")
        prometheus = await asyncio.to_thread(server.__enter__)
        try:
            empty, rows = ["not asked yet"], []
            async with asyncio.timeout(PATIENCE_S):
                while empty:
                    await asyncio.sleep(1)
                    empty, rows = await asyncio.to_thread(silent, prometheus)
            if pictures is not None:
                await asyncio.sleep(dashboards.SECONDS)
                for board in (each for each in BOARDS if each is not OPERATOR_BOARD):
                    shown[board.uid] = await asyncio.to_thread(
                        dashboards.recorded, prometheus, board, "shown"
                    )
        except TimeoutError:
            pytest.fail("nothing to show:\n" + "\n".join(empty))
        finally:
            await asyncio.to_thread(server.__exit__, None, None, None)
        needless = {each.where for each, found in rows if found and each.needs}
        assert not needless, "these have values now: say no longer that they need something"
        if wanted := os.environ.get("HEADGATE_MONITORING_TABLE"):
            Path(wanted).write_text(table(rows))

    watch(make_job(tmp_path), script)
    for board in BOARDS:
        if pictures is not None and board.uid in shown:
            dashboards.draw(board, shown[board.uid], pictures)
