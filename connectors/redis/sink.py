"""A stream of Redis or Valkey as a sink, at least once or exactly once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import pyarrow as pa

from ...errors import SourceError, UsageError
from ...operators.sink import (
    Guarantee,
    GuaranteeLike,
    Sink,
    SinkRun,
    SinkWriter,
    parse_guarantee,
    stream_columns,
)
from ..arguments import ON_LOST, OnLost, check_count, check_policy, parse_bytes
from ..formats.format import Format, planning
from ..formats.text import FormatName
from .client import Address, connect, reason_of
from .fields import to_entry_format
from .keys import SinkKeys
from .source import BUFFER, FIELD
from .writer import RedisWriter, SinkSettings

FORMATS: Final = ("fields", "json", "raw")


class RedisSink(Sink):
    """One stream."""

    guarantees = frozenset(Guarantee)
    needs_columns = True

    def __init__(self, settings: SinkSettings, guarantee: Guarantee) -> None:
        self.settings = settings
        self.guarantee = guarantee
        self.extras = ("redis", *settings.format.extras)
        self.place = f"{settings.stream} of {settings.address}"

    def bind(self, schema: pa.Schema | None) -> None:
        schema = stream_columns(schema, "entries of Redis")
        with planning():
            self.settings.format.check_output(schema)

    def writer(self) -> SinkWriter:
        return RedisWriter(self.settings, self.guarantee is Guarantee.EXACTLY_ONCE)

    def check_output(self, run: SinkRun) -> None:
        """Check that the server answers and that the stream is one; say what an outage could lose."""
        import redis

        client = connect(self.settings.address, f"headgate-{run.job}-{run.sink}")
        try:
            check_stream(client, self.settings)
            if self.guarantee is not Guarantee.NONE and not self.settings.address.cluster:
                for warning in _risks(client):
                    run.announce(f"sink `{run.sink}`: {warning}")
        except redis.RedisError as error:
            raise cannot_look(self.settings, error) from error
        finally:
            client.close()

    def check_connection(self, options: Mapping[str, str]) -> str:
        import redis

        self.settings.format.check_connection()
        client = connect(self.settings.address, "headgate-check")
        try:
            check_stream(client, self.settings)
            there = client.exists(self.settings.stream)
        except redis.RedisError as error:
            raise cannot_look(self.settings, error) from error
        finally:
            client.close()
        return "the stream exists" if there else "the stream does not exist yet"

    def describe(self) -> str:
        return f"redis({self.settings.stream})"


def check_stream(client: Any, settings: SinkSettings) -> None:
    """Check that the key is that of a stream, or free.

    Raises:
        SourceError: something else is there.
    """
    kind = client.type(settings.stream).decode()
    if kind not in ("stream", "none"):
        raise SourceError(
            f"the key is not that of a stream stream=`{settings.stream}` type=`{kind}`",
            fix="write to another key",
        )


def _risks(client: Any) -> list[str]:
    """Return what the settings of the server may lose, as far as it tells them."""
    import redis

    try:
        told = client.info("everything")
    except redis.NoPermissionError:
        return []
    risks = []
    if not told.get("aof_enabled", 1):
        risks.append(
            "the server writes no append-only file (appendonly no): if it ends, it loses entries that it "
            "had acknowledged"
        )
    else:
        risks += _risks_of_sync(client)
    if told.get("maxmemory") and told.get("maxmemory_policy", "noeviction") != "noeviction":
        risks.append(
            f"the server deletes keys when its memory is full ({told['maxmemory_policy']}): it may delete "
            "the stream, or entries that wait for their checkpoint"
        )
    return risks


def _risks_of_sync(client: Any) -> list[str]:
    import redis

    try:
        policy = client.config_get("appendfsync").get("appendfsync", "always")
    except redis.RedisError:
        return []  # managed servers do not tell
    if policy == "always":
        return []
    return [
        f"the server writes its append-only file in the background (appendfsync {policy}): if it ends, it "
        "loses entries of the last seconds that it had acknowledged"
    ]


def cannot_look(settings: SinkSettings, error: BaseException) -> SourceError:
    """Return the error for a stream that cannot be looked at."""
    return SourceError(
        f"the stream cannot be looked at stream=`{settings.stream}` server=`{settings.address}`: "
        f"{reason_of(error)}",
        fix="check the rights of the user (ACL)",
    )


def redis_sink(
    stream: str,
    *,
    url: str,
    format: Literal["fields"] | FormatName | Format = "fields",
    field: str = FIELD,
    guarantee: GuaranteeLike = "at_least_once",
    max_length: int | None = None,
    on_lost: OnLost = "fail",
    buffer: str | int = BUFFER,
    password: str | None = None,
    ca: str | None = None,
    certificate: str | None = None,
    key: str | None = None,
    cluster: bool = False,
) -> RedisSink:
    """Return a sink that adds to a stream of Redis or Valkey. It needs `pip install 'headgate[redis]'`.

    Args:
        stream: the key of the stream, which is created with its first entry.
        url: the server, as for `redis_source`.
        format: `fields` (each column is a field with a text as its value; null is no field); or that of a
            payload in one field: `json`, `raw`, or what `avro_format` and `protobuf_format` return.
        field: with such a payload: the name of the field.
        guarantee: `at_least_once`, `exactly_once` (entries are staged, and added when the checkpoint is
            complete) or `none`.
        max_length: about the most entries that the stream keeps (`MAXLEN ~`). None: all of them.
        on_lost: what a restore does if staged entries of the checkpoint are missing in the server: `fail`,
            or `skip` them with a warning.
        buffer: the most bytes that wait to be sent, per subtask.
        password: the password, or where it can be read on each machine: `file:/path` or `env:NAME`.
        ca: with TLS: the file of the authorities to trust. None: those of the system.
        certificate: with TLS: the file with the certificate of the client.
        key: with TLS: the file with its key.
        cluster: the server is a node of a Redis cluster.

    Raises:
        UsageError: an argument is wrong. Whether the server answers is found out when the job starts.
    """
    if not stream:
        raise UsageError("no stream is named", fix='redis_sink("orders", url="redis://host:6379")')
    address = Address(url, password, ca, certificate, key, cluster)
    address.check()
    made = to_entry_format(format, None, FORMATS)
    check_policy("on_lost", on_lost, ON_LOST)
    if max_length is not None:
        check_count("max_length", max_length, 1)
    buffer_bytes = parse_bytes("buffer", buffer)
    wanted = parse_guarantee(guarantee)
    if wanted is Guarantee.EXACTLY_ONCE and cluster:
        SinkKeys.check_cluster(stream)
    settings = SinkSettings(stream, address, made, field, max_length, on_lost, buffer_bytes)
    return RedisSink(settings, wanted)
