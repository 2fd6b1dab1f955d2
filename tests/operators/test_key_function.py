"""Key functions: those that only read a field are read in C, with the same results and errors."""

import dis
import sys
import traceback
from functools import partial

import pytest

from headgate.errors import UserCodeError
from headgate.operators.aggregation.reduce import ReduceOperator
from headgate.operators.elements import ObjectBatch
from headgate.operators.functions import key_function
from headgate.operators.functions.bytecode import direct_place, direct_read
from headgate.operators.functions.key_function import KeyFunction
from headgate.operators.origin import Origin


class Record:
    def __init__(self, name):
        self.name = name

    def method(self):
        return self.name

    @property
    def upper(self):
        return self.name.upper()


class Keyed:
    field = "a"

    def key(self, record):
        return record["user"]

    def own(self, record):
        return self.field


def by_name(record):
    """The function has a docstring."""
    return record.name


def with_default(record, field=0):
    return record[field]


def assigns(record):
    record = OTHER
    return record.name


async def waits(record):
    return record.name


def generates(record):
    yield record.name


OTHER = Record("other")
FIELD = 0

READS = [
    (lambda record: record.name, Record("x"), "x"),
    (lambda record: record.upper, Record("x"), "X"),
    (by_name, Record("x"), "x"),
    (lambda record: record[0], ("x", 1), "x"),
    (lambda record: record[-1], ("x", 1), 1),
    (lambda record: record["user"], {"user": "x"}, "x"),
    (lambda record: record[1.5], {1.5: "x"}, "x"),
    (lambda record: record["a", 1], {("a", 1): "x"}, "x"),
    (lambda record: record[None], {None: "x"}, "x"),
    (lambda record: record[1_000_000], {1_000_000: "x"}, "x"),
    (Keyed().key, {"user": "x"}, "x"),
]
OTHERS = [
    lambda record: record,
    lambda record: "a",
    lambda record: record.method(),
    lambda record: record.name.real,
    lambda record: record[0][1],
    lambda record: record.name or None,
    lambda record: (record.name,),
    lambda record: OTHER.name,
    lambda record: record[FIELD],
    lambda record: record[1:],
    lambda record: record[0] + 1,
    lambda record: -record[0],
    lambda record: record == 0,
    lambda record: record + 1,
    lambda record: record - 1,
    lambda record: record * 2,
    lambda record: record is None,
    lambda record: 0 in record,
    lambda *record: record[0],
    lambda **record: record["a"],
    lambda: OTHER.name,
    with_default,
    assigns,
    waits,
    generates,
    Keyed().own,
    partial(by_name),
    str.upper,
    len,
]


@pytest.mark.parametrize(("function", "record", "key"), READS)
def test_a_function_that_only_reads_a_field_is_found(function, record, key):
    assert function(record) == key
    assert direct_read(function)(record) == key


@pytest.mark.parametrize("function", OTHERS)
def test_a_function_that_does_anything_else_is_not(function):
    assert direct_read(function) is None


def test_a_function_of_an_outer_variable_is_called():
    place = 1
    assert direct_read(lambda record: record[place]) is None
    assert keys_of(lambda record: record[place], [(1, 2), (3, 4)]) == [2, 4]


def keys_of(function, records):
    keys = []
    KeyFunction(function).extend(keys, records)
    return keys


@pytest.mark.parametrize("function", [lambda r: r[0], lambda r: r[0] + 0])
def test_an_error_is_raised_from_the_line_of_the_function(function):
    keys, records = [], [(1,), (2,), (), (3,)]
    with pytest.raises(IndexError) as caught:
        KeyFunction(function).extend(keys, records)
    assert keys == [1, 2]
    text = "".join(traceback.format_exception(caught.value))
    assert "[lambda r: r[0], lambda r: r[0] + 0]" in text


class Moody:
    """Its key cannot be read the first time."""

    def __init__(self, error):
        self._errors = [error]

    def __getitem__(self, place):
        if self._errors:
            raise self._errors.pop()
        return "key"


@pytest.mark.parametrize("error", [ValueError("first"), StopIteration()])
@pytest.mark.parametrize("function", [lambda r: r[0], lambda r: r[0] or ""])
def test_what_fails_once_in_c_may_succeed_in_the_function(function, error):
    records = [("a",), Moody(error), ("b",)]
    if isinstance(error, ValueError) and direct_read(function) is None:
        with pytest.raises(ValueError, match="first"):
            keys_of(function, records)
    else:
        assert keys_of(function, records) == ["a", "key", "b"]


@pytest.mark.parametrize("function", [lambda r: r[0], lambda r: r[0] or ""])
def test_a_stop_iteration_is_an_error_of_its_record(function):
    class Ends:
        def __getitem__(self, place):
            raise StopIteration

    keys = []
    with pytest.raises(StopIteration):
        KeyFunction(function).extend(keys, [("a",), Ends(), ("b",)])
    assert keys == ["a"]


def test_the_reduce_names_the_record_whose_key_stops_the_iteration(harness):
    def key(record):
        if record == 2:
            raise StopIteration
        return record

    operator = ReduceOperator(lambda a, b: a, key, step="sum", origin=Origin("job.py:1"))
    run = harness(operator)
    with pytest.raises(UserCodeError, match=r"`sum` raised StopIteration record=`2`"):
        run.push(ObjectBatch([1, 2, 3]))


def test_a_debugger_sees_all_calls():
    called = []

    def trace(frame, event, argument):
        if event == "call" and frame.f_code is by_name.__code__:
            called.append(event)

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        assert keys_of(by_name, [Record("x"), Record("y")]) == ["x", "y"]
    finally:
        sys.settrace(before)
    assert len(called) == 2


@pytest.mark.skipif(not hasattr(sys, "monitoring"), reason="Python 3.12 and later")
def test_a_tool_that_monitors_sees_all_calls():
    sys.monitoring.use_tool_id(sys.monitoring.DEBUGGER_ID, "test")
    try:
        assert key_function.is_watched()
    finally:
        sys.monitoring.free_tool_id(sys.monitoring.DEBUGGER_ID)


def test_the_instructions_are_those_that_are_looked_for():
    """If a new Python has others, keys are still right, but slow: this says so."""
    names = {step.opname for step in dis.get_instructions(lambda record: record[0])}
    assert direct_read(lambda record: record[0]) is not None, names


@pytest.mark.parametrize(
    ("function", "place"),
    [
        (lambda pair: pair[0], 0),
        (lambda pair: pair[-2], -2),
        (lambda pair: pair["a"], None),
        (lambda pair: pair[True], None),
        (lambda pair: pair.a, None),
        (lambda pair: pair, None),
        (lambda pair: pair[0] + 1, None),
    ],
)
def test_the_place_that_a_key_function_reads(function, place):
    assert direct_place(function) == place
