"""The types of SQL fragments over a stream's columns."""

from __future__ import annotations

from functools import cached_property
from typing import cast

import pyarrow as pa

from ...lazy_modules import pl
from .tokens import quoted


def polars_types(schema: pa.Schema) -> dict[str, pl.DataType]:
    """Return the Polars types of an Arrow schema."""
    frame = cast(pl.DataFrame, pl.from_arrow(schema.empty_table()))
    return dict(frame.schema)


class Types:
    """Determines the type of SQL over records of `schema`; each text is evaluated once."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        self._known: dict[str, pl.DataType | None] = {}

    def __call__(self, text: str) -> pl.DataType | None:
        """Return the type; None if the text does not fit the columns, which the full check reports."""
        if text not in self._known:
            self._known[text] = self._columns.get(text) or self._ask(text)
        return self._known[text]

    @cached_property
    def _columns(self) -> dict[str, pl.DataType]:
        return {quoted(name): kind for name, kind in polars_types(self._schema).items()}

    @cached_property
    def _frame(self) -> pl.LazyFrame:
        return pl.LazyFrame(schema=polars_types(self._schema))

    def _ask(self, text: str) -> pl.DataType | None:
        try:
            (kind,) = self._frame.select(pl.sql_expr(text).alias("_")).collect_schema().values()
        except Exception:
            return None
        return kind
