"""A client of schema registries that have the API of Confluent's, and the header of messages that use one.

Schemas never change under their id, so each is asked for once. Messages of known schemas are decoded while
the registry does not answer.
"""

from __future__ import annotations

import base64
import http.client
import json
import logging
import ssl
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, TypeVar
from urllib.parse import quote, urlsplit

import numpy as np
import pyarrow as pa

from ...errors import JobError, UsageError
from ...operators.clock import Clock, SystemClock
from ...operators.durations import Duration, parse_duration
from ...operators.sizes import parse_size
from ..arguments import check_count
from ..files.decode import Decoded
from ..secrets import read_secret
from .format import UndecodableError

HEADER_BYTES: Final = 5
"""A zero, and the id of the schema as a number of four bytes, the highest first."""
REFERENCES_MAX: Final = 100
_PAUSE_S: Final = 0.2
_PAUSE_S_MAX: Final = 5.0
_UNKNOWN_TRIES: Final = 3
"""A new schema may not have reached every node of the registry."""
_UNKNOWN_S: Final = 30.0
"""A schema that the registry does not have is not asked for again for this time."""
_JSON: Final = "application/vnd.schemaregistry.v1+json"
_log = logging.getLogger("headgate.connectors.formats")
T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class SchemaRegistry:
    """The arguments of `schema_registry`, which documents them."""

    urls: tuple[str, ...]
    username: str | None
    password: str | None
    token: str | None
    ca: str | None
    certificate: str | None
    key: str | None
    timeout_s: float
    patience_s: float
    cached: int
    response_bytes: int
    auto_register: bool

    def __repr__(self) -> str:
        """Return the settings without secrets."""
        return f"SchemaRegistry({', '.join(self.urls)})"


def schema_registry(
    url: str,
    *,
    username: str | None = None,
    password: str | None = None,
    token: str | None = None,
    ca: str | None = None,
    certificate: str | None = None,
    key: str | None = None,
    timeout: Duration = "5s",
    patience: Duration = "30s",
    cached: int = 1000,
    response_max: str | int = "4mb",
    auto_register: bool = False,
) -> SchemaRegistry:
    """Return the settings of a schema registry, for formats that use one.

    Args:
        url: its address, `https://host:port/path`; several with commas, which are tried in turn.
        username: for basic authentication, with `password`.
        password: `file:/path` and `env:NAME` are read where the client runs, so that the job holds no
            secret.
        token: for bearer authentication; in the same forms.
        ca: a file with the certificates to trust; None: those of the machine.
        certificate: a file with the certificate of this client, and `key`, the file of its key.
        key: see `certificate`.
        timeout: for one request.
        patience: a request is tried again for this time while the registry does not answer.
        cached: the most schemas that a subtask keeps.
        response_max: the most bytes of an answer.
        auto_register: True if a sink registers its schema; otherwise the schema must be there.

    Raises:
        UsageError: an argument is wrong.
    """
    urls = tuple(each.strip().rstrip("/") for each in url.split(","))
    for each in urls:
        parts = urlsplit(each)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(
                f"not the address of a registry url=`{parts._replace(netloc='').geturl()}`",
                fix='schema_registry("https://registry:8081")',
            )
        if parts.username or parts.password:
            raise UsageError(
                "the address of the registry has a password in it",
                fix="give username= and password=, which are not shown in messages",
            )
        if parts.query or parts.fragment:
            raise UsageError("the address of the registry has a query", fix="leave it out")
    if (username is None) != (password is None) or (username is not None and token is not None):
        raise UsageError(
            "the registry needs a username and a password, or a token", fix="keep one of the two"
        )
    if key is not None and certificate is None:
        raise UsageError("the key belongs to a certificate", fix="certificate=")
    check_count("cached", cached, 1)
    return SchemaRegistry(
        urls,
        username,
        password,
        token,
        ca,
        certificate,
        key,
        parse_duration(timeout, "timeout") / 1000,
        parse_duration(patience, "patience") / 1000,
        cached,
        parse_size(response_max, "response_max") if isinstance(response_max, str) else response_max,
        auto_register,
    )


@dataclass(frozen=True)
class Registered:
    """A schema of the registry.

    Attributes:
        id: its number.
        kind: `AVRO`, `JSON` or `PROTOBUF`.
        text: the schema.
        references: the names and texts of schemas that it refers to, each behind those that it needs.
    """

    id: int
    kind: str
    text: str
    references: tuple[tuple[str, str], ...] = ()


