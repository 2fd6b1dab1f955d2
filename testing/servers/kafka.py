"""Apache Kafka: one broker in KRaft mode, from Maven Central.

The client confluent-kafka (`pip install 'headgate[kafka]'`), Maven and a Java of version 17 or newer are
needed; the jars are fetched once, 43 MB for each version of Kafka.
"""

from __future__ import annotations

import secrets
import subprocess
import time
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from ...operators.clock import SystemClock
from .authority import Authority
from .maven import jars, java
from .process import HeldPort, ServerProcess, runs
from .programs import NotAvailableError

NEWEST: Final = "4.4.0"
OLDEST: Final = "3.9.2"
_FORMAT_S_MAX: Final = 300
_REQUEST_S_MAX: Final = 300
_ONE_BROKER: Final = {
    "process.roles": "broker,controller",
    "node.id": "1",
    "controller.listener.names": "CONTROLLER",
    "default.replication.factor": "1",
    "num.partitions": "1",
    "auto.create.topics.enable": "false",
    "offsets.topic.replication.factor": "1",
    "offsets.topic.num.partitions": "1",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "transaction.state.log.num.partitions": "1",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    "group.initial.rebalance.delay.ms": "0",
    # A broker that was killed is fenced for this long, and then comes back. One that is only slow is fenced
    # as well, and its topics have no leaders then, so this is more than the pauses of a busy machine.
    "broker.session.timeout.ms": "3000",
    "broker.heartbeat.interval.ms": "100",
    "log.retention.check.interval.ms": "200",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "200",
}


