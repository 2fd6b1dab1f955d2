"""When output of earlier runs may be deleted, and that the job log remembers which, however it is trimmed.

Method: the decisions as values, and real logs on a store in memory, one coordinator after the other.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from typing import Any

import pytest

from headgate.errors import CorruptError
from headgate.operators.clock import SystemClock
from headgate.operators.sink import OutputFile
from headgate.runtime.protocol import joblog, names
from headgate.runtime.protocol.checkpoints.manifest import Manifest
from headgate.runtime.protocol.joblog import JobStatus, OutputListed
from headgate.runtime.protocol.old_output import OldOutput, pack, unpack
from headgate.runtime.storage.joblog_store import JobLog
from headgate.runtime.storage.memory import MemoryStore

FILES = [OutputFile(f"part-{number}", f"{number:x}") for number in range(3)]


def listed(*sinks: str) -> OldOutput:
    return OldOutput().listed("run", 2, sinks)


def test_files_are_due_with_the_first_checkpoint_that_follows_records_of_their_sink() -> None:
    state = listed("a", "b").completed(1, []).completed(2, ["b", "other"]).completed(3, ["a", "b"])
    assert state.due == {"a": 3, "b": 2}


@pytest.mark.parametrize(
    ("committed", "ready"),
    [
        ({"a": 0, "b": 0}, ()),
        ({"a": 0, "b": 2}, ("b",)),
        ({"a": 2, "b": 2}, ("b",)),
        ({"a": 3, "b": 9}, ("a", "b")),
    ],
)
def test_files_are_ready_once_their_checkpoint_is_committed(
    committed: dict[str, int], ready: tuple[str, ...]
) -> None:
    state = listed("a", "b").completed(2, ["b"]).completed(3, ["a"])
    assert state.ready(committed) == ready


def test_files_that_are_not_due_are_never_ready() -> None:
    assert listed("a").completed(5, []).ready({"a": 5}) == ()


def test_a_shorter_list_keeps_what_is_due() -> None:
    state = listed("a", "b").completed(1, ["a", "b"]).listed("run that resumes", 7, ["b"])
    assert (state.sequence, state.sinks, state.due) == (7, ("b",), {"b": 1})


def test_an_empty_list_has_no_entry_to_keep() -> None:
    assert listed().sequence == 0
    assert listed().run == "run", "the run has looked all the same"


def test_many_files_are_packed_small() -> None:
    files = [OutputFile(f"part-00c0ffee-{n:010}-{n:09}.parquet", f"{n:x}-400") for n in range(1000)]
    assert unpack(pack(files)) == files
    assert len(pack(files)) < 20 * len(files)


class Logs:
    """Coordinators of one job, one after the other."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.store = MemoryStore("job", self.objects)
        self.writers = 0
        self.checkpoints = 0

    def do(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run(coroutine)

    def reader(self) -> JobLog:
        self.writers += 1
        log = JobLog(self.store, f"writer-{self.writers}", SystemClock())
        self.do(log.load())
        return log

    def lead(self, run: str, **given: Any) -> JobLog:
        self.writers += 1
        log = JobLog(self.store, f"writer-{self.writers}", SystemClock())
        self.do(log.start_generation(parallelism=1, max_parallelism=4, run=run, **given))
        return log

    def checkpoint(self, log: JobLog, *wrote: str) -> None:
        self.checkpoints += 1
        manifest = Manifest(
            checkpoint_id=self.checkpoints,
            trigger_ms=1,
            completed_ms=2,
            duration_ms=1,
            max_parallelism=4,
            operators=(),
        )
        self.do(log.complete_checkpoint(manifest, wrote=wrote))
        self.do(log.trim(1))

    def lists(self) -> int:
        """Return the number of lists of files in the store."""
        decode = joblog.ENTRIES.decode
        found = {n: d for n, d in self.objects.items() if not n.startswith("log/generation")}
        entries = [decode(data, name) for name, data in found.items()]
        return sum(isinstance(entry, OutputListed) and bool(entry.files) for entry in entries)


@pytest.fixture
def logs() -> Logs:
    return Logs()


def test_the_list_outlives_trimming_and_takeovers_and_nothing_of_it_is_left(logs: Logs) -> None:
    log = logs.lead("run")
    logs.do(log.list_output({"a": FILES, "b": FILES[:1], "empty": []}))
    for _ in range(4):
        logs.checkpoint(log)
    log = logs.lead("run")
    logs.checkpoint(log, "a")
    logs.checkpoint(log, "a")
    log = logs.lead("run")
    assert log.view.head > log.view.old_output.sequence > 0, "the list lies in front of the log"
    assert log.view.old_output.due == {"a": 5}
    assert logs.do(log.old_output()) == {"a": FILES, "b": FILES[:1]}
    logs.do(log.list_output({"b": FILES[:1]}))
    assert logs.do(logs.reader().old_output()) == {"b": FILES[:1]}
    assert logs.lists() == 1
    logs.do(log.list_output({}))
    for _ in range(3):
        logs.checkpoint(log, "a")
    assert logs.lists() == 0
    assert logs.reader().view.old_output.sinks == ()


@pytest.mark.parametrize(
    ("next_run", "kept"),
    [({}, True), ({"fresh": True}, False), ({"restore_from": "elsewhere"}, False)],
    ids=["resumes", "begins again", "begins with a savepoint"],
)
def test_what_a_stopped_run_had_still_to_delete(
    logs: Logs, next_run: dict[str, Any], kept: bool
) -> None:
    log = logs.lead("run")
    logs.do(log.list_output({"a": FILES}))
    logs.checkpoint(log)
    logs.checkpoint(log)
    logs.do(log.end_job(JobStatus.STOPPED))
    log = logs.lead("next", **next_run)
    assert logs.do(log.old_output()) == ({"a": FILES} if kept else {})
    assert logs.lists() == kept


def test_a_new_run_without_any_checkpoint_knows_no_list(logs: Logs) -> None:
    logs.do(logs.lead("run").list_output({"a": FILES}))
    assert logs.lead("run").view.old_output.sinks == ("a",), "the same run goes on"
    assert logs.lead("next").view.old_output == OldOutput()


def test_a_list_that_is_gone_is_damage(logs: Logs) -> None:
    log = logs.lead("run")
    logs.do(log.list_output({"a": FILES}))
    del logs.objects[names.log_entry(log.view.old_output.sequence)]
    with pytest.raises(CorruptError, match="list of old output is missing"):
        logs.do(log.old_output())


@pytest.mark.parametrize("seed", range(40))
def test_random_lives(logs: Logs, seed: int) -> None:
    """A model that remembers everything says the same as the trimmed log, at each moment."""
    rng = random.Random(seed)
    log, run, runs = logs.lead("0"), "0", 0
    doomed: dict[str, list[OutputFile]] = {}
    due: dict[str, int] = {}
    for _ in range(40):
        match rng.randrange(6):
            case 0 if not logs.checkpoints:
                doomed = dict.fromkeys(rng.sample("abc", rng.randint(0, 3)), FILES)
                due = {}
                logs.do(log.list_output(doomed))
            case 1 | 2:
                wrote = rng.sample("abc", rng.randint(0, 2))
                logs.checkpoint(log, *wrote)
                due |= {s: logs.checkpoints for s in wrote if s in doomed and s not in due}
            case 3 if due:
                gone = rng.choice(sorted(due))
                del doomed[gone], due[gone]
                logs.do(log.list_output(doomed))
            case 4:
                log = logs.lead(run)
            case 5 if logs.checkpoints and rng.random() < 0.3:
                runs += 1
                run = str(runs)
                if fresh := rng.random() < 0.3:
                    doomed, due = {}, {}
                log = logs.lead(run, fresh=fresh)
                if fresh:
                    doomed = {"a": FILES}
                    logs.do(log.list_output(doomed))
        view = logs.reader().view
        assert (set(view.old_output.sinks), view.old_output.due) == (set(doomed), due)
        assert logs.do(logs.reader().old_output()) == doomed
