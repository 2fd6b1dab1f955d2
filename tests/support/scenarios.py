"""Steps that tests of readers and writers have in common."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from headgate.operators.sink import SinkWriter


def guarded(scenario: Awaitable[Any], seconds: float) -> Any:
    """Run a scenario in a loop of its own; raise TimeoutError if it takes longer."""

    async def main() -> Any:
        async with asyncio.timeout(seconds):
            return await scenario

    return asyncio.run(main())


async def prepared(writer: SinkWriter, checkpoint_id: int = 1) -> list[bytes]:
    """Let a writer prepare its part of a checkpoint, and return what is to be committed."""
    precommit = writer.roll(checkpoint_id)
    assert precommit is not None
    return await asyncio.to_thread(precommit)
