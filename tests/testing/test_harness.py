"""Jobs in a harness: records in, time on, crashes, results out."""

from __future__ import annotations

import asyncio
import importlib.util
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

import headgate as hg
from headgate.connectors import collect, from_list
from headgate.errors import PlanError, UsageError
from headgate.runtime.manifest import load_job
from headgate.testing import harness


def sums(payments: list[tuple[str, int]]) -> list[tuple[str, int, int]]:
    """Return the results of the `spending` job for these payments."""
    totals: dict[str, tuple[int, int]] = {}
    made = []
    for user, amount in payments:
        total, number = totals.get(user, (0, 0))
        totals[user] = (total + amount, number + 1)
        made.append((user, *totals[user]))
    return made


PAYMENTS = [("ann", 5), ("bob", 3), ("ann", 7), ("cy", 1), ("bob", 2), ("ann", 1)]


@pytest.mark.parametrize("parallelism", [1, 2, 3])
@pytest.mark.parametrize("seed", range(5))
def test_state_per_key_survives_crashes_once(
    spending_job: Any, parallelism: int, seed: int
) -> None:
    with harness(spending_job(), seed=seed, parallelism=parallelism) as h:
        h.crash()  # before there is any checkpoint
        for number, payment in enumerate(PAYMENTS):
            h.push("payments", payment)
            if number == 2:
                h.checkpoint()
            if number in (3, 4):
                h.crash()
        h.checkpoint()
        assert h.drain("out") == sums(PAYMENTS)
        assert h.drain("out") == []


def test_a_crash_without_a_checkpoint_reads_everything_again(spending_job: Any) -> None:
    with harness(spending_job(guarantee="at_least_once"), parallelism=2) as h:
        h.push("payments", PAYMENTS)
        assert h.drain("out") == sums(PAYMENTS)
        h.crash()
        assert h.drain("out") == sums(PAYMENTS)  # twice: the sink promises no more


def test_records_of_several_pushes_are_replayed_in_their_order(spending_job: Any) -> None:
    payments = [("ann", n) for n in range(20)]
    with harness(spending_job(), parallelism=3, seed=4) as h:
        for payment in payments:
            h.push("payments", payment)
        h.crash()
        h.checkpoint()
        assert h.drain("out") == sums(payments)


def test_exactly_once_sinks_show_what_is_committed(spending_job: Any) -> None:
    with harness(spending_job()) as h:
        h.push("payments", PAYMENTS[:2])
        assert h.drain("out") == []
        assert h.pending("out") == sums(PAYMENTS[:2])
        h.checkpoint()
        assert h.pending("out") == []
        h.push("payments", PAYMENTS[2:3])
        h.crash()
        assert h.drain("out") == sums(PAYMENTS[:2])
        assert h.pending("out") == sums(PAYMENTS[:3])[2:]
        h.end()
        assert h.drain("out") == sums(PAYMENTS[:3])[2:]
        assert h.pending("out") == []


def test_results_come_in_the_order_they_were_written(spending_job: Any) -> None:
    payments = [(f"user {n}", n) for n in range(30)]
    with harness(spending_job(), parallelism=4) as h:
        for payment in payments:
            h.push("payments", payment)
        assert h.pending("out") == sums(payments)
        h.checkpoint()
        assert h.drain("out") == sums(payments)


def test_other_sinks_show_everything_at_once(spending_job: Any) -> None:
    with harness(spending_job(guarantee="at_least_once")) as h:
        h.push("payments", *PAYMENTS)
        assert h.drain("out") == sums(PAYMENTS)
        assert h.pending("out") == []


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1), (1, 4)])
def test_rescaling_moves_state(spending_job: Any, before: int, after: int) -> None:
    with harness(spending_job(), parallelism=before) as h:
        for payment in PAYMENTS[:4]:
            h.push("payments", payment)
        h.rescale(after)
        h.push("payments", PAYMENTS[4])
        h.crash()  # restores what the rescale wrote
        h.push("payments", PAYMENTS[5])
        h.checkpoint()
        assert h.drain("out") == sums(PAYMENTS)


def test_records_pushed_at_the_new_parallelism_are_replayed_too(spending_job: Any) -> None:
    payments = [("ann", n) for n in range(9)]
    with harness(spending_job(), parallelism=1) as h:
        h.rescale(3)
        for payment in payments:
            h.push("payments", payment)
        h.crash()
        h.checkpoint()
        assert h.drain("out") == sums(payments)


