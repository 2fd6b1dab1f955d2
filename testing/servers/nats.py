"""NATS with JetStream, built with Go once and kept outside of the tree.

The client nats-py (`pip install 'headgate[nats]'`) is needed.
"""

from __future__ import annotations

import socket
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import msgspec

from .process import LocalServer, ServerProcess, runs
from .programs import NotAvailableError, go_command, made_once

VERSION: Final = "v2.11.4"
MODULE: Final = f"github.com/nats-io/nats-server/v2@{VERSION}"
_BUILD_S_MAX: Final = 600
_GREETING_S_MAX: Final = 5


class NatsServer(LocalServer):
    """A server on loopback with JetStream, whose data survives its death.

    Attributes:
        port: its port on 127.0.0.1.
        url: its address for clients.
    """

    def __init__(self, directory: Path, settings: str = "") -> None:
        """Prepare a server; `start` starts it.

        Args:
            directory: for its configuration, its data and its log; created.
            settings: further lines of its configuration.

        Raises:
            NotAvailableError: there is no client, no Go, no network, or not enough time.
        """
        if find_spec("nats") is None:
            raise NotAvailableError("nats-py is not installed: pip install 'headgate[nats]'")
        program = made_once(f"nats-server-{VERSION}", ["nats-server"], _build) / "nats-server"
        directory.mkdir(parents=True, exist_ok=True)
        super().__init__()
        self.url = f"nats://127.0.0.1:{self.port}"
        self._name = f"headgate-{self.port}"
        config = directory / "nats.conf"
        config.write_text(
            f'server_name: "{self._name}"\nlisten: "127.0.0.1:{self.port}"\n'
            f'jetstream {{ store_dir: "{directory.resolve() / "data"}" }}\n{settings}\n'
        )
        self._process = ServerProcess(
            "NATS", [str(program), "-c", str(config)], directory / "nats.log", self._answers
        )

    def _answers(self) -> bool:
        """Return True if this very server greets us, and its JetStream is ready."""
        with socket.create_connection(("127.0.0.1", self.port), _GREETING_S_MAX) as connection:
            connection.settimeout(_GREETING_S_MAX)
            line = connection.makefile("rb").readline()
        kind, _, text = line.partition(b" ")
        if kind != b"INFO":
            return False
        told = msgspec.json.decode(text)
        return bool(told.get("server_name") == self._name and told.get("jetstream"))


running = runs(NatsServer)
"""Runs a server for the time of a block; its arguments and errors are those of `NatsServer`."""


def _build(directory: Path) -> None:
    go_command("install", MODULE, seconds_max=_BUILD_S_MAX, GOBIN=str(directory))
