"""Metrics of running jobs, scraped over HTTP."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import headgate as hg
from headgate.connectors import Crash, Pause, blackhole, from_list, json_source
from headgate.runtime.observe import endpoint
from headgate.runtime.observe.catalogue import CATALOGUE, JOB, LABELS, OPERATOR, TASK, markdown
from headgate.runtime.observe.endpoint import open_endpoint
from headgate.runtime.observe.metrics import MetricsRegistry
from headgate.tests.support.held import PacedByCompletion

DOCS = Path(hg.__file__).resolve().parent / "docs" / "metrics.md"
TIMES = [1_000, 200_000, 300_000, 500]
"""The last one is late."""


def make_job(path: Path, **options: str) -> hg.Job:
    """One of everything that has metrics. It never ends."""
    lines = path / "lines.json"
    lines.write_text('{"id": 1}\nnonsense\n{"id": 2}\n')
    job = hg.Job(
        "measured",
        parallelism=2,
        options={
            "metrics.port": "0",
            "pipeline.auto-watermark-interval": "0s",
            "taskmanager.network.memory.buffer-debloat.enabled": "true",
            **options,
        },
    )
    job.checkpoint(every="50ms", storage=str(path / "checkpoints"))
    job.restart(attempts=3, delay="10ms")
    events = [{"user": "u", "ts": ts} for ts in TIMES]
    (
        job.read(
            from_list(
                [*events, Pause("1h")], schema={"user": "string", "ts": "int64"}, batch_rows=1
            ),
            name="events",
        )
        .event_time("ts", max_out_of_order="0s")
        .key_by("user")
        .window(hg.tumbling("1m"))
        .agg(n=hg.count(), name="windows")
        .write(blackhole(), name="out")
    )
    source = json_source(str(lines), {"id": "int64"}, on_bad_record="drop")
    read = job.read(source, name="lines")
    read.write(blackhole(), name="lines out")
    read.key_by("id").process(Timed(), name="timed").write(blackhole(), name="timers out")
    read.iterate(lambda once: (once.filter("id > 2"), once), name="loop").write(
        blackhole(), name="looped"
    )
    read.map_async(echo, name="asked").write(blackhole(), name="answers")
    timed = read.event_time("id", name="id time").key_by("id")
    pairs = timed.join(timed, within=("0s", "0s"), suffix="_other", name="pairs")
    pairs.write(blackhole(), name="pairs out")
    timed.match(hg.cep.begin("a"), name="matches").write(blackhole(), name="matches out")
    return job


async def echo(record: Any) -> Any:
    return record


class Timed(hg.KeyedProcess[int, Any, Any]):
    """Sets a timer in event time, and one by the clock that will not be due."""

    def on_record(self, record: Any, ctx: hg.Context[int]) -> None:
        ctx.event_time.at(5)
        ctx.processing_time.after("1d")

    def on_timer(self, timer: hg.Timer, ctx: hg.Context[int]) -> None:
        return None


def test_every_metric_is_in_the_catalogue_and_there(watch: Any, tmp_path: Path) -> None:
    async def script(job: Any) -> None:
        scraped = await job.scrape()
        assert {family.name: family.type for family in scraped.families} == {
            metric.sample.removesuffix("_total"): metric.type for metric in CATALOGUE
        }
        assert scraped.names() == {metric.sample for metric in CATALOGUE}
        assert {(f.name, f.documentation) for f in scraped.families} == {
            (metric.sample.removesuffix("_total"), metric.meaning) for metric in CATALOGUE
        }
        scopes = {metric.sample: metric.scope for metric in CATALOGUE}
        for sample in scraped.samples:
            assert set(sample.labels) == set(LABELS[scopes[sample.name]])
        series = Counter((s.name, *sorted(s.labels.items())) for s in scraped.samples)
        assert max(series.values()) == 1
        assert scraped.text.count("# TYPE") == len(scraped.families)

    watch(make_job(tmp_path), script)


def test_what_tasks_and_operators_count(watch: Any, tmp_path: Path) -> None:
    async def script(job: Any) -> None:
        def done(scraped: Any) -> bool:
            late = scraped.value(f"{OPERATOR}_numLateRecordsDropped_total", operator_name="windows")
            lines = scraped.value(f"{OPERATOR}_numRecordsIn_total", operator_name="lines out")
            timers = [
                sum(scraped.values(f"{OPERATOR}_{counted}_total", operator_name="timed"))
                for counted in ("numFiredTimers", "numTimersDropped")
            ]
            times = [
                *scraped.values(f"{TASK}_currentInputWatermark", task_name="windows -> out"),
                *scraped.values(f"{OPERATOR}_currentOutputWatermark", operator_name="windows"),
            ]
            through = times == [299_999] * 4  # both subtasks of the window have heard of it
            return through and late == 1 and lines == 2 and timers == [2, 2]

        scraped = await job.until(done)

        def operator(name: str, operator: str) -> float:
            return scraped.value(f"{OPERATOR}_{name}", operator_name=operator)

        assert operator("numRecordsOut_total", "events") == len(TIMES)
        assert operator("numRecordsIn_total", "windows") == len(TIMES)
        assert operator("numRecordsSend_total", "out") == operator("numRecordsOut_total", "windows")
        assert operator("numRecordsInErrors_total", "lines") == 1
        assert scraped.values(f"{OPERATOR}_numRecordsSend_total", operator_name="windows") == []
        for counted in ("numFiredTimers", "numTimersDropped"):
            found = scraped.values(f"{OPERATOR}_{counted}_total", operator_name="timed")
            assert sum(found) == 2
        windows = {"task_name": "windows -> out"}
        assert scraped.value(f"{TASK}_numRecordsIn_total", **windows) == len(TIMES)
        assert scraped.value(f"{TASK}_numRecordsOut_total", **windows) == 0
        (task,) = {
            sample.labels["task_name"]
            for sample in scraped.samples
            if sample.labels.get("operator_name") == "events"
        }
        assert scraped.value(f"{TASK}_numRecordsOut_total", task_name=task) == len(TIMES)
        assert scraped.value(f"{TASK}_numBuffersOut_total", task_name=task) == len(TIMES)
        assert scraped.value(f"{TASK}_numBytesOut_total", task_name=task) >= 8 * len(TIMES)
        # Event time: the newest was 300,000; both subtasks of the window heard of it.
        inputs = scraped.values(f"{TASK}_currentInputWatermark", **windows)
        assert inputs == [299_999] * 2
        assert scraped.values(f"{TASK}_currentInputWatermark", task_name=task) == []
        outputs = scraped.values(f"{OPERATOR}_currentOutputWatermark", operator_name="windows")
        assert outputs == [299_999] * 2
        status = await job.status()
        workers = {worker["worker"] for worker in status["workers"]}
        assert {s.labels["worker"] for s in scraped.samples if "worker" in s.labels} == workers
        assert {s.labels.get("subtask_index") for s in scraped.samples} == {None, "0", "1"}
        assert {s.labels["job_name"] for s in scraped.samples} == {"measured"}

    watch(make_job(tmp_path), script)


def test_lags_and_time(watch: Any, tmp_path: Path) -> None:
    async def script(job: Any) -> None:
        name, events = f"{OPERATOR}_watermarkLag", {"operator_name": "event_time"}
        scraped = await job.until(lambda s: any(v == v for v in s.values(name, **events)))
        # One subtask has the events of 1970; the other has none, and so no watermark.
        seen, unseen = sorted(scraped.values(name, **events), key=math.isnan)
        assert seen > 50 * 365 * 86_400_000
        assert math.isnan(unseen)
        lags = scraped.values(f"{OPERATOR}_currentEmitEventTimeLag", **events)
        lag, _ = sorted(lags, key=math.isnan)
        assert lag > 50 * 365 * 86_400_000
        names = ("busyTimeMsPerSecond", "idleTimeMsPerSecond", "backPressuredTimeMsPerSecond")
        shares = [scraped.values(f"{TASK}_{name}") for name in names]
        sums = [sum(parts) for parts in zip(*shares, strict=True)]
        assert sums == pytest.approx([1000] * len(sums), abs=2)
        assert set(scraped.values(f"{TASK}_isBackPressured")) == {0}

    watch(make_job(tmp_path), script)


def test_checkpoints(watch: Any, tmp_path: Path) -> None:
    async def script(job: Any) -> None:
        scraped = await job.until(lambda s: s.value(f"{JOB}_numberOfCompletedCheckpoints") >= 2)
        status = await job.status()
        assert 2 <= scraped.value(f"{JOB}_lastCompletedCheckpointId") <= status["last_checkpoint"]
        assert scraped.value(f"{JOB}_lastCheckpointSize") > 0
        assert scraped.value(f"{JOB}_lastCheckpointDuration") >= 0
        assert scraped.value(f"{JOB}_lastCheckpointCompletedTimestamp") > 1_600_000_000_000
        assert scraped.value(f"{JOB}_lastCheckpointRestoreTimestamp") == -1
        assert scraped.value(f"{JOB}_runningState") == 1
        assert scraped.value(f"{JOB}_failingState") == 0
        # read one after the other: a millisecond may lie between them
        assert 0 < scraped.value(f"{JOB}_uptime") <= scraped.value(f"{JOB}_runningTime")
        assert scraped.value(f"{JOB}_numRegisteredTaskManagers") == 2
        assert scraped.value(f"{JOB}_taskSlotsTotal") == 2

    watch(make_job(tmp_path), script)


def test_a_restart_begins_anew(watch: Any, tmp_path: Path) -> None:
    job = hg.Job("crashing", options={"metrics.port": "0"})
    job.checkpoint(every="20ms", storage=str(tmp_path / "checkpoints"))
    job.restart(attempts=3, delay="0s")
    items = [1, 2, Crash(), 3, Pause("1h")]
    source = PacedByCompletion(from_list(items, batch_rows=1), 2)  # so that there is one to restore
    job.read(source, name="items").write(blackhole(), name="out")

    async def script(job: Any) -> None:
        def restarted(scraped: Any) -> bool:
            known = scraped.value(f"{JOB}_numRestarts") and scraped.value(f"{JOB}_runningState")
            return bool(known and sum(scraped.values(f"{TASK}_numRecordsIn_total")))

        scraped = await job.until(restarted)
        assert scraped.values(f"{TASK}_numRecordsIn_total") == [1]
        assert scraped.value(f"{JOB}_numRestarts") == 1
        assert scraped.value(f"{JOB}_lastCheckpointRestoreTimestamp") > 1_600_000_000_000

    watch(job, script)


def test_the_list_of_jobs_shows_the_endpoints(watch: Any, tmp_path: Path) -> None:
    async def script(job: Any) -> None:
        command = [sys.executable, "-c", "from headgate.runtime.cli import main; main()"]
        ran = await asyncio.to_thread(
            subprocess.run, [*command, "list", "--json"], capture_output=True, check=True
        )
        (listed,) = json.loads(ran.stdout)
        assert listed["metrics"] == (await job.status())["metrics"]
        (one,) = listed["metrics"]
        assert one["process"] == "coordinator"

    watch(make_job(tmp_path), script)


def test_without_checkpoints_and_without_an_endpoint(watch: Any) -> None:
    job = hg.Job("bare")
    job.read(from_list([1, Pause("1h")]), name="items").write(blackhole(), name="out")

    async def script(job: Any) -> None:
        assert (await job.status())["metrics"] == []

    watch(job, script)


@pytest.mark.ray
def test_every_process_has_a_port(watch: Any, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        async def script(job: Any) -> None:
            endpoints = (await job.status())["metrics"]
            assert [e["process"] for e in endpoints] == [
                "coordinator",
                *(worker["worker"] for worker in (await job.status())["workers"]),
            ]
            ports = [int(e["url"].removesuffix("/metrics").rpartition(":")[2]) for e in endpoints]
            assert len(set(ports)) == 3
            assert all(port < p < port + 20 for p in ports)
            coordinator, first = await job.scrape(0), await job.scrape(1)
            assert all(s.name.startswith(f"headgate_{JOB}_") for s in coordinator.samples)
            assert {s.labels["worker"] for s in first.samples} == {endpoints[1]["process"]}

        watch(make_job(tmp_path, **{"metrics.port": str(port)}), script, "local")


# -- the parts -----------------------------------------------------------------------------------------


def collected(metrics: MetricsRegistry) -> dict[tuple[str, str], float]:
    return {
        (sample.name, json.dumps(sample.labels)): sample.value
        for family in metrics.collect()
        for sample in family.samples
    }


def test_a_gauge_that_fails_is_no_number_and_harms_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    metrics = MetricsRegistry()
    scope = metrics.group(job_name="j").add("test")
    scope.gauge("bad", lambda: 1 // 0)
    scope.gauge("good", lambda: 3)
    found = {name: value for (name, _), value in collected(metrics).items()}
    assert math.isnan(found["headgate_test_bad"])
    assert found["headgate_test_good"] == 3
    assert "headgate_test_bad" in caplog.text


def test_groups_share_families_and_go_alone() -> None:
    metrics = MetricsRegistry()
    groups = [metrics.group(worker=worker) for worker in "ab"]
    for group in groups:
        group.operator("t", "o", 0).counter("user's count").inc(2)
        group.operator("t", "o", 0).counter("user's count").inc(3)
    assert len(list(metrics.collect())) == 1
    assert list(collected(metrics).values()) == [5, 5]
    groups[0].close()
    groups[0].close()
    ((name, labels),) = collected(metrics)
    assert name == f"headgate_{OPERATOR}_user_s_count_total"
    assert json.loads(labels)["worker"] == "b"


def test_the_first_free_port(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = MetricsRegistry()
    assert open_endpoint(metrics, None, "127.0.0.1") is None
    first = open_endpoint(metrics, 0, "127.0.0.1")
    assert first is not None
    second = open_endpoint(metrics, first.port, "127.0.0.1")
    assert second is not None
    assert second.port > first.port
    assert urllib.request.urlopen(second.url, timeout=10).status == 200
    second.close()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(second.url, timeout=10)
    monkeypatch.setattr(endpoint, "PORTS_TRIED_MAX", 1)
    assert open_endpoint(metrics, first.port, "127.0.0.1") is None
    assert f"no metrics endpoint port=`{first.port}`" in caplog.text
    first.close()


def test_an_endpoint_for_all_shows_the_name_of_the_host() -> None:
    opened = open_endpoint(MetricsRegistry(), 0, "0.0.0.0")
    assert opened is not None
    assert opened.url == f"http://{socket.gethostname()}:{opened.port}/metrics"
    opened.close()


def test_the_documentation_is_current() -> None:
    assert DOCS.read_text() == markdown(), "python -m headgate.runtime.observe.catalogue"
