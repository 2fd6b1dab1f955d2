"""Probes and hooks of containers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import aiohttp

from headgate.tests.support.kube.kubelet.network import Network
from headgate.tests.support.kube.kubelet.sandbox import Running
from headgate.tests.support.kube.kubelet.spec import port_number

Object = dict[str, Any]
SLOWER = 30
"""The machine of a test may be slower than manifests expect: probes get this number of times the time for
an answer, and containers this number of times the time for their start."""
LOOK_S = 0.5
"""While a success is awaited, a probe comes at least this often, whatever its period, so that a container
is known to be ready as soon as it is. One that is ready is probed as its manifest says."""


@dataclass(frozen=True)
class Place:
    """The address of a container."""

    network: Network
    ip: str

    def connector(self) -> aiohttp.TCPConnector:
        return aiohttp.TCPConnector(socket_factory=lambda _: self.network.socket())


async def until_started(container: Object, place: Place, running: Running) -> bool:
    """Wait for the startup probe, where there is one. False: it failed too often."""
    probe = container.get("startupProbe")
    if probe is None:
        return True
    await asyncio.sleep(probe.get("initialDelaySeconds", 0))
    return await _until(probe, container, place, running, wanted=True)


async def until_dead(container: Object, place: Place, running: Running) -> None:
    """Return when the liveness probe failed as often as it may not; without a probe never."""
    probe = container.get("livenessProbe")
    if probe is None:
        await asyncio.Event().wait()
    else:
        await asyncio.sleep(probe.get("initialDelaySeconds", 0))
        await _until(probe, container, place, running, wanted=False)


async def keep(
    container: Object, name: str, place: Place, running: Running, tell: Callable[[bool], None]
) -> None:
    """Tell for ever whether the probe holds, with its thresholds; without a probe it holds."""
    probe = container.get(name)
    if probe is None:
        tell(True)
        return
    good = False
    await asyncio.sleep(probe.get("initialDelaySeconds", 0))
    while True:
        await _until(probe, container, place, running, wanted=not good)
        good = not good
        tell(good)


async def _until(
    probe: Object, container: Object, place: Place, running: Running, *, wanted: bool
) -> bool:
    """Probe until `wanted` was the answer as often as its threshold says.

    For a startup probe, which wants success, False after too many failures.
    """
    failures_max = probe.get("failureThreshold", 3)
    threshold = probe.get("successThreshold", 1) if wanted else failures_max
    period = probe.get("periodSeconds", 10)
    pause = min(period, LOOK_S) if wanted else period
    is_startup = probe is container.get("startupProbe")
    same = failures = 0
    while True:
        answer = await once(probe, container, place, running)
        same = same + 1 if answer == wanted else 0
        failures = failures + 1 if not answer else 0
        if same >= threshold:
            return True
        if is_startup and failures * pause >= SLOWER * failures_max * period:
            return False
        await asyncio.sleep(pause)


async def hook(
    action: Object, container: Object, place: Place, running: Running, grace: float
) -> None:
    """A preStop hook, for the grace period at most."""
    if "sleep" in action:
        await asyncio.sleep(min(grace, action["sleep"]["seconds"]))
    else:
        await once({**action, "timeoutSeconds": grace / SLOWER}, container, place, running)


async def once(probe: Object, container: Object, place: Place, running: Running) -> bool:
    """One probe: whether it succeeded within its timeout, with some patience."""
    seconds = SLOWER * float(probe.get("timeoutSeconds", 1))
    if "exec" in probe:
        return await running.run(probe["exec"]["command"], seconds)
    try:
        async with asyncio.timeout(seconds):
            if "tcpSocket" in probe:
                action = probe["tcpSocket"]
                port = port_number(container, action["port"])
                _, writer = await place.network.connect(action.get("host", place.ip), port)
                writer.close()
                return True
            return await _http(probe["httpGet"], container, place)
    except (OSError, TimeoutError, aiohttp.ClientError):
        return False


async def _http(action: Object, container: Object, place: Place) -> bool:
    host = action.get("host", place.ip)
    scheme = action.get("scheme", "HTTP").lower()
    url = f"{scheme}://{host}:{port_number(container, action['port'])}{action.get('path', '/')}"
    headers = {header["name"]: header["value"] for header in action.get("httpHeaders", [])}
    async with (
        aiohttp.ClientSession(connector=place.connector()) as session,
        # As a kubelet, which does not check certificates.
        session.get(url, headers=headers, ssl=False, allow_redirects=False) as answer,
    ):
        return 200 <= answer.status < 400
