"""The job log: its decisions as tables, and the shell when answers are lost or objects are missing."""

from __future__ import annotations

import asyncio
import functools
import itertools

import msgspec
import pyarrow as pa
import pytest
import xxhash

from headgate.errors import CorruptError, FencedError, InternalError, StateError, StorageError
from headgate.runtime.protocol import joblog, names
from headgate.runtime.protocol.checkpoints.manifest import (
    Manifest,
    ManifestOperator,
    ManifestSubtask,
    unshared_files,
)
from headgate.runtime.protocol.joblog import (
    AlreadyAppended,
    Appended,
    CheckpointEntry,
    Fenced,
    GenerationRecord,
    GenerationStarted,
    JobEnded,
    JobStatus,
    LogHead,
    LogView,
    OutputListed,
    RetryAfterTail,
)
from headgate.runtime.storage.joblog_store import JobLog
from headgate.runtime.storage.memory import MemoryStore
from headgate.state.sealed import FORMAT_VERSION
from headgate.state.snapshot import OperatorSnapshot, StateHandle
from headgate.tests.support.clocks import MovedClock


def manifest(checkpoint_id, *files, inline=None):
    handles = [
        StateHandle(state=f, kind="table", size_bytes=1, checksum="00", rows=1, file=f)
        for f in files
    ]
    if inline is not None:
        handles.append(
            StateHandle(state="i", kind="items", size_bytes=1, checksum="0", rows=1, inline=inline)
        )
    subtask = ManifestSubtask(
        subtask=0, snapshots=(OperatorSnapshot(operator="op", handles=tuple(handles)),)
    )
    return Manifest(
        checkpoint_id=checkpoint_id,
        trigger_ms=1,
        completed_ms=2,
        duration_ms=1,
        max_parallelism=128,
        operators=(ManifestOperator(name="op", parallelism=1, subtasks=(subtask,)),),
    )


def start(generation, writer):
    return GenerationStarted(
        generation=generation,
        writer=writer,
        started_ms=1,
        job_fingerprint="f",
        parallelism=1,
        max_parallelism=128,
    )


def done(generation, writer, checkpoint_id):
    return CheckpointEntry(
        generation=generation,
        writer=writer,
        checkpoint_id=checkpoint_id,
        manifest=manifest(checkpoint_id),
        completed_ms=1,
    )


def end(generation, writer, last_checkpoint_id=0):
    return JobEnded(
        generation=generation,
        writer=writer,
        status=JobStatus.FINISHED,
        reason="",
        ended_ms=1,
        last_checkpoint_id=last_checkpoint_id,
    )


def view_of(*entries, head=1):
    return functools.reduce(joblog.fold, entries, LogView.beginning_at(head))


@pytest.mark.parametrize(
    "record",
    [
        start(1, "a"),
        CheckpointEntry(
            generation=1,
            writer="a",
            checkpoint_id=3,
            manifest=manifest(3, "chk/1-3/x", inline=bytes(range(256))),
            completed_ms=5,
            is_final=True,
        ),
        end(1, "a", 7),
        OutputListed(generation=1, writer="a", files={"out": bytes(range(256))}),
    ],
)
def test_entries_survive_json(record):
    assert joblog.ENTRIES.decode(joblog.ENTRIES.encode(record), "x") == record


@pytest.mark.parametrize(
    "data", [b"", b"{}", b'{"entry":"Unknown"}', b'{"entry":"JobEnded"}', b"\xff"]
)
def test_unreadable_entries_are_named(data):
    with pytest.raises(CorruptError, match=r"log/7\.json"):
        joblog.ENTRIES.decode(data, "log/7.json")


NEWER = FORMAT_VERSION + 1


def sealed(body: bytes, version: int = FORMAT_VERSION) -> bytes:
    """A record with these fields, as a program that knows the envelope would write it."""
    head, rest = b'{"format":%d,"checksum":"' % version, b'",' + body[1:]
    return head + xxhash.xxh3_64_hexdigest(head + rest).encode() + rest


def test_unknown_fields_are_refused_with_the_format():
    body = msgspec.json.encode(start(1, "a"))
    assert joblog.ENTRIES.decode(sealed(body), "x") == start(1, "a")
    with pytest.raises(
        CorruptError, match=rf"fields of format {FORMAT_VERSION} name=`x`.*`added_later`"
    ):
        joblog.ENTRIES.decode(sealed(body[:-1] + b',"added_later":1}'), "x")


