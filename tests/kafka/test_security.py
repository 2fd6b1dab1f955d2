"""Passwords, tokens, TLS and rights, on a real broker: all ways to connect, refusals, and no leaks."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from headgate.connectors import KafkaSecurity, kafka_sink, kafka_source
from headgate.connectors.kafka.client import describe_topics
from headgate.errors import HeadgateError, UsageError
from headgate.operators.elements import ColumnBatch
from headgate.operators.sink import SinkRun
from headgate.runtime.manifest import load_job
from headgate.state.snapshot import CommitPermit
from headgate.testing.connectors import make_context, read_all
from headgate.testing.servers.kafka import SecureKafkaServer
from headgate.testing.servers.programs import NotAvailableError
from headgate.tests.kafka.conftest import thorough_only
from headgate.tests.support.scenarios import guarded
from headgate.tests.support.skips import skip_or_fail

PASSWORD = "a-password-that-leaks-nowhere"
run = partial(guarded, seconds=120)
RUN = SinkRun("secure", "out", {}, None, lambda text: None)
_numbers = itertools.count()


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureKafkaServer]:
    """A running broker with users and rights."""
    try:
        server = SecureKafkaServer(tmp_path_factory.mktemp("kafka") / "secure")
    except NotAvailableError as error:
        skip_or_fail(str(error))
    try:
        server.start()
        yield server
    finally:
        server.close()


@dataclass
class Rights:
    """What a user may do; a test takes one away."""

    topic: tuple[str, ...] = ("READ", "WRITE")
    transactional_id: tuple[str, ...] = ("WRITE",)
    group: tuple[str, ...] = ("READ",)
    denied: dict[str, tuple[str, ...]] = field(default_factory=dict)


def new_topic(secure: SecureKafkaServer) -> str:
    name = f"secure-{next(_numbers)}"
    secure.create_topic(name)
    return name


def give(secure: SecureKafkaServer, user: str, topic: str, rights: Rights) -> None:
    places = {"topic": topic, "transactional_id": "hg-*", "group": "hg-*"}
    for kind, name in places.items():
        if operations := getattr(rights, kind):
            secure.allow(user, kind, name, *operations)
        if operations := rights.denied.get(kind, ()):
            secure.allow(user, kind, name, *operations, permission="DENY")


def new_user(
    secure: SecureKafkaServer, topic: str, rights: Rights, mechanism: Any = "SCRAM-SHA-512"
) -> KafkaSecurity:
    name = f"user-{next(_numbers)}"
    secure.add_user(name, PASSWORD, mechanism)
    give(secure, name, topic, rights)
    return KafkaSecurity(mechanism=mechanism, username=name, password=PASSWORD)


def unsecured_token(subject: str) -> str:
    """A JSON web token without a signature, which this broker believes."""

    def part(given: dict[str, Any]) -> str:
        return base64.urlsafe_b64encode(json.dumps(given).encode()).decode().rstrip("=")

    now = int(time.time())
    return f"{part({'alg': 'none'})}.{part({'sub': subject, 'iat': now, 'exp': now + 3600})}."


async def write_and_read(bootstrap: str, topic: str, security: KafkaSecurity) -> list[Any]:
    """Write two records in a transaction, and return what a source reads."""
    sink = kafka_sink(
        topic, bootstrap=bootstrap, format="raw", guarantee="exactly_once", security=security
    )
    await asyncio.to_thread(sink.check_output, RUN)
    writer = sink.writer()
    writer.open(make_context())
    await asyncio.to_thread(writer.prepare)
    writer.write(ColumnBatch(pa.record_batch({"value": [b"1", b"2"]})))
    precommit = writer.roll(1)
    assert precommit is not None
    committables = await asyncio.to_thread(precommit)
    await asyncio.to_thread(writer.commit, committables, CommitPermit("secure", 0, 1))
    writer.close()
    source = kafka_source(
        topic, bootstrap=bootstrap, format="raw", stop="latest", security=security
    )
    return await read_all(source)


@pytest.mark.parametrize(
    ("mechanism", "tls"),
    [
        pytest.param("PLAIN", False, marks=thorough_only),
        pytest.param("SCRAM-SHA-256", False, marks=thorough_only),
        ("SCRAM-SHA-512", True),
        ("OAUTHBEARER", False),
        pytest.param("OAUTHBEARER", True, marks=thorough_only),
        ("certificate", True),
    ],
)
def test_every_way_to_connect_writes_in_transactions_and_reads(
    secure: SecureKafkaServer, tmp_path: Path, mechanism: str, tls: bool
) -> None:
    topic = new_topic(secure)
    encrypted: dict[str, Any] = {"tls": True, "ca": str(secure.ca)} if tls else {}
    bootstrap = secure.sasl_tls if tls else secure.sasl
    if mechanism == "certificate":
        bootstrap, user = secure.tls, f"client-{next(_numbers)}"
        certificate, key = secure.issue(user)
        security = KafkaSecurity(certificate=str(certificate), key=str(key), **encrypted)
        user = f"CN={user}"
    elif mechanism == "OAUTHBEARER":
        user = f"token-{next(_numbers)}"
        (tmp_path / "token").write_text(unsecured_token(user) + "\n")
        security = KafkaSecurity(
            mechanism="OAUTHBEARER", token=f"file:{tmp_path / 'token'}", **encrypted
        )
    else:
        user, password = secure.PLAIN_USER
        if mechanism != "PLAIN":
            user, password = f"user-{next(_numbers)}", PASSWORD
            secure.add_user(user, password, mechanism)
        (tmp_path / "password").write_text(password + "\n")
        security = KafkaSecurity(
            mechanism=mechanism,  # type: ignore[arg-type]
            username=user,
            password=f"file:{tmp_path / 'password'}",
            **encrypted,
        )
    give(secure, user, topic, Rights())
    assert len(run(write_and_read(bootstrap, topic, security))) == 2


def refusals(secure: SecureKafkaServer) -> dict[str, tuple[str, str, KafkaSecurity, str]]:
    """Address, topic, security and reason of what is refused to sources and sinks alike."""
    topic = new_topic(secure)
    right = new_user(secure, topic, Rights())
    encrypted = {"mechanism": right.mechanism, "username": right.username, "tls": True}
    wrong = KafkaSecurity(mechanism=right.mechanism, username=right.username, password=PASSWORD[1:])
    trusting = KafkaSecurity(password=PASSWORD, ca=str(secure.ca), **encrypted)  # type: ignore[arg-type]
    strange = KafkaSecurity(password=PASSWORD, **encrypted)  # type: ignore[arg-type]
    return {
        "a wrong password": (secure.sasl, topic, wrong, "invalid credentials"),
        "a wrong token": (
            secure.sasl,
            topic,
            KafkaSecurity(mechanism="OAUTHBEARER", token="no.token.at-all"),
            "token|SASL",
        ),
        "an authority that is not trusted": (
            secure.sasl_tls,
            topic,
            strange,
            "certificate verify failed",
        ),
        "another name in the certificate": (
            secure.sasl_tls.replace("localhost", "127.0.0.1"),
            topic,
            trusting,
            "certificate verify failed",
        ),
        "no certificate of the client": (
            secure.tls,
            topic,
            KafkaSecurity(tls=True, ca=str(secure.ca)),
            "SSL alert",
        ),
        "an unknown topic": (secure.sasl, "no-such-topic", right, "no-such-topic"),
    }


@pytest.mark.parametrize(
    "mistake",
    [
        "a wrong password",
        pytest.param("a wrong token", marks=thorough_only),
        pytest.param("an authority that is not trusted", marks=thorough_only),
        "another name in the certificate",
        pytest.param("no certificate of the client", marks=thorough_only),
        "an unknown topic",
    ],
)
def test_a_mistake_is_an_error_with_its_reason_before_the_first_record(
    secure: SecureKafkaServer, monkeypatch: pytest.MonkeyPatch, mistake: str
) -> None:
    """No error waits until the time is up in which a cluster has to answer: here it is never up."""
    monkeypatch.setattr("headgate.connectors.kafka.client.ANSWER_S_MAX", 3_600.0)
    bootstrap, topic, security, reason = refusals(secure)[mistake]
    source = kafka_source(topic, bootstrap=bootstrap, format="raw", security=security)
    sink = kafka_sink(
        topic, bootstrap=bootstrap, format="raw", guarantee="exactly_once", security=security
    )
    for check in (
        lambda: source.splits(1),
        lambda: sink.check_output(RUN),
        lambda: source.check_connection({}),
        lambda: sink.check_connection({}),
    ):
        with pytest.raises(HeadgateError, match=reason) as raised:
            check()
        assert PASSWORD[1:] not in str(raised.value)


@pytest.mark.parametrize(
    ("rights", "missing"),
    [
        (Rights(topic=("READ",)), "right=`WRITE` topic=`secure-"),
        (Rights(topic=("WRITE",)), "right=`READ` topic=`secure-"),
        (Rights(topic=()), "no right to WRITE topic=`secure-"),
        (Rights(transactional_id=()), "right=`WRITE` transactional-id=`hg-"),
        (Rights(group=()), "right=`READ` group=`hg-"),
    ],
)
def test_a_sink_names_the_right_that_it_lacks(
    secure: SecureKafkaServer, rights: Rights, missing: str
) -> None:
    topic = new_topic(secure)
    security = new_user(secure, topic, rights)
    sink = kafka_sink(
        topic, bootstrap=secure.sasl, format="raw", guarantee="exactly_once", security=security
    )
    with pytest.raises(UsageError) as raised:
        sink.check_output(RUN)
    assert missing in str(raised.value)


def test_a_sink_names_the_right_that_it_lacks_however_late_the_answer_is(
    secure: SecureKafkaServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a right to write a producer gets no id, and then it answers nothing any more."""

    def late(client: Any, *arguments: Any) -> Any:
        for _ in range(10):
            client.poll(0.1)
        return describe_topics(client, *arguments)

    monkeypatch.setattr("headgate.connectors.kafka.sink.describe_topics", late)
    topic = new_topic(secure)
    security = new_user(secure, topic, Rights(topic=()))
    sink = kafka_sink(
        topic, bootstrap=secure.sasl, format="raw", guarantee="exactly_once", security=security
    )
    for check in (lambda: sink.check_output(RUN), lambda: sink.check_connection({})):
        with pytest.raises(UsageError, match=f"no right to WRITE topic=`{topic}`"):
            check()


