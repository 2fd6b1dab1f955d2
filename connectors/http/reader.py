"""Readers of services of HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from ...errors import BadRecordError, SourceError, StorageError
from ...operators.async_calls.in_flight import RETRIES_COUNTER
from ...operators.base import OperatorContext
from ...operators.elements import Batch
from ..fetched_splits import OneSplitReader
from ..formats.format import Decode
from .client import RETRIED, Answer, HttpClient, HttpSettings, NoAnswer, retry_after_s


class HttpReader(OneSplitReader):
    """Has a client for the time of its requests."""

    def __init__(self, http: HttpSettings, what: str) -> None:
        """Make a reader.

        Args:
            http: of the requests.
            what: names the thread.
        """
        super().__init__(what)
        self._http = http

    async def read(self, client: HttpClient, position: str | int | None) -> None:
        """Hand on what follows a position, in order; return at the end of the source."""
        raise NotImplementedError

    def open(self, context: OperatorContext, reject: Callable[[Batch], None]) -> None:
        super().open(context, reject)
        self._retried = context.metrics.counter(RETRIES_COUNTER)

    async def fetch(self, position: str | int | None) -> None:
        context = self.context
        seed = f"{context.run_id} {context.operator_name}"
        client = HttpClient(self._http, context.clock, 1, self._retried.inc, seed)
        await client.open()
        try:
            await self.read(client, position)
        finally:
            await client.close()


class ConnectionReader(HttpReader):
    """Reads one connection after the other, until one ends with all that the source has.

    A pause before the next connection is longer the more of them in a row have given nothing.
    """

    def __init__(self, http: HttpSettings, what: str, missing: str) -> None:
        """Make a reader.

        Args:
            http: of the connections.
            what: names the thread.
            missing: says of a service that is not reached what it does not do.
        """
        super().__init__(http, what)
        self._missing = missing
        self._fails = 0
        """The connections in a row that were not answered."""
        self._quiet = 0
        """The connections in a row that did not give anything."""
        self.asked_s = 0.0
        """The pause that the service has asked for."""

    async def connect(self, client: HttpClient) -> str | None:
        """Read one connection to its end; return why it has ended, None at the end of the source.

        Raises:
            NoAnswer: there is no connection, or it is lost.
        """
        raise NotImplementedError

    def answered(self) -> None:
        """Note that there is a connection."""
        self._fails = 0

    def given(self) -> None:
        """Note that it has given something."""
        self._quiet, self.asked_s = 0, 0.0

    async def read(self, client: HttpClient, position: str | int | None) -> None:
        while True:
            self._fails += 1
            self._quiet += 1
            try:
                reason = await self.connect(client)
            except NoAnswer as error:
                reason = str(error)
            if reason is None:
                return
            if self._fails > self._http.retries:
                raise StorageError(
                    f"the service {self._missing} url=`{self._http.shown}` tries=`{self._fails}`: "
                    f"{reason}",
                    fix="check that it runs; raise retries= if it may be away for longer",
                )
            await asyncio.sleep(client.pause_s(max(0, self._quiet - 1), self.asked_s))
            self._retried.inc()

    def not_now(self, client: HttpClient, answer: Answer) -> str:
        """Return the reason of an answer that may be another one later.

        Raises:
            SourceError: it will be the same.
        """
        if answer.status not in RETRIED:
            raise refused(client, client.shown_answer(answer))
        header = answer.headers.get("retry-after")
        self.asked_s = retry_after_s(header, self.context.clock.now_ms())
        return client.shown_answer(answer)


def decoded(payloads: list[bytes], decode: Decode, shown: str) -> pa.RecordBatch:
    """Decode payloads, at least one.

    Args:
        payloads: of the records.
        decode: the decoder.
        shown: the address, for errors.

    Raises:
        BadRecordError: one cannot be decoded.
    """
    found = decode(payloads)
    if found.bad:
        index, reason = found.bad[0]
        raise BadRecordError(
            f"a record cannot be read url=`{shown}` record=`{index + 1} of {len(payloads)}`: {reason}",
            fix="correct the schema, or what the service gives",
        )
    batch = found.batch()
    if batch is None or batch.num_rows != len(payloads):
        raise SourceError(f"records were lost while they were decoded url=`{shown}`")
    return batch


def refused(client: HttpClient, text: str) -> SourceError:
    """Return the error for an answer that another request would not change."""
    return SourceError(
        f"the service refuses the request url=`{client.settings.shown}`: {text}",
        fix="check the address and the credentials",
    )


def value_of(found: Any, column: str, shown: str) -> str | int:
    """Return the position of a record, which has this value in the column of positions."""
    if found is None:
        raise SourceError(f"a record has no position url=`{shown}` column=`{column}`")
    value: str | int = found
    return value