class UnknownSchema(Exception):
    """Raised if the registry answers that it does not have a schema."""


class RegistryError(JobError):
    """The registry does not answer, or refuses what is asked."""


class RegistryClient:
    """Asks a registry. Its methods block, and are called in one thread.

    Args:
        settings: of the registry.
        clock: of the machine, unless it is a test.
        sleep: waits for some seconds.

    Raises:
        UsageError: a secret cannot be read or sent.
    """

    def __init__(
        self,
        settings: SchemaRegistry,
        clock: Clock | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._settings = settings
        self._clock = clock or SystemClock()
        self._sleep = sleep
        self._headers = {"Accept": f"{_JSON}, application/json", "Content-Type": _JSON}
        self._first = 0
        """The address that answered last."""
        if settings.username is not None and settings.password is not None:
            pair = f"{settings.username}:{read_secret('password', settings.password)}"
            self._headers["Authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
        if settings.token is not None:
            token = read_secret("token", settings.token)
            if not (token.isascii() and token.isprintable()):
                # Not left to the HTTP client, whose error shows it.
                raise UsageError(
                    "the token of the registry has characters that a header cannot have",
                    fix="is there more than the token in the file or variable?",
                )
            self._headers["Authorization"] = f"Bearer {token}"

    def schema(self, id: int, query: str = "") -> Registered:
        """Return the schema with this id.

        Raises:
            UnknownSchema: there is none.
            RegistryError: the registry does not answer, or refuses.
        """
        for attempt in range(_UNKNOWN_TRIES):
            if attempt:
                self._sleep(_PAUSE_S)
            found = self._ask("GET", f"/schemas/ids/{id}{query}")
            if found is not None:
                return self._registered(id, found, query)
        raise UnknownSchema(f"the registry has no schema with the id {id}")

    def check(self) -> None:
        """Ask once for a subject that need not exist; this changes nothing.

        Raises:
            RegistryError: the registry does not answer, or refuses us.
        """
        once = RegistryClient(replace(self._settings, patience_s=0), self._clock, self._sleep)
        once._ask("GET", "/subjects/headgate-check/versions/latest")

    def latest(self, subject: str) -> Registered:
        """Return the newest schema of a subject.

        Raises:
            UnknownSchema: the subject has none.
            RegistryError: the registry does not answer, or refuses.
        """
        found = self._ask("GET", f"/subjects/{quote(subject, safe='')}/versions/latest")
        if found is None:
            raise UnknownSchema(f"the registry has no schema of the subject `{subject}`")
        return self._registered(self._id_of(found), found)

    def id_of(self, subject: str, kind: str, text: str, *, register: bool) -> int:
        """Return the id of a schema of a subject, which is registered on request.

        Raises:
            UnknownSchema: the subject does not have it.
            RegistryError: the registry does not answer, or refuses.
        """
        path = f"/subjects/{quote(subject, safe='')}{'/versions' if register else ''}"
        body: dict[str, Any] = {"schema": text}
        if kind != "AVRO":
            body["schemaType"] = kind
        found = self._ask("POST", path, body)
        if found is None:
            raise UnknownSchema(f"the subject `{subject}` does not have this schema")
        return self._id_of(found)

    def _registered(self, id: int, found: Mapping[str, Any], query: str = "") -> Registered:
        texts: dict[str, str] = {}
        self._collect(found.get("references") or (), texts, 0, query)
        text = found.get("schema")
        if not isinstance(text, str):
            raise self._refused("an answer has no schema")
        kind = found.get("schemaType") or "AVRO"
        return Registered(id, str(kind), text, tuple(texts.items()))

    def _collect(
        self, references: Sequence[Any], texts: dict[str, str], depth: int, query: str
    ) -> None:
        """Add the texts of references, and of those that they refer to."""
        for each in references:
            try:
                name, subject, version = each["name"], each["subject"], int(each["version"])
            except (KeyError, TypeError, ValueError):
                raise self._refused("a reference between schemas is damaged") from None
            if name in texts:
                continue
            if depth > REFERENCES_MAX or len(texts) >= REFERENCES_MAX:
                raise self._refused(f"a schema refers to more than {REFERENCES_MAX} others")
            path = f"/subjects/{quote(str(subject), safe='')}/versions/{version}"
            found = self._ask("GET", path + query)
            if found is None or not isinstance(found.get("schema"), str):
                raise self._refused(f"a schema refers to `{subject}`, which is not there")
            self._collect(found.get("references") or (), texts, depth + 1, query)
            texts[str(name)] = found["schema"]

    def _id_of(self, found: Mapping[str, Any]) -> int:
        id = found.get("id")
        if not isinstance(id, int) or not 0 <= id < 1 << 32:
            raise self._refused("an answer has no id")
        return id

    def _refused(self, reason: str) -> RegistryError:
        return RegistryError(
            f"the schema registry cannot be used url=`{', '.join(self._settings.urls)}`: {reason}",
            fix="check the address, the credentials and the rights of the user",
        )

    def _ask(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> dict[str, Any] | None:
        """Return what the registry answers; None: there is no such thing. Tries for `patience`."""
        data = None if body is None else json.dumps(body).encode()
        deadline = self._clock.monotonic() + self._settings.patience_s
        pause, urls = _PAUSE_S, self._settings.urls
        while True:
            for _ in urls:
                url = urls[self._first % len(urls)]
                try:
                    status, answer = self._request(url, method, path, data)
                except ssl.SSLCertVerificationError as error:
                    raise self._refused(str(error)) from error
                except (OSError, http.client.HTTPException) as error:
                    reason = f"{type(error).__name__}: {error}"
                else:
                    if status < 500 and status not in (408, 429):
                        return self._answer(status, answer)
                    reason = f"status {status}: {_message(answer)}"
                self._first += 1  # the next address
            if self._clock.monotonic() + pause > deadline:
                raise self._refused(f"no answer, the last one was: {reason}")
            _log.warning("the schema registry is asked again: %s", reason)
            self._sleep(pause)
            pause = min(2 * pause, _PAUSE_S_MAX)

    def _answer(self, status: int, answer: bytes) -> dict[str, Any] | None:
        if status == 404:
            return None
        if status != 200:
            raise self._refused(f"status {status}: {_message(answer)}")
        try:
            found = json.loads(answer)
        except ValueError:
            found = None
        except RecursionError:
            found = None
        if not isinstance(found, dict):
            raise self._refused("an answer is no object of JSON")
        return found

    def _request(self, url: str, method: str, path: str, data: bytes | None) -> tuple[int, bytes]:
        """Send one request; redirects are not followed, as they would carry the credentials away."""
        settings, parts = self._settings, urlsplit(url)
        host, timeout = parts.hostname or "", settings.timeout_s
        if parts.scheme == "https":
            context = ssl.create_default_context(cafile=settings.ca)
            if settings.certificate is not None:
                context.load_cert_chain(settings.certificate, settings.key)
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                host, parts.port, timeout=timeout, context=context
            )
        else:
            connection = http.client.HTTPConnection(host, parts.port, timeout=timeout)
        deadline = self._clock.monotonic() + timeout
        with closing(connection):
            connection.request(method, parts.path + path, data, self._headers)
            answer = connection.getresponse()
            body = b""
            while chunk := answer.read1(1 << 16):
                body += chunk
                if len(body) > settings.response_bytes:
                    raise self._refused(
                        f"an answer has more than {settings.response_bytes} bytes (response_max=)"
                    )
                if self._clock.monotonic() > deadline:
                    raise TimeoutError("the answer did not end in time")
            return answer.status, body


def _message(answer: bytes) -> str:
    """Return what an error says, without the request, which may have been echoed."""
    try:
        found = json.loads(answer)["message"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return "no message"
    return str(found)[:300]


class SchemaCache(Generic[T]):
    """Keeps the objects made of schemas, by id: the last ones used, up to a limit.

    Args:
        client: asks the registry.
        make: makes it; raises ValueError if the schema is of no use here, with the reason.
        limit: the most schemas to keep.
    """

    def __init__(
        self,
        client: RegistryClient,
        make: Callable[[Registered], T],
        limit: int,
        clock: Clock | None = None,
    ) -> None:
        self._client = client
        self._make = make
        self._limit = limit
        self._clock = clock or SystemClock()
        self._made: OrderedDict[int, T | str] = OrderedDict()
        """By id: what was made, or the reason why nothing was."""
        self._unknown: OrderedDict[int, tuple[float, str]] = OrderedDict()
        """The ids that the registry does not have, and when they are asked for again."""

    def get(self, id: int) -> T | str:
        """Return what the schema with this id makes, or the reason why it makes nothing.

        Raises:
            RegistryError: it is not known here, and the registry does not answer.
        """
        if id in self._made:
            self._made.move_to_end(id)
            return self._made[id]
        now = self._clock.monotonic()
        if id in self._unknown and self._unknown[id][0] > now:
            return self._unknown[id][1]
        try:
            registered = self._client.schema(id)
        except UnknownSchema as error:
            self._unknown[id] = (now + _UNKNOWN_S, str(error))
            self._unknown.move_to_end(id)
            while len(self._unknown) > self._limit:
                self._unknown.popitem(last=False)
            return str(error)
        made: T | str
        try:
            made = self._make(registered)
        except ValueError as error:
            made = f"schema {id} of the registry: {error}"
        self._made[id] = made
        while len(self._made) > self._limit:
            self._made.popitem(last=False)
        return made


DecodeBehind = Callable[[Sequence[bytes]], Decoded]
"""Decodes messages, of which the header is still there."""


def decode_by_id(messages: Sequence[bytes], cache: SchemaCache[DecodeBehind]) -> Decoded:
    """Decode messages, each by the schema that its header names.

    Raises:
        UndecodableError: a schema is not known, and the registry does not answer.
    """
    heads = [message[:HEADER_BYTES] for message in messages]
    return decode_in_groups(messages, heads, lambda head, index: _decoder_of(head, cache, index))


def decode_in_groups(
    messages: Sequence[bytes],
    keys: Sequence[K],
    decoder_of: Callable[[K, int], DecodeBehind | str],
) -> Decoded:
    """Decode messages, those of one key together.

    Args:
        messages: to be decoded.
        keys: one for each message.
        decoder_of: returns the decoder for a key, or the reason why there is none. It gets the index of the
            first message, too.
    """
    groups: dict[K, list[int]] = {}
    if len(set(keys)) == 1:
        groups[keys[0]] = list(range(len(messages)))
    else:
        for index, key in enumerate(keys):
            groups.setdefault(key, []).append(index)
    bad: list[tuple[int, str]] = []
    parts: list[tuple[list[int], pa.RecordBatch]] = []
    for key, places in groups.items():
        decode = decoder_of(key, places[0])
        if isinstance(decode, str):
            bad += [(place, decode) for place in places]
            continue
        alone = len(places) == len(messages)
        decoded = decode(messages if alone else [messages[place] for place in places])
        if alone:
            return decoded
        wrong = {index for index, _ in decoded.bad}
        bad += [(places[index], reason) for index, reason in decoded.bad]
        batch = decoded.batch()
        if batch is not None:
            good = [place for index, place in enumerate(places) if index not in wrong]
            parts.append((good, batch))
    if not parts:
        return Decoded([], sorted(bad))
    order = np.argsort(np.concatenate([np.array(places) for places, _ in parts]))
    joined = pa.concat_batches([batch for _, batch in parts])
    return Decoded([joined.take(pa.array(order))], sorted(bad))


def _decoder_of(head: bytes, cache: SchemaCache[DecodeBehind], index: int) -> DecodeBehind | str:
    """Return the decoder of messages with this header, or the reason why they cannot be decoded."""
    if len(head) < HEADER_BYTES or head[0] != 0:
        return "it does not begin with the header of a schema registry"
    id = int.from_bytes(head[1:], "big")
    try:
        return cache.get(id)
    except RegistryError as error:
        raise UndecodableError(
            f"a message needs the schema {id}, which is not known here: {error.message}",
            index,
            error.fix,
        ) from error


def header_of(id: int) -> bytes:
    """Return the header of messages of a schema."""
    return b"\0" + id.to_bytes(4, "big")


def subject_of(topic: str) -> str:
    """Return the subject of the values of a topic."""
    return f"{topic}-value"


def written_id(settings: SchemaRegistry, topic: str, kind: str, text: str) -> int:
    """Return the id under which a sink writes a schema, which is registered if the user wants it.

    Raises:
        RegistryError: the registry does not answer, refuses, or does not have the schema.
    """
    client, subject = RegistryClient(settings), subject_of(topic)
    try:
        return client.id_of(subject, kind, text, register=settings.auto_register)
    except UnknownSchema as error:
        raise RegistryError(
            f"the schema of the sink is not registered topic=`{topic}`: {error} schema=`{text:.300}`",
            fix="register it, or say auto_register=True",
        ) from None


def newest(settings: SchemaRegistry, topic: str) -> Registered:
    """Return the newest schema of the values of a topic.

    Raises:
        RegistryError: there is none, or the registry does not answer, or refuses.
    """
    try:
        return RegistryClient(settings).latest(subject_of(topic))
    except UnknownSchema as error:
        raise RegistryError(
            f"the sink has no schema topic=`{topic}`: {error}",
            fix="register one, or say auto_register=True",
        ) from None