@pytest.mark.parametrize("parallelism", [1, 2])
def test_windows_fire_when_the_watermark_comes(
    windows_job: Any, click: Any, count: Any, t0: Any, parallelism: int
) -> None:
    with harness(windows_job(), parallelism=parallelism) as h:
        h.push("clicks", click("ann", 1, t0), click("bob", 2, t0 + timedelta(seconds=59)))
        h.push("clicks", click("ann", 3, t0 + timedelta(seconds=59)))
        h.advance_watermark("clicks", t0 + timedelta(milliseconds=59_998))
        assert h.pending("out") == []
        h.advance_watermark("clicks", t0 + timedelta(milliseconds=59_999))
        assert sorted(h.pending("out"), key=lambda c: c.user) == [
            count("ann", 2, 4),
            count("bob", 1, 2),
        ]
        h.push("clicks", click("ann", 9, t0 + timedelta(seconds=59)))
        h.push("clicks", click("ann", 4, t0 + timedelta(seconds=60)))
        assert [row["amount"] for row in h.drain("counts.late")] == [9]
        h.end()
        assert sorted(h.drain("out"), key=lambda c: c.user)[-2:] == [
            count("ann", 1, 4),
            count("bob", 1, 2),
        ]


def test_declared_watermarks_outlive_crashes_and_rescales(
    windows_job: Any, click: Any, count: Any, t0: Any
) -> None:
    late = click("ann", 9, t0)
    with harness(windows_job(), parallelism=2) as h:
        h.push("clicks", click("ann", 1, t0))
        h.checkpoint()
        h.advance_watermark("clicks", t0 + timedelta(minutes=1))
        h.crash()
        h.push("clicks", late)
        h.rescale(3)
        h.push("clicks", late)
        h.crash()
        h.push("clicks", late)
        assert len(h.drain("counts.late")) == 4  # the second one once more after the crash
        h.checkpoint()
        assert h.drain("out") == [count("ann", 1, 1)]


def test_a_record_that_was_in_time_is_in_time_again(
    windows_job: Any, click: Any, count: Any, t0: Any
) -> None:
    with harness(windows_job()) as h:
        h.push("clicks", click("ann", 1, t0))
        h.advance_watermark("clicks", t0 + timedelta(minutes=1))
        h.push("clicks", click("ann", 2, t0 + timedelta(minutes=1)))
        h.crash()
        h.advance_watermark("clicks", t0 + timedelta(minutes=2))
        h.checkpoint()
        assert h.drain("out") == [count("ann", 1, 1), count("ann", 1, 2)]


def test_a_record_that_was_late_is_late_again(
    windows_job: Any, click: Any, count: Any, t0: Any
) -> None:
    with harness(windows_job()) as h:
        h.push("clicks", click("ann", 1, t0))
        h.advance_watermark("clicks", t0 + timedelta(minutes=1))
        h.push("clicks", click("ann", 2, t0))
        h.crash()
        assert [row["amount"] for row in h.drain("counts.late")] == [2, 2]
        h.end()
        assert h.drain("out") == [count("ann", 1, 1)]


def test_the_jobs_own_watermarks_go_out_as_time_passes(
    windows_job: Any, click: Any, count: Any, t0: Any
) -> None:
    with harness(windows_job(max_out_of_order="10s")) as h:
        h.push("clicks", click("ann", 1, t0), click("bob", 2, t0 + timedelta(seconds=69)))
        h.advance_time("200ms")
        assert h.pending("out") == []
        # at once, since a watermark that ends a window does not wait for the interval
        h.push("clicks", click("bob", 2, t0 + timedelta(seconds=70)))
        assert h.pending("out") == [count("ann", 1, 1)]
        # a watermark behind those of the job changes nothing
        h.advance_watermark("clicks", t0)
        h.push("clicks", click("ann", 1, t0))
        assert len(h.drain("counts.late")) == 1


def test_watermarks_that_end_no_window_wait_for_the_interval(click: Any, t0: Any) -> None:
    job = hg.Job("visits")
    clicks = job.read(from_list([], schema=click), name="clicks").event_time("at")
    visits = clicks.key_by("user").window(hg.session("1m")).agg(n=hg.count(), name="visits")
    visits.write(collect(guarantee="none"), name="out")
    with harness(job) as h:
        h.push(
            "clicks",
            click("ann", 1, t0),
            click("bob", 2, t0 + timedelta(minutes=2)),
        )
        assert h.drain("out") == []
        h.advance_time("200ms")
        assert [row["user"] for row in h.drain("out")] == ["ann"]


