"""The settings that the source of MQTT shares with its reader, and columns of metadata."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from ..bad_records import OnBadRecord
from ..messages import MessageColumns
from .client import Broker

REJECTED_SCHEMA: Final = pa.schema(
    [
        pa.field("topic", pa.string(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("data", pa.binary()),
    ]
)
"""The columns of the side output `rejected`."""
METADATA: Final = pa.schema(
    [
        pa.field("topic", pa.string(), nullable=False),
        pa.field("retained", pa.bool_(), nullable=False),
        pa.field(
            "properties", pa.list_(pa.struct([("name", pa.string()), ("value", pa.string())]))
        ),
    ]
)
"""The parts of a message beside its data; those that it may lack are nullable."""


@dataclass(frozen=True)
class MqttSettings:
    """The arguments of `mqtt_source`, which documents them."""

    topics: tuple[str, ...]
    broker: Broker
    client_id: str
    session_s: int
    unacknowledged_max: int
    columns: MessageColumns
    on_bad_record: OnBadRecord
    batch_rows: int
