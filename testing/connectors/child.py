"""A process that writes and pre-commits a batch, and then kills itself: the kit runs it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import cloudpickle
import msgspec

from ...operators.sink import SinkOperator
from .context import finished, make_context


async def main() -> None:
    """Read a sink and a batch from standard input; write the items of checkpoint 1 to standard output."""
    sys.path[:] = cloudpickle.load(sys.stdin.buffer)
    sink, batch = cloudpickle.load(sys.stdin.buffer)
    operator = SinkOperator(sink)
    await finished(operator.open(make_context()))
    operator.process(batch, 0)
    snapshot = operator.snapshot(1)
    cuts = {} if snapshot is None else snapshot.items
    items = {
        name: await asyncio.to_thread(cut.items) if callable(cut.items) else cut.items
        for name, cut in cuts.items()
    }
    sys.stdout.buffer.write(msgspec.msgpack.encode(items))
    sys.stdout.buffer.flush()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    asyncio.run(main())
