"""A process that reads messages, completes a checkpoint, and kills itself: the kit runs it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import cloudpickle

from .context import open_reader
from .reading import at_least


async def main() -> None:
    """Read a source from standard input; write what its complete checkpoint has to standard output."""
    sys.path[:] = cloudpickle.load(sys.stdin.buffer)
    source = cloudpickle.load(sys.stdin.buffer)
    reader = open_reader(source, source.splits(1))
    reader.rows_wanted = 1
    records = await at_least(reader, 2)
    reader.begin_checkpoint(1)
    reader.snapshot()
    await at_least(reader, 1)
    reader.on_checkpoint_complete(1)
    sys.stdout.buffer.write(cloudpickle.dumps(records))
    sys.stdout.buffer.flush()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    asyncio.run(main())
