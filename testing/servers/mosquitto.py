"""Mosquitto, a broker of MQTT, from Debian's packages.

The client paho-mqtt (`pip install 'headgate[mqtt]'`) is needed. A broker that the machine has is used;
otherwise the packages are unpacked once, and nothing is installed or started as a service.
"""

from __future__ import annotations

import os
import shutil
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from .process import LocalServer, ServerProcess, runs
from .programs import NotAvailableError, debian_packages, made_once

_PACKAGES: Final = (
    *("mosquitto", "libmosquitto1", "libwebsockets17", "libcjson1", "libdlt2", "libev4"),
    *("libuv1", "libwrap0", "libcap2"),
)
"""The broker, and libraries that a small Debian may not have."""
_ANSWER_S_MAX: Final = 5


class MosquittoServer(LocalServer):
    """A broker on loopback that keeps sessions and their messages, also when it is killed.

    Attributes:
        port: its port on 127.0.0.1.
        url: its address for clients.
    """

    def __init__(self, directory: Path, settings: str = "allow_anonymous true") -> None:
        """Prepare a broker; `start` starts it.

        Args:
            directory: for its configuration, its data and its log; created.
            settings: further lines of its configuration.

        Raises:
            NotAvailableError: there is no client, or no broker and no way to get one.
        """
        if find_spec("paho") is None:
            raise NotAvailableError("paho-mqtt is not installed: pip install 'headgate[mqtt]'")
        program, environment = _program()
        directory.mkdir(parents=True, exist_ok=True)
        super().__init__()
        self.url = f"mqtt://127.0.0.1:{self.port}"
        config = directory / "mosquitto.conf"
        data = directory.resolve() / "data"
        data.mkdir(exist_ok=True)
        # It gives up its rights as root, and its data must then be writable.
        user = "root" if os.getuid() == 0 else ""
        config.write_text(
            f"listener {self.port} 127.0.0.1\npersistence true\npersistence_location {data}/\n"
            f"autosave_on_changes true\nautosave_interval 1\nmax_queued_messages 0\n"
            f"max_inflight_messages 0\nlog_type all\n{f'user {user}' if user else ''}\n{settings}\n"
        )
        self._log = directory / "mosquitto.log"
        self._process = ServerProcess(
            "mosquitto",
            [program, "-c", str(config)],
            self._log,
            self._answers,
            environment,
        )

    def acknowledgements(self, client_id: str) -> int:
        """Return how many acknowledgements of messages a client has sent to it, by its log."""
        return self._log.read_text(errors="replace").count(f"Received PUBACK from {client_id} (")

    def _answers(self) -> bool:
        """Return True if a broker answers that is no other process: the port is held for it."""
        from paho.mqtt.client import Client, MQTTv5
        from paho.mqtt.enums import CallbackAPIVersion

        answered = threading.Event()

        def connected(client: Any, data: Any, flags: Any, reason: Any, properties: Any) -> None:
            answered.set()  # a refusal is an answer as well

        client = Client(CallbackAPIVersion.VERSION2, protocol=MQTTv5)
        client.on_connect = connected
        client.connect("127.0.0.1", self.port, _ANSWER_S_MAX)
        client.loop_start()
        try:
            return answered.wait(_ANSWER_S_MAX)
        finally:
            client.disconnect()
            client.loop_stop()


running = runs(MosquittoServer)
"""Runs a broker for the time of a block; its arguments and errors are those of `MosquittoServer`."""


def _program() -> tuple[str, dict[str, str] | None]:
    """Return the path of a broker, and the environment that it needs, if that is not this process's."""
    installed = shutil.which("mosquitto")
    if installed is not None:
        return installed, None

    def make(directory: Path) -> None:
        debian_packages(directory, _PACKAGES, "Mosquitto", "mosquitto")

    tree = made_once("mosquitto-debian", ["usr/sbin/mosquitto"], make)
    libraries = ":".join(
        str(tree / each / f"{os.uname().machine}-linux-gnu") for each in ("usr/lib", "lib")
    )
    return str(tree / "usr/sbin/mosquitto"), {**os.environ, "LD_LIBRARY_PATH": libraries}
