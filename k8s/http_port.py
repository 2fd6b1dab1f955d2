"""HTTP ports without a token, for probes and metrics, with the bounds that the ports of a job have.

Everybody in the network can connect to them. So each connection serves one request and has a limited time
for it, and when too many are open the oldest one is closed, as `runtime/listening.py` explains.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Final

from aiohttp import web

from ..runtime.listening import ListenerLimits
from ..runtime.rest.server import RestListener

LIMITS: Final = ListenerLimits()
SHUTDOWN_S: Final = 1.0
"""The time that answers under way may take when the port is closed."""
Page = Callable[[web.Request], Awaitable[web.StreamResponse]]


@contextlib.asynccontextmanager
async def answering(
    pages: Mapping[str, Page], host: str, port: int, name: str, limits: ListenerLimits = LIMITS
) -> AsyncIterator[None]:
    """Answer GET requests for the time of the block.

    Args:
        pages: what answers, by path.
        host, port: the address at which it listens.
        name: the name of the port in the log.
        limits: the bounds; a connection ends after the handshake timeout, whatever its peer does.
    """
    application = web.Application(middlewares=[_one_request])
    for path, page in pages.items():
        application.router.add_get(path, page)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=SHUTDOWN_S)
    await runner.setup()
    assert runner.server is not None
    listener = RestListener(limits, name)
    try:
        await listener.listen_at(runner.server, host, port)
        yield
    finally:
        listener.stop_listening()
        await runner.cleanup()


@web.middleware
async def _one_request(request: web.Request, handler: Page) -> web.StreamResponse:
    """Close the connection behind the answer, so that its time limit never cuts a later request."""
    try:
        response = await handler(request)
    except web.HTTPException as error:
        error.force_close()
        raise
    response.force_close()
    return response
