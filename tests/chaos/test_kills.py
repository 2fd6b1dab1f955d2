"""Real processes on a local Ray are killed and frozen; the output equals the reference exactly."""

from __future__ import annotations

import os
import signal
from typing import Any

import polars as pl
import pyarrow.dataset as ds
import pyarrow.fs as pafs
import pytest

import headgate as hg
from headgate.connectors import generator, parquet_sink, random_int, sequence
from headgate.runtime.control import registry

pytestmark = [pytest.mark.ray, pytest.mark.chaos]
ROWS = 40_000
KEYS = 50


def make_job(
    storage: str,
    out: str,
    rate: float,
    options: dict[str, str] | None = None,
    parallelism: int = 2,
) -> hg.Job:
    """Windows of 1,000 rows of event time per key, counted and summed up."""
    job = hg.Job("chaos", parallelism=parallelism, options=options)
    job.checkpoint(every="250ms", storage=storage)
    job.restart(attempts=1000, delay="50ms")
    rows = generator(
        {"n": sequence(), "k": random_int(0, KEYS)}, rows=ROWS, rate=rate, batch_rows=100, seed=7
    )
    (
        job.read(rows, name="rows")
        .event_time("n", max_out_of_order="2s")
        .key_by("k")
        .window(hg.tumbling("1s"))
        .agg(c=hg.count(), s=hg.sum("n"), name="windows")
        .write(parquet_sink(out, guarantee="exactly_once"), name="out")
    )
    return job


def reference() -> pl.DataFrame:
    rows = generator({"n": sequence(), "k": random_int(0, KEYS)}, rows=ROWS, seed=7)
    table = pl.from_arrow(rows.make(0, ROWS).data)
    assert isinstance(table, pl.DataFrame)
    return (
        table.group_by("k", pl.col("n") // 1000)
        .agg(c=pl.len().cast(pl.Int64), s=pl.col("n").sum())
        .select("k", "n", "c", "s")
        .sort("k", "n")
    )


def found(out: str, filesystem: Any = None) -> pl.DataFrame:
    table = pl.from_arrow(ds.dataset(out, format="parquet", filesystem=filesystem).to_table())
    assert isinstance(table, pl.DataFrame)
    window = pl.col("window_start").cast(pl.Int64) // 1000
    return table.select("k", n=window, c="c", s="s").sort("k", "n")


def test_kills_on_local_storage(
    ring: Any, kills: Any, killings: Any, tmp_path: Any, capfd: Any
) -> None:
    job = make_job(str(tmp_path / "chk"), str(tmp_path / "out"), rate=4000)
    ran = ring.run(job, kills(workers=5, coordinators=1), seed=1, until=killings(6))
    assert len(ran.chaos.kills) == 6, ran.chaos.kills
    assert len(ran.chaos.texts("takeover")) == 1
    assert found(str(tmp_path / "out")).equals(reference())
    lost = [text for text in ran.chaos.texts("failure") if "worker lost" in text or "died" in text]
    assert lost == ran.chaos.texts("failure")
    assert "(raylet)" not in capfd.readouterr().err


def test_workers_of_several_slots_are_killed(ring: Any, tmp_path: Any) -> None:
    """Each of two processes hosts two subtasks of every step; both are lost, one after the other."""
    seen: list[int] = []

    async def kill(chaos: Any) -> None:
        seen.append(len((await chaos.status())["workers"]))
        await chaos.kill_worker()

    def plan(chaos: Any, event: Any, body: dict[str, Any]) -> None:
        if event.kind != "checkpoint" or body.get("status") != "COMPLETED":
            return
        asked = chaos.state.setdefault("asked", 0)
        if asked == len(chaos.texts("restored")) < 2:
            chaos.state["asked"] = asked + 1
            chaos.later(0.0, kill)

    job = make_job(
        str(tmp_path / "chk"),
        str(tmp_path / "out"),
        rate=4000,
        options={"taskmanager.numberOfTaskSlots": "2"},
        parallelism=4,
    )
    ran = ring.run(job, plan, seed=6, until=lambda chaos: len(chaos.texts("restored")) == 2)
    assert seen == [2, 2]
    assert len(ran.chaos.kills) == 2, ran.chaos.kills
    assert found(str(tmp_path / "out")).equals(reference())


def test_kills_on_s3(ring: Any, kills: Any, killings: Any, s3_server: Any) -> None:
    job = make_job(
        s3_server.uri, f"s3://{s3_server.bucket}/out", rate=4000, options=s3_server.options
    )
    ran = ring.run(job, kills(workers=3, coordinators=1), seed=2, until=killings(4))
    assert len(ran.chaos.kills) == 4, ran.chaos.kills
    store = pafs.S3FileSystem(
        access_key="testing",
        secret_key="testing",
        region="us-east-1",
        scheme="http",
        endpoint_override=s3_server.endpoint.removeprefix("http://"),
    )
    assert found(f"{s3_server.bucket}/out", store).equals(reference())


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=["kill", "term"])
def test_workers_go_on_without_their_coordinator(ring: Any, tmp_path: Any, how: int) -> None:
    """The coordinator alone is killed, or told to end: the next one adopts what runs, processes and all."""
    seen: dict[str, Any] = {}

    async def kill(chaos: Any) -> None:
        seen.update(await chaos.status())
        chaos.kill_coordinator(how)

    def plan(chaos: Any, event: Any, body: dict[str, Any]) -> None:
        if event.kind == "checkpoint" and not chaos.state:
            chaos.state["armed"] = True
            chaos.later(0.1, kill)
        elif event.kind == "adopted":
            chaos.state.update(body)

    job = make_job(str(tmp_path / "chk"), str(tmp_path / "out"), rate=8000)
    ran = ring.run(job, plan, seed=4, until=lambda chaos: "adopted" in chaos.state)
    assert len(ran.chaos.kills) == 1
    after = ran.chaos.state
    assert after["adopted"], after
    assert (seen["generation"], after["generation"]) == (1, 2)
    assert seen["attempt"] == after["attempt"]
    assert seen["workers"] == after["workers"]
    assert ran.outcome.checkpoint > seen["last_checkpoint"]
    assert not ran.chaos.texts("restored") + ran.chaos.texts("failure")
    assert found(str(tmp_path / "out")).equals(reference())


