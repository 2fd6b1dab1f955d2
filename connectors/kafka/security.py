"""How clients prove who they are and encrypt: one set of options for librdkafka and kafka-python.

The options become properties of librdkafka, because all settings of a connection are such properties. The
client for transactions, kafka-python, is configured from the same properties.
"""

from __future__ import annotations

import base64
import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Literal

from ...errors import UsageError
from ...operators.clock import SystemClock
from ...operators.suggestions import suggest
from ..secrets import read_secret

Mechanism = Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"]
MECHANISMS: Final = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER")
_TOKEN: Final = "headgate.oauthbearer.token"
"""The token among the properties. librdkafka asks for it by a call, so it never gets this property."""
_TOKEN_S: Final = 300.0
"""A token that does not say when it expires is read again after this time."""
_SECRET: Final = re.compile(
    r"password|passphrase|secret|token|\.pem$|sasl\.oauthbearer\.config|jaas"
)
_PYTHON: Final = {
    "security.protocol": "security_protocol",
    "sasl.mechanism": "sasl_mechanism",
    "sasl.mechanisms": "sasl_mechanism",
    "sasl.username": "sasl_plain_username",
    "sasl.password": "sasl_plain_password",
    "ssl.ca.location": "ssl_cafile",
    "ssl.certificate.location": "ssl_certfile",
    "ssl.key.location": "ssl_keyfile",
    "ssl.key.password": "ssl_password",
}
"""Properties of librdkafka, and the arguments of kafka-python that mean the same."""


@dataclass(frozen=True, kw_only=True)
class KafkaSecurity:
    """The credentials of a Kafka source or sink, and its encryption.

    A `password`, `token` or `key_password` of the form `file:/path` or `env:NAME` is read where the client
    runs: on the machine that submits the job, and on each worker. Then it is no part of the job.

    Attributes:
        mechanism: of SASL: `PLAIN`, `SCRAM-SHA-256`, `SCRAM-SHA-512` or `OAUTHBEARER`; None: no SASL.
        username: for all mechanisms but OAUTHBEARER.
        password: for all mechanisms but OAUTHBEARER.
        token: for OAUTHBEARER: a JSON web token. A file is read again before the token expires.
        tls: encrypt, and check the certificates of the brokers and their names.
        ca: the file with the certificates of the authorities to trust; None: those of the system.
        certificate: the file with the certificate of this client.
        key: the file with its key.
        key_password: the password of that file.
    """

    mechanism: Mechanism | None = None
    username: str | None = None
    password: str | None = None
    token: str | None = None
    tls: bool = False
    ca: str | None = None
    certificate: str | None = None
    key: str | None = None
    key_password: str | None = None

    def __post_init__(self) -> None:
        """Check that the options fit together.

        Raises:
            UsageError: one is missing, or has no effect.
        """
        if self.mechanism is not None and self.mechanism not in MECHANISMS:
            raise UsageError(
                f"no such mechanism of SASL mechanism=`{self.mechanism}`",
                fix=suggest(self.mechanism, MECHANISMS, "mechanisms"),
            )
        by_token = self.mechanism == "OAUTHBEARER"
        by_password = self.mechanism is not None and not by_token
        for needed, names in ((by_password, ("username", "password")), (by_token, ("token",))):
            for name in names:
                if (getattr(self, name) is not None) != needed:
                    problem = "needs" if needed else "has no use for"
                    raise UsageError(
                        f"this security {problem} an option option=`{name}` "
                        f"mechanism=`{self.mechanism}`",
                        fix=_FIXES[by_token],
                    )
        for name in ("ca", "certificate", "key", "key_password"):
            if getattr(self, name) is not None and not self.tls:
                raise UsageError(
                    f"this option has no effect without TLS option=`{name}`", fix="tls=True"
                )
        if (self.certificate is None) != (self.key is None):
            raise UsageError(
                "a client certificate and its key belong together", fix="give certificate= and key="
            )

    def __repr__(self) -> str:
        """Return the options without secrets."""
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        told = {
            name: "***" if _SECRET.search(name) else value
            for name, value in given.items()
            if value not in (None, False)
        }
        return f"KafkaSecurity({', '.join(f'{name}={value!r}' for name, value in told.items())})"

    def properties(self) -> dict[str, str]:
        """Return the same as properties of librdkafka; secrets stay as they were given."""
        protocol = ("SASL_" if self.mechanism else "") + ("SSL" if self.tls else "PLAINTEXT")
        given = {
            "security.protocol": protocol.lower(),
            "sasl.mechanism": self.mechanism,
            "sasl.username": self.username,
            "sasl.password": self.password,
            _TOKEN: self.token,
            "ssl.ca.location": self.ca,
            "ssl.certificate.location": self.certificate,
            "ssl.key.location": self.key,
            "ssl.key.password": self.key_password,
        }
        return {name: value for name, value in given.items() if value is not None}