def test_missing_fields_are_refused_with_the_format_and_their_path():
    body = msgspec.json.encode(done(1, "a", 3))
    without = body.replace(b'"is_final":false,', b"")
    with pytest.raises(
        CorruptError, match=rf"fields of format {FORMAT_VERSION} .*`is_final` is missing"
    ):
        joblog.ENTRIES.decode(sealed(without), "x")
    inner = body.replace(b',"finished":false', b"")
    with pytest.raises(CorruptError, match=r"`manifest.operators\[0\].subtasks\[0\].finished` is"):
        joblog.ENTRIES.decode(sealed(inner), "x")


def test_a_newer_format_is_named_also_if_its_fields_are_not_known():
    with pytest.raises(
        StateError,
        match=f"format=`{NEWER}` known=`{FORMAT_VERSION}`",
    ):
        joblog.ENTRIES.decode(sealed(b'{"entry":"Other"}', NEWER), "x")


def test_entries_of_the_second_format_lack_the_history_of_runs():
    body = msgspec.json.encode(done(1, "a", 3))
    history = body.index(b',"history":')
    old = body[:history] + b"}"
    assert joblog.ENTRIES.decode(sealed(old, 2), "x") == done(1, "a", 3)
    with pytest.raises(
        CorruptError, match=rf"fields of format {FORMAT_VERSION}.*`history` is missing"
    ):
        joblog.ENTRIES.decode(sealed(old), "x")
    with pytest.raises(CorruptError, match="fields of format 2.*`added_later`"):
        joblog.ENTRIES.decode(sealed(old[:-1] + b',"added_later":1}', 2), "x")


def test_entries_of_the_third_format_lack_the_output_that_is_replaced():
    body = msgspec.json.encode(done(1, "a", 3))
    old = body[: body.index(b',"old_output":')] + b"}"
    assert joblog.ENTRIES.decode(sealed(old, 3), "x") == done(1, "a", 3)
    with pytest.raises(
        CorruptError, match=rf"fields of format {FORMAT_VERSION}.*`old_output` is missing"
    ):
        joblog.ENTRIES.decode(sealed(old), "x")


def test_entries_of_the_first_format_are_read_if_they_have_its_fields_only():
    body = msgspec.json.encode(done(1, "a", 3))
    assert joblog.ENTRIES.decode(body, "x") == done(1, "a", 3)
    with pytest.raises(CorruptError, match="format 1.*`manifesr`"):
        joblog.ENTRIES.decode(body.replace(b'"is_final"', b'"manifesr"'), "x")


def test_a_sealed_entry_without_its_head_is_not_taken_for_an_old_one():
    data = joblog.ENTRIES.encode(done(1, "a", 3))
    old = b"{" + data[data.index(b'"entry"') :]
    for length in range(1, data.index(b'"entry"') + 2):
        for rest in (data[length:], b"{" + data[length:], b'{"' + data[length:]):
            if rest not in (old, data):  # no flip, swap or truncation takes exactly the head away
                with pytest.raises(CorruptError):
                    joblog.ENTRIES.decode(rest, "x")


def test_ends_of_before_failures_were_kept_are_read():
    data = (
        b'{"entry":"JobEnded","generation":2,"writer":"a","status":"FAILED","reason":"out of attempts",'
        b'"ended_ms":1,"last_checkpoint_id":4,"run":"r"}'
    )
    ended = joblog.ENTRIES.decode(data, "x")
    assert (ended.reason, ended.checkpoint, ended.failure) == ("out of attempts", 0, None)


def test_takeovers_of_a_run_count_until_its_next_checkpoint():
    def started(generation, run, at_ms):
        return msgspec.structs.replace(start(generation, "w"), run=run, started_ms=at_ms)

    def completed(generation, checkpoint_id):
        return msgspec.structs.replace(done(generation, "w", checkpoint_id), run="one")

    view = view_of(started(1, "one", 10))
    assert view.takeovers_ms == ()  # the start of a run takes nothing over
    view = joblog.fold(joblog.fold(view, started(2, "one", 20)), started(3, "one", 30))
    assert view.takeovers_ms == (20, 30)
    assert [view.takeovers_since(ms) for ms in (20, 21, 31)] == [2, 1, 0]
    assert joblog.fold(view, completed(3, 1)).takeovers_ms == ()
    assert joblog.fold(view, started(4, "two", 40)).takeovers_ms == ()
    trimmed = view_of(completed(1, 1), started(2, "one", 20), head=5)
    assert trimmed.takeovers_ms == (20,)


