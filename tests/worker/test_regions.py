"""The regions of one worker, begun and dropped one without the other."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from headgate.runtime.worker.deployment import RunningRegions


class _Slow:
    """A deployment that is not gone before the test says so."""

    region, attempt = 1, 7
    subtasks = ()

    def __init__(self) -> None:
        self.may_go = asyncio.Event()

    async def cancel(self) -> None:
        await self.may_go.wait()


def test_a_region_that_is_dropped_once_more_is_gone_with_the_first_time() -> None:
    """A second failure cancels it again, under another number: its next attempt begins upon that answer."""
    happened: list[str] = []

    async def reset(regions: Any = ()) -> None:
        happened.append(f"reset {sorted(regions)}")

    async def main() -> None:
        hub: Any = SimpleNamespace(reset=reset)
        watch: Any = SimpleNamespace(begin=lambda *_: None, end=lambda _: None)
        regions, slow = RunningRegions(hub, watch), _Slow()
        regions.add(slow)  # type: ignore[arg-type]
        regions.drop([1], lambda: happened.append("first"))
        regions.drop([1, 2], lambda: happened.append("second"))
        regions.drop([3], lambda: happened.append("another"))
        for _ in range(20):
            await asyncio.sleep(0)
        assert happened == ["reset [3]", "another"]
        slow.may_go.set()
        await regions.drop_all()

    asyncio.run(main())
    assert happened[2:6] == ["reset [1]", "first", "reset [1, 2]", "second"]