class KafkaServer:
    """A broker on loopback with all its files in `directory`.

    Attributes:
        bootstrap: its address for clients, `host:port`.
        proxy_port: the port at which clients look for it that have connected through a proxy, so that the
            proxy must listen there.
        proxied_port: the port of the broker to which that proxy connects.
    """

    def __init__(
        self, directory: Path, version: str = NEWEST, options: Mapping[str, str] | None = None
    ) -> None:
        """Prepare a broker; `start` starts it.

        Args:
            directory: its own, which is created.
            version: of Kafka.
            options: of the broker, beside those of a single one.

        Raises:
            NotAvailableError: there is no client, no Java, or the jars cannot be fetched.
        """
        if find_spec("confluent_kafka") is None:
            raise NotAvailableError(
                "confluent-kafka is not installed: pip install 'headgate[kafka]'"
            )
        clients = f"kafka-clients-{version}.jar"
        program = jars(f"kafka-{version}", "org.apache.kafka", "kafka_2.13", version, clients)
        self._java = [java(), "-cp", f"{program}/*"]
        self._version = version
        self._ports = [HeldPort() for _ in range(4)]
        self._directory = directory
        self.bootstrap = f"127.0.0.1:{self._ports[0].number}"
        controller = f"127.0.0.1:{self._ports[1].number}"
        self.proxied_port, self.proxy_port = self._ports[2].number, self._ports[3].number
        # The first byte is 0, because an id that begins with "-" looks like an option to Kafka's tool.
        self._cluster = urlsafe_b64encode(b"\0" + secrets.token_bytes(15)).decode().rstrip("=")
        self._properties = directory / "server.properties"
        directory.mkdir(parents=True)
        listeners = {
            "PLAINTEXT": self.bootstrap,
            "PROXIED": f"127.0.0.1:{self.proxied_port}",
            **self._more_listeners(),
        }
        advertised = {**listeners, "PROXIED": f"127.0.0.1:{self.proxy_port}"}
        settings = {
            **_ONE_BROKER,
            "listeners": _joined({**listeners, "CONTROLLER": controller}, "://"),
            "advertised.listeners": _joined(advertised, "://"),
            "listener.security.protocol.map": _joined(
                dict.fromkeys(("PLAINTEXT", "PROXIED", "CONTROLLER"), "PLAINTEXT")
                | self._more_protocols(),
                ":",
            ),
            "controller.quorum.voters": f"1@{controller}",
            "log.dirs": str(directory / "data"),
            **self._more_settings(),
            **(options or {}),
        }
        self._properties.write_text(
            "".join(f"{name}={value}\n" for name, value in settings.items())
        )
        self._process = ServerProcess(
            f"Kafka {version}",
            [
                *(self._java[0], "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"),
                *(*self._java[1:], "kafka.Kafka", str(self._properties)),
            ],
            directory / "server.log",
            self._answers,
        )
        self._formatted = False

    def _more_listeners(self) -> dict[str, str]:
        """Return further listeners and their addresses."""
        return {}

    def _more_protocols(self) -> dict[str, str]:
        """Return the protocols of these listeners."""
        return {}

    def _more_settings(self) -> dict[str, str]:
        """Return further settings for them."""
        return {}

    def start(self) -> None:
        """Start it, or start it again with its data.

        Raises:
            RuntimeError: it did not come up; the text has the end of its log.
        """
        if not self._formatted:
            tool = ["kafka.tools.StorageTool", "format", "-t", self._cluster]
            done = subprocess.run(
                [*self._java, *tool, "-c", str(self._properties)],
                capture_output=True,
                text=True,
                timeout=_FORMAT_S_MAX,
                check=False,
            )
            if done.returncode:
                raise RuntimeError(f"Kafka's storage was not formatted: {done.stdout}{done.stderr}")
            self._formatted = True
        self._process.start()

    def kill(self) -> None:
        """Kill the broker, as a crash of its machine would."""
        self._process.kill()

    def stop(self) -> None:
        """Shut the broker down in order."""
        self._process.stop()

    def close(self) -> None:
        """Shut it down for good, and give its ports back."""
        self.stop()
        for port in self._ports:
            port.release()

    def admin(self) -> Any:
        """Return a new `confluent_kafka.admin.AdminClient` of this broker."""
        from confluent_kafka.admin import AdminClient

        return AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 0})

    def create_topic(
        self, name: str, partitions: int = 1, config: Mapping[str, str] | None = None
    ) -> None:
        """Create a topic, and wait until clients see it and its partitions have leaders."""
        from confluent_kafka import KafkaError, KafkaException
        from confluent_kafka.cimpl import NewTopic

        topic = NewTopic(name, partitions, 1, config=dict(config or {}))
        admin = self.admin()  # its requests end with it
        clock = SystemClock()
        deadline = clock.monotonic() + _REQUEST_S_MAX
        tried_before = False
        while True:
            try:
                for created in admin.create_topics([topic], operation_timeout=30).values():
                    created.result(_REQUEST_S_MAX)
                break
            except KafkaException as error:
                # A broker that a slow machine has paused is fenced for a moment, and none is left.
                code = error.args[0].code()
                paused = (KafkaError.INVALID_REPLICATION_FACTOR, KafkaError._TIMED_OUT)
                if code == KafkaError.TOPIC_ALREADY_EXISTS and tried_before:
                    break  # by a request whose answer was late
                if code not in paused or clock.monotonic() > deadline:
                    raise
                tried_before = True
            time.sleep(0.1)
        # The controller has answered; the broker, whom clients ask, learns of it a moment later.
        _wait_until(lambda: self._leads(admin, name, partitions))

    def _leads(self, admin: Any, topic: str, partitions: int) -> bool:
        from confluent_kafka import KafkaException

        try:
            # Of all topics: the answer for one that is not there yet would be remembered for a while.
            found = admin.list_topics(timeout=10).topics.get(topic)
        except KafkaException:
            return False
        leaders = [each.leader for each in found.partitions.values()] if found else []
        return len(leaders) == partitions and min(leaders) >= 0

    def produce(
        self,
        topic: str,
        values: Sequence[bytes | None],
        *,
        partition: int = 0,
        keys: Sequence[bytes | None] | None = None,
        timestamps_ms: Sequence[int] | None = None,
        headers: Sequence[tuple[str, bytes]] = (),
    ) -> None:
        """Write records to a partition, in order, and wait until the broker has them all."""
        from confluent_kafka import Producer

        failed: list[str] = []

        def delivered(error: object, _: object) -> None:
            if error is not None:
                failed.append(str(error))

        producer = Producer(
            {"bootstrap.servers": self.bootstrap, "log_level": 0, "linger.ms": 1, "acks": "all"}
        )
        for index, value in enumerate(values):
            producer.produce(
                topic,
                value=value,
                key=None if keys is None else keys[index],
                partition=partition,
                timestamp=0 if timestamps_ms is None else timestamps_ms[index],
                headers=list(headers),
                on_delivery=delivered,
            )
            if index % 10_000 == 9_999:
                producer.flush(_REQUEST_S_MAX)
        left = producer.flush(_REQUEST_S_MAX)
        if failed or left:
            raise RuntimeError(f"{left} records were not written: {failed[:1]}")

    def _answers(self) -> bool:
        from confluent_kafka import KafkaException

        try:
            found = self.admin().list_topics(timeout=10)
        except KafkaException:
            return False
        return bool(found.cluster_id == self._cluster and found.brokers)