def test_the_view_of_a_whole_life():
    view = view_of(start(1, "a"), done(1, "a", 1), done(1, "a", 4), start(3, "b"), done(3, "b", 5))
    assert (view.head, view.tail, view.generation, view.writer) == (1, 5, 3, "b")
    assert view.starts == (1, 4)
    assert [(c.sequence, c.checkpoint_id) for c in view.checkpoints] == [(2, 1), (3, 4), (5, 5)]
    assert view.newest is view.checkpoints[-1]
    assert view.next_checkpoint_id == 6
    assert view.ended is None
    ended = joblog.fold(view, end(3, "b", last_checkpoint_id=9))
    assert ended.ended == end(3, "b", 9)
    assert ended.next_checkpoint_id == 10
    assert joblog.fold(ended, start(4, "c")).ended is None
    assert view_of(end(3, "b", 9), head=6).next_checkpoint_id == 10


@pytest.mark.parametrize(
    "entries",
    [
        [start(2, "a"), start(2, "b")],
        [start(2, "a"), start(1, "b")],
        [start(1, "a"), done(1, "b", 1)],
        [start(1, "a"), done(2, "a", 1)],
        [start(1, "a"), start(2, "b"), done(1, "a", 1)],
        [start(1, "a"), done(1, "a", 2), done(1, "a", 2)],
        [start(1, "a"), done(1, "a", 2), start(2, "b"), done(2, "b", 1)],
        [start(1, "a"), end(1, "a"), done(1, "a", 1)],
    ],
)
def test_a_log_that_no_coordinators_could_have_written_is_refused(entries):
    view_of(*entries[:-1])
    with pytest.raises(CorruptError, match="the job log is damaged"):
        view_of(*entries)


LEADER = [start(1, "a"), done(1, "a", 1)]


@pytest.mark.parametrize(
    ("proposal", "existing", "outcome"),
    [
        (done(1, "a", 2), None, Appended),
        (done(1, "a", 2), done(1, "a", 2), AlreadyAppended),
        (done(1, "a", 2), start(2, "b"), Fenced),
        (done(1, "a", 2), start(9, "b"), Fenced),
        (end(1, "a"), start(2, "b"), Fenced),
        (end(1, "a"), None, Appended),
        (start(3, "c"), None, Appended),
        (start(3, "c"), start(3, "c"), AlreadyAppended),
        (start(3, "c"), done(1, "a", 2), RetryAfterTail),
        (start(3, "c"), end(1, "a"), RetryAfterTail),
        (start(3, "c"), start(2, "b"), RetryAfterTail),
        (start(3, "c"), start(4, "d"), Fenced),
        (start(3, "c"), start(3, "d"), Fenced),
    ],
)
def test_what_follows_from_an_attempt_to_append(proposal, existing, outcome):
    before = view_of(*LEADER)
    decision = joblog.decide_append(before, proposal, existing)
    assert type(decision) is outcome
    if isinstance(decision, Fenced):
        assert decision.by == existing
    else:
        assert decision.view == joblog.fold(before, existing or proposal)


@pytest.mark.parametrize("proposal", [done(1, "b", 2), done(2, "a", 2), end(2, "b")])
def test_only_the_leader_proposes_more_than_a_start(proposal):
    with pytest.raises(InternalError):
        joblog.decide_append(view_of(*LEADER), proposal, None)


def test_heads_merge_in_any_order_to_the_highest():
    records = [
        GenerationRecord(generation=1, writer="a", head=5, swept=2),
        GenerationRecord(generation=2, writer="b", head=9, swept=7),
        GenerationRecord(generation=3, writer="c", head=9, swept=6),
        GenerationRecord(generation=4, writer="d"),
    ]
    for order in itertools.permutations(records):
        head = LogHead()
        for record in order:
            head = joblog.merge_head(head, record)
        assert head == LogHead(9, 6, published=True)


