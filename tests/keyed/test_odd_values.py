"""Values and keys that look like those of the declared type, and what becomes of them."""

from __future__ import annotations

import datetime as dt
import enum
from typing import Annotated, Any

import msgspec
import pytest

from headgate.errors import StateError
from headgate.state.codecs import codec_of
from headgate.state.keyed.keys import keys_of_type
from headgate.state.keyed.memory import MemoryBackend

NAIVE = dt.datetime(2020, 1, 1)
AWARE = NAIVE.replace(tzinfo=dt.UTC)


class Color(str, enum.Enum):  # noqa: UP042  (StrEnum differs in str())
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


@pytest.mark.parametrize(
    ("hint", "value", "plain"), [(str, Color.RED, "red"), (int, Level.HIGH, 3)]
)
def test_members_of_mixed_enums_are_held_as_their_values(hint: Any, value: Any, plain: Any) -> None:
    held = codec_of(hint).hold(value)
    assert held == plain
    assert type(held) is hint
    assert codec_of(hint).decode(codec_of(hint).encode(value)) == plain


def test_times_with_a_zone_are_refused_as_no_column_keeps_it() -> None:
    codec = codec_of(dt.time)
    with pytest.raises(TypeError, match="has a zone"):
        codec.hold(dt.time(12, tzinfo=dt.UTC))
    assert codec.hold(dt.time(12)) == dt.time(12)


@pytest.mark.parametrize(
    ("hint", "good", "bad"),
    [
        (dt.datetime, [AWARE, None], NAIVE),
        (tuple[str, dt.datetime], [("a", AWARE), ("a", None)], ("a", NAIVE)),
        (int, [2**63 - 1, -(2**63), None], 2**63),
        (int, [0], -(2**63) - 1),
        (tuple[int, int], [(0, 2**63 - 1)], (0, 2**63)),
    ],
)
def test_keys_that_their_column_would_change_or_not_take_are_refused(
    hint: Any, good: list[Any], bad: Any
) -> None:
    keys = keys_of_type(hint)
    keys.check(good)
    keys.to_arrays(good)
    with pytest.raises(StateError, match="a key does not fit its type"):
        keys.check([*good, bad])


def test_a_checkpoint_that_a_value_spoils_names_the_state(int_keys: Any, make_spec: Any) -> None:
    spec = make_spec("spans", "value", dt.timedelta, keys=int_keys)
    backend = MemoryBackend(int_keys, {"spans": spec}, 16)
    backend.set_key(1)
    backend.value_table("spans").put(dt.timedelta.max)
    with pytest.raises(StateError, match="state `spans`") as caught:
        backend.snapshot({})["spans"].make(None)
    assert "duration" in caught.value.message


class Stamped(msgspec.Struct):
    at: dt.datetime


class Local(msgspec.Struct):
    at: Annotated[dt.datetime, msgspec.Meta(tz=False)]


class Daily(msgspec.Struct):
    at: dt.time


@pytest.mark.parametrize(
    ("hint", "good", "bad", "message"),
    [
        (Stamped, Stamped(AWARE), Stamped(NAIVE), "lacks a zone"),
        (list[dt.datetime], [AWARE], [NAIVE], "lacks a zone"),
        (Local, Local(NAIVE), Local(AWARE), "has a zone"),
        (Daily, Daily(dt.time(1)), Daily(dt.time(1, tzinfo=dt.UTC)), "has a zone"),
    ],
)
def test_times_inside_of_records_are_not_changed_by_a_checkpoint(
    hint: Any, good: Any, bad: Any, message: str
) -> None:
    """A restored value must be the one that was set: with a zone, or without."""
    codec = codec_of(hint)
    assert codec.from_array(codec.to_array([good])) == [good]
    with pytest.raises(TypeError, match=message):
        codec.to_array([bad])
