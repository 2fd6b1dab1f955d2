"""Keys that clients write as text, and values as JSON."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from headgate.errors import PlanError, StateError, UsageError
from headgate.operators.origin import Origin
from headgate.operators.queries import (
    QueriedEntries,
    QueryableState,
    TooLarge,
    check_unique,
    key_as_json,
    parse_key,
    queryable_state,
    to_json,
    to_json_array,
)
from headgate.state.hashing import hash_columns, hash_key
from headgate.state.keyed.base import ABSENT
from headgate.state.keyed.keys import (
    OPAQUE_KEYS,
    EncodedKeys,
    KeyShape,
    decode_key,
    encode_key,
    joined_keys,
    key_count,
    keys_of_columns,
    keys_of_type,
)


def state_of(keys: KeyShape, *columns: str) -> QueryableState:
    return QueryableState("totals", "total", "value", keys, columns)


def of_columns(**types: pa.DataType) -> QueryableState:
    fields = [pa.field(name, type_) for name, type_ in types.items()]
    return state_of(keys_of_columns(fields), *types)


NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
COLUMNS = [
    (pa.string(), "alice", "alice"),
    (pa.string(), "42", "42"),
    (pa.string(), "", ""),
    (pa.large_string(), "ü/?&", "ü/?&"),
    (pa.dictionary(pa.int32(), pa.string()), "a", "a"),
    (pa.int8(), "-7", -7),
    (pa.int64(), "42", 42),
    (pa.uint64(), "18446744073709551615", 2**64 - 1),
    (pa.bool_(), "true", True),
    (pa.binary(), "aGk=", b"hi"),
    (pa.binary(2), "aGk=", b"hi"),
    (pa.date32(), "2026-01-31", date(2026, 1, 31)),
    (pa.timestamp("ms", tz="UTC"), "2026-01-31T12:00:00Z", NOON),
    (pa.timestamp("us", tz="UTC"), "2026-01-31T13:00:00+01:00", NOON),
    (pa.decimal128(10, 2), "12.5", Decimal("12.5")),
]


@pytest.mark.parametrize(("type_", "text", "key"), COLUMNS)
def test_a_key_of_one_column_is_its_text(type_: pa.DataType, text: str, key: Any) -> None:
    if type_ == pa.uint64() and key >= 1 << 63:
        with pytest.raises(UsageError, match="64 bits"):  # as for the keys of records
            parse_key(of_columns(user=type_), text)
        return
    found = parse_key(of_columns(user=type_), text)
    assert found == key
    assert type(found) is type(key)


@pytest.mark.parametrize(("type_", "text", "key"), COLUMNS)
def test_the_key_group_is_that_of_the_records(type_: pa.DataType, text: str, key: Any) -> None:
    column = pa.array([key], type_)
    assert hash_key(decode_key(encode_key(key))) == hash_columns([column])[0]
    both = [column, pa.array([7], pa.int32())]
    assert hash_key((key, 7)) == hash_columns(both)[0]


@pytest.mark.parametrize(
    ("type_", "text"),
    [
        (pa.int64(), "alice"),
        (pa.int64(), ""),
        (pa.int64(), "1.5"),
        (pa.int64(), "1_000"),
        (pa.int64(), str(2**63)),
        (pa.int8(), "300"),
        (pa.bool_(), "yes"),
        (pa.binary(), "no base64!"),
        (pa.date32(), "31.1.2026"),
        (pa.timestamp("ms", tz="UTC"), "2026-01-31T12:00:00"),
        (pa.decimal128(10, 2), "one"),
        (pa.decimal128(10, 2), "1.234"),
        (pa.decimal128(10, 2), "NaN"),
    ],
)
def test_a_text_of_another_type_is_refused(type_: pa.DataType, text: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_key(of_columns(user=type_), text)
    assert "state=`totals`" in refused.value.message
    assert refused.value.fix.startswith("write the key as ")


def test_a_key_of_several_columns() -> None:
    state = of_columns(user=pa.string(), day=pa.date32(), n=pa.int64())
    key = ("alice", date(2026, 1, 31), 3)
    for text in ('{"n": 3, "user": "alice", "day": "2026-01-31"}', '["alice", "2026-01-31", 3]'):
        assert parse_key(state, text) == key
    assert parse_key(state, '["alice", null, 3]') == ("alice", None, 3)
    assert key_as_json(state, key) == {"user": "alice", "day": "2026-01-31", "n": 3}
    assert state.key_types == {"user": "str", "day": "date", "n": "int"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"user": "alice"}', "lacks the column `n`"),
        ('{"user": "alice", "n": 3, "more": 1}', "has no column `more`"),
        ('["alice"]', "has 2 columns, and 1 values"),
        ("alice", "is not JSON"),
        ('"alice"', "has several columns"),
        ('{"user": "alice", "n": "3"}', "column `n` of the key is of type int"),
        ('{"user": 3, "n": 3}', "column `user` of the key is of type str"),
        ('{"user": "alice", "n": true}', "column `n` of the key is of type int"),
        ('{"user": "alice", "n": 1.0}', "column `n` of the key is of type int"),
        ("[" * 100_000, "is not JSON"),
        ("\ud800", "is not JSON"),
    ],
)
def test_a_wrong_key_of_several_columns_is_explained(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as refused:
        parse_key(of_columns(user=pa.string(), n=pa.int64()), text)
    assert refused.value.fix == 'write the key as a JSON object: {"user": "alice", "n": 42}'


@pytest.mark.parametrize(
    ("type_", "text", "key"),
    [
        (
            UUID,
            "12345678-1234-5678-1234-567812345678",
            UUID(int=0x12345678123456781234567812345678),
        ),
        (datetime, "2026-01-31T12:00:00Z", NOON),
        (tuple[str, int], '["alice", 3]', ("alice", 3)),
        (tuple[str, int], '{"key_1": "alice", "key_2": 3}', ("alice", 3)),
    ],
)
def test_keys_of_a_declared_type(type_: Any, text: str, key: Any) -> None:
    assert parse_key(state_of(keys_of_type(type_)), text) == key


@pytest.mark.parametrize(
    ("text", "key"),
    [('"alice"', "alice"), ("42", 42), ("true", True), ("null", None), ('["a", [1]]', ("a", (1,)))],
)
def test_a_key_of_no_declared_type_is_json(text: str, key: Any) -> None:
    state = state_of(OPAQUE_KEYS)
    assert parse_key(state, text) == key
    assert decode_key(encode_key(key)) == key
    assert state.key_types == {}


@pytest.mark.parametrize("text", ["alice", "1.5", '{"a": 1}', "[1.5]", ""])
def test_json_that_is_no_key_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="state=`totals`") as refused:
        parse_key(state_of(OPAQUE_KEYS), text)
    assert '"alice" with the quotes' in refused.value.fix


def test_names_are_checked() -> None:
    def named(name: object) -> Any:
        return queryable_state(name, "total", "value", OPAQUE_KEYS, None, "job.py:1")

    assert named("") == ()
    ((state),) = named("totals-by.user_1")
    assert state.name == "totals-by.user_1"
    for wrong in ("a b", "a/b", ".", "..", "ä", "x" * 129, 7, "a\n"):
        with pytest.raises(PlanError, match="cannot be the name"):
            named(wrong)
    check_unique([state], {"other": "one"}, "two", Origin("job.py:1"))
    for taken, added in (({state.name: "one"}, [state]), ({}, [state, state])):
        with pytest.raises(PlanError, match="two states are queryable as `totals-by.user_1`"):
            check_unique(added, taken, "two", Origin("job.py:1"))


class Payment(msgspec.Struct):
    amount: Decimal
    at: datetime


@dataclass
class Visit:
    page: str


def test_values_as_json() -> None:
    def read(value: Any) -> Any:
        return msgspec.json.decode(to_json(value, 10_000))

    assert to_json(ABSENT, 10) == b""
    assert read(None) is None
    assert read(2**80) == 2**80
    assert read(Payment(Decimal("1.50"), NOON)) == {"amount": "1.50", "at": "2026-01-31T12:00:00Z"}
    assert read({"v": Visit("a"), "n": np.int64(3), "x": np.arange(2)}) == {
        "v": {"page": "a"},
        "n": 3,
        "x": [0, 1],
    }
    assert read(math.nan) is None
    pairs = [(("a", 1), b"x"), (("b", 2), b"y")]
    assert read(QueriedEntries(iter(pairs), is_map=True)) == [
        {"key": ["a", 1], "value": "eA=="},
        {"key": ["b", 2], "value": "eQ=="},
    ]
    assert read(QueriedEntries(iter(pairs), is_map=False)) == ["eA==", "eQ=="]
    assert to_json(QueriedEntries(iter([]), is_map=True), 10) == b""


def test_large_values_are_refused_before_all_is_written() -> None:
    written: list[int] = []

    def entries() -> Any:
        for number in range(1_000_000):
            written.append(number)
            yield number, "x" * 10

    with pytest.raises(TooLarge):
        to_json(QueriedEntries(entries(), is_map=False), 1_000)
    assert len(written) < 200
    with pytest.raises(TooLarge):
        to_json("x" * 100, 100)
    assert to_json("x" * 98, 100)


def test_a_value_that_json_does_not_know_is_an_error() -> None:
    for value in (object(), {(1, 2): 3}, QueriedEntries(iter([(0, object())]), is_map=False)):
        with pytest.raises(StateError, match="cannot be written as JSON"):
            to_json(value, 1_000)


@pytest.mark.parametrize(
    ("type_", "keys"),
    [
        (pa.int64(), [0, 1, -1, (1 << 63) - 1, -(1 << 63)]),
        (pa.int32(), [7, -7]),
        (pa.uint64(), [3, (1 << 64) - 1]),
        (pa.string(), ["", "a", "\u00e4" * 30, "i1234567"]),
        (pa.large_string(), ["a", None]),
        (pa.binary(), [b"a", b"bc"]),
        (pa.date32(), [date(2026, 1, 31)]),
    ],
    ids=str,
)
def test_encoded_keys_lie_in_columns_like_the_keys_themselves(type_: Any, keys: list[Any]) -> None:
    shape = keys_of_columns([pa.field("k", type_)])
    forms = [tuple(map(encode_key, keys))]
    if all(isinstance(key, str) for key in keys):
        forms.append(tuple(keys))
    elif all(isinstance(key, int) and key < 1 << 63 for key in keys):
        forms.append(np.array(keys, "<i8").tobytes())
    for form in [*forms, joined_keys([form[:0] for form in forms] + forms[-1:])]:
        assert key_count(form) == len(keys)
        encoded = EncodedKeys(form)
        assert list(encoded) == keys
        assert list(encoded[1:]) == keys[1:]
        (column,) = shape.to_arrays(encoded)
        assert column.equals(shape.to_arrays(keys)[0])
        assert shape.to_arrays(EncodedKeys(form[:0]))[0].equals(pa.array([], type_))


def test_encoded_keys_of_other_types_are_refused() -> None:
    words = np.array([1, -2], "<i8").tobytes()
    for type_, keys in (
        (pa.int64(), (encode_key(1), encode_key("a"))),
        (pa.int64(), ("1", "2")),
        (pa.string(), ("a", encode_key(1))),
        (pa.string(), words),
        (pa.int8(), np.array([300], "<i8").tobytes()),
        (pa.uint64(), words),
        (pa.date32(), ("2026-01-31",)),
    ):
        shape = keys_of_columns([pa.field("k", type_)])
        with pytest.raises((pa.ArrowException, TypeError, OverflowError)):
            shape.to_arrays(EncodedKeys(keys))
    for wrong in (b"1234567", (1,)):
        with pytest.raises(StateError, match="keys are n"):
            key_count(wrong)  # type: ignore[arg-type]


def test_values_of_several_keys_are_one_array() -> None:
    entries = QueriedEntries(iter([("a", 1), ("b", 2)]), is_map=True)
    none = QueriedEntries(iter([]), is_map=True)
    values = [1, ABSENT, None, {"n": float("nan")}]
    for given in (values, iter(values)):
        assert to_json_array(given, 100) == (b'[1,null,null,{"n":null}]', (1,))
    found = to_json_array(iter([entries, none, "x"]), 100)
    assert found == (b'[[{"key":"a","value":1},{"key":"b","value":2}],null,"x"]', (1,))
    for given in ([1, "x" * 100], iter([1, "x" * 100])):
        with pytest.raises(TooLarge):
            to_json_array(given, 100)