_FIXES: Final = {
    True: 'KafkaSecurity(mechanism="OAUTHBEARER", token="file:/run/secrets/token")',
    False: 'KafkaSecurity(mechanism="SCRAM-SHA-512", username="headgate", '
    'password="file:/run/secrets/kafka")',
}


def with_security(properties: Mapping[str, str], security: KafkaSecurity | None) -> dict[str, str]:
    """Return the properties with those of the security added.

    Raises:
        UsageError: a property says something about security, too.
    """
    if security is None:
        return dict(properties)
    for name in properties:
        if is_security(name):
            raise UsageError(
                f"security= and a property say how to connect property=`{name}`",
                fix="keep security=, and remove the property",
            )
    return {**properties, **security.properties()}


def is_security(name: str) -> bool:
    """Return True if a property of librdkafka is about security."""
    return name == "security.protocol" or name.startswith(
        ("ssl.", "sasl.", "enable.ssl", "enable.sasl")
    )


def without_secrets(properties: Mapping[str, str]) -> dict[str, str]:
    """Return properties for messages: without secrets."""
    return {name: "***" if _SECRET.search(name) else value for name, value in properties.items()}


def resolved(properties: Mapping[str, str]) -> dict[str, Any]:
    """Return properties for librdkafka, with secrets read from where `file:` and `env:` say.

    This happens on the machine that connects, so that the job holds no secret.

    Raises:
        UsageError: a file cannot be read, or a variable is not set.
    """
    found: dict[str, Any] = {name: read_secret(name, value) for name, value in properties.items()}
    if found.pop(_TOKEN, None) is not None:
        found["oauth_cb"] = _token_for_librdkafka(properties[_TOKEN])
    return found


def _token_for_librdkafka(given: str) -> Callable[[str], tuple[str, float]]:
    """Return the call by which librdkafka gets a token and the time at which it expires."""

    def token(_: str) -> tuple[str, float]:
        found = read_secret(_TOKEN, given)
        return found, _expiry_s(found)

    return token


def _expiry_s(token: str) -> float:
    """Return the time at which a token expires, in seconds since 1970."""
    try:
        claims = token.split(".")[1]
        return float(json.loads(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))["exp"])
    except (ValueError, LookupError, TypeError):
        return SystemClock().now_ms() / 1000 + _TOKEN_S  # the broker decides whether it is one


class _TokenProvider:
    """Gives kafka-python the token, which it asks for whenever it connects."""

    def __init__(self, given: str) -> None:
        self._given = given

    def token(self) -> str:
        return read_secret(_TOKEN, self._given)

    def extensions(self) -> dict[str, str]:
        return {}


def fits_kafka_python(properties: Mapping[str, str]) -> bool:
    """Return whether kafka-python can connect as librdkafka does with these properties."""
    mechanism = properties.get("sasl.mechanism", properties.get("sasl.mechanisms", "GSSAPI"))
    by_sasl = properties.get("security.protocol", "").lower().startswith("sasl")
    return (mechanism in MECHANISMS or not by_sasl) and all(
        name in _PYTHON for name in properties if is_security(name)
    )


def check_security(properties: Mapping[str, str]) -> None:
    """Check that both clients can connect in the same way.

    Raises:
        UsageError: one of the properties has no form for kafka-python.
    """
    for name in properties:
        if is_security(name) and name not in _PYTHON:
            raise UsageError(
                f"exactly-once output does not support this property property=`{name}`",
                fix=f'supported are {", ".join(_PYTHON)}; or say guarantee="at_least_once"',
            )


def for_kafka_python(properties: Mapping[str, str]) -> dict[str, Any]:
    """Return the security settings as arguments of kafka-python; other properties do not concern it."""
    found: dict[str, Any] = {
        _PYTHON[name]: read_secret(name, value)
        for name, value in properties.items()
        if name in _PYTHON
    }
    if "security_protocol" in found:
        found["security_protocol"] = found["security_protocol"].upper()
    # At the level DEBUG this client logs its settings and all requests, also those with passwords.
    logging.getLogger("kafka").setLevel(logging.INFO)
    if _TOKEN in properties:
        found["sasl_oauth_token_provider"] = _provider_class()(properties[_TOKEN])
    return found


def _provider_class() -> type[_TokenProvider]:
    from kafka.net.sasl.oauth import AbstractTokenProvider

    AbstractTokenProvider.register(_TokenProvider)
    return _TokenProvider
