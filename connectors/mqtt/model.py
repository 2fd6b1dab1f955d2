"""The settings that the source of MQTT shares with its reader, and columns of metadata."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from ..bad_records import OnBadRecord
from ..formats.format import Format
from ..messages import MetadataTypes
from .client import Broker

REJECTED_SCHEMA: Final = pa.schema(
    [
        pa.field("topic", pa.string(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("data", pa.binary()),
    ]
)
"""The columns of the side output `rejected`."""
METADATA: Final[MetadataTypes] = {
    "topic": pa.string(),
    "retained": pa.bool_(),
    "properties": pa.list_(pa.struct([("name", pa.string()), ("value", pa.string())])),
}
"""The parts of a message beside its data, and the types of their columns."""


@dataclass(frozen=True)
class MqttSettings:
    """The arguments of `mqtt_source`, which documents them."""

    topics: tuple[str, ...]
    broker: Broker
    client_id: str
    session_s: int
    unacknowledged_max: int
    format: Format
    metadata: dict[str, str]
    on_bad_record: OnBadRecord
    batch_rows: int
