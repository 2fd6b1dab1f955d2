"""`function_sink` beside its subtask, and `write_ahead_sink`, by themselves and in jobs."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import headgate as hg
from headgate.connectors import Crash, Epoch, from_list, function_sink, write_ahead_sink
from headgate.connectors.functions import write_ahead
from headgate.errors import HeadgateError, JobError, ManifestErrors, UsageError, UserCodeError
from headgate.operators.elements import ColumnBatch, ObjectBatch
from headgate.operators.sink import Sink, SinkWriter
from headgate.runtime.manifest import load_job
from headgate.state.snapshot import CommitPermit
from headgate.testing.connectors import CheckTimers, make_context
from headgate.tests.support.threads import begun

LIMIT_S = 60.0
"""The longest wait for something that will happen."""
COLUMNS = ColumnBatch(pa.RecordBatch.from_pylist([{"id": n, "name": f"n{n}"} for n in range(5)]))


def opened(sink: Sink, **context: Any) -> SinkWriter:
    writer = sink.writer()
    writer.open(make_context(**context))
    writer.prepare()
    return writer


def settled(writer: SinkWriter, checkpoint_id: int = 1) -> list[bytes]:
    pre_commit = writer.roll(checkpoint_id)
    return [] if pre_commit is None else pre_commit()


def test_calls_have_the_records_in_order_and_a_barrier_ends_the_last_one() -> None:
    seen: list[Any] = []
    writer = opened(function_sink(seen.append, rows=2))
    for records in ([1], [2, 3, 4], [5]):
        writer.write(ObjectBatch(list(records)))
    assert settled(writer) == []
    assert seen == [[1, 2], [3, 4], [5]]
    assert writer.roll(2) is None
    writer.close()


@pytest.mark.parametrize("records", ["list", "arrow"])
def test_rows_arrive_as_records_or_as_arrow(records: Any) -> None:
    seen: list[Any] = []

    async def write(given: Any) -> None:
        seen.append(given.to_pylist() if records == "arrow" else [(r.id, r["name"]) for r in given])

    writer = opened(function_sink(write, rows=4, records=records))
    writer.write(COLUMNS)
    settled(writer)
    writer.close()
    flat = [each for piece in seen for each in piece]
    rows = COLUMNS.data.to_pylist()
    assert flat == (rows if records == "arrow" else [(r["id"], r["name"]) for r in rows])
    assert [len(piece) for piece in seen] == [4, 1]


def test_a_coroutine_function_of_one_record() -> None:
    seen: list[Any] = []

    async def write(record: Any) -> None:
        seen.append(record)

    writer = opened(function_sink(write))
    writer.write(ObjectBatch([1, 2, 3]))
    settled(writer)
    writer.close()
    assert seen == [1, 2, 3]


def test_no_more_calls_than_allowed_run_at_the_same_time() -> None:
    running, most = [0], [0]
    full = threading.Event()

    async def write(records: Any) -> None:
        running[0] += 1
        most[0] = max(most[0], running[0])
        if running[0] == 3:
            full.set()
        await asyncio.to_thread(full.wait, LIMIT_S)
        await asyncio.sleep(0)
        running[0] -= 1

    writer = opened(function_sink(write, rows=1, max_in_flight=3))
    writer.write(ObjectBatch(list(range(20))))
    settled(writer)
    writer.close()
    assert most == [3]


def test_a_checkpoint_waits_for_the_calls_of_its_records_only() -> None:
    go = {1: threading.Event(), 2: threading.Event()}

    async def write(records: Any) -> None:
        await asyncio.to_thread(go[records[0]].wait, LIMIT_S)

    writer = opened(function_sink(write, rows=1, max_in_flight=2))
    writer.write(ObjectBatch([1]))
    first = writer.roll(1)
    writer.write(ObjectBatch([2]))
    second = writer.roll(2)
    assert first is not None
    assert second is not None
    done = begun(first)
    go[1].set()
    done.result(LIMIT_S)
    go[2].set()
    second()
    writer.close()


def test_records_that_wait_long_enough_go_alone() -> None:
    seen: list[Any] = []
    timers = CheckTimers()
    writer = opened(function_sink(seen.append, rows=100, within="5s"), timers=timers)
    writer.write(ObjectBatch([1]))
    assert 5000 in [delay for delay, _ in timers.due.values()]
    timers.fire()
    settled(writer)
    assert seen == [[1]]
    writer.close()


def test_records_that_wait_long_enough_wait_for_slow_calls_too() -> None:
    """Otherwise calls would pile up where few records come, because `write` waits for full ones only."""
    go, seen, timers = threading.Event(), list[list[int]](), CheckTimers()

    def write(records: list[int]) -> None:
        assert go.wait(LIMIT_S)
        seen.append(records)

    writer = opened(function_sink(write, rows=100), timers=timers)
    for number in range(10):
        writer.write(ObjectBatch([number]))
        timers.fire()
    go.set()
    settled(writer)
    writer.close()
    assert seen == [[0], [1], list(range(2, 10))]


def test_no_call_follows_one_that_failed() -> None:
    """With one call at a time, a record is not written before the one ahead of it."""
    seen: list[int] = []
    go = threading.Event()

    async def write(record: int) -> None:
        await asyncio.to_thread(go.wait, LIMIT_S)
        seen.append(record)
        raise ValueError("no")

    writer = opened(function_sink(write))
    writer.write(ObjectBatch([1, 2]))
    go.set()
    with pytest.raises(UserCodeError):
        settled(writer)
    writer.close()
    assert seen == [1]


def test_a_failed_call_is_repeated_with_the_same_records() -> None:
    seen: list[Any] = []

    async def write(records: Any) -> None:
        seen.append(list(records))
        if len(seen) < 3:
            raise ConnectionError("not yet")

    retry = hg.Retry(attempts=3, delay="1ms", on_exception=ConnectionError)
    writer = opened(function_sink(write, rows=2, retry=retry))
    writer.write(ObjectBatch([1, 2]))
    settled(writer)
    writer.close()
    assert seen == [[1, 2]] * 3


def test_a_call_that_fails_for_good_fails_the_checkpoint_and_the_attempt() -> None:
    timers = CheckTimers()

    def write(records: Any) -> None:
        raise ValueError(f"no {records[0]}")

    writer = opened(function_sink(write, rows=2), timers=timers, operator_name="shop")
    writer.write(ObjectBatch([1, 2]))
    message = "`shop` raised ValueError: no 1 record=.*2 records, the first of which is 1"
    for action in (lambda: settled(writer), timers.fire, lambda: writer.write(ObjectBatch([3]))):
        with pytest.raises(UserCodeError, match=message):
            action()
    writer.close()


def test_a_call_that_takes_too_long_fails() -> None:
    async def write(record: Any) -> None:
        await asyncio.sleep(1000)

    writer = opened(function_sink(write, timeout="10ms"))
    writer.write(ObjectBatch([1]))
    with pytest.raises(JobError, match="longer than its timeout"):
        settled(writer)
    writer.close()


SAID: list[str] = []
BEGAN = threading.Event()


class Hanging:
    """Notes what happens to it, and in which thread."""

    async def open(self, ctx: Any) -> None:
        self.thread = threading.get_ident()
        SAID.append("open")

    async def __call__(self, record: Any) -> None:
        assert threading.get_ident() == self.thread
        BEGAN.set()
        try:
            await asyncio.Event().wait()
        finally:
            SAID.append("cancelled")

    def close(self) -> None:
        assert threading.get_ident() == self.thread
        SAID.append("close")


def test_closing_cancels_the_calls_and_ends_a_checkpoint_that_waits_for_them() -> None:
    SAID.clear()
    BEGAN.clear()
    writer = opened(function_sink(Hanging()))
    writer.write(ObjectBatch([1]))
    pre_commit = writer.roll(1)
    assert pre_commit is not None
    assert BEGAN.wait(LIMIT_S)
    writer.close()
    assert SAID == ["open", "cancelled", "close"]
    with pytest.raises(JobError, match="was closed"):
        pre_commit()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: function_sink(print, within="1s"),
            "within of function_sink applies to calls with",
        ),
        (
            lambda: function_sink(print, rows=2, timeout="1s"),
            "timeout of function_sink applies to an",
        ),
        (lambda: function_sink(print, rows=2, max_in_flight=2), "max_in_flight of function_sink"),
        (lambda: function_sink(print, retry=hg.Retry()), "is not retried"),
        (lambda: function_sink(print, rows=0), "at least 1 rows=`0`"),
        (lambda: function_sink(print, rows=1, records="rows"), "no such form records=`rows`"),  # type: ignore[arg-type]
        (lambda: function_sink(lambda a, b: None, rows=2), "the records"),
        (lambda: write_ahead_sink(print, guarantee="none"), "cannot be guarantee=`none`"),
        (lambda: write_ahead_sink(lambda a: None, guarantee="exactly_once"), "2 arguments"),  # type: ignore[misc,arg-type]
        (lambda: write_ahead_sink(print, guarantee="exactly_once", buffer="0b"), "buffer"),
    ],
)
def test_arguments_that_cannot_work_are_refused(make: Callable[[], Sink], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()


# -- write-ahead -----------------------------------------------------------------------------------


def staged_ahead(function: Callable[..., Any], **options: Any) -> SinkWriter:
    return opened(write_ahead_sink(function, guarantee="exactly_once", **options))


def test_nothing_is_written_before_the_commit_and_then_in_order() -> None:
    seen: list[tuple[list[Any], Epoch]] = []

    def write(records: list[Any], epoch: Epoch) -> None:
        seen.append((records, epoch))

    writer = staged_ahead(write, rows=2)
    writer.write(ObjectBatch([1, 2, 3]))
    first = settled(writer, 1)
    writer.write(ObjectBatch([4]))
    second = settled(writer, 2)
    assert seen == []
    writer.commit([*first, *second], CommitPermit("conformance", 1, 2))
    writer.commit(first, CommitPermit("conformance", 1, 2))
    writer.close()
    assert [records for records, _ in seen] == [[1, 2], [3], [4], [1, 2], [3]]
    epochs = [epoch for _, epoch in seen]
    assert [(e.checkpoint_id, e.part) for e in epochs[:3]] == [(1, 0), (1, 1), (2, 0)]
    assert len({epoch.id for epoch in epochs}) == 3
    assert epochs[3:] == epochs[:2]


def test_an_identity_stays_the_same_in_another_subtask_of_another_job() -> None:
    seen: list[Epoch] = []

    def write(records: Any, epoch: Epoch) -> None:
        seen.append(epoch)

    writer = staged_ahead(write)
    writer.write(COLUMNS)
    committables = settled(writer)
    sink = write_ahead_sink(write, guarantee="exactly_once")
    other = opened(sink, attempt=7, subtask_index=3, parallelism=4, operator_name="renamed")
    for each in (writer, other):
        each.commit(committables, CommitPermit("conformance", 1, 1))
        each.close()
    assert seen[0] == seen[1]


@pytest.mark.parametrize("ahead", [False, True])
def test_a_repeat_has_the_records_that_a_call_has_removed_and_changed(
    monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    monkeypatch.setattr(write_ahead, "RETRY_PAUSES_S", (0.0,))
    seen: list[Any] = []

    async def write(records: list[Any], *epoch: Epoch) -> None:
        seen.append([dict(record) for record in records])
        if ahead:
            records[0]["n"] = -1
        records.clear()
        if len(seen) < 3:
            raise ConnectionError("nobody is there")

    sink = (
        write_ahead_sink(write, guarantee="exactly_once", rows=2)
        if ahead
        else function_sink(write, rows=2, retry=hg.Retry(attempts=3, delay="1ms"))
    )
    writer = opened(sink)
    writer.write(ObjectBatch([{"n": 1}, {"n": 2}]))
    writer.commit(settled(writer), CommitPermit("conformance", 1, 1))
    writer.close()
    assert seen == [[{"n": 1}, {"n": 2}]] * 3


def test_a_write_is_repeated_as_often_as_the_option_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_ahead, "RETRY_PAUSES_S", (0.0,))
    tries: list[str] = []

    async def write(records: Any, epoch: Epoch) -> None:
        tries.append(epoch.id)
        if len(tries) < 4:
            raise ConnectionError("nobody is there")

    sink = write_ahead_sink(write, guarantee="exactly_once")
    for retries, error in ((2, True), (3, False)):
        tries.clear()
        writer = opened(sink, options={"sink.committer.retries": str(retries)})
        writer.write(ObjectBatch([1]))
        committables = settled(writer)
        if error:
            with pytest.raises(UserCodeError, match="nobody is there"):
                writer.commit(committables, CommitPermit("conformance", 1, 1))
        else:
            writer.commit(committables, CommitPermit("conformance", 1, 1))
        assert len(tries) == retries + 1
        assert len(set(tries)) == 1
        writer.close()


def test_closing_ends_the_pauses_between_writes() -> None:
    failed = threading.Event()

    def write(records: Any, epoch: Epoch) -> None:
        failed.set()
        raise ConnectionError("nobody is there")

    writer = staged_ahead(write)
    writer.write(ObjectBatch([1]))
    committables = settled(writer)
    permit = CommitPermit("conformance", 1, 1)
    commit = begun(lambda: writer.commit(committables, permit))
    assert failed.wait(LIMIT_S)
    writer.close()
    with pytest.raises(HeadgateError):
        commit.result(LIMIT_S)


def test_more_than_the_buffer_holds_fails_with_what_to_do() -> None:
    writer = staged_ahead(print, rows=1, buffer="1kb")
    with pytest.raises(JobError, match="buffer_bytes=`1024`") as failed:
        writer.write(ObjectBatch(list(range(1000))))
    assert "checkpoints more often" in failed.value.fix
    writer.close()


class Table:
    """A table with the identities of what it has taken, in one transaction with the rows."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def open(self, ctx: Any) -> None:
        self.database = sqlite3.connect(self.path)  # it can be used in this thread only
        self.calls = 0

    def __call__(self, records: list[Any], epoch: Epoch) -> None:
        self.calls += 1
        if self.calls % 3 == 0:
            raise ConnectionError("the database is away")
        with self.database as database:
            done = database.execute("SELECT 1 FROM epochs WHERE id = ?", (epoch.id,)).fetchone()
            if not done:
                database.execute("INSERT INTO epochs VALUES (?)", (epoch.id,))
                rows = [(record["n"],) for record in records]
                database.executemany("INSERT INTO numbers VALUES (?)", rows)
        if self.calls % 4 == 0:
            raise ConnectionError("the answer was lost")

    def close(self) -> None:
        self.database.close()


