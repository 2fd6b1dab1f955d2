"""A commit whose target does not answer is repeated, and everything else fails the attempt."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import headgate as hg
from headgate.connectors import numbers, throttle
from headgate.errors import HeadgateError, JobError, TargetAwayError
from headgate.operators.elements import Batch, ObjectBatch
from headgate.operators.sink import Guarantee, Sink, SinkWriter
from headgate.runtime.task import chain


class Target:
    """A directory of commits, which does not answer as often as its file `away` says."""

    def __init__(self, directory: Path, error: type[HeadgateError] = TargetAwayError) -> None:
        self.directory, self.error = directory, error

    def begin(self, away: int) -> Target:
        self.directory.mkdir(exist_ok=True)
        (self.directory / "away").write_text(str(away))
        return self

    @property
    def away(self) -> int:
        return int((self.directory / "away").read_text())

    @property
    def asked(self) -> int:
        return len(list(self.directory.glob("asked-*")))

    @property
    def visible(self) -> list[int]:
        files = self.directory.glob("*.json")
        return sorted(number for file in files for number in json.loads(file.read_text()))

    def commit(self, committables: list[bytes]) -> None:
        (self.directory / f"asked-{self.asked}").touch()
        for committable in committables:
            if self.away:
                self.begin(self.away - 1)
                raise self.error("the target does not answer")
            name, records = json.loads(committable)
            (self.directory / f"{name}.json").write_text(json.dumps(records))


class Away(Sink):
    guarantees = frozenset(Guarantee)
    guarantee = Guarantee.EXACTLY_ONCE

    def __init__(self, target: Target) -> None:
        self.target = target

    def writer(self) -> SinkWriter:
        return AwayWriter(self.target)


class AwayWriter(SinkWriter):
    def __init__(self, target: Target) -> None:
        self.target, self.records = target, list[Any]()

    def write(self, batch: Batch) -> None:
        assert isinstance(batch, ObjectBatch)
        self.records += batch.records

    def roll(self, checkpoint_id: int) -> Any:
        records, self.records = self.records, []
        name = f"{self.context.attempt}-{checkpoint_id}-{self.context.subtask_index}"
        return lambda: [json.dumps([name, records]).encode()]

    def commit(self, committables: list[bytes], permit: Any) -> None:
        self.target.commit(committables)


def job(target: Target, *, rows: int | None = 40, retries: int = 10) -> hg.Job:
    made = hg.Job("away", options={"sink.committer.retries": str(retries)})
    made.checkpoint(every="1h", storage=str(target.directory / "state"))
    made.restart(hg.no_restart())
    source = numbers(rows, batch_rows=5)
    if rows is None:
        source = throttle(source, 100)
    made.read(source, name="numbers").write(Away(target), name="out")
    return made


def wait_for(done: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain, "RETRY_PAUSES_S", (0.001,))


def test_it_is_repeated_until_it_succeeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_pauses(monkeypatch)
    target = Target(tmp_path / "target").begin(away=5)
    job(target).run()
    assert target.visible == list(range(40))
    assert (target.away, target.asked) == (0, 6)


def test_only_so_often_and_a_later_run_commits_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_pauses(monkeypatch)
    target = Target(tmp_path / "target").begin(away=100)
    with pytest.raises(TargetAwayError, match="does not answer"):
        job(target, retries=2).run()
    assert (target.asked, target.visible) == (3, [])
    target.begin(away=4)  # now the restore has to try again
    job(target).run()
    assert target.visible == list(range(40))
    assert target.away == 0


def test_another_error_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_pauses(monkeypatch)
    target = Target(tmp_path / "target", error=JobError).begin(away=1)
    with pytest.raises(JobError, match="does not answer"):
        job(target).run()
    assert target.asked == 1


@pytest.mark.parametrize("while_restoring", [False, True])
def test_a_job_that_is_cancelled_does_not_wait_for_a_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, while_restoring: bool
) -> None:
    target = Target(tmp_path / "target").begin(away=1_000_000)
    if while_restoring:
        with pytest.raises(TargetAwayError):
            job(target, retries=0).run()
    asked = target.asked
    monkeypatch.setattr(chain, "RETRY_PAUSES_S", (3600.0,))
    with job(target, rows=None).start() as handle:
        if not while_restoring:
            wait_for(lambda: handle.status()["status"] == "RUNNING")
            handle.checkpoint()
        wait_for(lambda: target.asked > asked)
        handle.cancel()
    assert target.visible == []


class Named(Away):
    names_committables = True

    def writer(self) -> SinkWriter:
        return NamedWriter(self.target)


class NamedWriter(AwayWriter):
    def name_of(self, committable: bytes) -> bytes:
        return str(json.loads(committable)[0]).encode()

    def commit(self, committables: list[bytes], permit: Any) -> None:
        if (self.target.directory / "down").exists():  # for all subtasks
            raise TargetAwayError("the target does not answer")
        super().commit(committables, permit)

    def restored(self, names: frozenset[bytes] | None) -> None:
        told = sorted(map(bytes.decode, names or ()))
        file = self.target.directory / f"told-{self.context.subtask_index}"
        file.write_text(json.dumps(told))


class UntoldWriter(NamedWriter):
    """The target is away when the writer wants to look at it with the names."""

    def restored(self, names: frozenset[bytes] | None) -> None:
        if (away := self.target.directory / "away-while-told").exists():
            away.unlink()
            raise TargetAwayError("the target does not answer")
        super().restored(names)


class Untold(Named):
    def writer(self) -> SinkWriter:
        return UntoldWriter(self.target)


def test_a_writer_that_could_not_look_at_the_names_is_told_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would go on among leftovers that it never saw."""
    without_pauses(monkeypatch)
    target = Target(tmp_path / "target").begin(away=0)

    def named(rows: int) -> hg.Job:
        made = hg.Job("named", options={"sink.committer.retries": "1"})
        made.checkpoint(every="1h", storage=str(target.directory / "state"))
        made.restart(hg.no_restart())
        made.read(numbers(rows, batch_rows=5), name="numbers").write(Untold(target), name="out")
        return made

    (target.directory / "down").touch()
    with pytest.raises(TargetAwayError, match="does not answer"):
        named(40).run()
    (target.directory / "down").unlink()
    (target.directory / "away-while-told").touch()
    named(40).run()
    assert target.visible == list(range(40))
    assert json.loads((target.directory / "told-0").read_text())


@pytest.mark.parametrize("parallelism", [2, 3, 1])
def test_after_a_rescale_every_writer_knows_what_all_had_pre_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parallelism: int
) -> None:
    without_pauses(monkeypatch)
    target = Target(tmp_path / "target").begin(away=0)
    (target.directory / "down").touch()

    def named(subtasks: int) -> hg.Job:
        made = hg.Job("named", options={"sink.committer.retries": "1"}, parallelism=subtasks)
        made.checkpoint(every="1h", storage=str(target.directory / "state"))
        made.restart(hg.no_restart())
        read = made.read(numbers(40, batch_rows=5), name="numbers", parallelism=2)
        read.rebalance().write(Named(target), name="out")
        return made

    with pytest.raises(TargetAwayError, match="does not answer"):
        named(2).run()
    (target.directory / "down").unlink()
    named(parallelism).run()
    assert target.visible == list(range(40))
    committed = sorted(file.stem for file in target.directory.glob("*-*-*.json"))
    files = sorted(target.directory.glob("told-*"))
    assert len(files) == parallelism
    for file in files:
        told = json.loads(file.read_text())
        assert told
        assert set(told) <= set(committed)
        assert {name.rpartition("-")[2] for name in told} == {"0", "1"}
