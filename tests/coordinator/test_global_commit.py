"""Sinks whose output the coordinator commits, once per checkpoint for all writers.

Method: the checks of the conformance kit, and real jobs in this process whose table stays away for a
while. The simulation has crashes of coordinators and workers around each step (kinds `global` and
`global regions`).
"""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import headgate as hg
from headgate.connectors import from_list, generator
from headgate.errors import HeadgateError
from headgate.operators.elements import Batch, ObjectBatch
from headgate.operators.sink import (
    GlobalCommit,
    GuaranteeLike,
    OutputFile,
    Sink,
    SinkRun,
    SinkWriter,
)
from headgate.testing.connectors import Check, Feature, SinkCase, sink_checks
from headgate.tests.support.connector_cases import Directory
from headgate.tests.support.global_sink import (
    NO_MARKER,
    TableSink,
    TableWriter,
    read_table,
    visible,
)
from headgate.tests.support.skips import thorough_only

OPTIONS = {"restart-strategy.type": "none"}


class TableCase(Directory, SinkCase):
    features = frozenset({Feature.EXACTLY_ONCE})
    bug = ""

    def records(self) -> Sequence[Any]:
        return list(range(12))

    def batches(self, records: Sequence[Any]) -> list[Batch]:
        return [ObjectBatch(list(records[at : at + 2])) for at in range(0, len(records), 2)]

    def sink(self, place: Path, guarantee: GuaranteeLike) -> Sink:
        return TableSink(place, self.bug)

    def visible(self, place: Path) -> list[Any]:
        return visible(place)


CHECKS = {check.name: check for check in sink_checks() if check.applies_to(TableCase)}


@pytest.mark.parametrize("check", CHECKS.values(), ids=list(CHECKS))
def test_it_keeps_the_promises_of_the_kit(check: Check[SinkCase]) -> None:
    if check.thorough:
        thorough_only()
    asyncio.run(check.run(TableCase()))


def test_the_kit_finds_a_commit_that_is_not_idempotent() -> None:
    case = TableCase()
    case.bug = NO_MARKER
    with pytest.raises(AssertionError):
        asyncio.run(CHECKS["once_after_any_crash"].run(case))


def job_of(
    tmp_path: Path, parallelism: int = 2, sink: type[TableSink] = TableSink, **options: str
) -> hg.Job:
    job = hg.Job("table", parallelism=parallelism, options=OPTIONS | options)
    job.checkpoint(every="50ms", storage=tmp_path / "checkpoints", retain=3)
    table = tmp_path / "table"
    table.mkdir(exist_ok=True)
    # One split, so that any checkpoint has the first numbers without a gap.
    source = generator({"n": "sequence"}, rate=2_000, batch_rows=20, splits=1)
    numbers = job.read(source, name="numbers", parallelism=1)
    numbers.rebalance().write(sink(table), name="table")
    return job


