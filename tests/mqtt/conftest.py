"""A broker for the tests of a process."""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections.abc import Iterator

import pytest

from headgate.testing.servers.mosquitto import MosquittoServer, running
from headgate.tests.support.queue_cases import MQTT_SETTINGS
from headgate.tests.support.skips import available


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MosquittoServer]:
    """A running broker, which knows the user ann; others need no password."""
    directory = tmp_path_factory.mktemp("mqtt")
    salt = b"salt of ann."
    made = hashlib.pbkdf2_hmac("sha512", b"right", salt, 101, 64)
    line = f"ann:$7$101${b64encode(salt).decode()}${b64encode(made).decode()}\n"
    (directory / "passwords").write_text(line)
    with available(
        running(directory / "server", MQTT_SETTINGS.format(passwords=directory / "passwords"))
    ) as running_server:
        yield running_server