def test_a_standby_takes_over_and_who_died_stands_by(ring: Any, tmp_path: Any) -> None:
    """kill -9 of the leader, twice: the process that takes over was there before, the first time."""
    stood_by: list[set[int]] = []
    checkpoints_of_two = 0
    """Checkpoints since both processes are there: the one that stands by has begun to watch the leader."""
    adopted: list[dict[str, Any]] = []
    leaders: list[int] = []

    def kill(chaos: Any) -> None:
        leader = leaders[-1]
        stood_by.append(set(chaos.coordinators()) - {leader})
        chaos.kills.append(f"leader {leader}")
        os.kill(leader, signal.SIGKILL)

    def plan(chaos: Any, event: Any, body: dict[str, Any]) -> None:
        nonlocal checkpoints_of_two
        if event.kind == "adopted":
            adopted.append(body)
        if event.kind == "checkpoint" and checkpoints_of_two < 4:
            checkpoints_of_two += len(chaos.coordinators()) == 2
        elif event.kind == "checkpoint" and len(leaders) == len(adopted) < 2:
            record = registry.find("chaos")
            assert record is not None
            leaders.append(record.pid)
            chaos.later(0.1, kill)
        elif event.kind == "checkpoint" and len(leaders) == len(adopted) == 2 and not chaos.state:
            record = registry.find("chaos")
            assert record is not None
            chaos.state["last"] = record.pid

    options = {"headgate.coordinator.standby": "1"}
    job = make_job(str(tmp_path / "chk"), str(tmp_path / "out"), rate=4000, options=options)
    ran = ring.run(job, plan, seed=5, until=lambda chaos: "last" in chaos.state)
    assert [(each["adopted"], each["generation"]) for each in adopted] == [(True, 2), (True, 3)]
    assert leaders[1] in stood_by[0]
    assert len({*leaders, ran.chaos.state["last"]}) == 3
    assert not ran.chaos.texts("restored") + ran.chaos.texts("failure")
    assert found(str(tmp_path / "out")).equals(reference())


def test_a_coordinator_that_dies_behind_the_end_of_its_job(ring: Any, tmp_path: Any) -> None:
    """The job has finished, whether the coordinator could still say so or its successor does."""

    def plan(chaos: Any, event: Any, body: dict[str, Any]) -> None:
        if event.kind == "status" and body["status"] == "FINISHED" and not chaos.kills:
            chaos.kill_coordinator()

    job = make_job(str(tmp_path / "chk"), str(tmp_path / "out"), rate=20_000)
    ran = ring.run(job, plan, seed=6)
    assert len(ran.chaos.kills) == 1
    assert not ran.chaos.texts("restored") + ran.chaos.texts("failure")
    assert found(str(tmp_path / "out")).equals(reference())


def test_a_frozen_worker(ring: Any, tmp_path: Any) -> None:
    """A worker stopped for longer than the heartbeat timeout is lost, and does no harm when it wakes
    up.
    """
    before: list[str] = []
    """Failures of workers that a slow machine did not let beat in time."""

    async def freeze(chaos: Any) -> None:
        await chaos.kill_worker(signal.SIGSTOP)
        before[:] = chaos.texts("failure")

    def plan(chaos: Any, event: Any, body: dict[str, Any]) -> None:
        if event.kind == "checkpoint" and not chaos.state:
            chaos.state["frozen"] = True
            chaos.later(0.1, freeze)

    job = make_job(
        str(tmp_path / "chk"),
        str(tmp_path / "out"),
        rate=8000,
        options={"heartbeat.interval": "200ms", "heartbeat.timeout": "2s"},
    )

    def noticed(chaos: Any) -> bool:
        return bool(chaos.kills) and len(chaos.texts("failure")) > len(before)

    ran = ring.run(job, plan, seed=3, until=noticed)
    assert len(ran.chaos.kills) == 1
    assert "no heartbeat for 2000 ms" in ran.chaos.texts("failure")[len(before)]
    assert found(str(tmp_path / "out")).equals(reference())