class SecureKafkaServer(KafkaServer):
    """A broker whose users have only the rights that `allow` gives them, with a listener for each protocol.

    Who connects to `bootstrap` without a password has all rights.

    Attributes:
        sasl: the address of the listener for passwords and tokens without TLS.
        sasl_tls: the same with TLS. It has the name `localhost`.
        tls: the address of the listener that asks for a client certificate.
        ca: the file with the certificate of the authority that has signed all others.
    """

    PLAIN_USER: Final = ("plain", "the-password-of-plain")
    """The name and the password of the only user of the mechanism PLAIN."""

    def _more_listeners(self) -> dict[str, str]:
        ports = [HeldPort() for _ in range(3)]
        self._ports += ports
        self.sasl = f"127.0.0.1:{ports[0].number}"
        self.sasl_tls = f"localhost:{ports[1].number}"
        self.tls = f"localhost:{ports[2].number}"
        return {"SASL": self.sasl, "SASLTLS": self.sasl_tls, "TLS": self.tls}

    def _more_protocols(self) -> dict[str, str]:
        return {"SASL": "SASL_PLAINTEXT", "SASLTLS": "SASL_SSL", "TLS": "SSL"}

    def _more_settings(self) -> dict[str, str]:
        authority = Authority(self._directory / "tls")
        self.ca = authority.file
        self._authority = authority
        certificate, key = authority.issue("localhost")
        both = certificate.with_name("server.pem")
        both.write_bytes(key.read_bytes() + certificate.read_bytes())
        name, password = self.PLAIN_USER
        modules = {
            "plain": f'plain.PlainLoginModule required user_{name}="{password}"',
            "scram-sha-256": "scram.ScramLoginModule required",
            "scram-sha-512": "scram.ScramLoginModule required",
            "oauthbearer": "oauthbearer.OAuthBearerLoginModule required "
            'unsecuredLoginStringClaim_sub="broker"',
        }
        return {
            "sasl.enabled.mechanisms": ",".join(each.upper() for each in modules),
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": str(both),
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": str(self.ca),
            "listener.name.tls.ssl.client.auth": "required",
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": "User:ANONYMOUS",
            **{
                f"listener.name.{listener}.{mechanism}.sasl.jaas.config": (
                    f"org.apache.kafka.common.security.{module};"
                )
                for listener in ("sasl", "sasltls")
                for mechanism, module in modules.items()
            },
        }

    def issue(self, name: str) -> tuple[Path, Path]:
        """Return the files of a new client certificate and its key. The user is `CN=` and the name."""
        return self._authority.issue(name)

    def add_user(self, name: str, password: str, mechanism: str) -> None:
        """Give a user a password for SCRAM-SHA-256 or SCRAM-SHA-512."""
        from confluent_kafka import KafkaException
        from confluent_kafka.admin import AdminClient

        names = _admin_names()
        kind = getattr(names.ScramMechanism, mechanism.replace("-", "_"))
        change = names.UserScramCredentialUpsertion(
            name, names.ScramCredentialInfo(kind, 4096), password.encode()
        )
        admin = self.admin()
        _until_done(lambda: admin.alter_user_scram_credentials([change]).values())

        def known() -> bool:
            """The credentials reach the listener a moment after they are described."""
            client = AdminClient(
                {
                    "bootstrap.servers": self.sasl,
                    "security.protocol": "sasl_plaintext",
                    "sasl.mechanism": mechanism,
                    "sasl.username": name,
                    "sasl.password": password,
                    "log_level": 0,
                }
            )
            try:
                client.list_topics(timeout=1)
            except KafkaException:
                return False
            return True

        _wait_until(known)

    def allow(
        self, user: str, kind: str, name: str, *operations: str, permission: str = "ALLOW"
    ) -> None:
        """Allow a user some operations on a resource; a name that ends with `*` is a prefix.

        Args:
            user: the name; that of a certificate begins with `CN=`.
            kind: `topic`, `group` or `transactional_id`.
            name: of the resource.
            operations: such as `READ`.
            permission: `ALLOW`, or `DENY`, which counts more.
        """
        names = _admin_names()
        prefixed = name.endswith("*")
        place = (
            names.ResourceType[kind.upper()],
            name.removesuffix("*"),
            names.ResourcePatternType.PREFIXED if prefixed else names.ResourcePatternType.LITERAL,
            f"User:{user}",
            "*",
        )
        given = names.AclPermissionType[permission]
        wanted = [names.AclBinding(*place, names.AclOperation[each], given) for each in operations]
        admin = self.admin()
        _until_done(lambda: admin.create_acls(wanted).values())
        own = names.AclBindingFilter(*place, names.AclOperation.ANY, given)
        _wait_until(
            lambda: len(_until_done(lambda: [admin.describe_acls(own)])[0]) >= len(set(operations))
        )


def _joined(values: Mapping[str, str], between: str) -> str:
    return ",".join(f"{name}{between}{value}" for name, value in values.items())


def _admin_names() -> Any:
    """Return the module with the classes of administration, which it does not export by its types."""
    from confluent_kafka import admin

    return admin


def _until_done(request: Callable[[], Iterable[Any]]) -> list[Any]:
    """Return the results of a request, which is repeated if a slow machine has no answer in time."""
    from confluent_kafka import KafkaError, KafkaException

    clock = SystemClock()
    deadline = clock.monotonic() + _REQUEST_S_MAX
    while True:
        try:
            return [each.result(_REQUEST_S_MAX) for each in request()]
        except KafkaException as error:
            if error.args[0].code() != KafkaError._TIMED_OUT or clock.monotonic() > deadline:
                raise


def _wait_until(holds: Callable[[], bool]) -> None:
    """Wait until a change has reached the broker."""
    while not holds():
        time.sleep(0.02)


running = runs(KafkaServer)
"""Runs a broker for the time of a block; its arguments and errors are those of `KafkaServer`."""
