"""The inputs of aggregates that are no columns of the records: SQL text about one record."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches

import pyarrow as pa

from ...errors import PlanError
from ..expressions.expressions import Column, check_value, result_type, show
from ..expressions.sql.tokens import SqlError, canonical
from ..schema import unknown_column

_PLAIN_NAME = re.compile(r"[^\W\d]\w*")
_WORDS = re.compile(r"[\w\s]+")


def check_texts(texts: Iterable[object], kind: str, where: str = "") -> None:
    """Raise PlanError if one of the inputs of an aggregate of `kind` is no text."""
    for text in texts:
        if not isinstance(text, str):
            raise PlanError(
                f"{kind} takes the name of a column or SQL text, got `{type(text).__name__}`",
                where=where,
                fix=f'such as hg.{kind}("amount * 2"); make a polars expression a column first: '
                '.select("*", expression.alias("x"))',
            )


def computed_input(text: str, kind: str, written: str, schema: pa.Schema, where: str) -> Column:
    """Return the column that computes the input `text` of an aggregate of `kind`, under that name.

    Args:
        text: SQL text; it is no column of `schema`.
        written: the whole aggregate, for errors about names.

    Raises:
        PlanError: the name of a column that does not exist, or no expression that fits.
    """
    if _PLAIN_NAME.fullmatch(text):
        raise unknown_column(text, schema, written, where)
    fix = f'leave AS out: agg gives the result its name, as in total=hg.{kind}("amount * 2")'
    try:
        column = check_value(text, text, schema, kind, where, fix)
    except PlanError:
        if _WORDS.fullmatch(text) and get_close_matches(text, schema.names, n=1):
            raise unknown_column(text, schema, kind, where) from None  # a misspelt name with spaces
        raise
    if kind == "count" and pa.types.is_boolean(result_type(column, schema)):
        raise PlanError(
            f"`{show(text)}` in count is a condition, and count counts the records where it is true and "
            "where it is false",
            where=where,
            fix=f"to count where it is true, write sum(CASE WHEN {show(text)} THEN 1 ELSE 0 END)",
        )
    return column


def with_computed(schema: pa.Schema, computed: Mapping[str, Column]) -> pa.Schema:
    """Return the schema with a column for each computed input."""
    made = [pa.field(name, result_type(column, schema)) for name, column in computed.items()]
    return pa.schema([*schema, *made])


def meant(text: str | None, schema: pa.Schema) -> str | None:
    """Return a text that is equal for equivalent inputs: the name of a column, or normalised SQL."""
    if text is None or text in schema.names:
        return text
    try:
        form = canonical(text)
    except SqlError:  # the check would have refused it
        return text
    name = form[1:-1].replace('""', '"')
    return name if form[:1] == '"' and name in schema.names else form
