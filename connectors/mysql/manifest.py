"""The fields of the connector `mysqlCdc` in a manifest."""

from __future__ import annotations

from typing import Any, Final

from ...api.manifest.fields import BooleanKind, Field, IntegerKind, TextKind
from ...operators.source import Source
from ..manifest_fields import PASSWORD, TLS
from .cdc_model import METADATA as METADATA
from .cdc_source import mysql_cdc_source

SOURCE: Final = {
    "url": Field(
        TextKind(),
        "the database, `mysql://user@host:3306/database`; or `file:/path` or `env:NAME`, read on each "
        "machine",
        required=True,
    ),
    "password": PASSWORD,
    "tls": Field(
        BooleanKind(), "true: encrypted, and the certificate of the server is checked; false"
    ),
    **TLS,
    "table": Field(TextKind(), "the table as SQL names it: `orders`, `shop.orders`", required=True),
    "serverId": Field(
        IntegerKind(1, (1 << 32) - 1),
        "the number by which the server knows the reader; made of the names of the job and the source",
    ),
}


def make_source(*, url: str, table: str, **arguments: Any) -> Source:
    """Return the source with these fields of a manifest as arguments."""
    return mysql_cdc_source(url, table, **arguments)
