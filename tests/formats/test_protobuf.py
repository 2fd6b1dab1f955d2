"""Protobuf messages: equal to those of the package protobuf, and a damaged one never changes another."""

from __future__ import annotations

import base64
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from google.protobuf import descriptor_pb2, timestamp_pb2
from google.protobuf.message_factory import GetMessageClass

from headgate.connectors.formats.format import NO_VALUE, Decode
from headgate.connectors.formats.protobuf import encode_indexes, protobuf_format, read_indexes
from headgate.connectors.formats.protobuf_schema import (
    find_message,
    indexes_in,
    load_files,
    name_at,
)
from headgate.connectors.formats.schema_registry import (
    RegistryError,
    header_of,
    schema_registry,
)
from headgate.errors import DataError, UsageError
from headgate.tests.formats.test_avro import rows_of
from headgate.tests.support.registry_stub import RegistryStub, registry_stub

PLAIN = {
    "double": 1, "float": 2, "int64": 3, "uint64": 4, "int32": 5, "fixed64": 6, "fixed32": 7, "bool": 8,
    "string": 9, "bytes": 12, "uint32": 13, "sfixed32": 15, "sfixed64": 16, "sint32": 17, "sint64": 18,
}  # fmt: skip
MESSAGE, ENUM, REPEATED = 11, 14, 3


def order_file() -> Any:
    """All kinds of fields, in proto3."""
    file = descriptor_pb2.FileDescriptorProto(name="order.proto", package="shop", syntax="proto3")
    for name in ("timestamp", "duration", "wrappers"):
        file.dependency.append(f"google/protobuf/{name}.proto")
    kind = file.enum_type.add(name="Kind")
    for number, name in enumerate(("NEW", "PAID", "SENT")):
        kind.value.add(name=name, number=number)
    other = file.message_type.add(name="Other")
    other.field.add(name="id", number=1, type=3, label=1)
    order = file.message_type.add(name="Order")
    numbers = iter(range(1, 100))

    def add(name: str, type: int, label: int = 1, kind: str = "", **more: Any) -> Any:
        return order.field.add(
            name=name, number=next(numbers), type=type, label=label, type_name=kind or None, **more
        )

    for name, number in PLAIN.items():
        add(f"p_{name}", number)
        add(f"r_{name}", number, REPEATED)
    add("o_int32", 5, proto3_optional=True, oneof_index=1)
    add("kind", ENUM, kind=".shop.Kind")
    add("kinds", ENUM, REPEATED, ".shop.Kind")
    add("at", MESSAGE, kind=".google.protobuf.Timestamp")
    add("took", MESSAGE, kind=".google.protobuf.Duration")
    add("note", MESSAGE, kind=".google.protobuf.StringValue")
    line = order.nested_type.add(name="Line")
    line.field.add(name="name", number=1, type=9, label=1)
    line.field.add(name="counts", number=2, type=5, label=REPEATED)
    line.field.add(
        name="at", number=3, type=MESSAGE, label=1, type_name=".google.protobuf.Timestamp"
    )
    add("line", MESSAGE, kind=".shop.Order.Line")
    add("lines", MESSAGE, REPEATED, ".shop.Order.Line")
    entries = (("prices", 1, ""), ("by_name", MESSAGE, ".shop.Order.Line"))
    for name, type, target in entries:
        entry = order.nested_type.add(name=f"{name.title().replace('_', '')}Entry")
        entry.options.map_entry = True
        entry.field.add(name="key", number=1, type=9, label=1)
        entry.field.add(name="value", number=2, type=type, label=1, type_name=target or None)
        add(name, MESSAGE, REPEATED, f".shop.Order.{entry.name}")
    order.oneof_decl.add(name="choice")
    order.oneof_decl.add(name="_o_int32")
    add("left", 9, oneof_index=0)
    add("right", 3, oneof_index=0)
    return file