def test_a_silent_subtask_holds_time_back_until_it_is_idle(
    windows_job: Any, click: Any, count: Any, t0: Any
) -> None:
    with harness(windows_job(idle_after="30s"), parallelism=2) as h:
        h.push("clicks", click("ann", 1, t0), click("ann", 2, t0 + timedelta(minutes=2)))
        h.advance_time("10s")
        assert h.pending("out") == []
        h.advance_time("21s")
        assert h.pending("out") == [count("ann", 1, 1)]


def test_a_declared_watermark_counts_at_an_idle_source(
    windows_job: Any, click: Any, count: Any, t0: Any
) -> None:
    with harness(windows_job(idle_after="1s"), parallelism=2) as h:
        h.push("clicks", click("ann", 1, t0))
        h.advance_time("10s")
        h.advance_watermark("clicks", t0 + timedelta(minutes=1))
        assert h.pending("out") == [count("ann", 1, 1)]


def test_time_passes_only_when_told() -> None:
    async def slowly(n: int) -> int:
        await asyncio.sleep(30)
        return n * 2

    job = hg.Job("slow")
    job.read(from_list([]), name="numbers").map(slowly).write(collect(guarantee="none"), name="out")
    with harness(job) as h:
        begun = h.now
        h.push("numbers", 1)
        h.advance_time("29s")
        assert h.drain("out") == []
        h.advance_time(timedelta(seconds=1))
        assert h.drain("out") == [2]
        assert h.now - begun == timedelta(seconds=30)
        h.push("numbers", 2)
        h.end()  # lets the call under way return
        assert h.drain("out") == [4]
        assert h.now - begun == timedelta(seconds=60)


def test_a_year_passes_quickly(spending_job: Any) -> None:
    with harness(spending_job()) as h:
        h.push("payments", PAYMENTS[0])
        h.advance_time("365d")
        h.push("payments", PAYMENTS[1])
        h.checkpoint()
        assert h.drain("out") == sums(PAYMENTS[:2])


def test_records_of_a_sink_come_as_its_class_as_dicts_as_batches() -> None:
    class Item(msgspec.Struct, frozen=True):
        name: str
        size: int | None = None

    job = hg.Job("forms")
    items = job.read(from_list([], schema=Item), name="items")
    items.write(collect(guarantee="none"), name="whole")
    items.select("name").write(collect(guarantee="none"), name="part")
    with harness(job) as h:
        h.push("items", Item("a"), [{"name": "b", "size": 2}], ("c", 3))
        h.push("items", pa.RecordBatch.from_pydict({"size": [4], "name": ["d"]}))
        assert h.drain("whole") == [Item("a"), Item("b", 2), Item("c", 3), Item("d", 4)]
        batches = h.drain("part", as_batches=True)
        assert [batch.to_pydict() for batch in batches] == [
            {"name": ["a", "b", "c"]},
            {"name": ["d"]},
        ]
        h.push("items", Item("e"))
        assert h.drain("part") == [{"name": "e"}]


def test_records_may_bring_their_own_time() -> None:
    job = hg.Job("own-time")
    (
        job.read(from_list([]), name="numbers")
        .key_with(lambda n: 0)
        .process(Stamps(), name="stamps")
        .write(collect(guarantee="none"), name="out")
    )
    with harness(job) as h:
        h.push("numbers", 1, 2, at=[1_000, 2_000])
        h.push("numbers", 3, at=h.now)
        h.push("numbers", 4)
        assert h.drain("out") == [(1, 1_000), (2, 2_000), (3, 1_767_225_600_000), (4, None)]
        with pytest.raises(UsageError, match="one time per record times=`2` records=`1`"):
            h.push("numbers", 1, at=[1, 2])


class Stamps(hg.KeyedProcess):
    def on_record(self, record: Any, ctx: Any) -> Any:
        yield (record, ctx.timestamp)


