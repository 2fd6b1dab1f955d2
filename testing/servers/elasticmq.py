"""ElasticMQ, which answers the requests of SQS, from Maven Central, with its messages on disk.

The client aiobotocore (`pip install 'headgate[sqs]'`), Maven and a Java of version 17 or newer are needed;
the jars are fetched once, 37 MB.
"""

from __future__ import annotations

import contextlib
import http.client
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from .maven import jars, java
from .process import LocalServer, ServerProcess, runs
from .programs import NotAvailableError

VERSION: Final = "1.7.1"
_ANSWER_S: Final = 5
_CONFIGURATION: Final = """include classpath("application.conf")
node-address {{ protocol = http, host = "127.0.0.1", port = {port}, context-path = "" }}
rest-sqs {{ enabled = true, bind-port = {port}, bind-hostname = "127.0.0.1", sqs-limits = strict }}
rest-stats {{ enabled = false }}
messages-storage {{ enabled = true, uri = "jdbc:h2:{data};WRITE_DELAY=0" }}
"""
"""H2 would otherwise write a change only half a second later."""


class ElasticMqServer(LocalServer):
    """A server on loopback whose queues and messages survive its death.

    Attributes:
        port: its port on 127.0.0.1.
        url: its address for clients, which need credentials, whichever they are.
    """

    def __init__(self, directory: Path) -> None:
        """Prepare a server; `start` starts it.

        Args:
            directory: for its configuration, its data and its log; created.

        Raises:
            NotAvailableError: there is no client, no Java, no Maven, or no network.
        """
        if find_spec("aiobotocore") is None:
            raise NotAvailableError("aiobotocore is not installed: pip install 'headgate[sqs]'")
        artifact = "elasticmq-server_2.13"
        program = jars(f"elasticmq-{VERSION}", "org.elasticmq", artifact, VERSION)
        directory.mkdir(parents=True, exist_ok=True)
        super().__init__()
        self.url = f"http://127.0.0.1:{self.port}"
        configuration = directory / "elasticmq.conf"
        data = directory.resolve() / "messages"
        configuration.write_text(_CONFIGURATION.format(port=self.port, data=data))
        self._process = ServerProcess(
            f"ElasticMQ {VERSION}",
            [
                *(java(), "-Xmx128m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"),
                *(f"-Dconfig.file={configuration}", "-cp", f"{program}/*"),
                "org.elasticmq.server.Main",
            ],
            directory / "elasticmq.log",
            self._answers,
        )

    def _answers(self) -> bool:
        """Return True if it answers; no other process has the port, which is held for it."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_ANSWER_S)
        with contextlib.closing(connection):
            connection.request("GET", "/health")
            return connection.getresponse().status == 200


running = runs(ElasticMqServer)
"""Runs a server for the time of a block; its arguments and errors are those of `ElasticMqServer`."""
