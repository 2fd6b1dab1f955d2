"""`python -m headgate.tests.support.kube.kubelet OPTIONS`: run nodes until SIGTERM."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import ssl
from pathlib import Path

from headgate.tests.support.kube.kubelet.api import Api
from headgate.tests.support.kube.kubelet.kubelet import Kubelet
from headgate.tests.support.kube.kubelet.logs import serve
from headgate.tests.support.kube.kubelet.network import Network
from headgate.tests.support.kube.kubelet.nodes import Capacity


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--server", required=True)
    parser.add_argument("--ca-file", required=True)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--node", action="append", required=True)
    parser.add_argument(
        "--image", action="append", required=True, help="PATTERN or PATTERN=DIRECTORY"
    )
    parser.add_argument("--cpu", default=Capacity.cpu)
    parser.add_argument("--memory", default=Capacity.memory)
    options = parser.parse_args()
    context = ssl.create_default_context(cafile=options.ca_file)
    capacity = Capacity(options.cpu, options.memory)
    async with Api(options.server, os.environ["KUBELET_TOKEN"], context) as api:
        images = {
            pattern: programs for pattern, _, programs in (i.partition("=") for i in options.image)
        }
        kubelet = Kubelet(api, options.directory, options.node, capacity, images, Network())
        kubelet.log_port = await serve(kubelet, options.directory)
        ready = asyncio.Event()
        running = asyncio.create_task(kubelet.run(ready))
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
        is_ready = asyncio.create_task(ready.wait())
        await asyncio.wait([running, is_ready], return_when=asyncio.FIRST_COMPLETED)
        if ready.is_set():
            (options.directory / "ready").touch()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        await kubelet.stop()


asyncio.run(main())
