"""The columns that a function reads, found in its bytecode: right, or None."""

from functools import partial

import pytest

from headgate.operators.functions.bytecode import used_columns

OTHER = object()


def many(row):
    if row.a > 3 and row["b"]:
        return row.c.lower()
    return f"{row.d!r}"


def in_a_loop(row):
    total = 0
    for number in range(row.n):
        total += number * row.price
    return total


async def waits(row):
    return await row.a.fetch()


def generates(row):
    yield row.a
    yield row.b


def by_exception(row):
    try:
        return row.a
    except ValueError:
        return row.b


@pytest.mark.parametrize(
    ("function", "columns"),
    [
        (lambda row: row.a > 3, {"a"}),
        (lambda row: row["a"] + row["my column"], {"a", "my column"}),
        (lambda row: (row.a, row.b, row.a), {"a", "b"}),
        (lambda row: 1, set()),
        (lambda row: row.a[0].real, {"a"}),
        (lambda row: {"x": row.a, "y": row.b}, {"a", "b"}),
        (many, {"a", "b", "c", "d"}),
        (in_a_loop, {"n", "price"}),
        (waits, {"a"}),
        (generates, {"a", "b"}),
        (by_exception, {"a", "b"}),
    ],
)
def test_attributes_and_items_are_found(function, columns):
    assert used_columns(function) == columns


def rebinds(row):
    first = row.a
    row = OTHER
    return first, row.b


def aliases(row):
    same = row
    return same.b


def inner(row):
    def read():
        return row.b

    return read()


def changes(row):
    row.a = 1
    return row.b


def deletes(row):
    del row
    return 1


@pytest.mark.parametrize(
    "function",
    [
        lambda row: row,
        lambda row: str(row),
        lambda row: getattr(row, "a"),  # noqa: B009
        lambda row: [row.a for _ in range(row.n) if row],
        lambda row: (row or OTHER).a,
        lambda row: row[0],
        lambda row: row[row.a],
        lambda row: row + "a",
        lambda row: locals(),
        lambda *rows: rows[0].a,
        lambda row, other=1: row.a,
        lambda row, *, other=1: row.a,
        rebinds,
        aliases,
        inner,
        changes,
        deletes,
        len,
        str.lower,
        partial(many),
        object(),
    ],
)
def test_in_doubt_there_is_no_answer(function):
    assert used_columns(function) is None


class Methods:
    def reads(self, row, ctx):
        return row.a, ctx.key

    def keeps(self, row, ctx):
        self.last = row

    def hands_over(self, row, ctx):
        ctx.emit("side", row)

    def alone(self, row):
        return row.b


def test_a_method_is_read_behind_self():
    assert used_columns(Methods().reads, 2) == {"a"}
    assert used_columns(Methods().alone) == {"b"}


@pytest.mark.parametrize("method", [Methods().keeps, Methods().hands_over, Methods().alone])
def test_a_method_in_doubt_has_no_answer(method):
    assert used_columns(method, 2) is None


def test_a_function_of_two_records_has_no_answer():
    assert used_columns(lambda a, b: a.price + b.price) is None
