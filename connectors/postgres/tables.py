"""Tables of PostgreSQL: what they have, which types of columns fit which, and values as CSV."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv

from ...errors import DataError, UsageError
from ...operators.lazy_modules import pl
from ...operators.suggestions import suggest
from .client import Address, Connection, reason_of


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        type: as the server writes it, such as `numeric(10,2)`.
        base: the name of the type without modifiers, of a domain that of its base type; `enum` for any.
        required: a row must have a value.
        generated: the server computes it.
        identity: the server numbers it, and takes another value only if told so.
        collation: as SQL names it; None: that of its type.
        not_null: every row has a value.
    """

    name: str
    type: str
    base: str
    required: bool
    generated: bool
    identity: bool
    collation: str | None
    not_null: bool

    @property
    def definition(self) -> str:
        """The type and the collation, for a table whose values are compared in the same way."""
        return self.type if self.collation is None else f"{self.type} COLLATE {self.collation}"


@dataclass(frozen=True)
class Table:
    """A table as the server describes it.

    Attributes:
        oid: its number.
        schema: the schema it is in.
        name: its name there.
        columns: in order.
        keys: the columns of each unique index, the primary key first.
        replica_identity: `d` (the primary key), `n` (nothing), `f` (the whole row) or `i` (an index).
        kind: `r` (a table), `p` (a partitioned one), `f` (a foreign one), `v` (a view), `m` (a materialized
            one); `q`: a query, which has no name.
    """

    oid: int
    schema: str
    name: str
    columns: tuple[Column, ...]
    keys: tuple[tuple[str, ...], ...]
    replica_identity: str
    has_primary_key: bool
    kind: str

    @property
    def full_name(self) -> str:
        """Its name for messages."""
        return "the query" if self.kind == "q" else f"{self.schema}.{self.name}"

    def column(self, name: str) -> Column | None:
        return next((each for each in self.columns if each.name == name), None)


_FIND: Final = """
SELECT c.oid, n.nspname, c.relname, c.relkind::text, c.relreplident::text
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.oid = to_regclass(%s)
"""
_COLUMNS: Final = """
SELECT a.attname, format_type(a.atttypid, a.atttypmod),
       CASE WHEN b.typtype = 'e' THEN 'enum' ELSE b.typname END,
       a.attnotnull AND NOT a.atthasdef AND a.attidentity = '',
       a.attgenerated <> '', a.attidentity = 'a',
       (SELECT format('%%I.%%I', n.nspname, c.collname)
        FROM pg_collation c JOIN pg_namespace n ON n.oid = c.collnamespace
        WHERE c.oid = a.attcollation AND a.attcollation <> t.typcollation),
       a.attnotnull
FROM pg_attribute a
JOIN pg_type t ON t.oid = a.atttypid
JOIN pg_type b ON b.oid = CASE WHEN t.typtype = 'd' THEN t.typbasetype ELSE t.oid END
WHERE a.attrelid = %s AND a.attnum > 0 AND NOT a.attisdropped
ORDER BY a.attnum
"""
_KEYS: Final = """
SELECT i.indisprimary,
       array(SELECT a.attname::text FROM pg_attribute a
             WHERE a.attrelid = i.indrelid AND a.attnum = ANY ((i.indkey::int2[])[0:i.indnkeyatts - 1])
             ORDER BY array_position(i.indkey::int2[], a.attnum))
FROM pg_index i
WHERE i.indrelid = %s AND i.indisunique AND i.indisvalid AND i.indimmediate
  AND i.indpred IS NULL AND i.indexprs IS NULL
ORDER BY i.indisprimary DESC, i.indexrelid
"""


