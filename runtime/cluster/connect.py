"""Connects this process to a Ray cluster that runs already, in bounded time.

`ray.init` blocks its thread, for more than ten minutes if no cluster is there, and Python handles no
signals in the main thread meanwhile. So it runs in a thread of its own, which is left behind when the time
is over or the user presses Ctrl-C. The usual mistake, an address at which nothing listens, is found before.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import threading
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import ray

from ...errors import HeadgateError, JobError, UsageError
from ...operators.durations import format_duration
from ..options.recovery import CLUSTER_CONNECT_TIMEOUT

_FIX = (
    "check the address and that the cluster runs (`ray start --head` prints its address); "
    "`--cluster local` starts a Ray of its own"
)


async def connect_to_cluster(address: str, namespace: str, timeout_ms: int) -> None:
    """Call `ray.init` for the cluster at `address`: `auto`, `host:port` or `ray://host:port`.

    Raises:
        UsageError: the address has no host or no port.
        JobError: no cluster answered in time, or it refused us.
    """
    try:
        async with asyncio.timeout(timeout_ms / 1000):
            await _check_listening(address)
            await _init_in_thread(address, namespace)
    except TimeoutError:
        raise JobError(
            f"the Ray cluster did not answer within {format_duration(timeout_ms)} address=`{address}`",
            fix=f"{_FIX}; {CLUSTER_CONNECT_TIMEOUT.key} gives it more time",
        ) from None


@contextlib.asynccontextmanager
async def ray_cluster(address: str, namespace: str, timeout_ms: int) -> AsyncIterator[None]:
    """Be connected to the cluster at `address` for the time of the block.

    A process that is connected to a Ray already stays so, and that one is taken for the one that is meant.

    Raises:
        UsageError: the address has no host or no port.
        JobError: no cluster answered in time, or it refused us.
    """
    if ray.is_initialized():
        yield
        return
    await connect_to_cluster(address, namespace, timeout_ms)
    try:
        yield
    finally:
        ray.shutdown()


async def _check_listening(address: str) -> None:
    """Connect to the port of the address, and close the connection."""
    if "://" not in address and ":" not in address:
        return  # `auto`: only Ray knows where that is
    host, port = _host_and_port(address)
    problem: OSError | None = None
    for candidate in _hosts(host):
        try:
            _, writer = await asyncio.open_connection(candidate, port)
        except OSError as error:
            problem = problem or error
        else:
            writer.close()
            return
    raise JobError(
        f"no Ray cluster listens there address=`{address}`: {problem}", fix=_FIX
    ) from problem


def _host_and_port(address: str) -> tuple[str, int]:
    try:
        parts = urlsplit(address if "://" in address else f"//{address}")
        if parts.hostname and parts.port:
            return parts.hostname, parts.port
    except ValueError:
        pass  # the port is no number
    raise UsageError(
        f"not the address of a Ray cluster cluster=`{address}`",
        fix="write `host:port`, such as `localhost:6379`, or `ray://host:10001`",
    )


def _hosts(host: str) -> list[str]:
    """Return the addresses of a Ray called `host`: a head node does not listen on loopback."""
    with contextlib.suppress(ValueError):
        if not ipaddress.ip_address(host).is_loopback:
            return [host]
        return [host, ray.util.get_node_ip_address()]
    return [host, ray.util.get_node_ip_address()] if host == "localhost" else [host]


async def _init_in_thread(address: str, namespace: str) -> None:
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    connection = _Connection(address, namespace)

    def settle(error: Exception | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    def run() -> None:
        error = connection.init()
        with contextlib.suppress(RuntimeError):  # the loop is closed, and its waiter gone
            loop.call_soon_threadsafe(settle, error)

    # No thread of asyncio's: the end of the loop and of the process would wait for those.
    threading.Thread(target=run, name="connect to Ray", daemon=True).start()
    try:
        await done
    except asyncio.CancelledError:
        connection.abandon()
        raise


class _Connection:
    """One call of `ray.init`, which may return after its caller has given it up."""

    def __init__(self, address: str, namespace: str) -> None:
        self._address = address
        self._namespace = namespace
        self._lock = threading.Lock()
        self._abandoned = False
        self._connected = False

    def init(self) -> HeadgateError | None:
        """Connect; return why that failed."""
        try:
            ray.init(
                address=self._address,
                namespace=self._namespace,
                logging_level=logging.ERROR,
                log_to_driver=False,
            )
        except Exception as error:
            failure = JobError(
                f"cannot connect to the Ray cluster address=`{self._address}`: {error}",
                fix="check the address; ray:// needs `pip install 'headgate[ray-client]'`, and a cluster "
                "with token authentication RAY_AUTH_TOKEN in the environment",
            )
            failure.__cause__ = error
            return failure
        with self._lock:
            self._connected = True
            if self._abandoned:
                ray.shutdown()
        return None

    def abandon(self) -> None:
        """Give the call up: disconnect now, or as soon as it is connected."""
        with self._lock:
            self._abandoned = True
            if self._connected:
                ray.shutdown()
