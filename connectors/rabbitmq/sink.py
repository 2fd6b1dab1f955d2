"""Streams and super streams of RabbitMQ as sinks."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from ...errors import UsageError
from ...operators.origin import Origin, capture_origin
from ...operators.sink import (
    Guarantee,
    GuaranteeLike,
    Sink,
    SinkRun,
    SinkWriter,
    parse_guarantee,
)
from ..arguments import check_choice, parse_bytes
from ..formats.format import Format
from ..formats.text import FormatName, to_output_format
from ..functions.loop_thread import in_thread
from ..functions.write_ahead import BUFFER
from ..messages import check_message_columns
from ..publishing import publishing_writer
from .client import Broker, connected, failures
from .envelope import ENVELOPES, EnvelopeName
from .publisher import BOUNDS, RabbitPublisher, SinkSettings, unusable
from .source import check_name
from .super_streams import RabbitSuperStreamSink


class RabbitSink(Sink):
    """One stream."""

    guarantees = frozenset(Guarantee)
    needs_columns = True

    def __init__(self, settings: SinkSettings, guarantee: Guarantee, origin: Origin) -> None:
        self.settings = settings
        self.guarantee = guarantee
        self.extras = ("rabbitmq", *settings.format.extras)
        self.place = f"{settings.target} of {settings.broker}"
        self._origin = origin

    def bind(self, schema: pa.Schema | None) -> None:
        check_message_columns(schema, {}, (), self.settings.format, "messages of RabbitMQ")

    def writer(self) -> SinkWriter:
        publisher, buffer_bytes = (
            RabbitPublisher(self.settings, self.settings.target),
            self.settings.buffer_bytes,
        )
        return publishing_writer(publisher, BOUNDS, self.guarantee, buffer_bytes, self._origin)

    def check_output(self, run: SinkRun) -> None:
        """Check that the stream exists."""
        in_thread(lambda: _look(self.settings))

    def check_connection(self, options: Mapping[str, str]) -> str:
        self.settings.format.check_connection()
        in_thread(lambda: _look(self.settings))
        return "the stream is there"

    def describe(self) -> str:
        return f"rabbitmq({self.settings.target})"


async def _look(settings: SinkSettings) -> None:
    """Check that the broker answers, and has the stream."""
    try:
        async with connected(settings.broker, settings.target, "headgate-check"):
            pass
    except failures() as error:
        raise unusable(settings.broker, settings.target, error) from error


def rabbitmq_sink(
    stream: str | None = None,
    *,
    url: str,
    super_stream: str | None = None,
    routing_key: str | None = None,
    user: str = "guest",
    password: str = "guest",
    virtual_host: str = "/",
    format: FormatName | Format = "json",
    envelope: EnvelopeName = "amqp",
    guarantee: GuaranteeLike = "at_least_once",
    buffer: str | int = BUFFER,
    ca: str | None = None,
    certificate: str | None = None,
    key: str | None = None,
) -> RabbitSink | RabbitSuperStreamSink:
    """Return a sink that publishes to a stream of RabbitMQ, or to a super stream.

    It needs `pip install 'headgate[rabbitmq]'`, and the plugin rabbitmq_stream in the broker.

    Args:
        stream: the name of the stream, which must exist; either it or `super_stream`.
        url: the brokers, as for `rabbitmq_source`.
        super_stream: the name of a super stream, which must exist.
        routing_key: the column of texts whose hash chooses the partition of a super stream. The hash is
            that of RabbitMQ's clients for Java and Go.
        user: the name of the user.
        password: the password, or where it can be read on each machine: `file:/path` or `env:NAME`.
        virtual_host: the virtual host of the streams.
        format: of the data: `json` (an object of all columns), `raw` (the one column), or what
            `avro_format` and `protobuf_format` return.
        envelope: `amqp`: the data is wrapped in messages of AMQP 1.0, as RabbitMQ's clients do it; `none`:
            it is stored as it is.
        guarantee: `at_least_once`; `exactly_once`, as long as the stream remembers the publishers of an
            interrupted commit; or `none`.
        buffer: with `exactly_once`: the most bytes staged between two checkpoints, as for
            `write_ahead_sink`.
        ca: with TLS: the file of the authorities to trust. None: those of the system.
        certificate: with TLS: the file with the certificate of the client.
        key: with TLS: the file with its key.

    Raises:
        UsageError: an argument is wrong. Whether the streams exist is found out when the job starts.
    """
    target = _target(stream, super_stream, routing_key)
    check_choice("envelope", envelope, ENVELOPES, "envelope", "envelopes")
    broker = Broker(url, user, password, virtual_host, ca, certificate, key)
    broker.check()
    made_format = to_output_format(format)
    buffer_bytes = parse_bytes("buffer", buffer)
    settings = SinkSettings(target, routing_key or "", broker, made_format, envelope, buffer_bytes)
    make = RabbitSink if super_stream is None else RabbitSuperStreamSink
    return make(settings, parse_guarantee(guarantee), capture_origin())


def _target(stream: str | None, super_stream: str | None, routing_key: str | None) -> str:
    """Return the name of the stream or of the super stream.

    Raises:
        UsageError: neither is given, or both are.
    """
    given = [name for name in (stream, super_stream) if name is not None]
    if len(given) != 1 or (super_stream is None) != (routing_key is None) or routing_key == "":
        raise UsageError(
            "a sink needs a stream, or a super stream and the column of its routing keys "
            f"stream=`{stream}` super_stream=`{super_stream}` routing_key=`{routing_key}`",
            fix='rabbitmq_sink("orders", ...), or '
            'rabbitmq_sink(super_stream="orders", routing_key="customer", ...)',
        )
    check_name(given[0])
    return given[0]
