"""Checks of sinks whose job has gone on behind a savepoint: what the savepoint has staged is not lost.

A savepoint commits nothing. The job commits what the savepoint has staged with its next checkpoint, and a
run that begins with the savepoint commits it first. A job that fails in between goes back to its last
checkpoint, and may drop it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import cloudpickle

from ...errors import HeadgateError, StorageError, TargetAwayError
from ...operators.sink import Sink, SinkOperator
from ...state.snapshot import RestoredState
from .cases import Feature, SinkCase
from .context import Items, expect, expect_same, finished, make_context, open_sink, pre_commit
from .sink_checks import CHECKS, all_of, batches_of, bound, commit, commit_globally, places_of

_JOB: Final = "conformance"
_COPY: Final = "conformance-copy"
"""Another job, which begins with a savepoint while the first one goes on."""


async def _begun(
    sink: Sink, attempt: int, restored: int, items: Items | None, job: str = _JOB, run: str = _JOB
) -> SinkOperator:
    """Begin an attempt of a run, and commit what it restores first."""
    copy: Sink = cloudpickle.loads(cloudpickle.dumps(sink))
    if items is not None:
        await commit_globally(sink, [items], restored, job)
    context = make_context(attempt=attempt, restored_checkpoint=restored, job_name=job, run_id=run)
    operator = await open_sink(copy, context)
    if items is not None:
        try:
            await finished(operator.restore(RestoredState(items=items)))
        except BaseException:
            operator.close()
            raise
    return operator


async def _checkpoint(operator: SinkOperator, sink: Sink, checkpoint_id: int) -> Items:
    """Take a checkpoint, commit it, and return the sink's part of it."""
    items = await pre_commit(operator, checkpoint_id) or {}
    await _commit(operator, sink, items, checkpoint_id)
    return items


async def _commit(operator: SinkOperator, sink: Sink, items: Items, checkpoint_id: int) -> None:
    await commit_globally(sink, [items], checkpoint_id)
    await commit(operator, checkpoint_id)


@CHECKS.check(Feature.EXACTLY_ONCE)
async def a_savepoint_outlives_a_failure(case: SinkCase) -> None:
    """If its job has gone back behind a savepoint, a run from it has all records, or it is refused.

    The job may have dropped what the savepoint had staged, and have committed less than that since. A run
    that begins with the savepoint then must not go on without these records. An error that refuses it says
    what to do. Records that the job has written again may be visible twice.
    """
    for goes_on in (False, True):
        await _gone_back(case, goes_on)


async def _gone_back(case: SinkCase, goes_on: bool) -> None:
    """Let a job fail behind a savepoint, and begin a run with the savepoint.

    Args:
        case: the sink.
        goes_on: the job commits a part of the same records before it ends.
    """
    first, second, third = batches_of(case)
    with places_of(case) as places:
        sink = bound(places.sink(), [first])
        killed = await _begun(sink, 1, 0, None)
        killed.process(first, 0)
        checkpoint = await _checkpoint(killed, sink, 1)
        killed.process(second, 0)
        killed.process(third, 0)
        savepoint = await pre_commit(killed, 2) or {}
        again = await _begun(sink, 2, 1, checkpoint)
        if goes_on:
            again.process(second, 0)
            await _checkpoint(again, sink, 3)
        again.close()
        visible = places.visible()
        situation = f"a run from a savepoint behind which its job failed; it went on: {goes_on}"
        refusal: Exception | None = None
        try:
            run = await _begun(sink, 3, 2, savepoint, run=f"{_JOB}-2")
            run.close()
        except Exception as error:
            refusal = error
        if refusal is None:
            _expect_no_loss(places.visible(), all_of((first, second, third)), second, situation)
        else:
            _expect_advice(refusal, situation)
            expect_same(places.visible(), visible, f"{situation}; it was refused")
        killed.close()  # only now, as a killed process closes nothing


def _expect_no_loss(
    found: Sequence[Any], wanted: Sequence[Any], twice: Any, situation: str
) -> None:
    """Check that all records are there, and only those of the batch `twice` perhaps twice."""
    counts = Counter(map(repr, found))
    repeated = set(map(repr, all_of([twice])))
    lost = [record for record in wanted if not counts[repr(record)]]
    expect(not lost, f"{situation}: {len(lost)} records are lost: {lost[:5]}")
    more = [each for each, count in counts.items() if count > 1 + (each in repeated)]
    expect(not more, f"{situation}: records are there too often: {more[:5]}")


def _expect_advice(error: Exception, situation: str) -> None:
    """Check that an error by which a run is refused says what to do, and is not tried again for ever."""
    expect(isinstance(error, HeadgateError), f"{situation}: refused with {error!r}")
    assert isinstance(error, HeadgateError)
    expect(error.fix, f"{situation}: the error does not say what to do: {error}")
    passing = isinstance(error, (StorageError, TargetAwayError))
    expect(not passing, f"{situation}: the error says that trying again may help: {error}")


@CHECKS.check(Feature.EXACTLY_ONCE)
async def a_savepoint_is_committed_once(case: SinkCase) -> None:
    """If a job goes on behind a savepoint, and another one begins with it, both commit its records once.

    Either of them may be the first. The job may be refused once, and then commits after a restart.
    """
    first, second, third = batches_of(case)
    for job_first in (True, False):
        with places_of(case) as places:
            sink = bound(places.sink(), [first])
            job = await _begun(sink, 1, 0, None)
            job.process(first, 0)
            await _checkpoint(job, sink, 1)
            job.process(second, 0)
            savepoint = await pre_commit(job, 2) or {}
            job.process(third, 0)
            items = await pre_commit(job, 3) or {}
            copies: list[SinkOperator] = []
            if not job_first:
                copies.append(await _begun(sink, 1, 2, savepoint, _COPY, _COPY))
                expect_same(places.visible(), all_of((first, second)), "a copy of the job began")
            try:
                await _commit(job, sink, items, 3)
            except Exception:
                expect(not job_first, "the job cannot commit the checkpoint behind a savepoint")
            (await _begun(sink, 2, 3, items)).close()
            if job_first:
                copies.append(await _begun(sink, 1, 2, savepoint, _COPY, _COPY))
            situation = f"committed by the job and a copy of it; first by the job: {job_first}"
            expect_same(places.visible(), all_of((first, second, third)), situation)
            for each in (job, *copies):
                await asyncio.to_thread(each.close)
