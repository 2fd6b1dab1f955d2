"""Connections to a pod through the API server, as `kubectl port-forward` makes them.

The proxy of the API server (`.../services/NAME/proxy/`) cannot reach the REST API of a job: the API
server uses the header `Authorization` for itself and drops it, and the NetworkPolicy of the job refuses
it. A forwarded port ends inside the pod, and the bytes arrive as they were sent.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Final

import aiohttp

from ...errors import HeadgateError, JobError, UsageError
from ...runtime.rest.client import RestClient
from .. import ports
from ..objects import HEAD, ROLE
from ..operator.api import Api, ApiError
from ..operator.coordinators import read_token
from ..pod_troubles import trouble
from .cluster import JobCluster, explained, lacking, no_token
from .views import job_view

PROTOCOL: Final = "v4.channel.k8s.io"
"""Each message begins with the number of its channel."""
DATA: Final = 0
ERROR: Final = 1
CHUNK_BYTES: Final = 32 << 10
_PORT_BYTES: Final = 2
"""Each channel begins with the number of the port."""


class Forward:
    """A port of this machine whose connections lead to a port of a pod.

    Attributes:
        problem: the reason why a connection broke; None if none did.
    """

    def __init__(self, api: Api, namespace: str, pod: str, port: int) -> None:
        """Prepare the forwarding; nothing is open yet."""
        self._api = api
        self._namespace = namespace
        self._pod = pod
        self._port = port
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self.problem: HeadgateError | None = None

    async def listen(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Listen and return the port. Port 0 takes a free one.

        Raises:
            UsageError: the port is taken, or there is no right to forward ports.
        """
        await (await self._connect()).close()
        try:
            self._server = await asyncio.start_server(self._serve, host, port)
        except OSError as error:
            raise UsageError(
                f"the port cannot be opened address=`{host}:{port}`: {error.strerror or error}",
                fix="choose another one",
            ) from None
        return int(self._server.sockets[0].getsockname()[1])

    async def ended(self) -> None:
        """Serve until cancelled.

        `serve_forever` of the server is no help: from Python 3.12 on, its end waits for all clients.
        """
        await asyncio.Event().wait()

    async def close(self) -> None:
        """Close all connections."""
        if self._server is not None:
            self._server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _connect(self) -> aiohttp.ClientWebSocketResponse:
        path = f"/api/v1/namespaces/{self._namespace}/pods/{self._pod}/portforward"
        try:
            return await self._api.websocket(path, {"ports": str(self._port)}, PROTOCOL)
        except ApiError as error:
            if error.status == 403:
                # The refusal of a WebSocket comes without its text.
                raise lacking("get", "pods/portforward", "", self._namespace) from None
            raise explained(error) from None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            async with await self._connect() as tunnel:
                await _pump(reader, writer, tunnel)
        except HeadgateError as error:
            self.problem = error
        except (OSError, aiohttp.ClientError, asyncio.CancelledError):
            pass  # the connection ends, and that is all
        finally:
            self._connections.discard(task)
            writer.close()


async def _pump(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    tunnel: aiohttp.ClientWebSocketResponse,
) -> None:
    """Carry bytes both ways until one side closes the connection.

    Raises:
        JobError: the node says why it cannot connect.
    """

    async def send() -> None:
        while data := await reader.read(CHUNK_BYTES):
            await tunnel.send_bytes(bytes((DATA,)) + data)

    async def receive() -> None:
        announced: set[int] = set()
        async for message in tunnel:
            if message.type is not aiohttp.WSMsgType.BINARY or not message.data:
                continue
            channel, data = message.data[0], message.data[1:]
            if channel not in announced:
                announced.add(channel)
                data = data[_PORT_BYTES:]
            if channel == ERROR and data:
                raise JobError(f"the port of the pod cannot be reached: {data.decode()}")
            writer.write(data)
            await writer.drain()

    both = [asyncio.create_task(each()) for each in (send, receive)]
    try:
        done, _ = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in both:
            task.cancel()
        await asyncio.gather(*both, return_exceptions=True)


async def head_pod(cluster: JobCluster, job: str) -> str:
    """Return the name of the pod with the coordinator of a job.

    Raises:
        JobNotFound: there is no such StreamJob.
        JobError: none of its heads runs.
    """
    found = await cluster.job(job)
    heads = [
        pod
        for pod in await cluster.pods(job)
        if pod["metadata"]["labels"].get(ROLE) == HEAD
        and "deletionTimestamp" not in pod["metadata"]
    ]
    running = [pod for pod in heads if pod.get("status", {}).get("phase") == "Running"]
    if running:
        return str(running[0]["metadata"]["name"])
    view = job_view(found)
    said = "; ".join(filter(None, (view.message, *map(trouble, heads))))
    raise JobError(
        f"the head of job {job} does not run: the job is {view.phase}{f': {said}' if said else ''}",
        fix="`headgate k8s resume` starts a suspended job"
        if view.phase == "Suspended"
        else f"`headgate k8s status {job}` shows what it waits for",
    )


@contextlib.asynccontextmanager
async def coordinator(cluster: JobCluster, job: str) -> AsyncIterator[RestClient]:
    """Connect to the REST API of a job, through its pod and with the token of its Secret, for the block.

    Raises:
        HeadgateError: the head does not run, cannot be reached, or its token cannot be read.
    """
    pod = await head_pod(cluster, job)
    try:
        token = await read_token(cluster.api, cluster.namespace, job)
    except ApiError as error:
        raise no_token(error, cluster.namespace, job) from None
    forward = Forward(cluster.api, cluster.namespace, pod, ports.REST.number)
    port = await forward.listen()
    try:
        async with RestClient(f"http://127.0.0.1:{port}", token) as client:
            yield client
    except HeadgateError as error:
        # If no answer came, the reason is in the broken connection.
        raise (forward.problem or error) from None
    finally:
        await forward.close()
