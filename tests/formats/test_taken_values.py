"""Values that are taken in groups are those of a list, whether they were joined or not."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.connectors.formats.taken_values import TakenValues
from headgate.connectors.formats.text import to_format

GROUPS = st.lists(
    st.lists(
        st.one_of(st.sampled_from([b"", b"{}", b"a,b"]), st.sampled_from([None, b"x\ny", b"\n"])),
        max_size=4,
    ),
    max_size=5,
)
LINES = st.lists(st.lists(st.sampled_from([b"", b"{}", b"a,b"]), max_size=4), max_size=5)


def taken(groups: list[list[bytes | None]], lines: bool) -> TakenValues:
    values = TakenValues(lines=lines)
    for group in groups:
        values.add(iter(group))
    return values


@given(GROUPS | LINES, st.booleans(), st.integers(0, 20))
def test_values_are_those_that_were_taken(
    groups: list[list[bytes | None]], lines: bool, count: int
) -> None:
    expected = [value for group in groups for value in group]
    values = taken(groups, lines)
    assert len(values) == len(expected)
    text = values.text()
    if text is not None:
        assert lines
        assert text == b"".join(value + b"\n" for value in expected if value is not None)
        assert None not in expected
    assert list(values) == expected
    assert [values[index] for index in range(len(expected))] == expected
    assert values[1:3] == expected[1:3]
    shorter = taken(groups, lines)
    shorter.cut(count)
    assert list(shorter) == expected[:count]
    shorter.add([b"more"])
    assert list(shorter) == [*expected[:count], b"more"]


@given(st.lists(GROUPS | LINES, max_size=4), st.booleans())
def test_values_of_several_follow_each_other(
    parts: list[list[list[bytes | None]]], lines: bool
) -> None:
    expected = [value for groups in parts for group in groups for value in group]
    values = TakenValues.of_all([taken(groups, lines) for groups in parts])
    assert len(values) == len(expected)
    text = values.text()
    assert text is None or text.count(b"\n") == len(expected)
    assert list(values) == expected


def test_lines_are_joined_when_the_next_ones_come() -> None:
    values = taken([[b"a", b"b"]], lines=True)
    assert values.text() is None  # so few are decoded one by one
    values.add([b"c"])
    assert values.text() == b"a\nb\nc\n"
    values.add([b"d\ne"])
    assert values.text() is None
    assert taken([[b"a"], [b"b"]], lines=False).text() is None


@pytest.mark.parametrize("format", ["json", "csv"])
@given(
    st.lists(
        st.lists(
            st.sampled_from(
                [b'{"n":7,"s":"x"}', b"1,x", b"", b"{", None, b'{"n":\n1}', b'"a\nb",1', b"\xff"]
            ),
            max_size=4,
        ),
        max_size=4,
    )
)
def test_joined_values_are_decoded_as_single_ones_are(
    format: str, groups: list[list[bytes | None]]
) -> None:
    schema = pa.schema([("n", pa.int64()), ("s", pa.string())])
    kind = to_format(format)  # type: ignore[arg-type]  # the names of formats
    joined = kind.decoder(schema)(taken(groups, kind.reads_lines))
    single = kind.decoder(schema)([value for group in groups for value in group])
    assert joined.batch() == single.batch()
    assert joined.bad == single.bad