FILE = order_file()
DESCRIPTOR = descriptor_pb2.FileDescriptorSet(file=[FILE]).SerializeToString()
ORDER = find_message(load_files(DESCRIPTOR), "shop.Order")
Order = GetMessageClass(ORDER)
FORMAT = protobuf_format("shop.Order", descriptor=DESCRIPTOR)
COLUMNS = FORMAT.columns()


def random_order(draw: random.Random) -> Any:
    made = Order()
    for field in ORDER.fields:
        name = field.name
        if draw.random() < 0.4:
            continue
        if name[:2] in ("p_", "r_", "o_"):
            values = [value_of(name[2:], draw) for _ in range(draw.choice([1, 3]))]
            if name.startswith("r_"):
                getattr(made, name).extend(values)
            else:
                setattr(made, name, values[0])
    if draw.random() < 0.6:
        made.kind = draw.randrange(3)
        made.kinds.extend([0, 2, 1][: draw.randrange(4)])
        made.at.seconds, made.at.nanos = draw.randint(-(10**9), 10**9), draw.randrange(10**9)
        sign = draw.choice([1, -1])
        made.took.seconds, made.took.nanos = (
            sign * draw.randrange(10**6),
            sign * draw.randrange(10**9),
        )
        made.note.value = draw.choice(["", "é"])
        made.prices["a"] = 1.5
        made.by_name["x"].name = "y"
        made.left = ""
    else:
        made.right = 5
    for line in [made.line, *(made.lines.add() for _ in range(draw.randrange(3)))]:
        if draw.random() < 0.7:
            line.name = "n"
            line.counts.extend([1, -2])
            line.at.seconds = 7
    return made


def value_of(kind: str, draw: random.Random) -> Any:
    if kind in ("double", "float"):
        return draw.randint(-100, 100) / 4
    if kind == "bool":
        return draw.random() < 0.5
    if kind in ("string", "bytes"):
        return draw.choice(["", "a", "é" * 50]) if kind == "string" else draw.randbytes(3)
    bits = 64 if kind.endswith("64") else 32
    high = 2**bits if kind.startswith(("u", "f")) else 2 ** (bits - 1)
    low = 0 if kind.startswith(("u", "f")) else -high
    return draw.choice([low, high - 1, draw.randrange(low, high), 0, 1])


