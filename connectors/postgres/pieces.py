"""Readers of rows of PostgreSQL: they tell a server that is away from one that refuses."""

from __future__ import annotations

from ..fetched_splits import P
from ..rows_reader import RowsReader
from .client import Address, cannot_use, is_lost, reason_of


class PostgresRowsReader(RowsReader[P]):
    """Reads rows in a thread that goes on when a server that was away comes back."""

    def __init__(self, address: Address, buffer_bytes: int) -> None:
        super().__init__(buffer_bytes)
        self._address = address

    def why_away(self, error: Exception, *, went_on: bool) -> str:
        """A query that takes longer than the server allows is asked again only if something was read."""
        import psycopg

        cause = error if isinstance(error, psycopg.Error) else error.__cause__
        stuck = isinstance(cause, psycopg.errors.QueryCanceled) and not went_on
        if cause is None or not is_lost(cause) or stuck:
            if isinstance(error, psycopg.Error):
                raise cannot_use(self._address, error) from error
            raise error
        return reason_of(cause)