def test_several_sources_and_one_that_ends_first(count: Any, click: Any, t0: Any) -> None:
    job = hg.Job("two")
    job.checkpoint(every="1h", storage="never-made")
    streams = [job.read(from_list([], schema=click), name=name) for name in ("web", "app")]
    streams[0].event_time("at").union(streams[1].event_time("at")).key_by("user").window(
        hg.tumbling("1m")
    ).agg(n=hg.count(), name="counts").write(collect(guarantee="exactly_once"), name="out")
    with harness(job, parallelism=2) as h:
        h.push("web", click("ann", 1, t0))
        h.push("app", click("ann", 1, t0))
        h.advance_watermark("web", t0 + timedelta(minutes=1))
        assert h.pending("out") == []
        h.end("app")
        assert [row["n"] for row in h.pending("out")] == [2]
        h.checkpoint()
        h.crash()
        with pytest.raises(UsageError, match="source `app` has ended"):
            h.push("app", click("ann", 1, t0))
        h.push("web", click("ann", 1, t0 + timedelta(minutes=5)))
        h.end()
        assert [row["n"] for row in h.drain("out")] == [2, 1]
        with pytest.raises(UsageError, match="the job has finished"):
            h.checkpoint()


def test_one_event_time_step_behind_two_sources(click: Any, t0: Any) -> None:
    job = hg.Job("union")
    web, app = (job.read(from_list([], schema=click), name=name) for name in ("web", "app"))
    web.union(app).event_time("at").key_by("user").window(hg.tumbling("1m")).agg(
        n=hg.count(), name="counts"
    ).write(collect(guarantee="none"), name="out")
    with harness(job, parallelism=2) as h:
        h.push("web", click("ann", 1, t0))
        h.push("app", click("ann", 1, t0))
        h.advance_watermark("web", t0 + timedelta(minutes=1))
        assert [row["n"] for row in h.drain("out")] == [2]


def test_a_savepoint_is_the_beginning_of_another_run(spending_job: Any, tmp_path: Path) -> None:
    with harness(spending_job(), parallelism=2) as h:
        h.push("payments", PAYMENTS[:4])
        place = h.savepoint(tmp_path / "savepoints")
    with harness(spending_job(), parallelism=3, restore_from=place) as h:
        h.push("payments", PAYMENTS[4:])
        h.crash()  # before the first checkpoint of its own
        h.checkpoint()
        assert h.drain("out") == sums(PAYMENTS)[4:]


