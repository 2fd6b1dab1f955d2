"""MQTT over TLS: the broker proves who it is, and clients prove who they are."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from headgate.connectors import mqtt_sink, mqtt_source
from headgate.errors import SourceError, UsageError
from headgate.operators.connections import check_connection
from headgate.operators.elements import ColumnBatch
from headgate.testing.connectors import make_context, open_reader, records_of
from headgate.testing.servers.authority import Authority
from headgate.testing.servers.mosquitto import running
from headgate.testing.servers.process import HeldPort
from headgate.testing.servers.programs import NotAvailableError
from headgate.tests.support.skips import skip_or_fail

SCHEMA = {"id": "int64"}
_SETTINGS = """
allow_anonymous true
listener {port} 127.0.0.1
max_inflight_messages 0
cafile {ca}
certfile {certificate}
keyfile {key}
require_certificate true
"""


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The arguments of connectors that a broker takes."""
    directory = tmp_path_factory.mktemp("mqtt-tls")
    authority = Authority(directory / "authority")
    certificate, key = authority.issue("localhost")
    own, own_key = authority.issue("ann")
    try:
        with HeldPort() as port:
            settings = _SETTINGS.format(
                port=port, ca=authority.file, certificate=certificate, key=key
            )
            with running(directory / "server", settings):
                yield {
                    "url": f"mqtts://localhost:{port}",
                    "ca": str(authority.file),
                    "certificate": str(own),
                    "key": str(own_key),
                }
    except NotAvailableError as error:
        skip_or_fail(str(error))


def test_messages_come_and_go_over_tls(tls: dict[str, Any]) -> None:
    assert check_connection(mqtt_source("numbers", schema=SCHEMA, **tls), {})

    async def run() -> list[Any]:
        source = mqtt_source("numbers", schema=SCHEMA, client_id="over-tls", **tls)
        reader = open_reader(source, source.splits(1))
        while reader._subscribed is None:  # type: ignore[attr-defined]
            await asyncio.to_thread(lambda: None)
        writer = mqtt_sink("numbers", **tls).writer()
        writer.open(make_context())
        await asyncio.to_thread(writer.prepare)
        writer.write(ColumnBatch(pa.RecordBatch.from_pylist([{"id": n} for n in range(20)])))
        prepare = writer.roll(1)
        assert prepare is not None
        assert reader.lag_s() is None
        await asyncio.to_thread(prepare)
        await asyncio.to_thread(writer.close)
        found: list[Any] = []
        while len(found) < 20:
            batch = reader.poll()
            if batch is None:
                await reader.wait()
            else:
                found += records_of(batch)
        reader.close()
        return found

    assert asyncio.run(asyncio.wait_for(run(), 60)) == [{"id": n} for n in range(20)]


@pytest.mark.parametrize("missing", ["ca", "certificate"])
def test_without_trust_nobody_connects(tls: dict[str, Any], missing: str) -> None:
    given = {name: value for name, value in tls.items() if name not in (missing, "key")}
    if missing == "ca":
        given["key"] = tls["key"]
    source = mqtt_source("numbers", schema=SCHEMA, **given)
    with pytest.raises(SourceError, match="broker cannot be used"):
        source.splits(1)


def test_a_broker_of_another_name_is_refused(tls: dict[str, Any]) -> None:
    given = tls | {"url": tls["url"].replace("localhost", "127.0.0.1")}
    with pytest.raises(SourceError, match="certificate"):
        mqtt_source("numbers", schema=SCHEMA, **given).splits(1)


def test_files_that_are_missing_are_named(tls: dict[str, Any], tmp_path: Path) -> None:
    given = tls | {"ca": str(tmp_path / "none.pem")}
    with pytest.raises(UsageError, match="files of certificates"):
        mqtt_source("numbers", schema=SCHEMA, **given).splits(1)
