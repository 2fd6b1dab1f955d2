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
from headgate.errors import UsageError
from headgate.runtime.observe import endpoint
from headgate.runtime.observe.catalogue import CATALOGUE, LABELS
from headgate.runtime.observe.endpoint import memory_limit_bytes, open_endpoint
from headgate.runtime.observe.metrics import MetricsRegistry, UserMetrics
from headgate.runtime.observe.metrics_page import markdown
from headgate.runtime.task.accounting import Activity, LoopLoad, TimeAccounting
from headgate.tests.support.held import PacedByCompletion
from headgate.tests.support.prometheus import promtool

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
        labels={"team": "search"},
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
        scraped = await job.until(lambda s: s.values("checkpoint_last_id"))
        documented = {metric.sample.removesuffix("_total"): metric for metric in CATALOGUE}
        shown = {family.name: family.type for family in scraped.families}
        assert {name: documented[name].kind for name in shown} == shown
        absent = {name for name, metric in documented.items() if name not in shown}
        assert {name for name in absent if not documented[name].absent} == set()
        assert {(f.name, f.documentation) for f in scraped.families} == {
            (name, documented[name].help) for name in shown
        }
        for family in scraped.families:
            metric = documented[family.name]
            own = set(metric.labels) | ({"le"} if metric.kind == "histogram" else set())
            if metric.name == "job_info":
                own = {"label_team"}
            for sample in family.samples:
                labels = {*LABELS[metric.scope], *own}
                assert set(sample.labels) in (labels, labels - {"le"}), sample
        series = Counter((s.name, *sorted(s.labels.items())) for s in scraped.samples)
        assert max(series.values()) == 1
        assert not [s for s in scraped.samples if s.value in (-1, -(2.0**63), 2.0**63)]
        assert not [s for s in scraped.samples if math.isnan(s.value)]
        assert scraped.text.count("# TYPE") == len(scraped.families)

    watch(make_job(tmp_path), script)


def test_promtool_finds_nothing_wrong_with_a_scrape(watch: Any, tmp_path: Path) -> None:
    async def script(job: Any) -> None:
        scraped = await job.until(lambda s: s.values("checkpoint_last_id"))
        checked = await asyncio.to_thread(promtool, "check", "metrics", text=scraped.text)
        assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")

    watch(make_job(tmp_path), script)


def test_what_tasks_and_operators_count(watch: Any, tmp_path: Path) -> None:
    async def script(job: Any) -> None:
        def done(scraped: Any) -> bool:
            late = scraped.value("late_records_total", operator="windows")
            lines = scraped.value("records_in_total", operator="lines out")
            timers = [
                sum(scraped.values(f"timers_{counted}_total", operator="timed"))
                for counted in ("fired", "dropped")
            ]
            times = [
                *scraped.values("task_watermark_timestamp_seconds", task="windows -> out"),
                *scraped.values("output_watermark_timestamp_seconds", operator="windows"),
            ]
            through = times == [299.999] * 4  # both subtasks of the window have heard of it
            return through and late == 1 and lines == 2 and timers == [2, 2]

        scraped = await job.until(done)

        def operator(name: str, operator: str) -> float:
            return scraped.value(name, operator=operator)

        assert operator("records_out_total", "events") == len(TIMES)
        assert operator("source_records_total", "events") == len(TIMES)
        assert operator("records_in_total", "windows") == len(TIMES)
        assert operator("sink_records_total", "out") == operator("records_out_total", "windows")
        assert operator("source_record_errors_total", "lines") == 1
        assert scraped.values("sink_records_total", operator="windows") == []
        windows = {"task": "windows -> out"}
        assert scraped.value("task_records_in_total", **windows) == len(TIMES)
        assert scraped.value("task_records_out_total", **windows) == 0
        (task,) = {
            sample.labels["task"]
            for sample in scraped.samples
            if sample.labels.get("operator") == "events" and "task" in sample.labels
        }
        assert scraped.value("task_records_out_total", task=task) == len(TIMES)
        assert scraped.value("task_buffers_out_total", task=task) == len(TIMES)
        assert scraped.value("task_bytes_out_total", task=task) >= 8 * len(TIMES)
        # Event time: the newest was 300,000 ms; both subtasks of the window heard of it.
        assert scraped.values("task_watermark_timestamp_seconds", **windows) == [299.999] * 2
        assert scraped.values("task_watermark_timestamp_seconds", task=task) == []
        assert {s.labels.get("subtask") for s in scraped.samples} == {None, "0", "1"}
        assert {s.labels["job_name"] for s in scraped.samples} == {"measured"}

    watch(make_job(tmp_path), script)


