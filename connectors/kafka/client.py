"""The connection to a Kafka cluster: librdkafka's properties, secrets, and errors that say what to do."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Protocol, TypeVar

from ...errors import SourceError, UsageError
from ...operators.clock import SystemClock
from ...operators.suggestions import suggest
from .security import resolved

ANSWER_S_MAX: Final = 15.0
"""The time in which a cluster has to answer the first request."""
_LOOK_S: Final = 0.5
"""While it does not answer, errors are looked at this often."""
_AGAIN_S: Final = 0.1
"""The pause before a request is repeated that came too early."""
_OURS: Final = {
    "acks": "guarantee=",
    "auto.offset.reset": "start=",
    "bootstrap.servers": "bootstrap=",
    "client.id": "the name of the job and of the step",
    "delivery.report.only.error": "guarantee=",
    "enable.auto.commit": "group=",
    "enable.auto.offset.store": "group=",
    "enable.idempotence": "guarantee=",
    "enable.partition.eof": "stop=",
    "fetch.max.bytes": "buffer=",
    "group.id": "group=",
    "isolation.level": "read_uncommitted=",
    "queue.buffering.max.kbytes": "buffer=",
    "queue.buffering.max.messages": "buffer=",
    "queued.max.messages.kbytes": "buffer=",
    "transaction.timeout.ms": "transaction_timeout=",
    "transactional.id": "guarantee=",
}
"""Properties that headgate sets itself, with the argument that decides them."""
_log = logging.getLogger("headgate.connectors.kafka")
T = TypeVar("T")


def check_properties(properties: Mapping[str, str]) -> dict[str, str]:
    """Return a user's properties of librdkafka, as texts.

    Raises:
        UsageError: one of them is set by an argument of its own, or has no name.
    """
    for name in properties:
        if name in _OURS:
            raise UsageError(
                f"this property is set by headgate property=`{name}`",
                fix=f"remove it; it follows from {_OURS[name]}",
            )
    return {str(name): str(value) for name, value in properties.items()}


class ErrorListener:
    """Remembers the last error of a client, as requests only report that nothing answered."""

    def __init__(self) -> None:
        self.last = ""
        self.fatal = ""
        """The reason why no further attempt can succeed."""
        self.undelivered = ""
        """The reason why a record was not delivered, that of the first one."""
        self._logged: set[int] = set()

    def __call__(self, error: Any) -> None:
        """Take an error; the client calls this while it is polled."""
        from confluent_kafka import KafkaError

        if error.code() != KafkaError._ALL_BROKERS_DOWN or not self.last:
            self.last = str(error.str())  # that none is up says less than why the last one is not
        lasting = (
            KafkaError._AUTHENTICATION,
            KafkaError._SSL,
            KafkaError.TOPIC_AUTHORIZATION_FAILED,
            # This comes after `topic.metadata.propagation.max.ms`, so it is not that of a new topic.
            KafkaError.UNKNOWN_TOPIC_OR_PART,
        )
        if error.fatal() or error.code() in lasting or "ssl/tls alert" in self.last:
            self.fatal = self.last
        # A broker that is away is an error per attempt to reach it.
        level = logging.DEBUG if error.code() in self._logged else logging.WARNING
        self._logged.add(error.code())
        _log.log(level, "the Kafka client goes on after an error: %s", self.last)

    def not_delivered(self, error: Any, message: Any) -> None:
        """Take the report of a record that no broker has; the client calls this while it is polled."""
        self.undelivered = self.undelivered or str(error.str())


class Reports:
    """The callback of records that were handed to a producer, which knows when all have been reported.

    Only a record that fails is a call, as a call for each record would cost as much as to hand it over. But
    the client holds the callback of each record until it has reported it. So once nothing else holds this
    object, it goes with the last of its records, also while later records are on their way.

    Attributes:
        complete: set when the last record has been reported, and before that every failure of one.
    """

    def __init__(self, errors: ErrorListener) -> None:
        self._errors = errors
        self.complete = threading.Event()

    def __call__(self, error: Any, message: Any) -> None:
        """Take the report of a record that failed; the client calls this while it is polled."""
        self._errors.not_delivered(error, message)

    def __del__(self) -> None:
        self.complete.set()


def client_properties(
    bootstrap: str, properties: Mapping[str, str], on_error: Callable[[Any], None]
) -> dict[str, Any]:
    """Return the properties of any client of this cluster."""
    return {
        "bootstrap.servers": bootstrap,
        "error_cb": on_error,
        "logger": _log,
        "log_level": 2,  # errors come by the callback
        "reconnect.backoff.max.ms": 2_000,
        **resolved(properties),
    }


def describe_topics(
    client: Any, topic: str | None, bootstrap: str, errors: ErrorListener
) -> dict[str, Any]:
    """Return what the cluster says about a topic, or about all of them.

    Args:
        client: any client of librdkafka, whose errors go to `errors`.
        topic: its name; None: all topics.
        bootstrap: the address, for messages.
        errors: those of the client.

    Raises:
        SourceError: no broker answers, or it refuses us. That is known long before the time is up.
    """
    from confluent_kafka import KafkaException

    clock = SystemClock()
    deadline = clock.monotonic() + ANSWER_S_MAX
    arguments = () if topic is None else (topic,)
    while True:
        try:
            topics: dict[str, Any] = client.list_topics(*arguments, timeout=_LOOK_S).topics
            return topics
        except KafkaException as error:
            client.poll(_LOOK_S)  # the reason comes by the callback
            if errors.fatal or clock.monotonic() > deadline:
                raise no_answer(bootstrap, errors, error.args[0].str()) from error


def patiently(request: Callable[[], T]) -> T:
    """Return a request's answer, and repeat it while the cluster chooses leaders and coordinators.

    After a broker has started, it answers before it leads its partitions again. librdkafka reports
    that to those who ask for offsets, and marks such errors as retriable only in a few clients. It
    may also not know a partition that was made just now, although it has listed it.

    Raises:
        KafkaException: another reason, or the same one for `ANSWER_S_MAX`.
    """
    from confluent_kafka import KafkaError, KafkaException

    passing = (
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.FENCED_LEADER_EPOCH,
        KafkaError.UNKNOWN_LEADER_EPOCH,
        KafkaError.OFFSET_NOT_AVAILABLE,
        KafkaError.NOT_COORDINATOR,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError._TRANSPORT,
        KafkaError._UNKNOWN_PARTITION,
    )
    clock = SystemClock()
    deadline = clock.monotonic() + ANSWER_S_MAX
    while True:
        try:
            return request()
        except KafkaException as error:
            if error.args[0].code() not in passing or clock.monotonic() > deadline:
                raise
        time.sleep(_AGAIN_S)


def no_answer(bootstrap: str, errors: ErrorListener, error: object) -> SourceError:
    """Return the error for a cluster that does not answer, or refuses us."""
    reason = errors.fatal or errors.last or str(error)
    return SourceError(
        f"the Kafka cluster cannot be used bootstrap=`{bootstrap}`: {reason}",
        fix="check that the certificate is signed by an authority in ca=, and is for the name in bootstrap="
        if "certificate verify failed" in reason
        else "check the address, security=, the credentials, and that the brokers' advertised "
        "addresses can be reached from here",
    )


def no_topic(topic: str, known: list[str], right: str) -> UsageError:
    """Return the error for a topic that does not exist, or that we may not see.

    Args:
        topic: its name.
        known: the names of those that we see.
        right: the right that is needed, such as `READ`.
    """
    visible = [name for name in known if not name.startswith("__")]
    found = f"; {suggest(topic, visible, 'topics')}" if visible else ""
    return UsageError(
        f"there is no such topic, or no right to {right} topic=`{topic}`",
        fix=f"create it, or allow {right}{found}",
    )


class ConsumerSettings(Protocol):
    """The settings of a source that its consumers need."""

    @property
    def bootstrap(self) -> str: ...
    @property
    def properties(self) -> Mapping[str, str]: ...
    @property
    def group(self) -> str | None: ...
    @property
    def bounded(self) -> bool: ...
    @property
    def read_uncommitted(self) -> bool: ...
    @property
    def buffer_bytes(self) -> int: ...


def make_consumer(settings: ConsumerSettings, client: str, errors: ErrorListener) -> Any:
    """Return a consumer with these settings, which is not yet connected.

    Raises:
        UsageError: librdkafka does not know a property, or a secret cannot be read.
    """
    from confluent_kafka import Consumer, KafkaException

    kilobytes = max(1, settings.buffer_bytes >> 10)
    properties = client_properties(settings.bootstrap, settings.properties, errors)
    try:
        return Consumer(
            {
                # After an empty fetch, the default waits a second, which makes it five times slower.
                "fetch.queue.backoff.ms": 5,
                **properties,
                "client.id": client,
                "group.id": settings.group or client,
                "auto.offset.reset": "error",
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "on_commit": _log_commit,
                "enable.partition.eof": settings.bounded,
                "isolation.level": (
                    "read_uncommitted" if settings.read_uncommitted else "read_committed"
                ),
                "queued.max.messages.kbytes": kilobytes,
                "fetch.max.bytes": max(settings.buffer_bytes, 1_000_000),
            }
        )
    except KafkaException as error:
        raise wrong_properties(error) from error


def _log_commit(error: Any, places: Any) -> None:
    """Log that offsets were not written to the group; they are information only."""
    if error is not None:
        _log.warning("offsets were not written to the consumer group: %s", error.str())


def make_producer(
    bootstrap: str,
    properties: Mapping[str, str],
    client: str,
    buffer_bytes: int,
    errors: ErrorListener,
) -> Any:
    """Return a producer that is not yet connected. Its retries neither double nor reorder records.

    Only records that fail are reported, to `errors` or to the callback that was given with them. A record
    has arrived if it is not reported and `len(producer)` was 0 after it was handed over, as the client
    counts a record there until after its report, or if its `Reports` are complete.

    Raises:
        UsageError: librdkafka does not know a property, or a secret cannot be read.
    """
    from confluent_kafka import KafkaException, Producer

    try:
        return Producer(
            {
                "linger.ms": 5,
                # The default of Java's client: then all clients send records of one key to one partition.
                "partitioner": "murmur2_random",
                **client_properties(bootstrap, properties, errors),
                "client.id": client,
                "delivery.report.only.error": True,
                "enable.idempotence": True,
                "on_delivery": errors.not_delivered,
                "queue.buffering.max.kbytes": max(1, buffer_bytes >> 10),
                "queue.buffering.max.messages": 0,
            }
        )
    except KafkaException as error:
        raise wrong_properties(error) from error


@contextlib.contextmanager
def fatal_errors() -> Iterator[None]:
    """Raise the fatal error of a client that is polled in the block.

    confluent_kafka raises such an error in a callback. If other callbacks follow before the call returns,
    they fail with a SystemError, and the error is only its cause.
    """
    from confluent_kafka import KafkaException

    try:
        yield
    except SystemError as error:
        if isinstance(error.__cause__, KafkaException):
            raise error.__cause__ from None
        raise


def wrong_properties(error: Any) -> UsageError:
    """Return the error for properties that librdkafka refuses."""
    return UsageError(
        f"the properties of the Kafka client are wrong: {error.args[0].str()}",
        fix="properties= takes those of librdkafka, such as security.protocol and sasl.username",
    )
