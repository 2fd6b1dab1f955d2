"""Ray in a pod: the process of `ray start --block`, from its start to its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from typing import Final

STOP_S: Final = 5.0
"""The time that Ray gets between SIGTERM and SIGKILL, in seconds."""


class RayProcess:
    """A child in its own process group, so that a signal to ours does not end Ray before its workers."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        """Use `start`."""
        self._process = process
        self.ended: asyncio.Future[int] = asyncio.ensure_future(process.wait())
        """Ray's exit code, once it has ended."""

    @staticmethod
    async def start(command: Sequence[str], more: Mapping[str, str] | None = None) -> RayProcess:
        """Start Ray, with the variables `more` besides those of this process. It listens after a while."""
        env = {**os.environ, **(more or {})}
        return RayProcess(await asyncio.create_subprocess_exec(*command, process_group=0, env=env))

    @property
    def pid(self) -> int:
        return self._process.pid

    async def stop(self) -> None:
        """End `ray start`, which ends its children, and then the remaining processes of its group."""
        if not self.ended.done():
            self._process.terminate()
            await asyncio.wait({self.ended}, timeout=STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self.ended


async def listens(host: str, port: int) -> bool:
    """Return True if a process takes connections there."""
    try:
        async with asyncio.timeout(2.0):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


async def address_of(host: str) -> str:
    """Return the IP of a host, as the system resolves it; empty if the name is not known (yet).

    Ray has its own resolver, which does not read the hosts file.
    """
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return ""
    return str(found[0][4][0])