@pytest.mark.parametrize("parallelism", [1, 3])
def test_a_savepoint_of_a_real_run(
    tmp_path: Path, parallelism: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positions in the real source mean nothing here; all other state is taken over."""
    compat = Path(__file__).parent.parent / "compat"
    described = importlib.util.spec_from_file_location("state_job", compat / "state_job.py")
    assert described is not None
    assert described.loader is not None
    state_job = importlib.util.module_from_spec(described)
    monkeypatch.setitem(sys.modules, "state_job", state_job)
    described.loader.exec_module(state_job)
    outputs = state_job.Outputs(tmp_path)
    (tmp_path / "input").mkdir()
    job = state_job.make_job(tmp_path, outputs, parallelism=2, mark="harness", storage="never-made")
    savepoint = compat / "v0.1" / "canonical" / "savepoint"
    record = {"id": 1, "name": "ann", "number": 1, "ratio": None, "price": None}
    with harness(job, parallelism=parallelism, restore_from=savepoint) as h:
        for _ in range(4):
            h.push("events", record | {"at": state_job.TOLD_FROM})
        found = [row["lasting"] for row in h.pending("process-out") if row.get("id") == 1]
    assert found == list(range(found[0], found[0] + 4))
    assert found[0] > 1


def test_a_job_from_a_manifest(tmp_path: Path) -> None:
    manifest = tmp_path / "job.yaml"
    manifest.write_text(MANIFEST)
    with harness(load_job(manifest)) as h:
        h.push("numbers", {"k": 1, "n": 5})
        h.push("numbers", {"k": 1, "n": 6})
        assert h.drain("printed") == [{"k": 1, "total": 5}, {"k": 1, "total": 11}]


MANIFEST = """\
apiVersion: headgate.io/v1alpha1
kind: StreamJob
metadata: {name: sums}
spec:
  sources:
    numbers: {generator: {fields: {k: sequence, n: sequence}, rows: 10}}
  operators:
    totals: {from: numbers, keyBy: k, aggregate: {total: sum(n)}}
  sinks:
    printed: {from: totals, print: {}}
"""


def test_the_job_stays_as_it_is(windows_job: Any) -> None:
    job = windows_job()
    before = job.explain()
    with harness(job, parallelism=3):
        assert job.explain() == before
    assert job.parallelism == 1
    assert not Path("never-made").exists()


def test_ray_is_not_imported_nor_a_thread_started() -> None:
    script = """
import sys, threading
import headgate as hg
from headgate.connectors import collect, from_list
from headgate.testing import harness
job = hg.Job("job")
job.checkpoint(every="1s", storage="never-made")
job.read(from_list([]), name="in").write(collect(guarantee="exactly_once"), name="out")
with harness(job, parallelism=2) as h:
    h.push("in", 1)
    h.checkpoint()
    h.crash()
    assert h.drain("out") == [1]
    print(threading.active_count())
assert "ray" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("1\n", 0), done.stderr


def test_wrong_names_are_answered(windows_job: Any, click: Any, t0: Any) -> None:
    with harness(windows_job()) as h:
        with pytest.raises(UsageError, match=r"no source `click`\n.*did you mean `clicks`"):
            h.push("click", click("ann", 1, t0))
        with pytest.raises(UsageError, match=r"no sink `outt`\n.*`out`\? .*: out, counts.late"):
            h.drain("outt")


def test_what_does_not_fit_is_refused_before_it_reaches_the_job(
    windows_job: Any, click: Any, count: Any, t0: Any
) -> None:
    good = {"user": "ann", "amount": 1, "at": t0}
    wrong = {
        "record 1 is a dict without `at`": {"user": "ann", "amount": 1},
        "record 1 has no place in source `clicks` field=`usr`": good | {"usr": "ann"},
        "record 1 is a str for column `amount` of type int64": good | {"amount": "1"},
        "record 1 is None for column `user`": good | {"user": None},
        "record 1 is a Count, not a Click": count("ann", 1, 1),
        "record 1 is a int": 7,
    }
    with harness(windows_job()) as h:
        for message, record in wrong.items():
            with pytest.raises(UsageError, match=message):
                h.push("clicks", good, record)
        with pytest.raises(UsageError, match="no column `amount`"):
            h.push("clicks", pa.RecordBatch.from_pydict({"user": ["a"], "at": [t0]}))
        nulls = pa.RecordBatch.from_pydict(
            {**good, "user": pa.array([None], pa.string())}
            | {"amount": [1], "at": pa.array([t0], pa.timestamp("us", "UTC"))}
        )
        with pytest.raises(UsageError, match="nulls in column `user`"):
            h.push("clicks", nulls)
        h.end()
        assert h.drain("out") == []


def test_times_that_make_no_sense_are_refused(
    windows_job: Any, spending_job: Any, click: Any, t0: Any
) -> None:
    with harness(windows_job()) as h:
        h.advance_watermark("clicks", t0)
        with pytest.raises(UsageError, match="watermarks only rise"):
            h.advance_watermark("clicks", t0 - timedelta(seconds=1))
        with pytest.raises(UsageError, match="not a point in time"):
            h.advance_watermark("clicks", "12:00")  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="needs a unit"):
            h.advance_time(5)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="get their time from the job step=`event_time`"):
            h.push("clicks", click("ann", 1, t0), at=t0)
    with harness(spending_job()) as h:
        with pytest.raises(UsageError, match="no event_time step"):
            h.advance_watermark("payments", t0)
        with pytest.raises(UsageError, match="lies in the years 1 to 9999"):
            h.push("payments", ("ann", 1), at=2**63)


def test_a_wrong_job_is_refused(spending_job: Any) -> None:
    job = hg.Job("wrong")
    job.read(from_list([]), name="in").write(collect(guarantee="exactly_once"), name="out")
    with pytest.raises(PlanError, match="the job takes no checkpoints"):
        harness(job)
    with pytest.raises(UsageError, match="harness needs a job type=`str`"):
        harness("job.yaml")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="use `with harness"):
        harness(spending_job()).push("payments", 1)


def test_a_harness_inside_a_coroutine_is_refused(spending_job: Any) -> None:
    async def test() -> None:
        with harness(spending_job()):
            pass

    with pytest.raises(UsageError, match="plain function"):
        asyncio.run(test())


def test_rescaling_to_the_same_is_refused(spending_job: Any) -> None:
    with harness(spending_job(), parallelism=2) as h:
        with pytest.raises(UsageError, match="nothing would change"):
            h.rescale(2)
        h.push("payments", PAYMENTS)
        h.checkpoint()
        assert h.drain("out") == sums(PAYMENTS)