@pytest.mark.parametrize("seed", range(10))
def test_messages_come_back_as_they_were(seed: int) -> None:
    draw = random.Random(seed)
    orders = [random_order(draw) for _ in range(draw.choice([1, 40]))]
    decoded = FORMAT.decoder(COLUMNS)([each.SerializeToString() for each in orders])
    assert decoded.bad == []
    batch = decoded.batch()
    assert batch is not None
    batch.validate(full=True)
    for order, row in zip(orders, rows_of(decoded), strict=True):
        for name in (
            "p_int64",
            "p_uint64",
            "p_string",
            "p_bytes",
            "p_bool",
            "p_double",
            "p_sint32",
        ):
            assert row[name] == getattr(order, name)
        assert row["r_uint32"] == list(order.r_uint32)
        assert row["o_int32"] == (order.o_int32 if order.HasField("o_int32") else None)
        assert row["kind"] == ("NEW", "PAID", "SENT")[order.kind]
        assert row["note"] == (order.note.value if order.HasField("note") else None)
        assert (row["left"] is None) == (order.WhichOneof("choice") != "left")
        assert row["prices"] == dict(order.prices)
        assert [each["counts"] for each in row["lines"]] == [list(e.counts) for e in order.lines]
        assert (row["at"] is None) != order.HasField("at")
        if order.HasField("at"):
            assert row["at"].value == order.at.ToNanoseconds()
            assert row["took"].value == order.took.ToNanoseconds()
    FORMAT.check_output(COLUMNS)
    for rows in (batch, batch.slice(len(orders) // 2)):
        written = FORMAT.encoder(COLUMNS, "topic")(rows)
        assert [Order.FromString(each or b"") for each in written] == orders[-len(rows) :]


def test_damaged_messages_change_no_other() -> None:
    good = Order(p_int64=5, p_string="é").SerializeToString()
    bad = [good[:-1], b"\xff", Order(p_string="a").SerializeToString()[:-1] + b"\xff"]
    unknown = Order()
    unknown.kind = 7
    bad.append(unknown.SerializeToString())
    nanos = Order()
    nanos.at.nanos = 10**9
    bad.append(nanos.SerializeToString())
    far = Order()
    far.at.seconds = 10**11
    bad.append(far.SerializeToString())
    messages: list[bytes | None] = [bad[0], good, bad[1], bad[2], good, good, *bad[3:], None]
    decoded = FORMAT.decoder(COLUMNS)(messages)
    assert [index for index, _ in decoded.bad] == [0, 2, 3, 6, 7, 8, 9]
    assert [row["p_int64"] for row in rows_of(decoded)] == [5] * 3
    reasons = dict(decoded.bad)
    assert "no message `shop.Order`" in reasons[0]
    assert "`Kind` has no symbol for 7" in reasons[6]
    assert "out of range" in reasons[7]
    assert "does not fit into timestamp[ns" in reasons[8]
    assert reasons[9] == NO_VALUE


@pytest.mark.parametrize(
    ("column", "kind", "value"),
    [
        ("p_int32", pa.int64(), 3),
        ("p_int64", pa.int8(), 3),
        ("p_uint32", pa.float64(), 3.0),
        ("p_float", pa.float64(), 0.5),
        ("p_string", pa.binary(), b"x"),
        ("p_bytes", pa.large_binary(), b"x"),
        ("kind", pa.int32(), 2),
        ("kind", pa.large_string(), "SENT"),
        ("at", pa.timestamp("s", "UTC"), -2),
        ("r_int32", pa.large_list(pa.int64()), [1, 2]),
    ],
)
def test_columns_of_other_types(column: str, kind: pa.DataType, value: Any) -> None:
    order = Order(p_int32=3, p_int64=3, p_uint32=3, p_float=0.5, p_string="x", p_bytes=b"x", kind=2)
    order.r_int32.extend([1, 2])
    order.at.seconds, order.at.nanos = -2, 999_999_999
    schema = pa.schema([(column, kind)])
    FORMAT.check_columns(schema)
    batch = FORMAT.decoder(schema)([order.SerializeToString()]).batch()
    assert batch is not None
    made = batch.column(0)
    assert (made.cast(pa.int64()) if pa.types.is_timestamp(kind) else made).to_pylist() == [value]


def test_a_number_that_does_not_fit_its_column_is_a_bad_record() -> None:
    decode = FORMAT.decoder(pa.schema([("p_int64", pa.int8())]))
    messages = [Order(p_int64=value).SerializeToString() for value in (1, 1000, 2)]
    decoded = decode(messages)
    assert [index for index, _ in decoded.bad] == [1]
    assert rows_of(decoded) == [{"p_int64": 1}, {"p_int64": 2}]


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ({"nothing": pa.int64()}, "no field `nothing`"),
        ({"p_string": pa.int64()}, "string"),
        ({"p_double": pa.float32()}, "double"),
        ({"r_int32": pa.int32()}, "list"),
        ({"prices": pa.list_(pa.int32())}, "map"),
        ({"at": pa.timestamp("ms")}, "Timestamp"),
        ({"line": pa.struct([("x", pa.int32())])}, "no field `line.x`"),
        ({"line": pa.int32()}, "shop.Order.Line"),
    ],
)
def test_columns_that_do_not_fit(columns: dict[str, pa.DataType], text: str) -> None:
    for check in (FORMAT.check_columns, FORMAT.check_output):
        with pytest.raises(UsageError, match=text):
            check(pa.schema(columns))