def test_trimming_keeps_start_entries_and_the_newest_checkpoints():
    view = view_of(start(1, "a"), done(1, "a", 1), start(2, "b"), done(2, "b", 2), done(2, "b", 3))
    for retain, head, doomed in [(1, 5, [2, 4]), (2, 4, [2]), (3, 1, []), (9, 1, [])]:
        plan = joblog.plan_trim(view, retain)
        assert plan.head == head
        assert [entry.sequence for entry in plan.doomed] == doomed
        after = joblog.apply_trim(view, plan.head)
        assert [c.checkpoint_id for c in after.checkpoints] == [1, 2, 3][-retain:]
        assert after.newest == view.newest
    with pytest.raises(InternalError):
        joblog.plan_trim(view, 0)
    ended = joblog.fold(view, end(2, "b"))
    plan = joblog.plan_trim(ended, 0)
    assert (plan.head, [entry.sequence for entry in plan.doomed]) == (6, [2, 4, 5])
    assert joblog.apply_trim(ended, plan.head).ended is not None


def test_files_shared_with_a_retained_checkpoint_are_kept():
    old, new = manifest(1, "base", "d1", inline=b"x"), manifest(2, "base", "d2")
    assert unshared_files([old], [new]) == ["d1"]
    assert unshared_files([old, new], []) == ["base", "d1", "d2"]


# The shell.


class FaultyStore(MemoryStore):
    """Fails creates on request: before or after their effect, or for ever."""

    def __init__(self, objects):
        super().__init__("faulty", objects)
        self.fail_next = ""

    async def create_if_absent(self, name, data):
        failure, self.fail_next = self.fail_next, ""
        if failure == "before":
            raise StorageError("no answer")
        result = await super().create_if_absent(name, data)
        if failure == "after":
            raise StorageError("no answer")
        return result


def make_log(objects, writer="a", store=None):
    return JobLog(store or MemoryStore("x", objects), writer, MovedClock(1.0))


async def started(objects, writer="a", store=None):
    log = make_log(objects, writer, store)
    await log.start_generation(parallelism=1, max_parallelism=128)
    return log


@pytest.mark.parametrize("failure", ["before", "after"])
@pytest.mark.parametrize("then", ["same", "next", "end"])
def test_an_append_in_doubt_is_settled_before_the_next(failure, then):
    async def main():
        objects = {}
        store = FaultyStore(objects)
        log = await started(objects, "a", store)
        first, second = manifest(1), manifest(2)
        store.fail_next = failure
        with pytest.raises(StorageError):
            await log.complete_checkpoint(first)
        if then == "same":
            await log.complete_checkpoint(first)
        elif then == "next":
            await log.complete_checkpoint(second)
        else:
            assert await log.end_job(JobStatus.STOPPED) == 1
            assert await log.end_job(JobStatus.STOPPED) == 1
        view = await make_log(objects, "reader").load()
        assert view == log.view
        expected = [first, second] if then == "next" else [first]
        assert [c.manifest for c in view.checkpoints] == expected
        assert (view.ended is not None) == (then == "end")

    asyncio.run(main())


@pytest.mark.parametrize("failure", ["before", "after"])
def test_an_append_in_doubt_and_a_new_leader_agree(failure):
    """After the effect the new leader has seen the checkpoint; before it, it never completes."""

    async def main():
        objects = {}
        store = FaultyStore(objects)
        old = await started(objects, "a", store)
        store.fail_next = failure
        with pytest.raises(StorageError):
            await old.complete_checkpoint(manifest(1))
        new = await started(objects, "b")
        if failure == "after":
            assert new.view.newest.checkpoint_id == 1
        else:
            assert new.view.newest is None
        with pytest.raises(FencedError, match="writer=`b`"):
            await old.complete_checkpoint(manifest(2))
        for call in (
            old.trim(1),
            old.end_job(JobStatus.FAILED),
            old.complete_checkpoint(manifest(3)),
        ):
            with pytest.raises(FencedError):
                await call
        view = await make_log(objects, "reader").load()
        assert len(view.checkpoints) == (1 if failure == "after" else 0)

    asyncio.run(main())


def test_ids_go_on_when_all_checkpoints_are_dropped():
    async def main():
        objects = {}
        log = await started(objects)
        await log.complete_checkpoint(manifest(2))
        assert log.view.next_checkpoint_id == 3
        with pytest.raises(InternalError):
            await log.complete_checkpoint(manifest(1))
        await log.end_job(JobStatus.FINISHED)
        assert [m.checkpoint_id for m in await log.trim(0)] == [2]
        assert await log.trim(0) == []
        again = await started(objects, "b")
        assert again.view.newest is None
        assert again.view.next_checkpoint_id == 3

    asyncio.run(main())


