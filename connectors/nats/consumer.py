"""A consumer in the server, of which a reader takes messages, many at a time."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from typing import Any, Final

import msgspec

from .client import ANSWER_S_MAX, PAUSE_S, Connection, is_missing, reason_of
from .frames import Message, place_of, request, status_of
from .model import NatsSplit

_WAIT_S: Final = 0.5
"""A request waits for a message for this time."""
_UNUSED_S: Final = 60.0
"""The server forgets a consumer that was not used for this time; another one is made then."""
_IDLE_MAX: Final = 10
"""After this number of requests without the messages that were sent, a consumer is made again."""
_NS: Final = 1_000_000_000
_PLACED: Final = b"$JS.ACK."
_NONE_LEFT: Final = (404, 408)
"""Statuses of requests that are over: no message is there, or the time has passed."""
_NO_ANSWER: Final = 503
"""The status of a request that nobody answers, as the consumer is gone or has no leader."""
_ENDED: Final = 409
"""The status of a request that something has ended."""


class InterruptedConsumerError(Exception):
    """Raised if a consumer can no longer be used, and another one should be made."""


class Consumer:
    """A consumer that begins behind a position and needs no acknowledgements.

    Attributes:
        pending: the messages that the server had not sent when it sent the last one.
    """

    def __init__(self, connection: Connection, split: NatsSplit) -> None:
        self._connection = connection
        self._split = split
        self._name = f"headgate-{secrets.token_hex(8)}"
        self._received = 0
        self._idle = 0
        self.pending = 0

    async def make(self) -> None:
        """Make the consumer in the server."""
        from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

        at = self._split
        config = ConsumerConfig(
            name=self._name,
            deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=at.after + 1,
            ack_policy=AckPolicy.NONE,
            mem_storage=True,
            inactive_threshold=_UNUSED_S,
            filter_subject=at.subject or None,
        )
        told = await self._connection.jetstream.add_consumer(at.stream, config=config)
        self.pending = told.num_pending
        self._inbox = await self._connection.inbox()

    async def delete(self) -> None:
        """Delete it, if the server answers."""
        with contextlib.suppress(Exception):
            await self._connection.jetstream.delete_consumer(self._split.stream, self._name)

    async def fetch(self, count: int) -> list[Message]:
        """Return the messages that are there, at most `count`, or wait a moment for the first one.

        Raises:
            InterruptedConsumerError: some did not arrive, or the server has ended the consumer.
        """
        found = await self._pull({"batch": count, "no_wait": True})
        if not found:
            found = await self._pull({"batch": 1, "expires": int(_WAIT_S * _NS)})
        if found:
            self._note(found)
        return found

    def _note(self, found: list[Message]) -> None:
        self._received += len(found)
        self._idle = 0
        last = place_of(found[-1])
        self.pending = last.pending
        if last.delivery != self._received:
            raise self._interrupted()

    def _interrupted(self) -> InterruptedConsumerError:
        return InterruptedConsumerError(f"messages of `{self._split.name}` did not arrive")

    async def _pull(self, asked: dict[str, Any]) -> list[Message]:
        """Make one request, and return its messages."""
        count, reply = asked["batch"], self._inbox.new_reply()
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{self._split.stream}.{self._name}"
        await self._connection.send(request(subject, reply, msgspec.json.encode(asked)))
        found: list[Message] = []
        while len(found) < count:
            try:
                arrived = await self._inbox.some(ANSWER_S_MAX)
            except TimeoutError:
                break  # what did not arrive is found out by its number
            messages = [each for each in arrived if each.reply.startswith(_PLACED)]
            found += messages
            if len(messages) < len(arrived):
                others = [each for each in arrived if not each.reply.startswith(_PLACED)]
                if await self._is_over(others, reply.encode()):
                    break
            if found and not place_of(found[-1]).pending:
                break  # a status follows, which the next request passes over
        return found

    async def _is_over(self, answers: list[Message], reply: bytes) -> bool:
        """Return True if one of the answers ends the request with this reply subject."""
        from nats.js.errors import APIError

        for answer in answers:
            status = status_of(answer)
            if status is None or answer.subject != reply:
                continue
            code, text = status
            if code in _NONE_LEFT:
                return True
            if code == _NO_ANSWER:
                await asyncio.sleep(PAUSE_S)
                return True
            if code == _ENDED and any(
                each in text.lower() for each in ("deleted", "leadership", "shutdown")
            ):
                raise InterruptedConsumerError(f"{text}: `{self._split.name}`")
            raise APIError(code=code, description=text)
        return False

    async def has_passed_all(self) -> bool:
        """Return True if no message is left that the filter matches; asked when none has come.

        Raises:
            InterruptedConsumerError: some did not arrive, or the server has forgotten the consumer.
        """
        jetstream = self._connection.jetstream
        try:
            told = await jetstream.consumer_info(self._split.stream, self._name)
        except Exception as error:
            if is_missing(error) and "consumer" in reason_of(error).lower():
                raise InterruptedConsumerError(
                    f"the server has forgotten the consumer of `{self._split.name}`"
                ) from error
            raise
        self._idle += 1
        arrived = told.delivered.consumer_seq == self._received
        if not arrived and self._idle > _IDLE_MAX:
            raise self._interrupted()
        return arrived and not told.num_pending