def test_lags_and_time(watch: Any, tmp_path: Path) -> None:
    async def script(job: Any) -> None:
        name, events = "watermark_lag_seconds", {"operator": "event_time"}
        scraped = await job.until(lambda s: s.values(name, **events))
        # One subtask has the events of 1970; the other has none, and so no watermark.
        (seen,) = scraped.values(name, **events)
        assert seen > 50 * 365 * 86_400
        (lag,) = scraped.values("emit_event_time_lag_seconds", **events)
        assert lag > 50 * 365 * 86_400
        assert set(scraped.values("task_backpressured")) == {0}

    watch(make_job(tmp_path), script)


def test_time_of_a_task_adds_up_to_the_time_that_has_passed() -> None:
    now = [100.0]
    time = TimeAccounting(lambda: now[0])
    time.switch(Activity.BUSY)
    now[0] += 3
    time.switch(Activity.BACKPRESSURED)
    now[0] += 2
    seconds = {activity: time.seconds_in(activity) for activity in Activity}
    assert seconds[Activity.BUSY] == 3
    assert seconds[Activity.BACKPRESSURED] == 2, "also while it lasts"
    assert sum(seconds.values()) == 5


def test_the_load_of_an_event_loop_is_the_work_of_all_its_tasks() -> None:
    now = [100.0]
    load = LoopLoad()
    tasks = [TimeAccounting(lambda: now[0], load) for _ in range(2)]
    assert load.share(now[0]) == 0.0
    for task in tasks:
        task.switch(Activity.BUSY)
        now[0] += 1
        task.rest()  # others may work now, though its records still wait
    now[0] += 2
    assert load.share(now[0]) == 0.5
    for task in tasks:
        task.switch(Activity.BUSY)
        now[0] += 1
        task.switch(Activity.IDLE)
    assert load.share(now[0]) == 1.0
    now[0] += 4
    assert load.share(now[0]) == 0.0


def test_checkpoints(watch: Any, tmp_path: Path) -> None:
    async def script(job: Any) -> None:
        done = {"outcome": "completed"}
        scraped = await job.until(lambda s: s.value("checkpoints_total", **done) >= 2)
        status = await job.status()
        assert 2 <= scraped.value("checkpoint_last_id") <= status["last_checkpoint"]
        assert scraped.value("checkpoint_size_bytes", kind="full") > 0
        assert scraped.value("checkpoint_size_bytes", kind="written") > 0
        assert scraped.value("checkpoint_duration_seconds_count") >= 2
        assert scraped.value("checkpoint_duration_seconds_sum") > 0
        aligned = scraped.value("checkpoint_part_seconds_count", part="alignment")
        subtasks = sum(vertex["parallelism"] for vertex in status["vertices"])
        assert aligned >= 2 * subtasks
        assert scraped.value("checkpoint_last_completed_timestamp_seconds") > 1_600_000_000
        assert scraped.value("checkpoint_interval_seconds") == 0.05
        assert scraped.value("checkpoint_timeout_seconds") == 600
        assert scraped.value("state_size_bytes", operator="windows") > 0
        assert scraped.values("state_size_bytes", operator="out") == []
        assert scraped.values("restore_timestamp_seconds") == []
        assert scraped.value("job_state", state="running") == 1
        assert scraped.value("job_state", state="failing") == 0
        assert scraped.value("job_uptime_seconds") > 0
        assert scraped.value("job_workers") == 1
        assert scraped.value("job_slots") == 2

    watch(make_job(tmp_path), script)


def test_subtasks_beyond_the_bound_share_a_series(watch: Any, tmp_path: Path) -> None:
    async def script(job: Any) -> None:
        scraped = await job.until(
            lambda s: sum(s.values("records_in_total", operator="windows")) == len(TIMES)
        )
        assert not [s for s in scraped.samples if "subtask" in s.labels]
        assert len(scraped.values("records_in_total", operator="windows")) == 1

    watch(make_job(tmp_path, **{"metrics.subtask-labels-max": "1"}), script)


def test_a_restart_begins_anew(watch: Any, tmp_path: Path) -> None:
    job = hg.Job("crashing", options={"metrics.port": "0"})
    job.checkpoint(every="20ms", storage=str(tmp_path / "checkpoints"))
    job.restart(attempts=3, delay="0s")
    items = [1, 2, Crash(), 3, Pause("1h")]
    source = PacedByCompletion(from_list(items, batch_rows=1), 2)  # so that there is one to restore
    job.read(source, name="items").write(blackhole(), name="out")

    async def script(job: Any) -> None:
        def restarted(scraped: Any) -> bool:
            known = scraped.value("job_restarts_total") and scraped.value(
                "job_state", state="running"
            )
            return bool(known and sum(scraped.values("task_records_in_total")))

        scraped = await job.until(restarted)
        assert scraped.values("task_records_in_total") == [1]
        assert scraped.value("job_restarts_total") == 1
        assert len(scraped.values("job_failures_total")) == 4, "one for each category, also of zero"
        assert scraped.value("job_failures_total") == 1
        assert scraped.value("restore_timestamp_seconds") > 1_600_000_000
        assert scraped.value("restore_duration_seconds_count") == 1
        assert scraped.value("restart_duration_seconds_count") == 1
        assert scraped.value("restart_phase_seconds_count", phase="deploy") == 1
        assert scraped.value("restart_phase_seconds_count", phase="silence") == 0

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
            assert not [s for s in coordinator.samples if "task" in s.labels]
            assert len(first.values("process_resident_memory_bytes", job_name="measured")) == 1
            of_process = ("headgate_process_", "headgate_storage_")
            own = [s for s in first.samples if not s.name.startswith(of_process)]
            assert own
            assert all("task" in s.labels for s in own)

        watch(make_job(tmp_path, **{"metrics.port": str(port)}), script, "local")


