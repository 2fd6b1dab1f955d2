"""Requests to one service: its address and credentials, and how often a request is made again.

The address may have secrets in its query, and headers in their values. Neither is shown.
"""

from __future__ import annotations

import asyncio
import random
import re
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Any, Final
from urllib.parse import quote, quote_plus, unquote, unquote_plus, urlsplit, urlunsplit

from ...errors import JobError, StorageError, UsageError
from ...operators.clock import Clock
from ...operators.durations import Duration, parse_duration
from ..arguments import check_count
from ..secrets import is_reference, read_secret

HTTP: Final = ("http", "https")
WEBSOCKET: Final = ("ws", "wss")
RETRIED: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
"""The statuses of a service that may answer otherwise later."""
FIRST_PAUSE_S: Final = 0.5
RETRY_AFTER_S_MAX: Final = 300.0
"""A service that asks for a longer pause is asked again after this one."""
ANSWER_BYTES_MAX: Final = 4096
"""The most bytes of an answer that are read to show them."""
CONNECT_S_MAX: Final = 10.0
_SHOWN_MAX: Final = 300
_CLOSE_S_MAX: Final = 1.0
"""The longest wait for a service to end a WebSocket, too."""
_SECRET_MIN: Final = 6
"""Shorter values that stand in the job itself are not hidden: they would be found in any text."""
_WORDS: Final = re.compile(rf"[^\s\"{{}}\[\],:]{{{_SECRET_MIN},}}")
_HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """The settings of requests.

    Attributes:
        url: the address.
        headers: further headers; a value may be `file:/path` or `env:NAME`.
        ca: the file of the authorities to trust; None: those of the system.
        timeout_s: the longest time of a request.
        retries: how often a request is made again.
        longest_s: the longest pause before that, unless the service asks for a longer one.
    """

    url: str = field(repr=False)
    headers: Mapping[str, str] = field(repr=False)
    ca: str | None
    timeout_s: float
    retries: int
    longest_s: float

    @property
    def shown(self) -> str:
        """The address without its query."""
        scheme, place, path, _, _ = urlsplit(self.url)
        return urlunsplit((scheme, place, path, "", ""))

    @property
    def secure(self) -> bool:
        """True if connections use TLS."""
        return urlsplit(self.url).scheme in ("https", "wss")


def check_url(url: str, schemes: tuple[str, str] = HTTP) -> None:
    """Raise UsageError unless this is the address of a service, without credentials before the host.

    Args:
        url: the address.
        schemes: of a connection without TLS, and of one with it.
    """
    plain, secure = schemes
    kind = "of HTTP" if schemes == HTTP else "of a WebSocket"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise UsageError(f"not an address {kind}", fix=f"{plain}://host:port/path") from None
    if parts.scheme not in schemes or not parts.hostname or port == 0:
        raise UsageError(
            f"not an address {kind} scheme=`{parts.scheme}` host=`{parts.hostname or ''}`",
            fix=f"{plain}://host:port/path, or {secure}://",
        )
    if parts.username is not None or parts.password is not None:
        raise UsageError(
            f"the address has credentials in it host=`{parts.hostname}`",
            fix='give them as a header: headers={"Authorization": "env:TOKEN"}',
        )


def check_headers(headers: Mapping[str, str], own: frozenset[str]) -> dict[str, str]:
    """Return a copy of the user's headers.

    Args:
        headers: of the user.
        own: names in lower case that the connector sets itself.

    Raises:
        UsageError: one cannot be sent, or is set by the connector.
    """
    for name, value in headers.items():
        if not _HEADER_NAME.fullmatch(name):
            raise UsageError(f"not the name of a header headers=`{name}`")
        if name.lower() in own:
            raise UsageError(f"the connector sets this header itself headers=`{name}`")
        if not isinstance(value, str):
            raise UsageError(f"the value of a header is a text headers=`{name}`")
        _check_value(name, value)
    return dict(headers)


