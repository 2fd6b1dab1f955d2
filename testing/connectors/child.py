"""A process that writes and pre-commits a batch, and then kills itself: the kit runs it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import cloudpickle
import msgspec

from .context import make_context, open_sink, pre_commit


async def main() -> None:
    """Read a sink and a batch from standard input; write the items of checkpoint 1 to standard output."""
    sys.path[:] = cloudpickle.load(sys.stdin.buffer)
    sink, batch = cloudpickle.load(sys.stdin.buffer)
    operator = await open_sink(sink, make_context())
    operator.process(batch, 0)
    items = await pre_commit(operator, 1)
    sys.stdout.buffer.write(msgspec.msgpack.encode(items or {}))
    sys.stdout.buffer.flush()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    asyncio.run(main())
