"""Joins that are refused before a job runs, with the user's line; and the columns of results."""

from __future__ import annotations

import pickle
from datetime import timedelta
from typing import Any

import pyarrow as pa
import pytest

import headgate as hg
from headgate.api.stream import output_of
from headgate.connectors import blackhole, from_list
from headgate.errors import HeadgateError, PlanError, UsageError

LEFT = pa.schema(
    [
        pa.field("k", pa.dictionary(pa.int32(), pa.string())),
        pa.field("v", pa.int64(), False),
        pa.field("at", pa.int64()),
    ]
)
RIGHT = pa.schema(
    [
        pa.field("k", pa.string()),
        pa.field("v", pa.float64()),
        pa.field("w", pa.string_view()),
        pa.field("at", pa.int64()),
    ]
)


def stream(job: Any, schema: Any, name: str, timed: bool = True) -> Any:
    read = job.read(from_list([], schema=schema), name=name)
    return read.event_time("at") if timed else read


@pytest.fixture
def job() -> hg.Job:
    return hg.Job("plans")


@pytest.fixture
def sides(job: hg.Job) -> tuple[Any, Any]:
    return stream(job, LEFT, "orders"), stream(job, RIGHT, "offers")


def text_of(error: pytest.ExceptionInfo[HeadgateError]) -> str:
    """All an error says; it survives pickling, and names the line here."""
    again = pickle.loads(pickle.dumps(error.value))
    assert str(again) == str(error.value)
    assert "test_join_plans.py:" in error.value.where
    assert error.value.message[0].islower() or error.value.message[0] == "`"
    assert not error.value.message.endswith(".")
    assert error.value.fix
    return f"{error.value.message} | {error.value.fix}"


def test_columns_of_the_result(sides: Any) -> None:
    left, right = sides
    joined = left.key_by("k").join(
        right.key_by("k"), within=("-1m", "1m"), suffix="_offer", how="left", name="joined"
    )
    assert joined.schema == pa.schema(
        [
            pa.field("k", pa.string()),
            pa.field("v", pa.int64(), False),
            pa.field("at", pa.int64()),
            pa.field("v_offer", pa.float64()),
            pa.field("w", pa.string()),
            pa.field("at_offer", pa.int64()),
        ]
    )
    assert joined.has_event_time
    assert joined.late.schema == LEFT
    assert joined.side("late_other").schema == RIGHT
    joined.write(blackhole(), name="out")
    output_of(joined).job.validate()


def test_rows_that_may_be_missing_make_columns_nullable(sides: Any) -> None:
    left, right = sides
    for how, nullable in (("inner", False), ("left", False), ("right", True), ("full", True)):
        joined = left.key_by("k").join(
            right.key_by("k"), within=("0s", "0s"), suffix="2", how=how, name=f"joined {how}"
        )
        assert joined.schema.field("v").nullable is nullable


def test_keys_of_other_names_are_both_there(sides: Any) -> None:
    left, right = sides
    joined = left.key_by("k").join(
        right.select("w AS name", "v AS price", "at AS since").key_by("name"),
        within=("0s", "1s"),
        name="joined",
    )
    assert joined.schema.names == ["k", "v", "at", "name", "price", "since"]


def test_names_that_clash(sides: Any) -> None:
    left, right = sides
    with pytest.raises(PlanError) as error:
        left.key_by("k").join(right.key_by("k"), within=("0s", "1s"), name="joined")
    assert text_of(error) == (
        "`event_time` and `event_time-2` both have a column `v` | "
        'add suffix="_right", which makes the second `v_right`, or rename it with select'
    )
    with pytest.raises(PlanError) as error:
        right.key_by("k").join(
            right.select("k", "v", "w AS vv").key_by("k"),
            within=("0s", "1s"),
            suffix="v",
            name="joined",
        )
    assert "column `v` of `select` becomes `vv`, which already exists" in text_of(error)


def test_versions_are_valid_for_some_time(sides: Any) -> None:
    left, right = (stream.key_by("k") for stream in sides)
    with pytest.raises(PlanError) as error:
        left.join_as_of(right, suffix="2", valid_for="0s", name="joined")
    assert "valid_for must be positive value=`0s`" in error.value.message
    assert "test_join_plans.py:" in error.value.where
    joined = left.join_as_of(right, suffix="2", valid_for="90s", name="joined")
    assert output_of(joined).node.detail == "inner, versions valid for 1m 30s"


