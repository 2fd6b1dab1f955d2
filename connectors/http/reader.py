"""The reader of a service of HTTP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa

from ...errors import BadRecordError, SourceError
from ...operators.async_calls.in_flight import RETRIES_COUNTER
from ...operators.base import OperatorContext
from ...operators.elements import Batch
from ..fetched_splits import OneSplitReader
from ..formats.format import Decode
from .client import HttpClient, HttpSettings


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
