"""The settings that the source of SQS shares with its reader, columns of metadata, and queues."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from ...errors import SourceError, UsageError
from ..aws import AwsService, code_of, reason_of
from ..bad_records import OnBadRecord
from ..messages import MessageColumns

REQUEST_MESSAGES: Final = 10
"""The most messages of a request."""
REJECTED_SCHEMA: Final = pa.schema(
    [
        pa.field("queue", pa.string(), nullable=False),
        pa.field("message_id", pa.string(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("data", pa.binary()),
    ]
)
"""The columns of the side output `rejected`."""
METADATA: Final = pa.schema(
    [
        pa.field("message_id", pa.string(), nullable=False),
        pa.field("timestamp", pa.timestamp("ms", tz="UTC")),
        pa.field("receives", pa.int64(), nullable=False),
        pa.field("group", pa.string()),
    ]
)
"""The parts of a message beside its data; those that it may lack are nullable."""
_MISSING: Final = ("NonExistentQueue", "QueueDoesNotExist")


@dataclass(frozen=True)
class SqsSettings:
    """The arguments of `sqs_source`, which documents them."""

    queue: str
    service: AwsService
    columns: MessageColumns
    consumers: int
    visibility_s: int
    unacknowledged_max: int
    on_bad_record: OnBadRecord


def check_queue(queue: str) -> None:
    """Check the name of a queue.

    Raises:
        UsageError: no queue can have it.
    """
    stem = queue.removesuffix(".fifo")
    fits = stem.replace("-", "").replace("_", "").isalnum() and stem.isascii()
    if not fits or len(queue) > 80:
        raise UsageError(
            f"not the name of a queue queue=`{queue}`",
            fix='"orders", up to 80 letters, digits, hyphens and underscores; not its URL',
        )


async def url_of(client: Any, queue: str, service: AwsService) -> str:
    """Return the URL of a queue, which requests name it by.

    Raises:
        SourceError: there is no such queue, or the service cannot be used.
    """
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        return str((await client.get_queue_url(QueueName=queue))["QueueUrl"])
    except ClientError as error:
        if code_of(error).endswith(_MISSING):
            raise SourceError(
                f"there is no such queue queue=`{queue}` at=`{service}`",
                fix="check the name, the region and the account",
            ) from None
        raise SourceError(
            f"a queue cannot be used queue=`{queue}` at=`{service}`: {reason_of(error)}",
            fix="check the rights: sqs:GetQueueUrl, and those that the page of SQS names",
        ) from error
    except (BotoCoreError, OSError) as error:
        raise service.cannot_use(error) from error


async def look(service: AwsService, queue: str) -> None:
    """Check that a queue exists.

    Raises:
        SourceError: it does not, or the service cannot be used.
    """
    async with service.client() as client:
        await url_of(client, queue, service)