def find_table(connection: Connection, name: str, address: Address) -> Table | None:
    """Return the table of this name, as SQL reads it; None if there is none.

    Raises:
        UsageError: it is no table, or the name cannot be one.
    """
    import psycopg

    try:
        found = connection.execute(_FIND, [name]).fetchone()
    except psycopg.errors.DatabaseError as error:
        raise UsageError(
            f"no table can have this name table=`{name}`: {reason_of(error)}",
            fix='table, schema.table, or "Quoted Name"; the user needs USAGE on the schema',
        ) from None
    if found is None:
        return None
    oid, schema, relation, kind, identity = found
    if kind not in ("r", "p", "f", "v", "m"):
        raise UsageError(f"this is no table name=`{name}` server=`{address}`")
    columns = tuple(Column(*row) for row in connection.execute(_COLUMNS, [oid]).fetchall())
    indexes = connection.execute(_KEYS, [oid]).fetchall()
    keys = tuple(tuple(index[1]) for index in indexes)
    primary = any(index[0] for index in indexes)
    return Table(oid, schema, relation, columns, keys, identity, primary, kind)


def no_table(connection: Connection, name: str, address: Address, fix: str = "") -> UsageError:
    """Return the error for a table that does not exist."""
    rows = connection.execute(
        "SELECT schemaname || '.' || tablename FROM pg_tables "
        "WHERE schemaname NOT IN ('pg_catalog', 'information_schema') ORDER BY 1 LIMIT 200"
    ).fetchall()
    known = [row[0] for row in rows]
    also = suggest(name if "." in name else f"public.{name}", known, "tables") if known else ""
    return UsageError(
        f"there is no such table table=`{name}` server=`{address}`",
        fix="; ".join(part for part in (fix or "create it", also) if part),
    )


# -- types --------------------------------------------------------------------------------------------

_TEXTS: Final = frozenset(
    (
        *("text", "varchar", "bpchar", "name", "citext", "enum", "json", "jsonb", "xml", "uuid"),
        *("inet", "cidr", "macaddr", "macaddr8", "interval", "ltree", "tsvector", "bit", "varbit"),
        *("int4range", "int8range", "numrange", "tsrange", "tstzrange", "daterange"),
    )
)
"""Types whose values are written as the text that the server understands."""
_INTEGERS: Final = frozenset(("int2", "int4", "int8", "numeric", "oid"))


@dataclass(frozen=True)
class _Fit:
    """The columns that an Arrow type becomes.

    Attributes:
        applies: is it this type?
        bases: the types of PostgreSQL that take its values.
        made: the type of a column that headgate creates.
    """

    applies: Callable[[pa.DataType], bool]
    bases: frozenset[str]
    made: Callable[[pa.DataType], str]


def _whole(kind: pa.DataType) -> str:
    if kind == pa.uint64():
        return "numeric(20)"
    wide = kind.bit_width * (2 if pa.types.is_unsigned_integer(kind) else 1)
    return "smallint" if wide <= 16 else "integer" if wide <= 32 else "bigint"


def is_text(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    )


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_fixed_size_binary(kind)
    )


def is_nested(kind: pa.DataType) -> bool:
    """Return True if values of this type become JSON."""
    return bool(pa.types.is_nested(kind))


_FITS: Final = (
    _Fit(pa.types.is_boolean, frozenset({"bool"}), lambda _: "boolean"),
    _Fit(pa.types.is_integer, _INTEGERS | {"float4", "float8"}, _whole),
    _Fit(
        pa.types.is_floating,
        frozenset({"float4", "float8", "numeric"}),
        lambda kind: "double precision" if kind == pa.float64() else "real",
    ),
    _Fit(
        pa.types.is_decimal,
        frozenset({"numeric", "float8"}),
        lambda kind: f"numeric({kind.precision},{kind.scale})",
    ),
    _Fit(is_text, _TEXTS, lambda _: "text"),
    _Fit(_is_bytes, frozenset({"bytea"}), lambda _: "bytea"),
    _Fit(pa.types.is_date, frozenset({"date", "timestamp"}), lambda _: "date"),
    _Fit(
        pa.types.is_timestamp,
        frozenset({"timestamp", "timestamptz"}),
        lambda kind: "timestamp" if kind.tz is None else "timestamptz",
    ),
    _Fit(pa.types.is_time, frozenset({"time"}), lambda _: "time"),
    _Fit(is_nested, frozenset({"json", "jsonb"}), lambda _: "jsonb"),
)


def _fit_of(kind: pa.DataType) -> _Fit | None:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return next((fit for fit in _FITS if fit.applies(kind)), None)