def test_a_new_job_is_empty_and_an_ended_one_says_how():
    async def main():
        objects = {}
        assert (await make_log(objects).load()).empty
        log = await started(objects)
        await log.end_job(JobStatus.FAILED, "out of attempts")
        await log.end_job(JobStatus.FINISHED)
        view = await make_log(objects, "reader").load()
        assert not view.empty
        assert (view.ended.status, view.ended.reason) == (JobStatus.FAILED, "out of attempts")

    asyncio.run(main())


async def trimmed_log():
    objects = {}
    log = await started(objects)
    for checkpoint_id in range(1, 6):
        await log.complete_checkpoint(manifest(checkpoint_id))
        await log.trim(1)
    await log.trim(1)
    return objects


def test_a_trimmed_log_holds_starts_and_the_retained_checkpoints():
    async def main():
        objects = await trimmed_log()
        entries = sorted(name for name in objects if name.startswith("log/0"))
        assert entries == [names.log_entry(1), names.log_entry(6)]
        view = await make_log(objects).load()
        assert [c.checkpoint_id for c in view.checkpoints] == [5]

    asyncio.run(main())


@pytest.mark.parametrize("missing", [names.log_entry(6), names.generation_record(1)])
def test_a_damaged_log_is_never_taken_for_an_empty_or_older_one(missing):
    async def main():
        objects = await trimmed_log()
        del objects[missing]
        with pytest.raises(CorruptError, match="the job log is damaged"):
            await make_log(objects).load()
        with pytest.raises(CorruptError, match="the job log is damaged"):
            await started(objects, "b")

    asyncio.run(main())


@pytest.mark.parametrize("claims", [0, 1, 2, 3, 6, 7, 8, 100])
def test_the_last_generation_is_found_among_any_number(claims):
    async def main():
        objects = {}
        for generation in range(1, claims + 1):
            record = GenerationRecord(generation=generation, writer="crashed")
            objects[names.generation_record(generation)] = joblog.RECORDS.encode(record)
        log = await started(objects)
        assert log.view.generation == claims + 1

    asyncio.run(main())


def test_calls_out_of_order_are_refused():
    async def main():
        objects = {}
        with pytest.raises(InternalError):
            await make_log(objects).complete_checkpoint(manifest(1))
        log = await started(objects)
        with pytest.raises(InternalError):
            await log.start_generation(parallelism=1, max_parallelism=1)
        with pytest.raises(InternalError):
            await log.load()

    asyncio.run(main())


def wide(subtasks: int) -> CheckpointEntry:
    """An entry that is large enough to be compressed."""
    entry = done(1, "a", 3)
    operator = entry.manifest.operators[0]
    wide = msgspec.structs.replace(
        operator,
        parallelism=subtasks,
        subtasks=tuple(
            msgspec.structs.replace(operator.subtasks[0], subtask=index)
            for index in range(subtasks)
        ),
    )
    manifest = msgspec.structs.replace(entry.manifest, operators=(wide,))
    return msgspec.structs.replace(entry, manifest=manifest)


def test_large_entries_are_compressed():
    entry = wide(10_000)
    data = joblog.ENTRIES.encode(entry)
    assert len(data) < len(msgspec.json.encode(entry)) / 5
    assert joblog.ENTRIES.decode(data, "x") == entry
    assert joblog.ENTRIES.encode(entry) == data
    small = joblog.ENTRIES.encode(done(1, "a", 3))
    assert msgspec.json.decode(small)["checkpoint_id"] == 3


def test_a_damaged_byte_of_a_compressed_entry_is_found():
    data = joblog.ENTRIES.encode(wide(10_000))
    for position in [0, 12, 40, 50, 58, 70, len(data) // 2, len(data) - 1]:
        damaged = bytearray(data)
        damaged[position] ^= 1
        with pytest.raises(StateError, match="log/7"):
            joblog.ENTRIES.decode(bytes(damaged), "log/7")
    for length in [30, 60, len(data) // 2, len(data) - 1]:
        with pytest.raises(StateError, match="log/7"):
            joblog.ENTRIES.decode(data[:length], "log/7")


@pytest.mark.parametrize("size", [b"1", b"999999", b"9999999999"])
def test_a_wrong_size_of_a_compressed_entry_is_found_with_a_right_checksum(size):
    fields = pa.compress(msgspec.json.encode(done(1, "a", 3))[1:], codec="zstd", asbytes=True)
    with pytest.raises(CorruptError, match=f"fields of format {FORMAT_VERSION} name=`x`"):
        joblog.ENTRIES.decode(sealed(b'{"zstd":' + size + b"}\n" + fields), "x")
