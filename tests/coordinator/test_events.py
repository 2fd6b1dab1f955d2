"""A burst of events leaves turns of the event loop to everything else."""

from __future__ import annotations

import asyncio
import itertools

from headgate.runtime.coordinator.environment import EVENTS_PER_TURN, EventQueue, Tick


def test_a_burst_does_not_keep_the_event_loop() -> None:
    async def main() -> list[int]:
        queue = EventQueue()
        for _ in range(10 * EVENTS_PER_TURN):
            queue.put_nowait(Tick())
        seen: list[int] = []

        async def other() -> None:
            while True:
                seen.append(queue.qsize())
                await asyncio.sleep(0)

        beating = asyncio.ensure_future(other())
        for _ in range(10 * EVENTS_PER_TURN):
            assert await queue.get() == Tick()
        beating.cancel()
        return seen

    sizes = asyncio.run(main())
    assert len(sizes) == 10
    assert max(before - after for before, after in itertools.pairwise(sizes)) == 64