def test_a_job_that_fails_again_and_again_writes_each_record_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_ahead, "RETRY_PAUSES_S", (0.0,))
    with sqlite3.connect(tmp_path / "db") as database:
        database.execute("CREATE TABLE epochs (id TEXT PRIMARY KEY)")
        database.execute("CREATE TABLE numbers (n INTEGER)")
    items: list[Any] = [{"n": n} for n in range(300)]
    items[100:100] = [Crash(attempts=1)]
    items[250:250] = [Crash(attempts=2)]
    job = hg.Job("ahead", parallelism=2)
    job.restart(5, "0s")
    job.checkpoint(every="10ms", storage=str(tmp_path / "state"))
    sink = write_ahead_sink(Table(tmp_path / "db"), guarantee="exactly_once", rows=7)
    numbers = job.read(from_list(items, batch_rows=1, splits=2), name="in")
    numbers.write(sink, name="table", parallelism=1)
    assert job.run().status == "FINISHED"
    found = database.execute("SELECT n FROM numbers").fetchall()
    database.close()
    assert Counter(n for (n,) in found) == Counter(range(300))


def test_a_job_calls_a_coroutine_function_with_records_at_least_once(tmp_path: Path) -> None:
    out = tmp_path / "out"

    async def write(records: list[Any]) -> None:
        with out.open("a") as file:
            file.writelines(f"{record}\n" for record in records)

    items: list[Any] = [*range(50), Crash(attempts=1), *range(50, 100)]
    job = hg.Job("beside")
    job.restart(2, "0s")
    job.checkpoint(every="10ms", storage=str(tmp_path / "state"))
    numbers = job.read(from_list(items, batch_rows=1), name="in")
    numbers.write(function_sink(write, rows=8, max_in_flight=2), name="out")
    assert job.run().status == "FINISHED"
    assert set(map(int, out.read_text().split())) == set(range(100))