@pytest.mark.parametrize(
    ("within", "problem"),
    [
        ("10m", "within= needs a pair of durations"),
        (("1m", "-1m"), "within= ends before it begins"),
        ((0, "1m"), "within needs a unit"),
        (("-", "1m"), "within is not a duration"),
        (("-1m", None), "within is not a duration"),
    ],
)
def test_bounds_that_are_none(sides: Any, within: Any, problem: str) -> None:
    left, right = sides
    with pytest.raises(UsageError) as error:
        left.key_by("k").join(right.key_by("k"), within=within, suffix="2", name="joined")
    assert problem in text_of(error)


def test_bounds_in_all_forms(sides: Any) -> None:
    left, right = sides
    forms = [("-10m", "+5s"), (timedelta(minutes=-10), timedelta(seconds=5)), ("- 600 s", "5000ms")]
    for number, within in enumerate(forms):
        joined = left.key_by("k").join(
            right.key_by("k"), within=within, suffix="2", name=f"joined {number}"
        )
        assert output_of(joined).node.detail == "-10m to 5s, inner"


JOINS = {
    "interval": lambda left, right, **more: left.join(
        right, **{"within": ("0s", "0s"), "suffix": "2", "name": "joined", **more}
    ),
    "window": lambda left, right, **more: left.window(hg.tumbling("1m")).join(
        right, **{"suffix": "2", "name": "joined", **more}
    ),
    "as of": lambda left, right, **more: left.join_as_of(
        right, **{"suffix": "2", "name": "joined", **more}
    ),
    "co-group": lambda left, right, **more: left.window(hg.tumbling("1m")).co_group(
        right, lambda key, left, right: [], **{"name": "joined", **more}
    ),
}


@pytest.mark.parametrize("join", JOINS.values(), ids=JOINS)
def test_streams_that_cannot_be_joined(job: hg.Job, sides: Any, join: Any) -> None:
    left, right = sides
    bare = stream(job, RIGHT, "bare", timed=False)
    objects = job.read(from_list([]), name="objects").event_time(lambda record: 1)
    wrong = {
        "needs a keyed stream, got `Stream`": (left.key_by("k"), right),
        "are streams of different jobs": (
            left.key_by("k"),
            stream(hg.Job("other"), RIGHT, "x").key_by("k"),
        ),
        "needs event time, and `bare` has none": (left.key_by("k"), bare.key_by("k")),
        "key_with gives a function": (left.key_by("k"), right.key_with(lambda row: row.k)),
        "stream of Python objects": (left.key_by("k"), objects.key_with(lambda record: record)),
        "equal keys would not match": (left.key_by("v"), right.key_by("k")),
        "has a column `_row`": (
            left.key_by("k"),
            right.select("k", "v AS _row").key_by("k"),
        ),
    }
    for problem, (one, other) in wrong.items():
        with pytest.raises(PlanError) as error:
            join(one, other)
        assert problem in text_of(error)
    with pytest.raises(PlanError) as error:
        join(left.key_by("k"), right.key_by("k"), name="")
    assert "stateful step has no name" in text_of(error)


def test_how_and_windows_that_are_none(sides: Any) -> None:
    left, right = (side.key_by("k") for side in sides)
    for name, wrong in (("interval", "outer"), ("window", "semi"), ("as of", "full")):
        with pytest.raises(PlanError) as error:
            JOINS[name](left, right, how=wrong)
        assert f"unknown how `{wrong}`" in text_of(error)
    with pytest.raises(PlanError) as error:
        sides[0].window(hg.tumbling("1m")).join(right, name="joined")
    assert "join needs a key" in text_of(error)
    for window in (hg.session("1m"), hg.tumbling("1m", emit_every="1s")):
        with pytest.raises(PlanError) as error:
            left.window(window).join(right, suffix="2", name="joined")
        assert "a window join takes windows of event time" in text_of(error)


def test_functions_that_cannot_be_called(sides: Any) -> None:
    left, right = (side.key_by("k") for side in sides)

    async def later(key: Any, left: Any, right: Any) -> Any:
        return []

    for function, problem in ((later, "is async"), (3, "needs a function, got `int`")):
        with pytest.raises(PlanError) as error:
            left.window(hg.tumbling("1m")).co_group(right, function, name="joined")
        assert problem in error.value.message