def _check_value(name: str, value: str) -> None:
    if not value.isprintable() or not value.isascii():
        raise UsageError(
            f"the value of a header has characters that cannot be sent header=`{name}`",
            fix="use printable ASCII",
        )


def http_settings(
    url: str,
    headers: Mapping[str, str] | None,
    ca: str | None,
    timeout: Duration,
    retries: int,
    longest_pause: Duration,
    own: frozenset[str],
    schemes: tuple[str, str] = HTTP,
) -> HttpSettings:
    """Return the checked settings of requests.

    Raises:
        UsageError: one is wrong.
    """
    check_url(url, schemes)
    check_count("retries", retries, 0)
    timeout_ms = parse_duration(timeout, "timeout")
    check_count("timeout", timeout_ms, 1)
    return HttpSettings(
        url,
        check_headers(headers or {}, own),
        ca,
        timeout_ms / 1000,
        retries,
        parse_duration(longest_pause, "longest_pause") / 1000,
    )


def check_reachable(settings: HttpSettings) -> None:
    """Check that something listens at the address; blocks.

    Raises:
        UsageError: nothing does.
    """
    _connected(settings).close()


def check_service(settings: HttpSettings) -> str:
    """Check all that can be checked without a request, which might change something; blocks.

    Returns:
        What was found.

    Raises:
        UsageError: nothing listens at the address, a secret cannot be read, or the service does not prove
            who it is.
    """
    for name, given in settings.headers.items():
        _check_value(name, read_secret(name, given))
    parts = urlsplit(settings.url)
    with _connected(settings) as plain:
        if not settings.secure:
            return "the service accepts connections; no request was made"
        try:
            context = ssl.create_default_context(cafile=settings.ca)
            context.wrap_socket(plain, server_hostname=parts.hostname).close()
        except OSError as error:
            raise UsageError(
                f"no connection with TLS is possible url=`{settings.shown}`: {error}",
                fix="check the address; ca= names the file of an authority of your own",
            ) from None
    return "the service accepts connections with TLS; no request was made"


def _connected(settings: HttpSettings) -> socket.socket:
    """Return a connection to the address, or raise UsageError."""
    parts = urlsplit(settings.url)
    port = parts.port or (443 if settings.secure else 80)
    try:
        return socket.create_connection((parts.hostname or "", port), CONNECT_S_MAX)
    except OSError as error:
        raise UsageError(
            f"the service cannot be reached url=`{settings.shown}`: {error}",
            fix="check the address, and that the service runs",
        ) from None


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of a service.

    Attributes:
        status: of HTTP.
        headers: by name in lower case.
        body: of the answer, perhaps cut.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def good(self) -> bool:
        """True if the service has done what was asked."""
        return 200 <= self.status < 300


class _Redirected(Exception):
    """A service wants a WebSocket to be opened elsewhere."""

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self.answer = answer


async def _stop_at_redirect(session: Any, context: Any, redirect: Any) -> None:
    raise _Redirected(Answer(redirect.response.status, {}, b"it redirects the connection"))


def _may_be_secret(value: str) -> bool:
    return len(value) >= _SECRET_MIN


class NoAnswer(Exception):
    """A request was not answered. The text is the reason, without secrets."""