def test_without_checkpoints_the_end_waits_for_all_calls(tmp_path: Path) -> None:
    out = tmp_path / "out"

    async def write(record: Any) -> None:
        await asyncio.sleep(0.001)
        with out.open("a") as file:
            file.write(f"{record}\n")

    job = hg.Job("beside")
    numbers = job.read(from_list(list(range(50))), name="in")
    numbers.write(function_sink(write, guarantee="none", max_in_flight=5), name="out")
    job.run()
    assert sorted(map(int, out.read_text().split())) == list(range(50))


FUNCTIONS = """
class Store:
    def open(self, ctx):
        self.file = open("stored", "a")

    async def __call__(self, rows):
        self.file.writelines(f"{row.n}\\n" for row in rows)

    def close(self):
        self.file.close()


def ahead(rows, epoch):
    with open(f"ahead-{epoch.id}", "w") as file:
        file.writelines(f"{n}\\n" for n in rows.column("n").to_pylist())
"""
MANIFEST = """
apiVersion: headgate.io/v1alpha1
kind: StreamJob
metadata: {name: functions}
spec:
  checkpoint: {every: 1s, storage: state}
  sources:
    numbers: {generator: {fields: {n: {kind: sequence}}, rows: 100}}
  sinks:
    store:
      from: numbers
      function:
        function: functions_of_users:Store
        rows: 30
        within: 2s
        maxInFlight: 4
        timeout: 10s
        retry: {attempts: 2, delay: 10ms}
      guarantee: at_least_once
    ahead:
      from: numbers
      writeAhead: {function: functions_of_users:ahead, rows: 40, buffer: 1mb, records: arrow}
      guarantee: exactly_once
"""


def test_manifests_name_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "functions_of_users.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    job = load_job(MANIFEST)
    text = job.explain()
    assert "30 records a call" in text
    assert "write_ahead(ahead, 40 records a call)" in text
    job.run()
    assert sorted(map(int, Path("stored").read_text().split())) == list(range(100))
    written = [int(n) for file in tmp_path.glob("ahead-*") for n in file.read_text().split()]
    assert sorted(written) == list(range(100))
    with pytest.raises(ManifestErrors, match="rows of function_sink|rows"):
        load_job(MANIFEST.replace("rows: 30", "rows: 0"))