def until(condition: Callable[[], bool], what: str) -> None:
    for _ in range(6_000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError(f"it does not happen: {what}")


def last_tried(table: Path) -> int:
    """Return the newest checkpoint that a commit was tried for."""
    return int(json.loads((table / "calls").read_text().splitlines()[-1])[-1])


def tries_of(table: Path, checkpoint_id: int) -> int:
    calls = [json.loads(line) for line in (table / "calls").read_text().splitlines()]
    return sum(call[-1] == checkpoint_id for call in calls)


def numbers_of(tmp_path: Path) -> list[int]:
    return sorted(record["n"] for record in visible(tmp_path / "table"))


def test_a_job_ends_with_all_output_in_the_table(tmp_path: Path) -> None:
    (tmp_path / "table").mkdir()
    job = hg.Job("table", parallelism=3)
    job.checkpoint(every="1h", storage=tmp_path / "checkpoints")
    items = job.read(from_list([{"n": n} for n in range(90)], splits=3), name="items")
    items.write(TableSink(tmp_path / "table"), name="table")
    assert job.run().status == "FINISHED"
    assert numbers_of(tmp_path) == list(range(90))
    assert (tmp_path / "table" / "calls").read_text().count("\n") == 1


def commits_of(handle: hg.JobHandle) -> dict[str, float]:
    """Return the metrics of the commits that the coordinator makes."""
    (url,) = {each["url"] for each in handle.status()["metrics"]}
    with urllib.request.urlopen(url, timeout=60) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return {
        sample.name.removeprefix("headgate_sink_"): sample.value
        for family in families
        for sample in family.samples
        if sample.labels.get("operator") == "table" and "subtask" not in sample.labels
    }


def test_no_checkpoint_completes_while_the_table_is_away(tmp_path: Path) -> None:
    handle = job_of(tmp_path, **{"metrics.port": "0"}).start()
    table = tmp_path / "table"
    until(lambda: len(read_table(table)["files"]) > 2, "a commit")
    (table / "away").touch()
    committed = max(read_table(table)["markers"].values())
    until(lambda: last_tried(table) > committed, "a commit that is refused")
    refused = last_tried(table)
    until(lambda: tries_of(table, refused) > 2, "the same commit again, after pauses")
    found_metrics = commits_of(handle)
    assert found_metrics["commit_errors_total"] >= 2
    assert found_metrics["commits_total"] == found_metrics["commit_seconds_count"] > 0
    # Checkpoints are due every 50 ms, and the pauses take 3 s.
    assert last_tried(table) == refused
    until(lambda: handle.status()["last_checkpoint"] == refused, "the checkpoint is complete")
    (table / "away").unlink()
    until(lambda: handle.status()["last_checkpoint"] > refused + 1, "another checkpoint")
    assert handle.stop().status == "SUSPENDED"
    found = numbers_of(tmp_path)
    assert found == list(range(len(found)))


def test_a_savepoint_waits_for_output_that_writers_have_forgotten(tmp_path: Path) -> None:
    handle = job_of(tmp_path).start()
    table = tmp_path / "table"
    until(lambda: len(read_table(table)["files"]) > 2, "a commit")
    (table / "away").touch()
    tried = len((table / "calls").read_text())
    until(lambda: len((table / "calls").read_text()) > tried, "a commit that is refused")
    with ThreadPoolExecutor(1) as threads:
        saving = threads.submit(handle.savepoint, tmp_path / "savepoints")
        wait([saving], timeout=1)
        assert not saving.done()
        (table / "away").unlink()
        saving.result(timeout=120)
    assert handle.cancel().status == "CANCELED"


def test_a_table_that_stays_away_fails_the_job_and_loses_nothing(tmp_path: Path) -> None:
    handle = job_of(tmp_path, **{"sink.committer.retries": "0"}).start()
    table = tmp_path / "table"
    until(lambda: len(read_table(table)["files"]) > 2, "a commit")
    (table / "away").touch()
    with pytest.raises(
        HeadgateError, match="sink `table` cannot commit checkpoint .*: the table does not answer"
    ):
        handle.wait(timeout=120)

    (table / "away").unlink()
    first = set(read_table(table)["markers"])
    again = job_of(tmp_path, parallelism=1).start()
    until(lambda: set(read_table(table)["markers"]) > first, "a commit of the second run")
    assert again.stop().status == "SUSPENDED"
    found = numbers_of(tmp_path)
    assert found == list(range(len(found)))


class LongNamesSink(TableSink):
    """Has committables that are too large for the manifest of a checkpoint."""

    def writer(self) -> SinkWriter:
        return LongNamesWriter(self.directory)

    def commit_globally(self, commit: GlobalCommit) -> None:
        epochs = tuple(
            replace(epoch, committables=tuple(name.strip() for name in epoch.committables))
            for epoch in commit.epochs
        )
        super().commit_globally(replace(commit, epochs=epochs))


class LongNamesWriter(TableWriter):
    def roll(self, checkpoint_id: int) -> Callable[[], list[bytes]] | None:
        draft = super().roll(checkpoint_id)
        return None if draft is None else lambda: [name.ljust(1 << 21) for name in draft()]


def test_a_checkpoint_whose_committables_are_gone_is_given_up_for_the_one_before(
    tmp_path: Path,
) -> None:
    apart = {"execution.checkpointing.file-merging.enabled": "false"}  # committables have own files
    handle = job_of(tmp_path, sink=LongNamesSink, **apart).start()
    table = tmp_path / "table"
    until(lambda: len(read_table(table)["files"]) > 8, "a few commits")
    assert handle.stop().status == "SUSPENDED"
    newest = max(tmp_path.rglob("*committables*"), key=lambda path: path.stat().st_mtime).parent
    for path in newest.glob("*committables*"):
        path.unlink()

    fallback = {"headgate.restore.fallback": "true"}
    first = set(read_table(table)["markers"])
    again = job_of(tmp_path, sink=LongNamesSink, **fallback).start()
    until(lambda: set(read_table(table)["markers"]) > first, "a commit of the second run")
    assert again.stop().status == "SUSPENDED"
    found = numbers_of(tmp_path)  # what was committed between the two is written again
    assert set(found) == set(range(max(found) + 1))


class ReplacingSink(TableSink):
    """Replaces a file `old` of an earlier run."""

    def list_output(self, run: SinkRun) -> list[OutputFile]:
        return [OutputFile("old", "1")] if (self.directory / "old").exists() else []

    def delete_output(self, run: SinkRun, files: list[OutputFile]) -> int:
        for file in files:
            (self.directory / file.name).unlink(missing_ok=True)
        return len(files)


def test_old_output_stays_until_the_commit_of_the_coordinator(tmp_path: Path) -> None:
    table = tmp_path / "table"
    table.mkdir()
    (table / "old").touch()
    (table / "away").touch()
    handle = job_of(tmp_path, sink=ReplacingSink).start(if_exists="overwrite")
    until(lambda: (table / "calls").exists(), "a commit that is refused")
    time.sleep(3)
    assert (table / "old").exists()
    (table / "away").unlink()
    until(lambda: not (table / "old").exists(), "the end of the old output")
    assert read_table(table)["files"]
    assert handle.cancel().status == "CANCELED"
