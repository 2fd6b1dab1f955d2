"""Unaligned checkpoints where streams meet, and failures at bad moments: nothing lost, nothing twice."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import headgate as hg
from headgate.connectors import collect, numbers
from headgate.runtime.task.input_subtask import InputSubtask

ROWS = 1500
BATCH = 32
UNALIGNED = {
    "execution.checkpointing.unaligned.enabled": "true",
    "taskmanager.network.memory.buffers-per-channel": "1",
    "taskmanager.network.memory.floating-buffers-per-gate": "1",
    "execution.buffer-timeout.interval": "0 ms",
    "headgate.task.slice": "5 ms",
}


class Slowly(hg.KeyedProcess[int, int, int]):
    def on_record(self, record: int, ctx: hg.Context[int]) -> Iterator[int]:
        time.sleep(0.0005)
        yield record


class Both(hg.CoProcess[int, int, int, int]):
    """Two inputs, one of them slower."""

    seen = hg.ValueState[int](default=0)

    def on_first(self, record: int, ctx: hg.Context[int]) -> Iterator[int]:
        time.sleep(0.0005)
        self.seen.set(self.seen.get() + 1)
        yield record

    def on_second(self, record: int, ctx: hg.Context[int]) -> Iterator[int]:
        self.seen.set(self.seen.get() + 1)
        yield record


class Told(hg.BroadcastProcess[int, int, int, int]):
    """An input that every subtask gets: its barriers stay in line."""

    rules = hg.BroadcastState[int, int]()

    def on_record(self, record: int, ctx: Any) -> Iterator[int]:
        yield record

    def on_broadcast(self, record: int, ctx: Any) -> None:
        self.rules.put(record, record)


def make_job(lab: Any, parallelism: int = 2, **options: str) -> hg.Job:
    job = hg.Job(
        "met", parallelism=parallelism, max_parallelism=24, options={**UNALIGNED, **options}
    )
    job.checkpoint(every="40ms", storage=lab.storage)
    job.restart(attempts=50, delay="10ms")
    return job


def source(job: hg.Job, name: str, first: int = 0, rows: int = ROWS) -> Any:
    stream = job.read(numbers(rows, batch_rows=BATCH, splits=4), name=name)
    return stream.map(lambda n, first=first: n + first, name=f"{name}-shifted") if first else stream


def key(n: int) -> int:
    return n % 24


def union(job: hg.Job) -> Any:
    both = source(job, "a").union(source(job, "b", ROWS))
    return both.key_with(key).process(Slowly(), name="slow")


def two_inputs(job: hg.Job) -> Any:
    one, two = source(job, "a"), source(job, "b", ROWS)
    return one.key_with(key).connect(two.key_with(key)).process(Both(), name="both")


def broadcast(job: hg.Job) -> Any:
    rules = source(job, "b", ROWS, rows=100).broadcast()
    told = source(job, "a").key_with(key).connect(rules).process(Told(), name="told")
    return told.key_with(lambda n: key(n) // 2).process(Slowly(), name="slow")


def mixed(job: hg.Job) -> Any:
    """A union of an exchange that keeps barriers in line and one in which they overtake elsewhere."""
    both = source(job, "a").union(source(job, "b", ROWS).rebalance())
    return both.key_with(key).process(Slowly(), name="slow")


def loop(job: hg.Job) -> Any:
    """Barriers overtake in front of a loop and behind it, and stay in line inside."""

    def body(stream: Any) -> tuple[Any, Any]:
        stepped = stream.map(lambda pair: (pair[0], pair[1] + 1), name="stepped")
        again = stepped.filter(lambda pair: pair[1] < 3, name="again")
        return again, stepped.filter(lambda pair: pair[1] >= 3, name="done")

    before = source(job, "a").key_with(key).process(Slowly(), name="before")
    around = before.map(lambda n: (n, 0), name="pairs").rebalance().iterate(body, name="loop")
    behind = around.map(lambda pair: pair[0], name="numbers")
    return behind.key_with(lambda n: n % 5).process(Slowly(), name="slow")


def together(key: int, left: list[Any], right: list[Any]) -> Iterator[Any]:
    time.sleep(0.01)
    yield {"k": key, "first": min([r.n for r in left + right]), "n": len(left), "m": len(right)}


def co_grouped(job: hg.Job) -> Any:
    """Windows of event time over two streams; every third number is on the right alone."""

    def side(name: str, kept: Callable[[int], bool]) -> Any:
        rows = (
            source(job, name)
            .filter(kept)
            .map(lambda n: {"k": key(n), "n": n}, into={"k": "long", "n": "long"})
        )
        return rows.event_time("n", max_out_of_order="1s").key_by("k")

    windows = side("a", lambda n: n % 3 != 0).window(hg.tumbling("240ms"))
    into = {"k": "long", "first": "long", "n": "long", "m": "long"}
    return windows.co_group(side("b", lambda n: True), together, into=into, name="together")


def test_kills_of_windows_over_two_streams(lab: Any, faults: Any) -> None:
    job, sink = make_job(lab), collect(guarantee="exactly_once")
    co_grouped(job).write(sink, name="out")
    ran = lab.run(job, faults.kills(7, 2))
    assert ran.outcome.status == "FINISHED", ran.failures
    assert ran.restores
    groups: dict[tuple[int, int], list[int]] = {}
    for n in range(ROWS):
        groups.setdefault((key(n), n // 240), []).append(n)
    wanted = Counter(
        (k, min(found), sum(n % 3 != 0 for n in found), len(found))
        for (k, _), found in groups.items()
    )
    assert Counter(tuple(row.values()) for row in sink.rows) == wanted


def expected(topology: Callable[[hg.Job], Any]) -> Counter[int]:
    return Counter(range(ROWS if topology in (broadcast, loop) else 2 * ROWS))


@pytest.mark.parametrize(
    ("topology", "timeout"),
    [
        *itertools.product([union, two_inputs, broadcast], ["0 ms", "30 ms"]),
        (mixed, "0 ms"),
        (loop, "0 ms"),
    ],
)
def test_kills_where_streams_meet(
    lab: Any, faults: Any, topology: Callable[[hg.Job], Any], timeout: str
) -> None:
    aligned = {"execution.checkpointing.aligned-checkpoint-timeout": timeout}
    job, sink = make_job(lab, **aligned), collect(guarantee="exactly_once")
    topology(job).write(sink, name="out")
    ran = lab.run(job, faults.kills(7, 2))
    assert ran.outcome.status == "FINISHED", ran.failures
    assert ran.restores
    assert Counter(sink.rows) == expected(topology)


def test_a_step_that_raises(lab: Any, raising: Any) -> None:
    job, sink = make_job(lab), collect(guarantee="exactly_once")
    marked = str(lab.path / "raised")
    (
        source(job, "a")
        .key_with(key)
        .process(Slowly(), name="slow")
        .map(lambda n: raising(marked, n, ROWS // 2), name="raises")
        .write(sink, name="out")
    )
    ran = lab.run(job)
    assert ran.outcome.status == "FINISHED", ran.failures
    assert len(ran.failures) == 1
    assert Counter(sink.rows) == Counter(range(ROWS))


def test_channel_state_that_cannot_be_written(lab: Any, trouble: Any) -> None:
    """The checkpoint is declined, its files go, and the job goes on from an older one."""
    job = make_job(lab, **{"execution.checkpointing.data-inline-threshold": "0 b"})
    sink = collect(guarantee="exactly_once")
    source(job, "a").key_with(key).process(Slowly(), name="slow").write(sink, name="out")
    trouble.only, trouble.fail["write_file"] = ".channel", 1
    ran = lab.run(job, opener=trouble.open)
    assert ran.outcome.status == "FINISHED", ran.failures
    assert len(ran.failures) == 1
    assert any(name.endswith(".channel") for call, name in trouble.calls if call == "write_file")
    assert not [name for name in lab.state_files("met") if name.endswith(".channel")]
    assert Counter(sink.rows) == Counter(range(ROWS))


def test_channel_state_that_cannot_be_read_at_first(lab: Any, trouble: Any, faults: Any) -> None:
    """The attempt fails, and the next one gets the same records."""
    job = make_job(lab, **{"execution.checkpointing.data-inline-threshold": "0 b"})
    sink = collect(guarantee="exactly_once")
    source(job, "a").key_with(key).process(Slowly(), name="slow").write(sink, name="out")
    trouble.only, trouble.fail["read_range"] = ".channel", 1

    async def script(running: Any) -> None:
        rng = random.Random(1)
        while not any(call == "read_range" for call, _ in trouble.calls):
            await running.checkpoint()
            running.kill(rng)
            await running.until("status", status="RUNNING")

    ran = lab.run(job, script, opener=trouble.open)
    assert ran.outcome.status == "FINISHED", ran.failures
    assert trouble.fail["read_range"] == 0
    assert any("injected call=`read_range`" in text for text in ran.failures), ran.failures
    assert Counter(sink.rows) == Counter(range(ROWS))


@pytest.mark.parametrize(
    ("timeout", "switched"), [("0 ms", 1), ("0 ms", 2), ("0 ms", 3), ("10 ms", 1)]
)
def test_a_worker_dies_while_some_subtasks_have_cut_their_state_and_others_have_not(
    lab: Any, monkeypatch: Any, timeout: str, switched: int
) -> None:
    aligned = {"execution.checkpointing.aligned-checkpoint-timeout": timeout}
    job, sink = make_job(lab, **aligned), collect(guarantee="exactly_once")
    both = source(job, "a").key_with(key).connect(source(job, "b", ROWS).key_with(key))
    both.process(Both(), name="both").key_with(lambda n: n % 5).process(
        Slowly(), name="slow"
    ).write(sink, name="out")
    start_capture, counts, jobs = InputSubtask._start_capture, Counter[int](), []

    def counted(subtask: InputSubtask, checkpoint_id: int) -> None:
        start_capture(subtask, checkpoint_id)
        counts[checkpoint_id] += 1
        # Not the first checkpoint: there must be one to go back to.
        if counts[checkpoint_id] == switched and len(counts) > 1 and jobs:
            running = jobs.pop()
            asyncio.get_running_loop().call_soon(running.live()[switched % 2].kill)

    async def script(running: Any) -> None:
        jobs.append(running)
        await running.until("restored")

    monkeypatch.setattr(InputSubtask, "_start_capture", counted)
    ran = lab.run(job, script)
    assert ran.outcome.status == "FINISHED", ran.failures
    assert ran.restores
    assert Counter(sink.rows) == Counter(range(2 * ROWS))


def test_a_checkpoint_is_aligned_in_some_subtasks_and_unaligned_in_others(lab: Any) -> None:
    aligned = {"execution.checkpointing.aligned-checkpoint-timeout": "60 ms"}
    job, sink = make_job(lab, **aligned), collect(guarantee="exactly_once")
    source(job, "a").key_with(key).process(Slowly(), name="slow").write(sink, name="out")
    mixed: list[dict[str, Any]] = []

    async def script(running: Any) -> None:
        while not mixed:
            id_ = await running.checkpoint()
            found = await running.request("checkpoints", id=id_)
            if 0 < found.get("unaligned_subtasks", 0) < found["num_subtasks"]:
                mixed.append(found)

    ran = lab.run(job, script)
    assert ran.outcome.status == "FINISHED", ran.failures
    by_task: dict[str, set[bool]] = {}
    for part in mixed[0]["subtasks"]:
        by_task.setdefault(part["task"], set()).add(part["unaligned_checkpoint"])
    assert by_task["a"] == {False}  # nothing to overtake in front of a source
    assert True in by_task["slow -> out"]
    assert Counter(sink.rows) == Counter(range(ROWS))


@pytest.mark.parametrize("killed", [False, True])
def test_at_least_once(lab: Any, faults: Any, killed: bool) -> None:
    mode = {
        "execution.checkpointing.mode": "AT_LEAST_ONCE",
        "execution.checkpointing.unaligned.enabled": "false",
    }
    job, sink = make_job(lab, **mode), collect(guarantee="at_least_once")
    union(job).write(sink, name="out")
    ran = lab.run(job, faults.kills(3, 2) if killed else faults.none(checkpoints=2))
    assert ran.outcome.status == "FINISHED", ran.failures
    assert ran.completed >= 2
    assert set(sink.rows) == set(range(2 * ROWS))
    if not killed:
        assert Counter(sink.rows) == Counter(range(2 * ROWS))