def test_a_source_names_the_right_that_it_lacks(secure: SecureKafkaServer) -> None:
    topic = new_topic(secure)
    for rights, group, missing in (
        (Rights(topic=()), None, "no right to READ topic=`secure-"),
        (Rights(topic=("WRITE",)), None, "right=`READ` topic=`secure-"),
        (Rights(), "other", "right=`READ` group=`other`"),
    ):
        security = new_user(secure, topic, rights)
        source = kafka_source(
            topic, bootstrap=secure.sasl, format="raw", security=security, group=group
        )
        with pytest.raises(UsageError) as raised:
            source.splits(1)
        assert missing in str(raised.value)


def test_a_user_who_sees_no_transactions_is_refused_at_each_attempt(
    secure: SecureKafkaServer,
) -> None:
    """The list of open transactions is empty for such a user, so those of dead attempts would stay open."""
    topic = new_topic(secure)
    denied = Rights(denied={"transactional_id": ("DESCRIBE",)})
    security = new_user(secure, topic, denied)
    sink = kafka_sink(
        topic, bootstrap=secure.sasl, format="raw", guarantee="exactly_once", security=security
    )

    async def attempt() -> None:
        writer = sink.writer()
        writer.open(make_context(attempt=2, restored_checkpoint=1))
        with pytest.raises(UsageError, match="transactional-id=`hg-"):
            await asyncio.to_thread(writer.prepare)
        writer.close()

    run(attempt())


