"""Values that are read as columns, and keys that are placed together."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest

import headgate as hg
from headgate.operators.queried_columns import QueriedColumns, SentColumn, received
from headgate.operators.queries import TooLarge, to_json_array
from headgate.runtime.reads.places import KeyPlaces
from headgate.state.hashing import hash_key, key_group_of
from headgate.state.keyed.base import ABSENT
from headgate.state.keyed.keys import EncodedKeys, encode_key
from headgate.state.keygroups import owner_of
from headgate.tests.query.test_committed import tell
from headgate.tests.support.subtasks import Step, steps, streams

__all__ = ["steps"]
Steps = Callable[..., Step]
WHEN = datetime(2026, 1, 31, tzinfo=UTC)


def some_columns(rng: random.Random, size: int) -> list[Any]:
    return [
        np.array([rng.choice([0, -1, 1 << 62, rng.randrange(100)]) for _ in range(size)], np.int64),
        np.array([rng.choice([0.5, math.nan, -math.inf, 7.0]) for _ in range(size)], np.float64),
        pa.array([rng.choice(["", "x", None]) for _ in range(size)], pa.string()),
        pa.array([rng.choice([WHEN, None]) for _ in range(size)], pa.timestamp("us", tz="UTC")),
    ]


def plain(values: Sequence[Any]) -> tuple[list[Any], tuple[int, ...]]:
    """Return values as they are without columns: plain data, and the places of those that are absent."""
    data, absent = to_json_array(list(values), 1 << 20)
    return msgspec.json.decode(data), absent


@pytest.mark.parametrize("seed", range(20))
def test_columns_are_the_values_that_they_are_made_of(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.choice([1, 2, 30])
    owners: list[list[int]] = [[], [], []]  # the last of them have no value
    for place in range(count):
        owners[rng.choice([0, 0, 1, 2]) if seed % 3 else 0].append(place)
    names = ["a", "b", "c", "d"]
    parts = [(np.array(each, np.intp), some_columns(rng, len(each))) for each in owners[:2]]
    columns = QueriedColumns.joined(names, parts, count)
    values = list(columns)
    for places, of_part in parts:
        rows = zip(*(column.tolist() for column in of_part), strict=True)
        for place, row in zip(places.tolist(), rows, strict=True):
            assert repr(values[place]) == repr(dict(zip(names, row, strict=True)))
    assert [place for place, value in enumerate(values) if value is ABSENT] == owners[2]
    first = rng.randrange(count)
    for low, high in ((0, count), (first, count), (first, first + 1)):
        sent, absent = columns.part(low, high).sent(1 << 20)
        data = msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=list[SentColumn])
        found = received(data, absent, high - low)
        assert (found, tuple(absent)) == plain(values[low:high])


def test_columns_are_bounded_and_checked() -> None:
    columns = QueriedColumns(["a"], [np.arange(10)], None, 10)
    assert columns.sent(80)[0][0].kind == "i"
    with pytest.raises(TooLarge):
        columns.sent(79)
    with pytest.raises(TooLarge):
        QueriedColumns(["a"], [pa.array(["x" * 80])], None, 1).sent(79)
    sent, absent = columns.sent(80)
    for more, missing, keys in ((sent, absent, 11), (sent, [1], 10)):
        with pytest.raises(ValueError, match="other values than keys"):
            received(more, missing, keys)
    for wrong in (
        SentColumn("b", "i", b"12345678"),
        SentColumn("b", "i", b"1"),
        SentColumn("b", "j", b"["),
    ):
        with pytest.raises((ValueError, msgspec.DecodeError)):
            received([*sent, wrong], absent, 10)


@pytest.mark.parametrize("type_", [pa.int64(), pa.int32(), pa.string()], ids=str)
@pytest.mark.parametrize("spread", [1, 10**6])
def test_keys_that_are_read_together_have_their_own_values(
    steps: Steps, type_: pa.DataType, spread: int
) -> None:
    """Live and as of checkpoints, with keys that are not there and keys that come twice."""
    schema = pa.schema([("k", type_), ("n", pa.int64())])
    rng = random.Random(spread)
    as_key: Any = str if type_ == pa.string() else int
    records = streams()[0].map(lambda record: record, into=schema).key_by("k")
    queryable = hg.Queryable("agg", committed=True)
    step = steps(
        records.agg(n=hg.count(), top=hg.max("n"), name="agg", queryable=queryable), parallelism=2
    )

    def push(numbers: range) -> None:
        rows = [
            {"k": as_key(rng.choice(numbers) * spread), "n": rng.randrange(99)} for _ in range(80)
        ]
        step.push_columns(pa.RecordBatch.from_pylist(rows, schema), key="k")

    def check(checkpoint_id: int) -> None:
        keys = [as_key(rng.randrange(60) * spread) for _ in range(100)]
        forms: list[Any] = [tuple(map(encode_key, keys))]
        forms.append(tuple(keys) if as_key is str else np.array(keys, "<i8").tobytes())
        for operator in step.operators:
            wanted = plain([operator.query("running", key, checkpoint_id) for key in keys])
            for form in forms:
                found = operator.query_many("running", EncodedKeys(form), checkpoint_id)
                on_disk = operator._spilling is not None
                assert isinstance(found, QueriedColumns) != on_disk
                assert plain(list(found)) == wanted

    for checkpoint_id in range(1, 4):
        push(range(20 * checkpoint_id))
        check(0)
        step.checkpoint(checkpoint_id)
        tell(step, checkpoint_id, complete=True)
        check(checkpoint_id)
        push(range(10, 20 * checkpoint_id + 10))
        check(checkpoint_id)


@pytest.mark.parametrize(
    ("types", "keys"),
    [
        ({"k": "int"}, [1, -5, 1 << 62, 3]),
        ({"k": "int"}, list(range(100))),
        ({"k": "int"}, [1 << 63, *range(20)]),
        ({"k": "str"}, ["a", "", "\u00e4" * 40]),
        ({"k": "str"}, [f"user {number}" for number in range(50)]),
        ({"k": "bool"}, [True, False]),
        ({"k": "int", "l": "str"}, [(1, "a"), (2, None), {"k": 3, "l": "b"}]),
        (None, [1, "a", None, (1, True)]),
    ],
)
@pytest.mark.parametrize("owners", [1, 3])
def test_keys_are_placed_as_the_job_places_them(types: Any, keys: list[Any], owners: int) -> None:
    placed = KeyPlaces(types, owners, 128).of(keys)
    assert placed is not None
    plain_keys = [tuple(key.values()) if isinstance(key, dict) else key for key in keys]
    assert list(placed.groups) == [key_group_of(hash_key(key), 128) for key in plain_keys]
    found: dict[int, Any] = {}
    for part in placed.parts:
        sent = list(EncodedKeys(part.keys))
        assert part.number == len(sent)
        assert len(msgspec.msgpack.encode(part.keys)) <= part.size_bytes + 8
        for place, key in zip(part.places, sent, strict=True):
            assert part.owner == owner_of(placed.groups[place], owners, 128)
            found[place] = key
    assert [found[place] for place in range(len(keys))] == plain_keys


def test_keys_that_only_the_job_can_place() -> None:
    for types, keys in (
        ({"k": "int"}, [1, "a"]),
        ({"k": "int"}, [1, True]),
        ({"k": "str"}, ["\ud800"]),
        ({"k": "str"}, ["\ud800"] * 9),
        ({"k": "int", "l": "int"}, [(1,)]),
        (None, [1.5]),
        (None, [(1.5,)]),
    ):
        assert KeyPlaces(types, 2, 128).of(keys) is None  # type: ignore[arg-type]