@pytest.mark.parametrize(
    ("kind", "value", "column"),
    [
        (pa.string(), "LOST", "kind"),
        (pa.list_(pa.int32()), [None], "r_int32"),
        (pa.int64(), 2**40, "p_int32"),
    ],
)
def test_a_value_without_a_form_fails(kind: pa.DataType, value: Any, column: str) -> None:
    schema = pa.schema([(column, kind)])
    with pytest.raises(DataError, match=f"column=`{column}`"):
        FORMAT.encoder(schema, "topic")(pa.record_batch([[value]], schema=schema))


def test_forms_of_the_descriptor(tmp_path: Path) -> None:
    (tmp_path / "order.pb").write_bytes(DESCRIPTOR)
    assert protobuf_format("shop.Order", descriptor=tmp_path / "order.pb").columns() == COLUMNS
    stamp = protobuf_format(timestamp_pb2.Timestamp)
    assert stamp.columns().names == ["seconds", "nanos"]


@pytest.mark.parametrize(
    ("message", "options", "text"),
    [
        ("shop.Order", {}, "descriptor="),
        ("shop.Ordr", {"descriptor": DESCRIPTOR}, "no such message"),
        (None, {"descriptor": DESCRIPTOR}, "which message"),
        ("shop.Order", {"descriptor": b"\xff"}, "no FileDescriptorSet"),
        ("shop.Order", {"descriptor": b""}, "no FileDescriptorSet"),
        ("shop.Order", {"descriptor": "/no/such.pb"}, "cannot be read"),
        (dict, {}, "generated class"),
    ],
)
def test_mistakes(message: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        protobuf_format(message, **options)


def test_a_descriptor_without_its_imports() -> None:
    file = descriptor_pb2.FileDescriptorProto(name="a.proto", dependency=["b.proto"])
    descriptor = descriptor_pb2.FileDescriptorSet(file=[file]).SerializeToString()
    with pytest.raises(UsageError, match=r"b\.proto"):
        protobuf_format("A", descriptor=descriptor)


# -- with a registry --------------------------------------------------------------------------------


TEXT = """
syntax = "proto3";  // message No { }
package shop;
import "google/protobuf/timestamp.proto";
option java_package = "message X {";
/* message No { } */
enum Kind { NEW = 0; }
message Other { int64 id = 1; map<string, int32> m = 2; oneof c { string s = 3; } }
message Order {
  enum Inner { A = 0; }
  message Line { message Deep { int32 x = 1; } string message = 1; }
  int64 p_int64 = 1;
  message Last {}
}
"""


def test_messages_are_found_by_their_indexes() -> None:
    encoded = base64.b64encode(FILE.SerializeToString()).decode()
    for text, name, indexes in (
        (TEXT, "shop.Other", [0]),
        (TEXT, "shop.Order", [1]),
        (TEXT, "shop.Order.Line", [1, 0]),
        (TEXT, "shop.Order.Line.Deep", [1, 0, 0]),
        (TEXT, "shop.Order.Last", [1, 1]),
        (encoded, "shop.Order", [1]),
        (encoded, "shop.Order.Line", [1, 0]),
    ):
        assert name_at(text, indexes) == name
        assert indexes_in(text, name) == indexes
    assert name_at(TEXT, [2]) is None
    assert name_at(TEXT, [-1]) is None
    assert indexes_in(TEXT, "shop.No") is None


@pytest.mark.parametrize("indexes", [[0], [1], [1, 0], [0, 300]])
def test_indexes_are_read_as_they_are_written(indexes: list[int]) -> None:
    head = header_of(1) + encode_indexes(indexes)
    assert read_indexes(head + b"rest") == (tuple(indexes), len(head))
    assert isinstance(read_indexes(head[:-1]), str)
    assert isinstance(read_indexes(header_of(1) + b"\xff" * 20), str)


@pytest.fixture
def stub() -> Iterator[RegistryStub]:
    with registry_stub() as running:
        yield running


def decoder(stub: RegistryStub, columns: pa.Schema, message: str | None, own: bool) -> Decode:
    registry = schema_registry(stub.url, patience="200ms")
    descriptor = DESCRIPTOR if own else None
    return protobuf_format(message, descriptor=descriptor, registry=registry).decoder(columns)


@pytest.mark.parametrize("own", [True, False])
def test_messages_with_a_header(stub: RegistryStub, own: bool) -> None:
    """By the descriptor of the user, or by that of the registry."""
    encoded = base64.b64encode(FILE.SerializeToString()).decode()
    id = stub.add("t-value", encoded, "PROTOBUF")
    order = header_of(id) + encode_indexes([1]) + Order(p_int64=7).SerializeToString()
    other = header_of(id) + encode_indexes([0]) + b"\x08\x05"
    messages = [order, other, order[:6], order + b"\xff", header_of(id) + b"\x02\x08", order]
    decoded = decoder(stub, pa.schema([("p_int64", pa.int64())]), "shop.Order", own)(messages)
    assert [index for index, _ in decoded.bad] == [1, 2, 3, 4]
    assert "`shop.Other`, not `shop.Order`" in decoded.bad[0][1]
    assert rows_of(decoded) == [{"p_int64": 7}] * 2


def test_a_schema_in_text_needs_a_descriptor(stub: RegistryStub) -> None:
    id = stub.add("t-value", TEXT, "PROTOBUF")
    message = header_of(id) + encode_indexes([1]) + Order(p_int64=7).SerializeToString()
    columns = pa.schema([("p_int64", pa.int64())])
    assert rows_of(decoder(stub, columns, "shop.Order", True)([message])) == [{"p_int64": 7}]
    ((_, reason),) = decoder(stub, columns, "shop.Order", False)([message]).bad
    assert "give descriptor=" in reason


def test_a_registry_that_compiles_on_request(stub: RegistryStub) -> None:
    id = stub.add("t-value", TEXT, "PROTOBUF")
    compiled = stub.add("compiled", base64.b64encode(FILE.SerializeToString()).decode(), "PROTOBUF")

    def serialized(path: str) -> tuple[int, bytes] | None:
        if "format=serialized" not in path:
            return None
        _, found = stub.answer("GET", f"/schemas/ids/{compiled}", {})
        return 200, str(found).replace("'", '"').encode()

    stub.trouble = serialized
    message = header_of(id) + encode_indexes([1]) + Order(p_int64=7).SerializeToString()
    decode = decoder(stub, pa.schema([("p_int64", pa.int64())]), None, False)
    assert rows_of(decode([message])) == [{"p_int64": 7}]


def test_a_registry_that_does_not_compile_makes_bad_records(stub: RegistryStub) -> None:
    """It may answer that there is no such thing."""
    id = stub.add("t-value", TEXT, "PROTOBUF")
    stub.trouble = lambda path: (404, b"{}") if "format=serialized" in path else None
    message = header_of(id) + encode_indexes([1]) + Order(p_int64=7).SerializeToString()
    decode = decoder(stub, pa.schema([("p_int64", pa.int64())]), None, False)
    ((_, reason),) = decode([message]).bad
    assert "give descriptor=" in reason


def test_a_sink_writes_the_header(stub: RegistryStub) -> None:
    schema = pa.schema([("p_int64", pa.int64())])
    batch = pa.record_batch([[7]], schema=schema)

    def written(**options: Any) -> list[bytes | None]:
        registry = schema_registry(stub.url, patience="200ms", **options)
        format = protobuf_format("shop.Order", descriptor=DESCRIPTOR, registry=registry)
        format.check_output(schema)
        return list(format.encoder(schema, "t")(batch))

    with pytest.raises(RegistryError, match="auto_register"):
        written()
    body = encode_indexes([1]) + Order(p_int64=7).SerializeToString()
    assert written(auto_register=True) == [header_of(1) + body]
    assert written() == [header_of(1) + body]
    stub.add("t-value", 'syntax = "proto3"; package shop; message Other {}', "PROTOBUF")
    with pytest.raises(RegistryError, match=r"no such message.*shop\.Order"):
        written()
