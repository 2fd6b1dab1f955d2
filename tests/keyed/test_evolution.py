"""Changes of a declaration: those that load old state, and the errors of the others."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from headgate.errors import StateError
from headgate.state.codecs import codec_of
from headgate.state.evolution import adapt, compare
from headgate.state.keyed.keys import keys_of_type


class Old(msgspec.Struct):
    a: int
    gone: str = ""


class Added(msgspec.Struct):
    a: int
    b: float = 2.5
    c: str | None = None
    d: list[int] = msgspec.field(default_factory=lambda: [1])


class OptionalDefault(msgspec.Struct):
    a: int
    b: float | None = 5.0


class Wider(msgspec.Struct):
    a: float


class Required(msgspec.Struct):
    a: int
    must: str


class Retyped(msgspec.Struct):
    a: str


@dataclasses.dataclass
class AsDataclass:
    a: int
    gone: str = "x"


MATRIX: list[tuple[Any, Any, Any, Any]] = [
    (int, 5, int, 5),
    (int, 5, float, 5.0),
    (int, 5, int | None, 5),
    (float, 5.5, int, "was double, now int64"),
    (str, "x", int, "was string, now int64"),
    (Any, 5, float, 5.0),
    (Any, Old(1, "g"), Old, Old(1, "g")),
    (Any, None, int | None, None),
    (Any, b"x", bytes, b"x"),
    (bytes, b"x", Any, "no declared type"),
    (Old, Old(1, "g"), Added, Added(1)),
    (Old, Old(1, "g"), OptionalDefault, OptionalDefault(1, 5.0)),
    (Old, Old(1, "g"), Wider, Wider(1.0)),
    (Old, Old(1, "g"), AsDataclass, AsDataclass(1, "g")),
    (Old, Old(1, "g"), Required, "value.must` (string) is new and has no default"),
    (Old, Old(1, "g"), Retyped, "`value.a` was int64, now string"),
    (list[Old], [Old(1)], list[Added], [Added(1)]),
    (dict[str, Old], {"k": Old(1)}, dict[str, Wider], {"k": Wider(1.0)}),
    (list[int], [1], list[float], [1.0]),
    (Old | None, None, Added | None, None),
]


@pytest.mark.parametrize(("old", "value", "new", "expected"), MATRIX)
def test_matrix(
    make_backend: Any, make_spec: Any, int_keys: Any, old: Any, value: Any, new: Any, expected: Any
) -> None:
    before = make_spec("s", "value", old, keys=int_keys)
    after = make_spec("s", "value", new, keys=int_keys)
    backend = make_backend(int_keys, {"s": before})
    backend.set_key(1)
    backend.value_table("s").put(value)
    state = make_backend.stored(backend)
    again = make_backend(int_keys, {"s": after})
    verdict = compare(before.info, after.info)
    if isinstance(expected, str):
        assert not verdict.ok
        assert expected in verdict.text
        assert "`s`" in verdict.text
        with pytest.raises(StateError, match="migrate="):
            again.restore(state, 0)
        return
    assert verdict.ok
    again.restore(state, 0)
    again.set_key(1)
    found = again.value_table("s").get()
    assert found == expected
    assert type(found) is type(expected)
    if verdict.verdict == "migration" and make_backend.kind == "memory":
        # The first checkpoint is written in full: its columns are not those that were restored.
        cut = again.snapshot({})["s"]
        assert cut.epoch == 0
        cut.make(None)
        cut.confirm(0)
        assert again.snapshot({})["s"].epoch > 0


def test_migrate_makes_new_values_of_old_ones(
    make_backend: Any, make_spec: Any, int_keys: Any
) -> None:
    before = make_spec("s", "value", Old, keys=int_keys)
    backend = make_backend(int_keys, {"s": before})
    backend.set_key(1)
    backend.value_table("s").put(Old(41, "x"))
    state = make_backend.stored(backend)
    calls = []

    def migrate(value: Any, version: int) -> str:
        calls.append((value, version))
        return f"{value['a']}{value['gone']}"

    after = make_spec("s", "value", str, keys=int_keys, version=2, migrate=migrate)
    assert compare(before.info, after.info).verdict == "migration"
    again = make_backend(int_keys, {"s": after})
    again.restore(state, 0)
    again.set_key(1)
    assert again.value_table("s").get() == "41x"
    assert calls == [({"a": 41, "gone": "x"}, 1)]

    for wrong, message in (
        (lambda value, version: 5, "take over"),
        (lambda v: v, "migrate= raised"),
    ):
        spec = make_spec("s", "value", str, keys=int_keys, version=2, migrate=wrong)
        with pytest.raises(StateError, match=message):
            make_backend(int_keys, {"s": spec}).restore(state, 0)


@pytest.mark.parametrize(("was", "now"), [(None, 100), (100, None), (100, 200)])
def test_ttl_can_be_switched(
    make_backend: Any, make_spec: Any, int_keys: Any, was: Any, now: Any
) -> None:
    before = make_spec("s", "value", int, keys=int_keys, ttl_ms=was)
    after = make_spec("s", "value", int, keys=int_keys, ttl_ms=now)
    backend = make_backend(int_keys, {"s": before})
    backend.set_key(1)
    backend.value_table("s").put(5 if was is None else (5, 30))
    again = make_backend(int_keys, {"s": after})
    again.restore(make_backend.stored(backend), 77)
    again.set_key(1)
    expected = 5 if now is None else (5, 77 if was is None else 30)
    assert again.value_table("s").get() == expected


def test_keys_never_change_their_type(make_spec: Any) -> None:
    ints = make_spec("s", "value", int, keys=keys_of_type(int)).info
    texts = make_spec("s", "value", int, keys=keys_of_type(str)).info
    assert "the key `key` was int64, now string" in compare(ints, texts).text
    pairs = make_spec("s", "value", int, keys=keys_of_type(tuple[int, int])).info
    assert "its keys were (key), now (key_1, key_2)" in compare(ints, pairs).text
    mapped = make_spec("s", "map", int, str, keys=keys_of_type(int)).info
    assert "of kind `value` and is now `map`" in compare(ints, mapped).text


def test_adapt_columns() -> None:
    table = pa.table({"a": pa.array([1, None], pa.int32()), "s": [{"x": 1}, None], "old": [1, 2]})
    table = pa.concat_tables([table.slice(1), table])
    schema = pa.schema(
        [
            ("s", pa.struct([("x", pa.float64()), ("y", pa.string())])),
            ("a", pa.int64()),
            ("n", pa.string()),
            pa.field("d", pa.int64(), False),
        ]
    )
    found = adapt(table, schema, {"d": 9})
    assert found.schema == schema
    assert found.to_pylist() == [
        {"s": None, "a": None, "n": None, "d": 9},
        {"s": {"x": 1.0, "y": None}, "a": 1, "n": None, "d": 9},
        {"s": None, "a": None, "n": None, "d": 9},
    ]
    with pytest.raises(StateError, match="must not be null"):
        adapt(table, schema)


@pytest.mark.parametrize("hint", [int, float, str, bytes, bool, list[int], Old, Old | None, Any])
def test_codecs_agree_with_themselves(hint: Any) -> None:
    samples: dict[Any, Any] = {
        int: -(2**63), float: float("inf"), str: "é", bytes: b"\0", bool: True, Old: Old(1),
    }  # fmt: skip
    value = samples.get(hint, [2] if hint == list[int] else None)
    codec = codec_of(hint)
    held = codec.hold(value)
    assert codec.release(held) == value
    assert codec.decode(codec.encode(value)) == value
    array = codec.to_array([value, value])
    assert array.type == codec.type_
    assert codec.from_array(array) == [value, value]
