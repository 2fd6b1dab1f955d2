"""A check of sinks that promise nothing for a crash."""

from __future__ import annotations

from .cases import Feature, SinkCase
from .context import expect_same, finished, make_context, open_sink, pre_commit
from .reading import in_time
from .sink_checks import CHECKS, all_of, batches_of, bound, places_of


@CHECKS.check(unless=[Feature.EXACTLY_ONCE, Feature.AT_LEAST_ONCE])
async def once_without_a_crash(case: SinkCase) -> None:
    """As long as nothing fails, each record is visible once, also if three subtasks write."""
    batches = batches_of(case)
    with places_of(case, "none") as places:
        for count in (1, 3):
            places.reset()
            sink = bound(places.sink(), batches)
            writers = [
                await open_sink(sink, make_context(subtask_index=number, parallelism=count))
                for number in range(count)
            ]
            for number, batch in enumerate(batches):
                writers[number % count].process(batch, 0)
            for each in writers:
                await in_time(finished(each.finish()), "the end of a writer")
                await pre_commit(each, 1)
                each.close()
            expect_same(places.visible(), all_of(batches), f"written by {count} subtasks")
