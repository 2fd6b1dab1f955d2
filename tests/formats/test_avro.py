"""Avro messages: equal to those of fastavro, and a damaged one never changes another."""

from __future__ import annotations

import io
import json
import random
import tracemalloc
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import fastavro
import pyarrow as pa
import pytest

from headgate.connectors.formats.avro import avro_format
from headgate.connectors.formats.avro_decode import AvroDecoder
from headgate.connectors.formats.avro_encode import record_writer
from headgate.connectors.formats.avro_schema import Unfit, avro_of, columns_of, parse_avro
from headgate.connectors.formats.format import NO_VALUE
from headgate.errors import DataError, UsageError

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Drawn:
    """Random schemas, and random values of them, as Python objects that both sides understand."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._names = 0

    def record(self, depth: int = 0) -> dict[str, Any]:
        fields = [
            {"name": f"f{n}", "type": self.type(depth + 1)}
            for n in range(self.random.randint(1, 5))
        ]
        return {"type": "record", "name": self._name(), "fields": fields}

    def _name(self) -> str:
        self._names += 1
        return f"T{self._names}"

    def type(self, depth: int, *, union: bool = True) -> Any:
        kinds = ["plain"] * 6 + ["logical", "fixed", "enum", "decimal"]
        kinds += ["array", "map", "record"] * (depth < 4) + ["union"] * 3 * union
        kind = self.random.choice(kinds)
        if kind == "plain":
            return self.random.choice(
                ["boolean", "int", "long", "float", "double", "bytes", "string"]
            )
        if kind == "logical":
            return self.random.choice(
                [
                    {"type": "int", "logicalType": "date"},
                    {"type": "int", "logicalType": "time-millis"},
                    {"type": "long", "logicalType": "timestamp-millis"},
                    {"type": "long", "logicalType": "timestamp-micros"},
                    {"type": "long", "logicalType": "local-timestamp-micros"},
                ]
            )
        if kind == "fixed":
            return {"type": "fixed", "name": self._name(), "size": self.random.randint(1, 20)}
        if kind == "enum":
            return {"type": "enum", "name": self._name(), "symbols": ["A", "B", "C"]}
        if kind == "decimal":
            decimal = {"logicalType": "decimal", "precision": 25, "scale": 3}
            if self.random.random() < 0.5:
                return {"type": "bytes", **decimal}
            return {"type": "fixed", "name": self._name(), "size": 13, **decimal}
        if kind == "array":
            return {"type": "array", "items": self.type(depth + 1)}
        if kind == "map":
            return {"type": "map", "values": self.type(depth + 1)}
        if kind == "record":
            return self.record(depth + 1)
        inner = self.type(depth, union=False)
        return self.random.choice([["null", inner], [inner, "null"]])

    def value(self, kind: Any) -> Any:
        draw = self.random
        if isinstance(kind, list):
            return self.value(draw.choice(kind))
        if isinstance(kind, dict):
            return self._complex(kind)
        size = draw.choice([0, 1, 3, 20, 200])
        return {
            "null": lambda: None,
            "boolean": lambda: draw.random() < 0.5,
            "int": lambda: draw.choice([0, -1, 63, 64, -(2**31), 2**31 - 1, draw.getrandbits(20)]),
            "long": lambda: draw.choice(
                [0, -(2**63), 2**63 - 1, draw.getrandbits(draw.randint(1, 63))]
            ),
            "float": lambda: float(draw.randint(-1000, 1000)) / 8,
            "double": lambda: draw.choice([draw.random(), 0.0, -1e300]),
            "bytes": lambda: draw.randbytes(size),
            "string": lambda: "".join(draw.choice("aé漢😀z") for _ in range(size)),
        }[kind]()

    def _complex(self, kind: dict[str, Any]) -> Any:
        draw, name = self.random, kind["type"]
        logical = kind.get("logicalType", "")
        if logical == "decimal":
            return Decimal(draw.choice([0, 1, -1, 127, 128, -128, -129, 10**24, -(10**24)])) / 1000
        if logical == "date":
            return date(1970, 1, 1) + timedelta(days=draw.randint(-100_000, 100_000))
        if logical == "time-millis":
            return time(draw.randint(0, 23), 5, 7, draw.randint(0, 999) * 1000)
        if logical:
            step = timedelta(milliseconds=draw.randint(-(10**12), 10**13))
            if "micros" in logical:
                step += timedelta(microseconds=draw.randint(0, 999))
            at = EPOCH + step
            return at.replace(tzinfo=None) if logical.startswith("local") else at
        if name == "fixed":
            return draw.randbytes(kind["size"])
        if name == "enum":
            return draw.choice(kind["symbols"])
        count = draw.choice([0, 0, 1, 2, 5])
        if name == "array":
            return [self.value(kind["items"]) for _ in range(count)]
        if name == "map":
            return {f"k{n}": self.value(kind["values"]) for n in range(count)}
        if name == "record":
            return {each["name"]: self.value(each["type"]) for each in kind["fields"]}
        return self.value(name)


def written(schema: Any, rows: list[Any]) -> list[bytes]:
    parsed = fastavro.parse_schema(schema)
    out = []
    for row in rows:
        file = io.BytesIO()
        fastavro.schemaless_writer(file, parsed, row)
        out.append(file.getvalue())
    return out


def read(schema: Any, message: bytes) -> Any:
    """The record that a message is to fastavro; raises if it is none, or if bytes are left."""
    file = io.BytesIO(message)
    found = fastavro.schemaless_reader(file, fastavro.parse_schema(schema), None)
    if file.tell() != len(message):
        raise ValueError("bytes are left")
    return found


def rows_of(decoded: Any) -> list[Any]:
    batch = decoded.batch()
    if batch is None:
        return []
    kind = pa.struct(list(batch.schema))
    return [with_dicts(row, kind) for row in batch.to_pylist()]


def with_dicts(value: Any, kind: pa.DataType) -> Any:
    """The same value with maps as dicts, as Arrow has lists of pairs."""
    if value is None:
        return None
    if pa.types.is_map(kind):
        return {key: with_dicts(each, kind.item_type) for key, each in value}
    if pa.types.is_list(kind):
        return [with_dicts(each, kind.value_type) for each in value]
    if pa.types.is_struct(kind):
        return {each.name: with_dicts(value[each.name], each.type) for each in kind}
    return value


@pytest.mark.parametrize("seed", range(60))
def test_random_schemas_are_read_and_written_as_fastavro_does(seed: int) -> None:
    drawn = Drawn(seed)
    schema = drawn.record()
    rows = [drawn.value(schema) for _ in range(drawn.random.choice([1, 7, 40]))]
    avro = parse_avro(schema)
    columns = columns_of(avro)
    messages = written(schema, rows)
    decoded = AvroDecoder(avro, columns)(messages)
    assert decoded.bad == []
    assert rows_of(decoded) == [read(schema, message) for message in messages]

    batch = decoded.batch()
    assert batch is not None
    batch.validate(full=True)
    ours = record_writer(avro, columns)(batch).to_pylist()
    # Some decimals have several forms, so the messages may differ.
    assert [read(schema, each) for each in ours] == [read(schema, each) for each in messages]
    again = record_writer(avro, columns)(batch.slice(len(rows) // 2)).to_pylist()
    assert again == ours[len(rows) // 2 :]


@pytest.mark.parametrize("seed", range(40))
def test_a_damaged_message_changes_no_other(seed: int) -> None:
    """Each message is decoded as if it was alone, and none is accepted that fastavro refuses."""
    drawn = Drawn(seed)
    schema = drawn.record()
    messages = written(schema, [drawn.value(schema) for _ in range(24)])
    harmed = list(messages)
    places = {0, 11, 23} | {drawn.random.randrange(24) for _ in range(4)}
    for place in places:
        harmed[place] = damage(messages[place], drawn.random)
    avro = parse_avro(schema)
    decoder = AvroDecoder(avro, columns_of(avro))
    decoded = decoder(harmed)
    bad = {index for index, _ in decoded.bad}
    assert bad <= places
    alone = [decoder([message]) for message in harmed]
    assert {index for index, each in enumerate(alone) if each.bad} == bad
    assert rows_of(decoded) == [row for each in alone for row in rows_of(each)]
    for place in sorted(places - bad):
        # What decodes exactly to its end is a record; fastavro says the same one.
        expected = read(schema, harmed[place])
        if json.dumps(expected, default=str).find("NaN") < 0:
            assert rows_of(alone[place]) == [expected]


def damage(message: bytes, draw: random.Random) -> bytes:
    kind = draw.choice(["cut", "more", "flip", "flips", "noise"])
    if kind == "cut":
        return message[: draw.randrange(len(message))] if message else b"\0"
    if kind == "more":
        return message + draw.randbytes(draw.randint(1, 5))
    if kind == "noise":
        return draw.randbytes(draw.randint(0, 40))
    found = bytearray(message or b"\0")
    for _ in range(1 if kind == "flip" else 5):
        found[draw.randrange(len(found))] ^= 1 << draw.randrange(8)
    return bytes(found)


# -- evolution --------------------------------------------------------------------------------------


def record(*fields: dict[str, Any]) -> dict[str, Any]:
    return {"type": "record", "name": "R", "fields": list(fields)}


def evolved(
    writer: dict[str, Any], rows: list[Any], columns: pa.Schema, reader: Any = None
) -> list[Any]:
    decoder = AvroDecoder(parse_avro(writer), columns, parse_avro(reader) if reader else None)
    decoded = decoder(written(writer, rows))
    assert decoded.bad == []
    return rows_of(decoded)


OLD = record({"name": "a", "type": "int"}, {"name": "b", "type": "string"})


def test_fields_are_found_by_name_and_others_are_skipped() -> None:
    columns = pa.schema([("b", pa.string()), ("new", pa.int64()), ("a", pa.int64())])
    found = evolved(OLD, [{"a": 1, "b": "x"}], columns)
    assert found == [{"b": "x", "new": None, "a": 1}]


@pytest.mark.parametrize("seed", range(20))
def test_any_field_can_be_skipped(seed: int) -> None:
    drawn = Drawn(seed)
    inner = drawn.record()
    schema = record({"name": "skipped", "type": inner}, {"name": "kept", "type": "string"})
    rows = [{"skipped": drawn.value(inner), "kept": f"row {n}"} for n in range(30)]
    found = evolved(schema, rows, pa.schema([("kept", pa.string())]))
    assert found == [{"kept": row["kept"]} for row in rows]


def test_aliases_and_defaults_of_the_readers_schema() -> None:
    reader = record(
        {"name": "name", "type": "string", "aliases": ["b"]},
        {"name": "kind", "type": {"type": "enum", "name": "K", "symbols": ["A"]}, "default": "A"},
        {"name": "raw", "type": "bytes", "default": "\u00ff\u0001"},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}, "default": 7},
        {"name": "tags", "type": {"type": "array", "items": "string"}, "default": ["x"]},
        {"name": "opt", "type": ["null", "int"], "default": None},
    )
    columns = columns_of(parse_avro(reader))
    assert evolved(OLD, [{"a": 1, "b": "x"}], columns, reader) == [
        {
            "name": "x",
            "kind": "A",
            "raw": b"\xff\x01",
            "at": EPOCH + timedelta(milliseconds=7),
            "tags": ["x"],
            "opt": None,
        }
    ]


@pytest.mark.parametrize(
    ("avro", "value", "column", "expected"),
    [
        ("int", 5, pa.int64(), 5),
        ("int", 5, pa.float32(), 5.0),
        ("int", 5, pa.float64(), 5.0),
        ("long", -7, pa.float64(), -7.0),
        ("float", 0.5, pa.float64(), 0.5),
        ("string", "é", pa.binary(), "é".encode()),
        ("bytes", "é".encode(), pa.large_string(), "é"),
        ("long", 7, pa.int16(), 7),
        ({"type": "int", "logicalType": "date"}, 1, pa.int32(), 1),
        ({"type": "long", "logicalType": "timestamp-millis"}, 5, pa.timestamp("us", "UTC"), 5),
        ({"type": "long", "logicalType": "timestamp-micros"}, 5000, pa.timestamp("ms", "UTC"), 5),
        (["int", "string", "null"], None, pa.int64(), None),
        (["null", "int", "long"], 9, pa.int64(), 9),
        (["string", "bytes"], b"x", pa.string(), "x"),
        ({"type": "fixed", "name": "F", "size": 2}, b"ab", pa.binary(), b"ab"),
        ({"type": "enum", "name": "E", "symbols": ["A", "B"]}, "B", pa.string(), "B"),
    ],
)
def test_promotions(avro: Any, value: Any, column: pa.DataType, expected: Any) -> None:
    writer = record({"name": "a", "type": avro})
    (found,) = evolved(writer, [{"a": value}], pa.schema([("a", column)]))
    if isinstance(found["a"], datetime):
        assert found["a"] == EPOCH + timedelta(milliseconds=expected)
    else:
        assert found["a"] == expected


@pytest.mark.parametrize(
    ("avro", "column", "text"),
    [
        ("string", pa.int64(), "`a` is string in Avro"),
        ("double", pa.float32(), "double"),
        ("double", pa.int64(), "double"),
        ("long", pa.timestamp("ms", "UTC"), "long"),
        ("long", pa.string(), "long"),
        (["int", "string"], pa.bool_(), "int"),
        ({"type": "array", "items": "null"}, pa.list_(pa.null()), "items without bytes"),
        (
            {"type": "long", "logicalType": "local-timestamp-millis"},
            pa.timestamp("ms", "UTC"),
            "lo",
        ),
        (
            {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 3},
            pa.decimal128(9, 2),
            "decimal",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_the_first_message(
    avro: Any, column: pa.DataType, text: str
) -> None:
    with pytest.raises(Unfit, match=text):
        AvroDecoder(parse_avro(record({"name": "a", "type": avro})), pa.schema([("a", column)]))


def test_a_column_without_nulls_needs_a_field_or_a_default() -> None:
    columns = pa.schema([pa.field("more", pa.int64(), nullable=False)])
    with pytest.raises(Unfit, match="no field `more`"):
        AvroDecoder(parse_avro(OLD), columns)


BAD_VALUES = [
    ("int", b"\x80\x80\x80\x80\x20", "more than 32 bits"),
    ("long", b"\xff" * 9 + b"\x02", "more than 64 bits"),
    ("long", b"\xff" * 11, "64 bits"),
    ("boolean", b"\x02", "neither 0 nor 1"),
    ("string", b"\x01", "longer than"),
    ("string", b"\x04a", "longer than"),
    ("string", b"\x02\xff", "UTF-8"),
    ("double", b"1234567", "ends within"),
    (["null", "int"], b"\x04\x00", "no such branch"),
    ({"type": "enum", "name": "E", "symbols": ["A"]}, b"\x02", "no such symbol"),
    ({"type": "array", "items": "int"}, b"\xff\xff\xff\xff\x0f\x02\x00", "items"),
    ({"type": "array", "items": "int"}, b"\x01\x04\x02\x00", "not as long as it says"),
    ({"type": "array", "items": "int"}, b"\x02\x02", "ends within"),
    ({"type": "int", "logicalType": "time-millis"}, b"\x01", "does not fit into time32"),
    ("int", b"", "ends within"),
    ("int", b"\x02\x00", "left behind"),
    (
        {"type": "bytes", "logicalType": "decimal", "precision": 3, "scale": 0},
        b"\x04\x03\xe8",
        "too many digits",
    ),
]


@pytest.mark.parametrize(("avro", "payload", "text"), BAD_VALUES)
def test_every_reason_is_given(avro: Any, payload: bytes, text: str) -> None:
    """At the first, a middle and the last place; its neighbours are unharmed."""
    schema = record({"name": "a", "type": avro})
    good = {"int": b"\x06", "long": b"\x06", "boolean": b"\x01", "string": b"\x04hi"}
    good |= {"double": bytes(8)}
    one = good.get(avro, b"\x02\x02\x00") if isinstance(avro, str) else None
    if one is None:
        kind = avro if isinstance(avro, list) else avro["type"]
        one = {"enum": b"\x00", "array": b"\x02\x02\x00", "bytes": b"\x02\x05"}.get(
            str(kind), b"\x00"
        )
    decoder = AvroDecoder(parse_avro(schema), columns_of(parse_avro(schema)))
    decoded = decoder([payload, one, one, payload, one, payload])
    assert [index for index, _ in decoded.bad] == [0, 3, 5]
    assert all(text in reason for _, reason in decoded.bad)
    assert rows_of(decoded) == rows_of(decoder([one])) * 3


def test_values_that_do_not_fit_the_column_are_bad_records() -> None:
    avro = parse_avro(record({"name": "a", "type": ["null", "long"]}))
    messages = [b"\x02\x02", b"\x00", b"\x02\x80\x04", b"\x02\x03"]
    narrow = pa.schema([pa.field("a", pa.int8(), nullable=False)])
    decoded = AvroDecoder(avro, narrow)(messages)
    assert decoded.bad == [(1, "no value for column `a`"), (2, "a number does not fit into int8")]
    assert rows_of(decoded) == [{"a": 1}, {"a": -2}]


def test_times_are_rounded_down_and_those_too_far_are_bad_records() -> None:
    micros = {"type": "long", "logicalType": "timestamp-micros"}
    schema = record({"name": "a", "type": micros})
    messages = [b"\xd0\x0f", b"\x01", b"\xfe" + b"\xff" * 8 + b"\x01"]  # 1000, -1, 2**63 - 1
    coarse = AvroDecoder(parse_avro(schema), pa.schema([("a", pa.timestamp("ms", "UTC"))]))
    batch = coarse(messages).batch()
    assert batch is not None
    times = batch.column(0).cast(pa.int64()).to_pylist()
    assert times == [1, -1, (2**63 - 1) // 1000]
    fine = AvroDecoder(parse_avro(schema), pa.schema([("a", pa.timestamp("ns", "UTC"))]))
    assert [index for index, _ in fine(messages).bad] == [2]


# -- the format -------------------------------------------------------------------------------------


def test_tombstones_are_bad_records() -> None:
    decode = avro_format(schema=OLD).decoder(columns_of(parse_avro(OLD)))
    good = written(OLD, [{"a": 1, "b": "x"}])
    decoded = decode([None, *good, b"", *good, None])
    assert decoded.bad == [(0, NO_VALUE), (2, "it ends within a value"), (4, NO_VALUE)]
    assert rows_of(decoded) == [{"a": 1, "b": "x"}] * 2
    assert decode([None]).bad == [(0, NO_VALUE)]


WIDE = pa.schema(
    [
        ("i8", pa.int8()),
        ("u32", pa.uint32()),
        ("s", pa.timestamp("s")),
        ("t", pa.time32("s")),
        ("ls", pa.large_string()),
        ("ll", pa.large_list(pa.int16())),
        ("m", pa.map_(pa.string(), pa.float32())),
        pa.field("f", pa.binary(2), nullable=False),
        ("d", pa.decimal128(38, 10)),
        ("st", pa.struct([("x", pa.list_(pa.struct([("y", pa.bool_())])))])),
    ]
)


def test_columns_without_a_schema_get_one_that_reads_back() -> None:
    row = {"i8": -3, "u32": 2**32 - 1, "s": datetime(2026, 1, 1), "t": time(1, 2, 3), "ls": "é"}
    row |= {"ll": [1, None], "m": [("k", None)], "f": b"ab", "d": Decimal("-0.5")}
    row |= {"st": {"x": [{"y": True}, None]}}
    empty = dict.fromkeys(WIDE.names) | {"f": b"cd"}
    batch = pa.RecordBatch.from_pylist([row, empty, row], schema=WIDE)
    format = avro_format()
    format.check_output(WIDE)
    messages = format.encoder(WIDE, "topic")(batch)
    decoded = AvroDecoder(parse_avro(avro_of(WIDE, "Value")), WIDE)(
        [message or b"" for message in messages]
    )
    assert decoded.bad == []
    assert decoded.batch() == batch


@pytest.mark.parametrize(
    ("kind", "text"),
    [(pa.uint64(), "no form"), (pa.duration("ms"), "no form"), (pa.date64(), "no form")],
)
def test_a_column_without_a_form_in_avro(kind: pa.DataType, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        avro_format().check_output(pa.schema([("a", kind)]))


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        (pa.schema([("a", pa.int64()), ("b", pa.string())]), "`a` of type int64"),
        (pa.schema([("a", pa.int32())]), "no column for the field `b`"),
        (pa.schema([("a", pa.int32()), ("b", pa.string()), ("c", pa.int8())]), "no field for `c`"),
        (pa.schema([]), "no column is left"),
    ],
)
def test_columns_that_do_not_fit_the_schema_of_a_sink(columns: pa.Schema, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        avro_format(schema=OLD).check_output(columns)


def test_a_null_or_a_symbol_that_the_schema_lacks_fails() -> None:
    columns = pa.schema([("a", pa.int32()), ("b", pa.string())])
    encode = avro_format(schema=OLD).encoder(columns, "topic")
    with pytest.raises(DataError, match="null"):
        encode(pa.record_batch([[1], [None]], schema=columns))
    enum = record({"name": "a", "type": {"type": "enum", "name": "E", "symbols": ["A"]}})
    column = pa.schema([("a", pa.string())])
    with pytest.raises(DataError, match="no such symbol"):
        avro_format(schema=enum).encoder(column, "topic")(pa.record_batch([["B"]], schema=column))


@pytest.mark.parametrize(
    "schema",
    [
        "{",
        "{}",
        "[]",
        '"nothing"',
        '{"type": "record", "name": "R"}',
        '{"type": "fixed", "name": "F", "size": -1}',
        '{"type": "record", "name": "R", "fields": [{"name": "a", "type": "B"}]}',
        '{"type": "array"}',
        "[" * 5000,
    ],
)
def test_what_is_no_schema_of_avro(schema: str) -> None:
    with pytest.raises(UsageError):
        avro_format(schema=schema)


def test_a_short_name_is_that_of_its_own_namespace() -> None:
    """Also if the empty namespace has a type of that name."""
    schema = """{"type": "record", "name": "Outer", "fields": [
        {"name": "a", "type": {"type": "fixed", "name": "F", "size": 2}},
        {"name": "b", "type": {"type": "record", "name": "x.Inner", "fields": [
            {"name": "c", "type": {"type": "fixed", "name": "F", "size": 4}},
            {"name": "d", "type": "F"}]}}]}"""
    assert columns_of(parse_avro(schema)).field("b").type.field("d").type == pa.binary(4)


def test_many_small_items_take_little_memory() -> None:
    schema = record({"name": "a", "type": {"type": "array", "items": "int"}})
    (message,) = written(schema, [{"a": [1] * 20_000}])
    decode = AvroDecoder(parse_avro(schema), columns_of(parse_avro(schema)))
    tracemalloc.start()
    try:
        decoded = decode([message])
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert rows_of(decoded) == [{"a": [1] * 20_000}]


def test_a_record_that_contains_itself_makes_no_columns() -> None:
    schema = record({"name": "next", "type": ["null", "R"]}, {"name": "a", "type": "int"})
    with pytest.raises(UsageError, match="contains itself"):
        columns_of(parse_avro(schema))
    with pytest.raises(Unfit, match="contains itself"):
        AvroDecoder(parse_avro(schema), pa.schema([("a", pa.int64())]))