# -- the parts -----------------------------------------------------------------------------------------


def collected(metrics: MetricsRegistry) -> dict[tuple[str, str], float]:
    return {
        (sample.name, json.dumps(sample.labels)): sample.value
        for family in metrics.collect()
        for sample in family.samples
    }


def test_a_gauge_that_fails_is_absent_and_harms_no_other(caplog: pytest.LogCaptureFixture) -> None:
    metrics = MetricsRegistry()
    scope = metrics.group(job_name="j").add()
    scope.gauge("bad", lambda: 1 // 0)
    scope.gauge("unknown", lambda: None)
    scope.gauge("no number", lambda: math.nan)
    scope.gauge("good", lambda: 3)
    for _ in range(2):
        found = {name: value for (name, _), value in collected(metrics).items()}
        assert found == {"headgate_user_good": 3}
    assert caplog.text.count("headgate_user_bad") == 1, "not at every scrape"


def test_groups_share_families_and_go_alone() -> None:
    metrics = MetricsRegistry()
    groups = [metrics.group(job_name=job) for job in "ab"]
    for group in groups:
        group.operator("t", "o", 0).counter("clicks' count").inc(2)
        group.operator("t", "o", 0).counter("clicks' count").inc(3)
    assert len(list(metrics.collect())) == 1
    assert list(collected(metrics).values()) == [5, 5]
    groups[0].close()
    groups[0].close()
    ((name, labels),) = collected(metrics)
    assert name == "headgate_user_clicks__count_total"
    assert json.loads(labels) == {"job_name": "b", "task": "t", "operator": "o", "subtask": "0"}


def test_subtasks_without_a_label_are_merged_as_the_catalogue_says() -> None:
    metrics = MetricsRegistry()
    group = metrics.group(job_name="j")
    for subtask, value in enumerate((3.0, 1.0, 2.0)):
        scope = group.task("t", subtask, labelled=False)
        scope.count("task_records_in", lambda value=value: value)  # type: ignore[misc]
        scope.gauge("task_watermark_timestamp_seconds", lambda value=value: value)  # type: ignore[misc]
        scope.gauge("task_call_seconds", lambda value=value: value)  # type: ignore[misc]
        scope.histogram("user_seconds", [1, 2]).observe(value)
    shown = json.dumps({"job_name": "j", "task": "t"})
    found = collected(metrics)
    assert found["headgate_task_records_in_total", shown] == 6
    assert found["headgate_task_watermark_timestamp_seconds", shown] == 1
    assert found["headgate_task_call_seconds", shown] == 3
    assert found["headgate_user_seconds_count", shown] == 3
    assert found["headgate_user_seconds_sum", shown] == 6


def test_a_histogram_counts_up_to_its_bounds() -> None:
    metrics = MetricsRegistry()
    took = metrics.group(job_name="j").add().histogram("took_seconds", [0.1, 1])
    for value in (0.05, 0.1, 0.5, 7):
        took.observe(value)
    counts = {
        json.loads(labels).get("le"): value for (_, labels), value in collected(metrics).items()
    }
    assert counts["0.1"] == 2, "a bound belongs to its bucket"
    assert counts["1.0"] == 3
    assert counts["+Inf"] == 4


def test_the_metrics_of_a_user_have_labels_in_bounds(caplog: pytest.LogCaptureFixture) -> None:
    metrics = MetricsRegistry()
    scope = metrics.group(job_name="j", user_series_max=2).operator("t", "o", 0)
    mine = UserMetrics(scope)
    for number in range(5):
        mine.counter("seen_total", labels={"shop": f"s{number}"}).inc()
        mine.counter("seen_total", labels={"shop": f"s{number}"}).inc()
    scope.counter("late_records").inc(7)
    mine.counter("late_records", labels={"shop": "s0"}).inc()
    found = {
        (name, json.loads(labels).get("shop")): value
        for (name, labels), value in collected(metrics).items()
    }
    assert found == {
        ("headgate_user_seen_total", "s0"): 2,
        ("headgate_user_seen_total", "s1"): 2,
        ("headgate_user_seen_total", "other"): 6,
        ("headgate_late_records_total", None): 7,
        ("headgate_user_late_records_total", "other"): 1,
    }
    assert caplog.text.count("metrics.user-series-max") == 1


@pytest.mark.parametrize("label", ["subtask", "le", "a b", "", "1a"])
def test_labels_that_cannot_be_are_refused(label: str) -> None:
    scope = MetricsRegistry().group(job_name="j").add()
    with pytest.raises(UsageError, match="cannot have this label"):
        UserMetrics(scope).counter("seen", labels={label: "x"})


def test_buckets_ascend() -> None:
    scope = MetricsRegistry().group(job_name="j").add()
    with pytest.raises(UsageError, match="ascend"):
        scope.histogram("took", [2, 1])


def test_one_name_is_one_kind_of_metric(caplog: pytest.LogCaptureFixture) -> None:
    metrics = MetricsRegistry()
    group = metrics.group(job_name="j")
    group.operator("t", "a", 0).gauge("x", lambda: 1)
    group.operator("t", "b", 0).counter("x").inc()
    assert len(collected(metrics)) == 1
    assert "a gauge here and a counter there" in caplog.text


class Counting:
    """A function with metrics of its own."""

    def open(self, ctx: Any) -> None:
        self.seen = ctx.metrics.counter("rows_seen", labels={"shop": "a"})
        self.sizes = ctx.metrics.histogram("row_bytes", [10, 100])
        ctx.metrics.gauge("last_id", lambda: 7)
        ctx.metrics.counter("late_records").inc()

    def __call__(self, row: Any) -> Any:
        self.seen.inc()
        self.sizes.observe(50)
        return row


def test_functions_have_metrics(watch: Any, tmp_path: Path) -> None:
    job = hg.Job("own", options={"metrics.port": "0"})
    job.read(from_list([1, 2, Pause("1h")]), name="items").map(Counting(), name="mine").write(
        blackhole(), name="out"
    )

    async def script(job: Any) -> None:
        scraped = await job.until(lambda s: sum(s.values("user_rows_seen_total")) == 2)
        (sample,) = [s for s in scraped.samples if s.name == "headgate_user_rows_seen_total"]
        assert sample.labels["operator"] == "mine"
        assert sample.labels["shop"] == "a"
        assert scraped.value("user_row_bytes_bucket", le="100.0") == 2
        assert scraped.value("user_last_id") == 7
        assert scraped.value("user_late_records_total") == 1
        assert scraped.values("late_records_total", operator="mine") == []

    watch(job, script)


def test_the_memory_limit_of_a_container(tmp_path: Path) -> None:
    second, first = tmp_path / "memory.max", tmp_path / "limit_in_bytes"
    assert memory_limit_bytes([second, first]) is None
    first.write_text("9223372036854771712\n")
    assert memory_limit_bytes([second, first]) is None
    second.write_text("max\n")
    assert memory_limit_bytes([second, first]) is None
    second.write_text("1048576\n")
    assert memory_limit_bytes([second, first]) == 1048576


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
    assert urllib.request.urlopen(second.url, timeout=60).status == 200
    second.close()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(second.url, timeout=60)
    monkeypatch.setattr(endpoint, "PORTS_TRIED_MAX", 1)
    assert open_endpoint(metrics, first.port, "127.0.0.1") is None
    assert f"no metrics endpoint port=`{first.port}`" in caplog.text
    first.close()


def test_an_endpoint_for_all_shows_the_name_of_the_host() -> None:
    opened = open_endpoint(MetricsRegistry(), 0, "0.0.0.0")
    assert opened is not None
    assert opened.url == f"http://{socket.gethostname()}:{opened.port}/metrics"
    opened.close()


def test_an_endpoint_for_all_of_a_node_shows_the_address_of_the_node() -> None:
    opened = open_endpoint(MetricsRegistry(), 0, "0.0.0.0", node_host="10.1.2.3")
    assert opened is not None
    assert opened.url == f"http://10.1.2.3:{opened.port}/metrics"
    opened.close()


def test_the_documentation_is_current() -> None:
    assert DOCS.read_text() == markdown(), "python -m headgate.runtime.observe.metrics_page"


def test_the_endpoint_opens_where_no_dns_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that waits for a DNS server is late for its coordinator, and is taken for dead."""

    def ask(*_: object) -> str:
        raise AssertionError("DNS was asked")

    for name in ("getfqdn", "gethostbyaddr", "gethostbyname"):
        monkeypatch.setattr(socket, name, ask)
    opened = open_endpoint(MetricsRegistry(), 0, "127.0.0.1")
    assert opened is not None
    try:
        with urllib.request.urlopen(opened.url, timeout=60) as answer:
            assert answer.status == 200
    finally:
        opened.close()
