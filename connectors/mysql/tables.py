"""Tables of MySQL and MariaDB: their columns and keys, and how their values become columns of Arrow."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from decimal import Decimal
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from ...errors import DataError, UsageError
from ...operators.suggestions import suggest
from .client import Address, Connection, query, quoted

_INTEGERS: Final = {"tinyint": 8, "smallint": 16, "mediumint": 32, "int": 32, "bigint": 64}
_TEXTS: Final = ("char", "varchar", "tinytext", "text", "mediumtext", "longtext")
_BYTES: Final = ("binary", "varbinary", "tinyblob", "blob", "mediumblob", "longblob")
_CHARSETS: Final = ("utf8", "utf8mb3", "utf8mb4", "ascii")
"""The character sets whose bytes in the log are those of UTF-8."""
_TYPES: Final[Mapping[str, pa.DataType]] = {
    "float": pa.float32(),
    "double": pa.float64(),
    "date": pa.date32(),
    "datetime": pa.timestamp("us"),
    "timestamp": pa.timestamp("us", "UTC"),
    "year": pa.int16(),
    **dict.fromkeys((*_TEXTS, "time", "enum", "set", "json"), pa.string()),
    **dict.fromkeys(_BYTES, pa.binary()),
}
_UTC: Final = timedelta(0)


class Column(msgspec.Struct, frozen=True):
    """A column of a table.

    Attributes:
        type: as the server writes it, such as `decimal(10,2)`.
        base: the type without modifiers.
        charset: of its texts; None: it has none.
        precision: of decimals: the number of digits.
        scale: of decimals: how many of them follow the point.
    """

    name: str
    type: str
    base: str
    charset: str | None
    precision: int
    scale: int

    @property
    def is_unsigned(self) -> bool:
        """True if it has no negative numbers."""
        return "unsigned" in self.type or "zerofill" in self.type

    @property
    def natural(self) -> pa.DataType | None:
        """The type in which it is read, unless the user gives another one; None: it cannot be read."""
        if self.base in _INTEGERS:
            return pa.type_for_alias(f"{'u' * self.is_unsigned}int{_INTEGERS[self.base]}")
        if self.base == "decimal":
            return (
                pa.decimal128(self.precision, self.scale) if self.precision <= 38 else pa.string()
            )
        if self.base == "bit":
            return pa.bool_() if self.type == "bit(1)" else pa.uint64()
        if self.charset not in (None, "binary", *_CHARSETS):
            return None
        return _TYPES.get(self.base)

    @property
    def selected(self) -> str:
        """The expression that reads it without a loss."""
        name = quoted(self.name)
        # The text of a float has six digits only, and that of bits is bytes.
        return {"float": f"{name} + 0e0", "bit": f"{name} + 0"}.get(self.base, name)


class Table(msgspec.Struct, frozen=True):
    """A table as the server describes it; the attributes `schema` and `name` are those of the server.

    Attributes:
        columns: in order.
        key: the columns of the primary key; empty: there is none.
        engine: it stores the rows.
    """

    schema: str
    name: str
    columns: tuple[Column, ...]
    key: tuple[str, ...]
    engine: str

    @property
    def full_name(self) -> str:
        """Its name for messages."""
        return f"{self.schema}.{self.name}"

    def column(self, name: str) -> Column | None:
        return next((each for each in self.columns if each.name == name), None)


_FIND: Final = (
    "SELECT table_schema, table_name, table_type, engine FROM information_schema.tables "
    "WHERE table_schema = COALESCE(%s, DATABASE()) AND table_name = %s"
)
_COLUMNS: Final = (
    "SELECT column_name, column_type, data_type, character_set_name, numeric_precision, numeric_scale "
    "FROM information_schema.columns WHERE table_schema = %s AND table_name = %s "
    "ORDER BY ordinal_position"
)
_KEY: Final = (
    "SELECT column_name, sub_part FROM information_schema.statistics WHERE table_schema = %s "
    "AND table_name = %s AND index_name = 'PRIMARY' ORDER BY seq_in_index"
)


def find_table(connection: Connection, name: str, address: Address) -> Table:
    """Return the table of this name, as SQL writes it.

    Raises:
        UsageError: there is none, it is no table, or it has no primary key.
    """
    parts = [
        within.replace("``", "`") or plain
        for within, plain in re.findall(r"`((?:[^`]|``)+)`|([^.`]+)", name)
    ]
    found = query(connection, _FIND, [*[None] * (2 - len(parts)), *parts][:2])
    if not found:
        known = query(
            connection,
            "SELECT CONCAT(table_schema, '.', table_name) FROM information_schema.tables "
            "WHERE table_type = 'BASE TABLE' AND table_schema NOT IN "
            "('mysql', 'sys', 'information_schema', 'performance_schema') ORDER BY 1 LIMIT 200",
        )
        also = suggest(".".join(parts), [row[0] for row in known], "tables") if known else ""
        raise UsageError(
            f"there is no such table, or the user has no right to it table=`{name}` server=`{address}`",
            fix="; ".join(
                part for part in ("create it, or GRANT SELECT ON it to the user", also) if part
            ),
        )
    schema, table, kind, engine = found[0]
    if kind != "BASE TABLE":
        raise UsageError(
            f"this is no plain table table=`{name}` server=`{address}` kind=`{kind.lower()}`",
            fix="read the tables below a view; of a system-versioned table, or a sequence, changes cannot "
            "be read",
        )
    # Without a right to read it no columns are shown.
    query(connection, f"SELECT 1 FROM {quoted(schema, table)} LIMIT 0")
    columns = tuple(
        Column(column, type_, base, charset, int(precision or 0), int(scale or 0))
        for column, type_, base, charset, precision, scale in query(
            connection, _COLUMNS, [schema, table]
        )
    )
    keys = query(connection, _KEY, [schema, table])
    if not keys or any(part is not None for _, part in keys):
        raise UsageError(
            f"the table has no primary key of whole columns table=`{schema}.{table}`",
            fix="ALTER TABLE ... ADD PRIMARY KEY (...)",
        )
    return Table(schema, table, columns, tuple(column for column, _ in keys), engine)


def schema_of(table: Table, given: pa.Schema | None) -> pa.Schema:
    """Return the columns to read, all of which may be null.

    Raises:
        UsageError: one that is given does not exist, cannot be read, or has values that do not fit.
    """
    names = [each.name for each in table.columns] if given is None else given.names
    fields = []
    for name in names:
        column = table.column(name)
        if column is None:
            raise UsageError(
                f"the table has no such column column=`{name}` table=`{table.full_name}`",
                fix=suggest(name, [each.name for each in table.columns], "columns"),
            )
        natural = column.natural
        if natural is None:
            charset = f" charset=`{column.charset}`" if column.charset else ""
            raise UsageError(
                f"columns of this type cannot be read column=`{name}` table=`{table.full_name}` "
                f"type=`{column.type}`{charset}",
                fix="name the columns to read in schema=, without this one"
                + ("; or ALTER TABLE ... CONVERT TO CHARACTER SET utf8mb4" if charset else ""),
            )
        wanted = natural if given is None else given.field(name).type
        try:
            pa.nulls(0, natural).cast(wanted)
        except (pa.ArrowNotImplementedError, pa.ArrowInvalid):
            raise UsageError(
                f"a column cannot be read as this type column=`{name}` table=`{table.full_name}` "
                f"has=`{column.type}` schema=`{wanted}`",
                fix=f"read it as {natural}, or as string",
            ) from None
        fields.append(pa.field(name, wanted))
    return pa.schema(fields)


# -- keys -----------------------------------------------------------------------------------------------


class KeyKind(msgspec.Struct, frozen=True):
    """The values of a column of a key, which are kept as texts.

    Attributes:
        order: makes values that Python orders as the statement does.
        text: makes a text of a value of the log.
        selected: the expression for the text of a column `{}`.
        ordered: the expression by which rows are sorted.
        given: the expression for a text in a statement.
    """

    order: Callable[[str], Any]
    text: Callable[[Any], str]
    selected: str = "{}"
    ordered: str = "{}"
    given: str = "%s"


_KEYS: Final[Mapping[str, KeyKind]] = {
    "integer": KeyKind(int, str, given="CAST(%s AS DECIMAL(20, 0))"),
    "decimal": KeyKind(
        Decimal, lambda value: format(value, "f"), given="CAST(%s AS DECIMAL(65, 30))"
    ),
    "date": KeyKind(str, lambda value: value.isoformat(), given="CAST(%s AS DATE)"),
    # By bytes, as those who compare have no collations.
    "text": KeyKind(
        str.encode,
        str,
        ordered="CAST(CONVERT({} USING utf8mb4) AS BINARY)",
        given="CAST(%s AS BINARY)",
    ),
    "bytes": KeyKind(bytes.fromhex, lambda value: value.hex(), "HEX({})", given="UNHEX(%s)"),
}


def key_kind(name: str) -> KeyKind:
    """Return the kind of this name, as `key_kind_of` returns them."""
    return _KEYS[name]


def key_kind_of(column: Column) -> str | None:
    """Return the name of the kind of a column of a key; None: the table cannot be read in its order."""
    if column.natural is None:
        return None
    if column.base in _INTEGERS:
        return "integer"
    if column.base in ("char", "varchar"):
        return "text"
    if column.base in ("binary", "varbinary"):
        return "bytes"
    return column.base if column.base in ("decimal", "date") else None


# -- values ---------------------------------------------------------------------------------------------


def from_rows(column: Column, values: Sequence[Any], wanted: pa.DataType) -> pa.Array:
    """Return a column of values that a statement has read, as texts or bytes.

    Raises:
        DataError: a value does not fit the type.
    """
    natural = column.natural
    assert natural is not None  # `schema_of` was asked
    return _fitting(column.name, wanted, lambda: _from_texts(column.base, values, natural))


def _from_texts(base: str, values: Sequence[Any], natural: pa.DataType) -> pa.Array:
    if pa.types.is_binary(natural):
        return pa.array(values, natural)
    texts = pa.array(values, pa.string())
    if base == "bit":
        number = texts.cast(pa.uint64())
        return pc.not_equal(number, 0) if pa.types.is_boolean(natural) else number
    if base in ("date", "datetime", "timestamp"):
        # What is no date, such as 0000-00-00, comes as null in changes, too.
        none = pc.match_substring_regex(texts, r"^0000|-00")
        texts = pc.if_else(none, pa.scalar(None, pa.string()), texts)
    if base == "timestamp":
        return texts.cast(pa.timestamp("us")).cast(natural)
    return texts.cast(natural)


def from_log(column: Any, values: Sequence[Any], wanted: pa.DataType) -> pa.Array:
    """Return a column of values of the server's log.

    Args:
        column: as the log describes it, a `Column` of pymysqlreplication.
        values: as that library decodes them.
        wanted: the type to return.

    Raises:
        DataError: a value does not fit the type.
    """
    return _fitting(column.name, wanted, lambda: _from_values(column, values))


def _from_values(column: Any, values: Sequence[Any]) -> pa.Array:
    from pymysqlreplication.constants import FIELD_TYPE as TYPE

    kind = column.type
    if kind in (TYPE.TINY, TYPE.SHORT, TYPE.INT24, TYPE.LONG, TYPE.LONGLONG):
        return pa.array(values, pa.uint64() if column.unsigned else pa.int64())
    if kind == TYPE.NEWDECIMAL:
        if column.precision <= 38:
            return pa.array(values, pa.decimal128(column.precision, column.decimals))
        return _each(values, lambda value: format(value, "f"))
    if kind == TYPE.BIT:
        bits = [None if value is None else int(value, 2) for value in values]
        numbers = pa.array(bits, pa.uint64())
        return pc.not_equal(numbers, 0) if column.bits == 1 else numbers
    if kind in (TYPE.TIMESTAMP, TYPE.TIMESTAMP2):
        times = pa.array(values, pa.timestamp("us"))
        none = pc.equal(
            times.cast(pa.int64()), 0
        )  # the log has 0000-00-00 as the beginning of 1970
        return pc.if_else(none, pa.scalar(None, times.type), times).cast(pa.timestamp("us", "UTC"))
    if kind == TYPE.YEAR:
        years = pa.array(values, pa.int16())
        return pc.if_else(pc.equal(years, 1900), pa.scalar(0, pa.int16()), years)
    if kind in (TYPE.TIME, TYPE.TIME2):
        digits = getattr(column, "fsp", 0)
        return _each(values, lambda value: time_text(value, digits))
    if kind == TYPE.SET:
        # The library has null for the empty set; `whole_row` has made it a set again.
        return _each(values, lambda value: ",".join(x for x in column.set_values if x in value))
    if kind == TYPE.JSON:
        return _each(values, json_text)
    if column.character_set_name == "binary" and kind != TYPE.ENUM:
        found = [None if each is None else whole_bytes(column, each) for each in values]
        return pa.array(found, pa.binary())
    simple = {
        TYPE.FLOAT: pa.float32(),
        TYPE.DOUBLE: pa.float64(),
        TYPE.DATE: pa.date32(),
        TYPE.DATETIME: pa.timestamp("us"),
        TYPE.DATETIME2: pa.timestamp("us"),
    }
    return pa.array(values, simple.get(kind, pa.string()))


def whole_bytes(column: Any, value: Any) -> bytes:
    """Return bytes as the table has them.

    The log leaves out zeros at the end of values of a fixed length, and the library makes a text of none.
    """
    from pymysqlreplication.constants import FIELD_TYPE

    found: bytes = value or b""
    return found.ljust(column.max_length, b"\0") if column.type == FIELD_TYPE.STRING else found


def _each(values: Sequence[Any], made: Callable[[Any], str]) -> pa.Array:
    return pa.array([None if value is None else made(value) for value in values], pa.string())


def time_text(value: timedelta, digits: int) -> str:
    """Return a time as the server writes it, such as `-838:59:59.000`."""
    sign, value = ("-", -value) if value < _UTC else ("", value)
    minutes, seconds = divmod(value.days * 86_400 + value.seconds, 60)
    fraction = f".{value.microseconds:06}"[: digits + 1] if digits else ""
    return f"{sign}{minutes // 60:02}:{minutes % 60:02}:{seconds:02}{fraction}"


def json_text(value: Any) -> str:
    """Return JSON of a value of the log, whose texts the library leaves as bytes."""
    return msgspec.json.encode(_plain(value)).decode()


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, dict):
        return {_plain(key): _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list) else value


def _fitting(name: str, wanted: pa.DataType, made: Callable[[], pa.Array]) -> pa.Array:
    try:
        found = made()
        return found if found.type == wanted else found.cast(wanted)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
        raise DataError(
            f"a value of MySQL does not fit the type of its column column=`{name}` type=`{wanted}`: "
            f"{error}",
            fix="give the column a wider type in schema=; all but columns of bytes can be read as string",
        ) from None
