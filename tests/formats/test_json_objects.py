"""The lines that are decoded by a class. `test_json_layout` says that the parser gives the same rows."""

from __future__ import annotations

import pyarrow as pa

from headgate.connectors.files.json_objects import LINES_MAX, LINES_MIN, ObjectReader

SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string()), ("price", pa.float64())])
LINE = b'{"id":1,"name":"a","price":1.5}'


def rows_of(*lines: bytes) -> list[tuple[object, ...]] | None:
    """Return the rows of lines, after the line that tells the layout; None: the parser is needed."""
    found = ObjectReader(SCHEMA).read(memoryview(b"\n".join([LINE, *lines])), [LINE, *lines])
    return None if found is None else [tuple(row.values()) for row in found.slice(1).to_pylist()]


def test_how_many_lines_are_read() -> None:
    reader = ObjectReader(SCHEMA)
    counts = (0, LINES_MIN - 1, LINES_MIN, LINES_MAX, LINES_MAX + 1)
    assert [reader.may_read(count) for count in counts] == [False, False, True, True, False]
    assert not ObjectReader(pa.schema([("flag", pa.bool_())])).may_read(LINES_MIN)


def test_white_space_and_the_order_of_fields_do_not_matter() -> None:
    assert rows_of(b' { "price" : 2, "id":\t7 ,"name":"b c" }\r') == [(7, "b c", 2.0)]


def test_a_field_that_a_line_has_twice_is_noticed() -> None:
    assert rows_of(b'{"id":1,"name":"a","price":1.5,"id":2}') is None
    assert rows_of(b'{"id":1,"name":"a","name":"b","price":1.5}') is None
    assert rows_of(b'{"id":1,"name":"a","price":1.5,"id":2}', b'{"name":"a","price":1.5}') is None


def test_minus_zero_is_left_to_the_parser() -> None:
    assert rows_of(b'{"id":0,"name":"-0","price":0}') == [(0, "-0", 0.0)]
    assert rows_of(b'{"id":0,"name":"a","price": -0}') is None


def test_numbers_that_no_column_holds_are_left_to_the_parser() -> None:
    assert rows_of(b'{"id":9223372036854775808,"name":"a","price":1}') is None
    assert rows_of(b'{"id":1,"name":"a","price":1e400}') is None
    assert rows_of(b'{"id":1.0,"name":"a","price":1}') is None
