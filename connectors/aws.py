"""Services of AWS: how they are reached, and errors that say what to do."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import cache
from typing import Any, Final, Generic, TypeVar
from urllib.parse import urlsplit

from ..errors import JobError, SourceError, StorageError, UsageError
from ..operators.clock import Clock
from .functions.calling import CallBounds, CallingWriter
from .outages import Outage

ANSWER_S_MAX: Final = 15
"""The time in which a service has to answer a request."""
AWAY_S: Final = 30.0
"""A service that is away is tried again for this time."""
PAUSE_S: Final = 0.5
"""The pause before a request is made again."""
_THROTTLED: Final = frozenset(
    {
        *("ProvisionedThroughputExceededException", "LimitExceededException", "Throttling"),
        *(
            "ThrottlingException",
            "RequestLimitExceeded",
            "KMSThrottlingException",
            "RequestThrottled",
        ),
    }
)
_FAILING: Final = frozenset({500, 502, 503, 504})
_log = logging.getLogger("headgate.connectors.aws")
M = TypeVar("M")


@dataclass(frozen=True)
class AwsService:
    """A service of one region, with the credentials that AWS clients find by themselves.

    Attributes:
        kind: its name, as in `boto3.client`.
        region: its region; None: that of the environment.
        endpoint: the address of another service with the same requests; None: that of AWS.
    """

    kind: str
    region: str | None = None
    endpoint: str | None = None

    def check(self) -> None:
        """Check the form of the address.

        Raises:
            UsageError: it is not that of a service.
        """
        if self.endpoint is None:
            return
        try:
            parts = urlsplit(self.endpoint)
            fits = parts.scheme in ("http", "https") and bool(parts.hostname)
            fits = fits and "@" not in parts.netloc and not parts.query
            fits = fits and (parts.port is None or parts.port > 0)
        except ValueError:
            fits = False
        if not fits:
            raise UsageError(
                "not the address of a service endpoint=",
                fix='endpoint="https://host:port", without credentials',
            )

    def __str__(self) -> str:
        """Return the address, or the region."""
        return self.endpoint or self.region or "the region of the environment"

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[Any]:
        """Yield a client for the time of the block. It makes each request once.

        Raises:
            SourceError: there is no region, or no credentials.
        """
        from aiobotocore.config import AioConfig
        from aiobotocore.session import get_session
        from botocore.exceptions import BotoCoreError

        session = get_session()
        session.register_component("data_loader", service_models())

        config = AioConfig(
            connect_timeout=ANSWER_S_MAX,
            read_timeout=ANSWER_S_MAX,
            retries={"mode": "standard", "total_max_attempts": 1},
        )
        try:
            made = session.create_client(
                self.kind, region_name=self.region, endpoint_url=self.endpoint, config=config
            )
            client = await made.__aenter__()
        except BotoCoreError as error:
            raise self.cannot_use(error) from error
        try:
            yield client
        finally:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(client.close(), ANSWER_S_MAX)

    def cannot_use(self, error: BaseException) -> SourceError:
        """Return the error for a service that does not answer, or refuses us."""
        return SourceError(
            f"the service cannot be used service=`{self.kind}` at=`{self}`: {reason_of(error)}",
            fix="check the region, the credentials (those of the AWS client: environment, profile or role) "
            "and the network, on all machines of the cluster",
        )


class Requests:
    """Makes requests that may be repeated, again while the service is away for a moment."""

    def __init__(self, service: AwsService, clock: Clock, is_closed: Callable[[], bool]) -> None:
        """Make requests of a service.

        Args:
            service: to ask.
            clock: measures for how long it is away.
            is_closed: returns True if nobody waits for answers any more.
        """
        self._service = service
        self._is_closed = is_closed
        self._outage = Outage(clock, AWAY_S)

    async def ask(self, request: Any, **arguments: Any) -> Any:
        """Make a request.

        Raises:
            SourceError: the service stays away.
            botocore.exceptions.ClientError: it refuses the request.
        """
        from botocore.exceptions import BotoCoreError, ClientError

        while True:
            try:
                answer = await request(**arguments)
            except (BotoCoreError, ClientError, OSError, TimeoutError) as error:
                if self._is_closed():
                    raise asyncio.CancelledError from error
                if is_throttled(error):
                    self._outage.end()
                elif code_of(error) and not is_away(error):
                    raise
                elif not is_away(error) or self._outage.is_too_long():
                    raise self._service.cannot_use(error) from error
                _log.debug(
                    "a request to `%s` is made again: %s", self._service.kind, reason_of(error)
                )
                await asyncio.sleep(PAUSE_S)
            else:
                self._outage.end()
                return answer


class AwsWriter(CallingWriter, Generic[M]):
    """Sends the records of one subtask in requests of which the service may store only some messages."""

    def __init__(self, service: AwsService, bounds: CallBounds) -> None:
        super().__init__(bounds)
        self._service = service
        self._stack = contextlib.AsyncExitStack()
        self._client: Any = None

    async def begin(self) -> None:
        self._client = await self._stack.enter_async_context(self._service.client())

    async def release(self) -> None:
        await self._stack.aclose()

    async def send(self, messages: Sequence[M]) -> tuple[Sequence[M], str]:
        """Make one request; return the messages that the service has not stored, and the reason."""
        raise NotImplementedError

    def refused(self, reason: str) -> JobError:
        """Return the error for messages that the service does not take."""
        raise NotImplementedError

    def unstored(self, reason: str) -> StorageError:
        """Return the error for messages that the service does not store for some time."""
        raise NotImplementedError

    async def store(self, messages: Sequence[M]) -> None:
        """Send messages until all of them are stored.

        Raises:
            StorageError: none is stored any more for some time.
            JobError: the service does not take messages like these.
        """
        from botocore.exceptions import BotoCoreError, ClientError

        clock = self.context.clock
        deadline_s = clock.monotonic() + AWAY_S
        while messages:
            try:
                left, reason = await self.send(messages)
                if len(left) < len(messages):
                    deadline_s = clock.monotonic() + AWAY_S
                messages = left
            except (BotoCoreError, ClientError, OSError, TimeoutError) as error:
                reason = reason_of(error)
                if not (is_away(error) or is_throttled(error)):
                    raise self.refused(reason) from error
            if not messages:
                return
            if clock.monotonic() > deadline_s:
                raise self.unstored(reason)
            self.context.logger.debug("messages are sent again: %s", reason)
            await asyncio.sleep(PAUSE_S)


@cache
def service_models() -> Any:
    """Return the descriptions of services, which take long to read."""
    from botocore.loaders import create_loader

    return create_loader()


def code_of(error: BaseException) -> str:
    """Return the code with which a service has refused a request; empty: it has not."""
    response = getattr(error, "response", None)
    told = response.get("Error", {}) if isinstance(response, dict) else {}
    return str(told.get("Code", ""))


def reason_of(error: BaseException) -> str:
    """Return the text of the service or of the client, in one line."""
    return " ".join(str(error).split()) or type(error).__name__


def answered_ms(answer: Mapping[str, Any], otherwise_ms: int) -> int:
    """Return the second in which a service has answered, by its own clock, in ms since 1970.

    Args:
        answer: of the service.
        otherwise_ms: if the answer does not tell.
    """
    told = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date", "")
    try:
        return int(parsedate_to_datetime(told).timestamp() * 1000)
    except ValueError:
        return otherwise_ms


def is_throttled(error: BaseException) -> bool:
    """Return True if a service asks for fewer requests."""
    return code_of(error) in _THROTTLED


def is_away(error: BaseException) -> bool:
    """Return True if a service did not answer, or failed, so that trying again may help."""
    from botocore import exceptions

    if isinstance(error, exceptions.ClientError):
        told = error.response.get("ResponseMetadata", {})
        return told.get("HTTPStatusCode") in _FAILING
    lost = (exceptions.HTTPClientError, exceptions.ConnectionError)
    return isinstance(error, (*lost, OSError, asyncio.TimeoutError)) and not isinstance(
        error, exceptions.SSLError
    )
