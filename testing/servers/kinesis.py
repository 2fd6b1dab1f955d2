"""Kinesalite, which answers the requests of Kinesis, from the npm registry.

The client aiobotocore (`pip install 'headgate[kinesis]'`), Node and npm are needed.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Awaitable, Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from ...connectors.aws import service_models
from ...connectors.functions.loop_thread import in_thread
from .process import LocalServer, ServerProcess, runs
from .programs import NotAvailableError, made_once, run_command

VERSION: Final = "3.3.3"
_INSTALL_S_MAX: Final = 300
_SCRIPT: Final = """
const [folder, port, path] = process.argv.slice(2)
const file = require.resolve(folder + '/node_modules/kinesalite/actions/getShardIterator')
const db = require(folder + '/node_modules/kinesalite/db')
const original = require(file)
// Kinesalite never answers when a shard has no record of that time or later.
require.cache[file].exports = function (store, data, cb) {
  if (data.ShardIteratorType != 'AT_TIMESTAMP') return original(store, data, cb)
  const {Timestamp, ...other} = data
  original(store, {...other, ShardIteratorType: 'LATEST'}, (error, latest) => {
    if (error) return cb(error)
    const shard = db.resolveShardId(data.ShardId).shardIx
    let found = null
    store.getStreamDb(data.StreamName)
      .createReadStream({gt: db.shardIxToHex(shard), lt: db.shardIxToHex(shard + 1)})
      .on('data', item => {
        if (!found && item.value.ApproximateArrivalTimestamp >= Timestamp) found = item.key
      })
      .on('error', cb)
      .on('end', () => cb(null, !found ? latest : {
        ShardIterator: db.createShardIterator(data.StreamName, data.ShardId, found.split('/')[1])
      }))
  })
}
const kinesalite = require(folder + '/node_modules/kinesalite')
const times = {createStreamMs: 5, deleteStreamMs: 5, updateStreamMs: 5}
kinesalite({path, shardLimit: 1000, ...times}).listen(+port, '127.0.0.1')
"""
"""The command line of kinesalite listens on all interfaces."""


class KinesisServer(LocalServer):
    """A server on loopback whose data survives its death.

    Attributes:
        port: its port on 127.0.0.1.
        url: its address for clients, which need credentials, whichever they are.
    """

    def __init__(self, directory: Path) -> None:
        """Prepare a server; `start` starts it.

        Args:
            directory: for its data and its log; created.

        Raises:
            NotAvailableError: there is no client, no Node, no npm, or no network.
        """
        if find_spec("aiobotocore") is None:
            raise NotAvailableError("aiobotocore is not installed: pip install 'headgate[kinesis]'")
        if shutil.which("node") is None:
            raise NotAvailableError("`node` is not installed: apt-get install nodejs npm")
        wanted = "node_modules/kinesalite/package.json"
        program = made_once(f"npm-kinesalite-{VERSION}", [wanted], _install)
        directory.mkdir(parents=True, exist_ok=True)
        super().__init__()
        self.url = f"http://127.0.0.1:{self.port}"
        script = directory / "start.js"
        script.write_text(_SCRIPT)
        self._mark = f"headgate-{self.port}"
        command = ["node", str(script), str(program), str(self.port), str(directory / "data")]
        self._process = ServerProcess(
            "kinesalite", command, directory / "kinesalite.log", self._answers
        )

    def do(self, work: Callable[[Any], Awaitable[Any]]) -> Any:
        """Do something with a client, and return the result."""
        return in_thread(lambda: self._do(work))

    async def _do(self, work: Callable[[Any], Awaitable[Any]]) -> Any:
        from aiobotocore.config import AioConfig
        from aiobotocore.session import get_session

        session = get_session()
        session.register_component("data_loader", service_models())
        made = session.create_client(
            "kinesis",
            region_name="us-east-1",
            endpoint_url=self.url,
            aws_access_key_id="any",
            aws_secret_access_key="any",
            config=AioConfig(connect_timeout=5, read_timeout=5, retries={"total_max_attempts": 1}),
        )
        async with made as client:
            return await work(client)

    def _answers(self) -> bool:
        """Return True if a stream that has the name of this server is there, or can be made."""
        from botocore.exceptions import BotoCoreError, ClientError

        async def mark(client: Any) -> bool:
            with contextlib.suppress(client.exceptions.ResourceInUseException):
                await client.create_stream(StreamName=self._mark, ShardCount=1)
            return self._mark in (await client.list_streams())["StreamNames"]

        try:
            return bool(self.do(mark))
        except (BotoCoreError, ClientError):
            return False


running = runs(KinesisServer)
"""Runs a server for the time of a block; its arguments and errors are those of `KinesisServer`."""


def _install(directory: Path) -> None:
    run_command(
        *("npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(directory)),
        f"kinesalite@{VERSION}",
        seconds_max=_INSTALL_S_MAX,
    )
