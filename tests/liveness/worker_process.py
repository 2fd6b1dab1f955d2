"""The main of a worker process without a cluster: `python worker_process.py ID TOKEN ADDRESS...`."""

from __future__ import annotations

import asyncio
import logging
import sys

from headgate.operators.clock import SystemClock
from headgate.runtime.cluster.process import tune_process
from headgate.runtime.control.link import connect
from headgate.runtime.exchange.hub import ExchangeHub
from headgate.runtime.observe.logs import configure_logging
from headgate.runtime.observe.metrics import MetricsRegistry
from headgate.runtime.storage.open_store import open_store
from headgate.runtime.worker.heartbeats import HeartbeatThreads
from headgate.runtime.worker.worker import Worker


async def main(worker_id: str, token: str, addresses: list[str]) -> None:
    clock = SystemClock()
    hub = ExchangeHub(worker_id, token)
    worker = Worker(
        worker_id,
        await connect(addresses[0]),
        hub,
        token=token,
        clock=clock,
        open_store=open_store,
        metrics=MetricsRegistry(),
        heartbeats=HeartbeatThreads(addresses, token, worker_id, clock),
    )
    hub.on_failure = worker.exchange_failed
    listening = await hub.start(None)
    await worker.run(listening.encode())


if __name__ == "__main__":
    configure_logging(logging.WARNING)
    tune_process()
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
