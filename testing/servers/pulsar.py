"""Apache Pulsar: a standalone broker with its bookie, from Maven Central.

The client pulsar-client (`pip install 'headgate[pulsar]'`), Maven and a Java of version 17 or newer are
needed; the distribution is fetched once, 245 MB.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import http.client
import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from .maven import distribution, java
from .process import HeldPort, ServerProcess, runs
from .programs import NotAvailableError

VERSION: Final = "4.0.8"
_TOP: Final = f"apache-pulsar-{VERSION}"
_ANSWER_S: Final = 20
_SECRET: Final = b"a key of the tests, which signs all of their tokens"
_OPENED: Final = (
    *("java.base/java.io", "java.base/java.util.zip", "java.base/java.nio"),
    *("java.base/jdk.internal.misc", "java.base/jdk.internal.platform"),
    *("java.management/sun.management", "jdk.management/com.sun.management.internal"),
)
_SMALL: Final = {
    "allowAutoTopicCreation": "false",
    "brokerDeleteInactiveTopicsEnabled": "false",
    "defaultRetentionTimeInMinutes": "-1",
    "defaultRetentionSizeInMB": "-1",
    "systemTopicEnabled": "false",
    "topicLevelPoliciesEnabled": "false",
    "webSocketServiceEnabled": "false",
    "numIOThreads": "2",
    "numOrderedExecutorThreads": "2",
    "numHttpServerThreads": "8",
    "bookkeeperNumberOfChannelsPerBookie": "1",
    "managedLedgerCacheSizeMB": "16",
    "dbStorage_writeCacheMaxSizeMb": "16",
    "dbStorage_readAheadCacheMaxSizeMb": "16",
    "dbStorage_rocksDB_blockCacheSize": str(8 << 20),
    # What was acknowledged outlives a crash.
    "journalSyncData": "true",
    # A bookie refuses to write when the disk is nearly full, which tells nothing about a test.
    "diskUsageThreshold": "0.999",
    "diskUsageWarnThreshold": "0.998",
    "listeningInterface": "lo",
    # Everyone may do everything, but who shows a token must show a good one.
    "authenticationEnabled": "true",
    "authenticationProviders": "org.apache.pulsar.broker.authentication.AuthenticationProviderToken",
    "anonymousUserRole": "anyone",
    "tokenSecretKey": f"data:;base64,{base64.b64encode(_SECRET).decode()}",
}


class PulsarServer:
    """A broker on loopback whose data survives its death. Topics are made by `create`.

    Attributes:
        port: its port on 127.0.0.1.
        url: its address for clients.
        tls_url: the same with TLS, if it has a certificate.
        proxy_port: the port at which clients look for it that have connected through a proxy, so that the
            proxy must listen there.
        proxied_port: the port of the broker to which that proxy connects.
    """

    def __init__(
        self,
        directory: Path,
        options: Mapping[str, str] | None = None,
        certificate: tuple[Path, Path] | None = None,
    ) -> None:
        """Prepare a broker; `start` starts it.

        Args:
            directory: for its configuration, its data and its log; created.
            options: of the broker, beside those of a small one.
            certificate: the files of its certificate and of the key; None: it has no TLS.

        Raises:
            NotAvailableError: there is no client, no Java, or the distribution cannot be fetched.
        """
        if find_spec("pulsar") is None:
            raise NotAvailableError(
                "pulsar-client is not installed: pip install 'headgate[pulsar]'"
            )
        configuration = f"{_TOP}/conf/standalone.conf"
        artifact = f"org.apache.pulsar:pulsar-server-distribution:{VERSION}:tar.gz:bin"
        program = distribution(f"pulsar-{VERSION}", artifact, [configuration])
        directory.mkdir(parents=True)
        self._ports = [HeldPort() for _ in range(6)]
        binary, web, bookie, tls, proxied, proxy = (port.number for port in self._ports)
        self.port = binary
        self.url = f"pulsar://127.0.0.1:{binary}"
        self.tls_url = f"pulsar+ssl://127.0.0.1:{tls}"
        self.proxied_port, self.proxy_port, self._web = proxied, proxy, web
        listeners = [f"internal:{self.url}", f"proxied:pulsar://127.0.0.1:{proxy}"]
        settings = {
            **_SMALL,
            "brokerServicePort": str(binary),
            "webServicePort": str(web),
            "bindAddress": "127.0.0.1",
            "bindAddresses": f"proxied:pulsar://127.0.0.1:{proxied}",
            "internalListenerName": "internal",
            **(options or {}),
        }
        if certificate is not None:
            listeners.append(f"internal:{self.tls_url}")
            files = dict(
                zip(
                    ("tlsCertificateFilePath", "tlsKeyFilePath"), map(str, certificate), strict=True
                )
            )
            settings |= {"brokerServicePortTls": str(tls), **files}
        settings["advertisedListeners"] = ",".join(listeners)
        file = directory / "standalone.conf"
        file.write_text(_configured((program / configuration).read_text(), settings))
        self._process = ServerProcess(
            f"Pulsar {VERSION}",
            [
                *(java(), "-Xmx320m", "-XX:MaxDirectMemorySize=256m", "-XX:+UseSerialGC"),
                *("-XX:TieredStopAtLevel=1", "-Djava.net.preferIPv4Stack=true"),
                *(f"--add-opens={name}=ALL-UNNAMED" for name in _OPENED),
                # Its native sockets would not share the ports that are held for it.
                "-Dio.netty.transport.noNative=true",
                "-Dio.netty.tryReflectionSetAccessible=true",
                *(f"-Dbookkeeper.metadata.{each}" for each in _METADATA_DRIVERS),
                f"-Dlog4j.configurationFile={program / _TOP / 'conf' / 'log4j2.yaml'}",
                *("-Dpulsar.log.appender=Console", f"-Dpulsar.log.dir={directory}"),
                *("-Dpulsar.log.level=warn", "-Dpulsar.log.root.level=warn"),
                *(
                    "-cp",
                    f"{program / _TOP / 'lib'}/*",
                    "org.apache.pulsar.PulsarStandaloneStarter",
                ),
                *("--config", str(file), "-nfw", "-nss"),
                *("--metadata-dir", str(directory / "metadata")),
                *("--bookkeeper-dir", str(directory / "ledgers")),
                *("--bookkeeper-port", str(bookie)),
            ],
            directory / "server.log",
            self._answers,
        )

    def start(self) -> None:
        """Start it, or start it again with its data.

        Raises:
            RuntimeError: it did not come up; the text has the end of its log.
        """
        self._process.start()

    def kill(self) -> None:
        """End it at once, as a crash of the process does."""
        self._process.kill()

    def close(self) -> None:
        """End it for good, and give its ports back. It is killed, as its data is not needed any more."""
        self._process.kill()
        for port in self._ports:
            port.release()

    def create(self, topic: str, partitions: int = 0) -> None:
        """Create a topic of `public/default`, or of the namespace in its name; 0: it has no partitions."""
        if partitions:
            self.ask("PUT", f"persistent/{_path(topic)}/partitions", partitions)
        else:
            self.ask("PUT", f"persistent/{_path(topic)}")

    def enlarge(self, topic: str, partitions: int) -> None:
        """Add partitions to a topic, until it has this many."""
        self.ask("POST", f"persistent/{_path(topic)}/partitions", partitions)

    def delete(self, topic: str, partitions: int = 0) -> None:
        """Delete a topic, also while it is read."""
        more = "/partitions" if partitions else ""
        self.ask("DELETE", f"persistent/{_path(topic)}{more}?force=true")

    def unload(self, topic: str) -> None:
        """Close a topic for a moment, which ends its current ledger."""
        self.ask("PUT", f"persistent/{_path(topic)}/unload")

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """Make a request of the admin API below `/admin/v2/`, and return the answer.

        Raises:
            RuntimeError: the broker refuses it.
        """
        connection = http.client.HTTPConnection("127.0.0.1", self._web, timeout=_ANSWER_S)
        with contextlib.closing(connection):
            data = None if body is None else json.dumps(body)
            connection.request(
                method, f"/admin/v2/{path}", data, {"Content-Type": "application/json"}
            )
            answer = connection.getresponse()
            text = answer.read().decode()
        if answer.status >= 300:
            raise RuntimeError(f"{method} {path}: {answer.status} {text[:500]}")
        return json.loads(text) if text else None

    def _answers(self) -> bool:
        """Return True if it serves the default namespace; no other process has its ports."""
        try:
            return "public/default" in self.ask("GET", "namespaces/public")
        except (RuntimeError, http.client.HTTPException):
            return False  # it has begun to listen


_METADATA_DRIVERS: Final = tuple(
    f"{side}.drivers=org.apache.pulsar.metadata.bookkeeper.PulsarMetadata{side.capitalize()}Driver"
    for side in ("bookie", "client")
)

running = runs(PulsarServer)
"""Runs a broker for the time of a block; its arguments and errors are those of `PulsarServer`."""


def token(subject: str, secret: bytes = _SECRET) -> str:
    """Return a token for this role, which a broker of tests takes if it is signed with its secret."""

    def coded(data: bytes) -> str:
        return base64.urlsafe_b64encode(data).decode().rstrip("=")

    parts = {"alg": "HS256"}, {"sub": subject}
    text = ".".join(coded(json.dumps(part).encode()) for part in parts)
    return f"{text}.{coded(hmac.digest(secret, text.encode(), hashlib.sha256))}"


def _path(topic: str) -> str:
    """Return the path of a topic in the admin API."""
    return topic.removeprefix("persistent://") if "/" in topic else f"public/default/{topic}"


def _configured(text: str, settings: Mapping[str, str]) -> str:
    """Return a configuration with other settings; one that it has is replaced, as it must be there once."""
    kept = [
        line
        for line in text.splitlines()
        if line and not line.startswith("#") and line.partition("=")[0].strip() not in settings
    ]
    return "\n".join([*kept, *(f"{name}={value}" for name, value in settings.items()), ""])
