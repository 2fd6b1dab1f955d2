"""The operator's HTTP ports: /healthz and /readyz on one, /metrics on the other."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Final, final

from aiohttp import web

from ...runtime.listening import ListenerLimits
from ..http_port import LIMITS, answering

SILENCE_S_MAX: Final = 300.0
"""The operator is not healthy, and is restarted, if one of its watches received nothing for this time."""


@final
@dataclass(frozen=True, slots=True)
class WatchHealth:
    """The health of the watch of one kind of object.

    Attributes:
        plural: the name of the kind for `kubectl get`.
        namespace: empty: the whole cluster.
        silent_s: the seconds since the last message.
        trouble: the reason why the last request failed; empty if it did not.
        missing: True if the kind is optional, and is not defined or may not be read.
    """

    plural: str
    namespace: str
    silent_s: float
    trouble: str = ""
    missing: bool = False

    def __str__(self) -> str:
        where = f" in {self.namespace}" if self.namespace else ""
        if self.missing:
            return f"{self.plural}{where} are not watched: {self.trouble}"
        why = f": {self.trouble}" if self.trouble else ""
        return f"there was no news of {self.plural}{where} for {self.silent_s:.0f} s{why}"


@contextlib.asynccontextmanager
async def serving(
    host: str,
    health_port: int,
    metrics_port: int,
    watches: Callable[[], Sequence[WatchHealth]],
    metrics: Callable[[], bytes],
    silence_s_max: float = SILENCE_S_MAX,
    limits: ListenerLimits = LIMITS,
) -> AsyncIterator[None]:
    """Answer on both ports for the time of the block.

    Args:
        host: the address at which both ports listen.
        health_port, metrics_port: their numbers.
        watches: returns the health of the watches; none while this process does not lead.
        metrics: all metrics in Prometheus' text format.
        silence_s_max: a watch without a message for longer is not healthy.
        limits: the bounds of each port.
    """

    async def healthz(_: web.Request) -> web.Response:
        found = watches()
        dead = [each for each in found if each.silent_s > silence_s_max]
        lines = ["not healthy" if dead else "ok"]
        lines += [str(each) for each in dead or found if each in dead or each.trouble]
        return web.Response(text="\n".join(lines) + "\n", status=503 if dead else 200)

    async def readyz(_: web.Request) -> web.Response:
        # A process that waits for the Lease is ready too, because it can take over.
        return web.Response(text="ok\n")

    async def read_metrics(_: web.Request) -> web.Response:
        headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        return web.Response(body=metrics(), headers=headers)

    probes = {"/healthz": healthz, "/readyz": readyz}
    async with (
        answering(probes, host, health_port, "health port", limits),
        answering({"/metrics": read_metrics}, host, metrics_port, "metrics port", limits),
    ):
        yield