class HttpClient:
    """The connections of one subtask to a service. All methods run in one event loop."""

    def __init__(
        self,
        settings: HttpSettings,
        clock: Clock,
        connections: int,
        on_retry: Callable[[], None],
        seed: str,
    ) -> None:
        """Make a client.

        Args:
            settings: of requests.
            clock: for times of `Retry-After`.
            connections: the most at the same time.
            on_retry: is called for each request that is made again.
            seed: of the lengths of pauses, different for each subtask.
        """
        self.settings = settings
        self._clock = clock
        self._connections = connections
        self._on_retry = on_retry
        self._chance = random.Random(seed)
        self._session: Any = None
        self._secrets: list[str] = []

    async def open(self) -> None:
        """Read the secrets, and make a session.

        Raises:
            UsageError: a secret or a certificate cannot be read.
        """
        import aiohttp

        settings = self.settings
        headers = {}
        for name, given in settings.headers.items():
            headers[name] = read_secret(name, given)
            _check_value(name, headers[name])
            # Any value may be a secret. A token is also hidden where it stands without the word `Bearer`.
            parts = [headers[name], *headers[name].split()]
            self._secrets += parts if is_reference(given) else filter(_may_be_secret, parts)
        context: ssl.SSLContext | bool = True
        if settings.secure:
            try:
                context = await asyncio.to_thread(ssl.create_default_context, cafile=settings.ca)
            except OSError as error:
                raise UsageError(
                    f"the certificates cannot be read ca=`{settings.ca}`: {error}"
                ) from None
        # A WebSocket has limits of its own, and its client follows redirects unless it is stopped.
        websocket = urlsplit(settings.url).scheme in WEBSOCKET
        traces = aiohttp.TraceConfig()
        traces.on_request_redirect.append(_stop_at_redirect)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=self._connections, ssl=context),
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=None if websocket else settings.timeout_s),
            trace_configs=[traces] if websocket else [],
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=True,
        )

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    @asynccontextmanager
    async def response(self, method: str, url: str, **options: Any) -> AsyncIterator[Any]:
        """Make one request, and yield the response of aiohttp.

        Redirects are not followed, as they would carry the credentials away.

        Raises:
            NoAnswer: there is none.
            JobError: there will be none, however often the request is made.
        """
        with self._failures():
            async with self._session.request(
                method, url, allow_redirects=False, **options
            ) as response:
                yield response

    @asynccontextmanager
    async def websocket(self, connect_s: float, message_bytes: int) -> AsyncIterator[Any]:
        """Make a connection, and yield the WebSocket of aiohttp, or the `Answer` that refuses it.

        Pings and pongs come as messages. Redirects are not followed.

        Args:
            connect_s: the longest time until it is there.
            message_bytes: the most bytes of a message.

        Raises:
            NoAnswer: there is no connection any more.
            JobError: there will be none, however often it is tried.
        """
        with self._failures():
            connected = await self._upgraded(connect_s, message_bytes)
            try:
                yield connected
            finally:
                if not isinstance(connected, Answer):
                    await connected.close()

    async def _upgraded(self, connect_s: float, message_bytes: int) -> Any:
        import aiohttp

        try:
            async with asyncio.timeout(connect_s):
                return await self._session.ws_connect(
                    self.settings.url,
                    autoping=False,
                    max_msg_size=message_bytes,
                    timeout=aiohttp.ClientWSTimeout(ws_close=_CLOSE_S_MAX),
                )
        except _Redirected as error:
            return error.answer
        except aiohttp.WSServerHandshakeError as error:
            headers = {name.lower(): value for name, value in (error.headers or {}).items()}
            return Answer(error.status, headers, error.message.encode())

    def hide(self, secret: str) -> None:
        """Leave a secret, and the longer words of it, out of all texts."""
        self._secrets += [secret, *_WORDS.findall(secret)]

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Turn errors of a connection into those of this class, without secrets."""
        import aiohttp

        try:
            yield
        except aiohttp.ClientSSLError as error:
            raise JobError(
                f"the service does not prove who it is url=`{self.settings.shown}`: "
                f"{self.redacted(str(error))}",
                fix="check the address; ca= names the file of an authority of your own",
            ) from None
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            text = self.redacted(str(error))
            kind = type(error).__name__
            raise NoAnswer(f"{kind}: {text}" if text else kind) from None

    async def once(
        self, method: str, url: str, bytes_max: int = ANSWER_BYTES_MAX, **options: Any
    ) -> Answer:
        """Make one request, and read at most a given number of bytes of the answer.

        Raises:
            NoAnswer: there is none.
        """
        async with self.response(method, url, **options) as response:
            body = bytearray()
            while len(body) < bytes_max:
                chunk = await response.content.read(bytes_max - len(body))
                if not chunk:
                    break
                body += chunk
            headers = {name.lower(): value for name, value in response.headers.items()}
            return Answer(response.status, headers, bytes(body))

    async def patient(
        self, method: str, url: str, busy: frozenset[int] = frozenset(), **options: Any
    ) -> Answer:
        """Make a request until there is an answer that another request would not change.

        Args:
            method: of the request.
            url: of the request.
            busy: statuses by which the service says that it is still at an earlier try.
            options: of `once`.

        Raises:
            StorageError: there is none after all retries.
            JobError: there will be none, however often the request is made.
        """
        for tries in range(self.settings.retries + 1):
            asked_s = 0.0
            try:
                answer = await self.once(method, url, **options)
            except NoAnswer as error:
                reason = str(error)
            else:
                if answer.status not in RETRIED and not (tries and answer.status in busy):
                    return answer
                reason = self.shown_answer(answer)
                asked_s = retry_after_s(answer.headers.get("retry-after"), self._clock.now_ms())
            if tries < self.settings.retries:
                self._on_retry()
                await asyncio.sleep(self.pause_s(tries, asked_s))
        raise StorageError(
            f"the service does not answer url=`{self.settings.shown}` tries=`{tries + 1}`: {reason}",
            fix="check that it runs; raise retries= if it may be away for longer",
        )

    def pause_s(self, tries: int, asked_s: float) -> float:
        """Return the pause after a failed request, with jitter.

        Args:
            tries: the failed requests before.
            asked_s: the pause that the service has asked for; 0: it has not.
        """
        longest_s = self.settings.longest_s
        pause_s = min(longest_s, FIRST_PAUSE_S * 2.0 ** min(tries, 30))
        jittered_s = pause_s * self._chance.uniform(0.5, 1)
        # Subtasks that were all told the same pause must not come back at the same time.
        return max(jittered_s, asked_s + jittered_s * 0.1 if asked_s else 0.0)

    def shown_answer(self, answer: Answer) -> str:
        """Return an answer as a text for errors."""
        text = " ".join(answer.body.decode(errors="replace").split())
        text = self.redacted(text)[:_SHOWN_MAX]
        return f"status {answer.status}: {text}" if text else f"status {answer.status}"

    def redacted(self, text: str) -> str:
        """Return a text without the secrets of the requests."""
        secrets = {*self._secrets, *_secrets_of(urlsplit(self.settings.url).query)}
        for secret in sorted(filter(None, secrets), key=len, reverse=True):
            text = text.replace(secret, "***")
        return text


def _secrets_of(query: str) -> set[str]:
    """Return a query and its values, in the forms in which the client or the service may give them back."""
    found = {query}
    for part in query.replace(";", "&").split("&"):
        value = part.partition("=")[2]
        plain = unquote_plus(value)
        # Codes stand for all characters that need them, or only for those that aiohttp writes so.
        codes = {quote(plain, safe=""), quote(plain, safe="/?:@!$'()*,~"), quote_plus(plain)}
        forms = {value, plain, unquote(value), *codes}
        found |= set(filter(_may_be_secret, forms))
    return found


def retry_after_s(header: str | None, now_ms: int) -> float:
    """Return the seconds that a header `Retry-After` asks for, at most `RETRY_AFTER_S_MAX`; 0: none."""
    if header is None:
        return 0.0
    text = header.strip()
    if text.isascii() and text.isdigit():
        return min(RETRY_AFTER_S_MAX, float(text[:9]))
    try:
        time = parsedate_to_datetime(text)
    except (ValueError, TypeError, OverflowError):
        return 0.0
    time = time if time.tzinfo is not None else time.replace(tzinfo=UTC)
    return min(RETRY_AFTER_S_MAX, max(0.0, time.timestamp() - now_ms / 1000))