def test_options_that_do_not_fit_together_are_refused() -> None:
    for given, problem in (
        ({"mechanism": "SCRAM"}, "no such mechanism"),
        ({"mechanism": "PLAIN", "username": "u"}, "option=`password`"),
        ({"mechanism": "OAUTHBEARER"}, "option=`token`"),
        ({"password": "p"}, "option=`password`"),
        ({"ca": "ca.pem"}, "without TLS option=`ca`"),
        ({"tls": True, "key": "k"}, "belong together"),
    ):
        with pytest.raises(UsageError, match=problem):
            KafkaSecurity(**given)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"property=`ssl.ca.location`"):
        kafka_sink(
            "t",
            bootstrap="b:1",
            security=KafkaSecurity(tls=True),
            properties={"ssl.ca.location": "ca.pem"},
        )


MANIFEST = """
apiVersion: headgate.io/v1alpha1
kind: StreamJob
metadata: {{name: secure}}
spec:
  checkpoint: {{every: 20ms, storage: {path}/state}}
  sources:
    source:
      kafka:
        topics: [{source}]
        bootstrap: {bootstrap}
        security: {security}
      schema: {{id: long}}
  sinks:
    out:
      from: source
      kafka: {{topic: {target}, bootstrap: "{bootstrap}", security: {security}}}
      guarantee: exactly_once
"""


@pytest.mark.parametrize(
    "given", [pytest.param("env:KAFKA_PASSWORD", marks=thorough_only), "${KAFKA_PASSWORD}"]
)
def test_a_password_is_in_no_file_log_or_text(
    secure: SecureKafkaServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    given: str,
) -> None:
    """A manifest, its checkpoints, a savepoint, the log of the job, logs, `explain` and errors."""
    source, target = new_topic(secure), new_topic(secure)
    security = new_user(secure, source, Rights())
    give(secure, str(security.username), target, Rights(transactional_id=(), group=()))
    monkeypatch.setenv("KAFKA_PASSWORD", PASSWORD)
    secure.produce(source, [b'{"id": %d}' % number for number in range(100)])
    options = f'{{mechanism: SCRAM-SHA-512, username: {security.username}, password: "{given}"}}'
    manifest = tmp_path / "secure.yaml"
    manifest.write_text(
        MANIFEST.format(
            path=tmp_path,
            source=source,
            target=target,
            bootstrap=secure.sasl,
            security=options,
        )
    )
    caplog.set_level(logging.DEBUG)
    job = load_job(manifest)
    texts = [job.explain(), repr(job)]
    with job.start() as handle:
        while len(read(secure, target)) < 100:
            texts.append(repr(handle.status()))
        handle.savepoint(str(tmp_path / "savepoints"))
        handle.stop()
    for text in (*texts, caplog.text, repr(security)):
        assert PASSWORD not in text
    looked_at = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(looked_at) > 3
    for path in looked_at:
        content = path.read_bytes()
        assert PASSWORD.encode() not in content, path
        assert base64.b64encode(PASSWORD.encode())[:-4] not in content, path


def read(secure: SecureKafkaServer, topic: str) -> list[Any]:
    source = kafka_source(topic, bootstrap=secure.bootstrap, format="raw", stop="latest")
    return list(run(read_all(source)))