def can_write(kind: pa.DataType) -> bool:
    """Return True if columns of this type have a form in PostgreSQL."""
    return _fit_of(kind) is not None


def takes(column: Column, kind: pa.DataType) -> bool:
    """Return True if a column of a table takes the values of this type."""
    fit = _fit_of(kind)
    return fit is not None and column.base in fit.bases


def type_for(kind: pa.DataType) -> str:
    """Return the type of a column that is created for values of this type."""
    fit = _fit_of(kind)
    assert fit is not None, kind  # `can_write` was asked when the job was planned
    return fit.made(kind.value_type if pa.types.is_dictionary(kind) else kind)


# -- rows as CSV --------------------------------------------------------------------------------------

_NO_HEADER: Final = pa_csv.WriteOptions(include_header=False)


def to_csv(columns: Sequence[pa.Array]) -> bytes:
    """Return rows in the CSV of `COPY`: a null is an empty value without quotes, and texts have quotes.

    Raises:
        DataError: a text has a character that PostgreSQL cannot store.
    """
    made = [_as_text(column) for column in columns]
    table = pa.RecordBatch.from_arrays(made, [str(number) for number in range(len(made))])
    lines = io.BytesIO()
    pa_csv.write_csv(table, lines, _NO_HEADER)
    return lines.getvalue()


def _as_text(column: pa.Array) -> pa.Array:
    """Return a column of a type that the writer of CSV knows, and in the form that the server reads."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        return _as_text(column.dictionary_decode())
    if is_nested(kind):
        return pa.array(
            [None if each is None else _JSON.encode(each).decode() for each in column.to_pylist()],
            pa.string(),
        )
    if _is_bytes(kind):
        texts: Any = pl.from_arrow(column.cast(pa.large_binary()))
        wide = pa.large_string()
        prefix, between = pa.scalar("\\x", wide), pa.scalar("", wide)
        return pc.binary_join_element_wise(
            prefix, texts.bin.encode("hex").to_arrow().cast(wide), between
        )
    if kind == pa.float16():
        return column.cast(pa.float32())
    if is_text(kind):
        check_text(column)
        return column.cast(pa.large_string()) if pa.types.is_string_view(kind) else column
    return column


def check_json(name: str, column: pa.Array) -> None:
    """Check that JSON has all numbers in a nested column: it has no NaN and no infinity.

    Raises:
        DataError: it has not.
    """
    for leaf in _floats(column):
        bad = leaf.filter(pc.invert(pc.is_finite(leaf)))
        if len(bad):
            raise DataError(
                f"JSON has no such number column=`{name}` value=`{bad[0].as_py()}`",
                fix="replace it before the sink, by null or a text; or filter the record out",
            )


def _floats(column: pa.Array) -> Iterator[pa.Array]:
    """Return the floating point values inside a nested column, without those of rows that are null."""
    kind = column.type
    if pa.types.is_floating(kind):
        yield column.cast(pa.float64())
    elif pa.types.is_dictionary(kind):
        yield from _floats(column.dictionary_decode())
    elif pa.types.is_struct(kind):
        for child in column.flatten():
            yield from _floats(child)
    elif pa.types.is_map(kind):
        # `keys` and `items` also have the entries of rows that are null or outside of a slice.
        present = column.drop_null()
        first, last = (present.offsets[place].as_py() for place in (0, -1))
        yield from _floats(present.keys.slice(first, last - first))
        yield from _floats(present.items.slice(first, last - first))
    elif is_nested(kind):
        yield from _floats(column.flatten())


_JSON: Final = msgspec.json.Encoder(decimal_format="number")


def check_text(column: pa.Array) -> None:
    """Check that PostgreSQL can store all texts of a column.

    Raises:
        DataError: it cannot.
    """
    if pc.any(pc.match_substring(column, "\0")).as_py():
        bad = column.filter(pc.match_substring(column, "\0"))[0].as_py()
        raise DataError(
            f"PostgreSQL stores no text with the character NUL value=`{bad[:100]!r}`",
            fix="remove it before, or write the column as binary into a column of type bytea",
        )
