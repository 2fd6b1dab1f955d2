"""Commands that run until Ctrl-C.

`asyncio.run` cancels its coroutine when Ctrl-C comes, but the handler of a signal only runs between two
bytecodes of the main thread. A signal that comes after the last of them, before the loop begins to wait for
its sockets, or one that the system gives to another thread, is noted and does not end the wait: a command
without traffic or timers would stay for ever. Here the signal also writes to a socket of the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Coroutine, Iterator
from typing import Any, Final, TypeVar

T = TypeVar("T")
_READ_BYTES: Final = 4096


def run_until_interrupted(command: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a loop of its own and return its result. Ctrl-C cancels it, whenever it comes.

    Raises:
        KeyboardInterrupt: the user pressed Ctrl-C; what the coroutine had to close is closed.
    """

    async def run() -> T:
        with _woken_by_signals():
            return await command

    return asyncio.run(run())


@contextlib.contextmanager
def _woken_by_signals() -> Iterator[None]:
    """Let each signal wake up the running loop, as long as it is that of the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    reading, written = socket.socketpair()
    with reading, written:
        reading.setblocking(False)
        written.setblocking(False)
        before = signal.set_wakeup_fd(written.fileno(), warn_on_full_buffer=False)
        loop.add_reader(reading, reading.recv, _READ_BYTES)
        try:
            yield
        finally:
            loop.remove_reader(reading)
            signal.set_wakeup_fd(before)
