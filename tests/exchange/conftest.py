"""Shared helpers of the exchange tests, as fixtures (test modules cannot import each other)."""

from __future__ import annotations

import asyncio
from collections import deque
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import uvloop

from headgate.operators.elements import ColumnBatch, ObjectBatch
from headgate.runtime.exchange.gate import InputChannelSpec, InputGate, LocalOutputChannel
from headgate.runtime.exchange.hub import ExchangeHub
from headgate.runtime.exchange.settings import ExchangeSettings
from headgate.tests.support.clocks import MovedClock


@pytest.fixture
def clock():
    return MovedClock()


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request):
    """Run a coroutine on a fresh loop of either kind; no test may hang."""

    def run(coroutine):
        factory = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(asyncio.wait_for(coroutine, 120))

    return run


def ints(start, count, timestamps=True):
    values = np.arange(start, start + count)
    times = values * 10 if timestamps else None
    return ColumnBatch(pa.record_batch({"n": values}), times)


def objects(start, count):
    return ObjectBatch(list(range(start, start + count)))


@pytest.fixture
def make():
    """Makers of batches and of a gate with local channels into it."""

    def wired(count, settings=None):
        settings = settings or ExchangeSettings()
        gate = InputGate([InputChannelSpec(i, 0) for i in range(count)], settings)
        channels = [LocalOutputChannel(i, settings) for i in range(count)]
        for channel in channels:
            channel.bind(gate)
        return gate, channels

    return SimpleNamespace(ints=ints, objects=objects, wired=wired)


@pytest.fixture
def drain():
    """Take all that is available from a gate: list of (position, element)."""

    def drain(gate):
        taken = []
        while (polled := gate.poll()) is not None:
            taken.append(polled)
        return taken

    return drain


class Pair:
    """Two hubs; `link(channels)` makes channels from `a` to a gate at `b`."""

    def __init__(self, a, b, addresses, settings, failures):
        self.a, self.b, self.addresses = a, b, addresses
        self.settings, self.failures = settings, failures

    async def link(self, count, attempt=1, settings=None):
        settings = settings or self.settings
        specs = [InputChannelSpec(i, i % 2) for i in range(count)]
        gate = InputGate(specs, settings)
        self.b.register_gate(gate, attempt)
        peer = self.addresses[1]
        channels = [self.a.output_channel(i, peer, attempt) for i in range(count)]
        await self.a.connect(self.addresses, attempt)
        return gate, channels

    async def close(self):
        await self.a.close()
        await self.b.close()


@pytest.fixture
def hubs(tmp_path_factory):
    """`await hubs(transport)` starts two hubs joined by `uds` or `tcp`."""

    async def hubs(transport="uds", settings=None, tokens=("secret", "secret"), limits=None):
        settings = settings or ExchangeSettings()
        failures = deque()
        made, addresses = [], []
        for name, token in zip("ab", tokens, strict=True):
            hub = ExchangeHub(
                name,
                token,
                settings=settings,
                limits=limits,
                on_failure=lambda peer, error, region, me=name: failures.append((me, peer, error)),
            )
            directory = str(tmp_path_factory.mktemp("uds")) if transport == "uds" else None
            addresses.append(await hub.start(directory))
            made.append(hub)
        return Pair(*made, addresses, settings, failures)

    return hubs


async def take(gate):
    """Await the next element of a gate: (position, element)."""
    while (polled := gate.poll()) is None:  # noqa: ASYNC110  as simple as can be
        await asyncio.sleep(0)
    return polled


@pytest.fixture(name="take")
def take_fixture():
    return take


@pytest.fixture
def receive():
    """Await `count` elements from a gate."""

    async def receive(gate, count):
        return [await take(gate) for _ in range(count)]

    return receive


@pytest.fixture
def lent():
    """Return the number of floating credits of a gate that its channels have."""
    return lambda gate: sum(channel.lent for channel in gate._channels)
