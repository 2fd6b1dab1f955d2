"""The key hash: scalar and columns agree, nothing but the value matters, and it never changes."""

from __future__ import annotations

import datetime as dt
import enum
import json
import os
import subprocess
import sys
import uuid
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.errors import StateError
from headgate.state.hashing import (
    check_key_type,
    hash_columns,
    hash_key,
    hash_keys,
    identity_columns,
    key_group_of,
    key_groups_of,
)

quick = settings(max_examples=40, deadline=None)

GOLDEN = Path(__file__).with_name("golden_hashes.json")

texts = st.text(max_size=40) | st.text(min_size=100, max_size=160) | st.text("ab", max_size=14)
blobs = st.binary(max_size=40) | st.binary(min_size=120, max_size=140)
int64s = st.integers(-(2**63), 2**63 - 1)
naive = st.datetimes(dt.datetime(1, 1, 2), dt.datetime(9999, 12, 30))
decimals = st.decimals(-(10**9), 10**9, places=3, allow_nan=False)

COLUMNS = [
    (pa.int8(), st.integers(-128, 127)),
    (pa.uint16(), st.integers(0, 2**16 - 1)),
    (pa.int32(), st.integers(-(2**31), 2**31 - 1)),
    (pa.int64(), int64s),
    (pa.uint64(), st.integers(0, 2**64 - 1)),
    (pa.bool_(), st.booleans()),
    (pa.string(), texts),
    (pa.large_string(), texts),
    (pa.string_view(), texts),
    (pa.binary(), blobs),
    (pa.large_binary(), blobs),
    (pa.binary_view(), blobs),
    (pa.binary(16), st.binary(min_size=16, max_size=16)),
    (pa.binary(5), st.binary(min_size=5, max_size=5)),
    (pa.date32(), st.dates()),
    (pa.date64(), st.dates()),
    (pa.timestamp("us"), naive),
    (pa.timestamp("us", tz="UTC"), naive.map(lambda t: t.replace(tzinfo=dt.UTC))),
    (pa.timestamp("ms"), naive.map(lambda t: t.replace(microsecond=t.microsecond // 1000 * 1000))),
    (pa.timestamp("s"), naive.map(lambda t: t.replace(microsecond=0))),
    (pa.decimal128(20, 3), decimals),
    (pa.decimal256(50, 3), decimals),
    (pa.null(), st.none()),
]


@pytest.mark.parametrize(("type_", "values"), COLUMNS, ids=lambda x: str(x)[:20])
@quick
@given(data=st.data())
def test_column_and_scalar_agree_whatever_the_slice(type_, values, data):
    items = data.draw(st.lists(st.none() | values, max_size=20))
    cut = data.draw(st.integers(0, len(items)))
    array = pa.array(items, type_)
    expected = [hash_key(value) for value in items]
    assert hash_columns([array]).tolist() == expected
    assert hash_columns([array.slice(cut)]).tolist() == expected[cut:]
    assert hash_columns([array.slice(0, cut)]).tolist() == expected[:cut]
    assert hash_keys(items).tolist() == expected


@pytest.mark.parametrize(("type_", "values"), COLUMNS, ids=lambda x: str(x)[:20])
@quick
@given(data=st.data())
def test_the_second_lane_depends_on_values_only(type_, values, data):
    items = data.draw(st.lists(st.none() | values, min_size=1, max_size=12))
    array = pa.array(items, type_)
    lane = identity_columns([array], 7)
    for index, value in enumerate(items):
        alone = identity_columns([pa.array([value], type_)], 7)
        assert lane[index] == alone[0]
        assert alone[0] != identity_columns([pa.array([value], type_)], 8)[0]
    # unequal values never share both lanes; equal ones share both
    both = set(zip(hash_columns([array]).tolist(), lane.tolist(), strict=True))
    assert len(both) == len(set(items))


@quick
@given(st.lists(st.tuples(int64s | st.none(), texts | st.none(), blobs)))
def test_several_columns_hash_like_tuples(rows):
    columns = [
        pa.array([row[index] for row in rows], type_)
        for index, type_ in enumerate([pa.int64(), pa.string(), pa.binary()])
    ]
    assert hash_columns(columns).tolist() == [hash_key(row) for row in rows]
    assert hash_columns(columns[:2]).tolist() == [hash_key(row[:2]) for row in rows]


@quick
@given(st.lists(texts | st.none()), st.integers(0, 5))
def test_dictionaries_hash_like_their_values(values, cut):
    encoded = pa.array(values, pa.string()).dictionary_encode()
    assert hash_columns([encoded]).tolist() == [hash_key(value) for value in values]
    assert hash_columns([encoded.slice(cut)]).tolist() == [hash_key(v) for v in values[cut:]]


@quick
@given(st.integers(-(2**80), 2**80))
def test_equal_numbers_hash_equal(number):
    assert hash_key(Decimal(number)) == hash_key(number)
    assert hash_key(Decimal(number).scaleb(2).scaleb(-2)) == hash_key(number)
    assert hash_keys([number, 1]).tolist() == [hash_key(number), hash_key(1)]


def test_one_value_has_one_hash_over_all_integer_types():
    types = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint32(), pa.uint64()]
    assert len({int(hash_columns([pa.array([5], type_)])[0]) for type_ in types}) == 1
    assert hash_key(True) == hash_key(1) == hash_key(np.int16(1)) == hash_key(np.bool_(True))


def test_units_and_zones_of_timestamps_do_not_matter():
    moment = dt.datetime(2024, 5, 1, 12, 30, 1, tzinfo=dt.UTC)
    elsewhere = moment.astimezone(dt.timezone(dt.timedelta(hours=5)))
    hashes = {hash_key(moment), hash_key(elsewhere), hash_key(moment.replace(tzinfo=None))}
    for unit in ("s", "ms", "us", "ns"):
        hashes.add(int(hash_columns([pa.array([moment], pa.timestamp(unit, tz="UTC"))])[0]))
    assert len(hashes) == 1
    fine = pa.array([1, 2, -1], pa.int64()).view(pa.timestamp("ns"))
    assert len(set(hash_columns([fine]).tolist())) == 3


def test_types_are_told_apart():
    different = [
        1,
        "1",
        b"1",
        (1,),
        None,
        dt.date(1970, 1, 2),
        dt.datetime(1970, 1, 1),
        Decimal("1.5"),
    ]
    assert len({hash_key(value) for value in different}) == len(different)
    assert hash_key(("ab", "c")) != hash_key(("a", "bc"))


def test_uuids_hash_as_their_bytes():
    value = uuid.UUID(int=77)
    assert hash_key(value) == hash_key(value.bytes)
    assert hash_columns([pa.array([value.bytes], pa.uuid())])[0] == hash_key(value)


def test_subclasses_hash_like_what_they_are():
    colour = enum.StrEnum("Colour", ["red"])
    assert hash_key(colour.red) == hash_key("red")


@pytest.mark.parametrize(
    "value", [1.5, float("nan"), [1], {"a": 1}, np.float32(1), object(), (1, 2.0)]
)
def test_values_that_cannot_be_keys_are_refused(value):
    with pytest.raises(StateError) as error:
        hash_key(value)
    assert error.value.fix


@pytest.mark.parametrize(
    "type_", [pa.float64(), pa.float32(), pa.list_(pa.int8()), pa.duration("s")]
)
def test_columns_that_cannot_be_keys_are_refused(type_):
    with pytest.raises(StateError):
        check_key_type(type_)
    with pytest.raises(StateError):
        hash_columns([pa.array([None], type_)])


@quick
@given(st.lists(st.integers(0, 2**64 - 1)), st.integers(1, 32768))
def test_key_groups_agree_and_lie_in_range(hashes, maximum):
    groups = key_groups_of(np.array(hashes, np.uint64), maximum)
    assert groups.dtype == np.int32
    assert groups.tolist() == [key_group_of(hash_, maximum) for hash_ in hashes]
    assert all(0 <= group < maximum for group in groups.tolist())


@pytest.mark.parametrize("kind", ["int", "str"])
def test_keys_spread_evenly_over_key_groups(kind):
    keys = [number if kind == "int" else f"user-{number}" for number in range(128_000)]
    counts = np.bincount(key_groups_of(hash_keys(keys), 128), minlength=128)
    assert counts.min() > 850
    assert counts.max() < 1150


def golden_values() -> dict[str, object]:
    return {
        "0": 0,
        "1": 1,
        "-1": -1,
        "42": 42,
        "int64 min": -(2**63),
        "uint64 max": 2**64 - 1,
        "2**64": 2**64,
        "-2**100": -(2**100),
        "''": "",
        "hello": "hello",
        "12 bytes": "abcdefghijkl",
        "13 bytes": "abcdefghijklm",
        "16 bytes": "abcdefghijklmnop",
        "17 bytes": "abcdefghijklmnopq",
        "umlauts": "grüße aus köln",
        "128 bytes": "x" * 128,
        "129 bytes": "x" * 129,
        "b''": b"",
        "b'hello'": b"hello",
        "b 20": bytes(range(20)),
        "None": None,
        "date": dt.date(2024, 2, 29),
        "datetime": dt.datetime(2024, 2, 29, 12, 0, 0, 123456),
        "old datetime": dt.datetime(1900, 1, 1, tzinfo=dt.UTC),
        "1.50": Decimal("1.50"),
        "-0.001": Decimal("-0.001"),
        "uuid": uuid.UUID(int=1),
        "()": (),
        "(1,)": (1,),
        "(1, 'a')": (1, "a"),
        "nested": (1, ("a", None)),
    }


def test_golden_hashes_never_change():
    """If this fails, every snapshot in the world is lost: change the code, not the file."""
    golden = json.loads(GOLDEN.read_text())
    assert {name: f"{hash_key(value):016x}" for name, value in golden_values().items()} == golden


def test_hashes_do_not_depend_on_the_process():
    script = "from headgate.state.hashing import hash_key; print(hash_key(('user', 5, b'x')))"
    found = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "12345")
    }
    assert found == {f"{hash_key(('user', 5, b'x'))}\n"}
