"""Steps that need keys say so, and show how a stream gets them."""

from __future__ import annotations

import copy

import pytest

import headgate as hg
from headgate.connectors import from_list
from headgate.errors import PlanError


@pytest.fixture
def stream():
    return hg.Job("j").read(from_list([{"n": 1}], schema={"n": "int64"}), name="rows")


@pytest.mark.parametrize("name", ["agg", "reduce", "match", "join"])
def test_methods_of_keyed_streams_ask_for_key_by(stream, name):
    with pytest.raises(AttributeError) as caught:
        getattr(stream, name)
    assert "key_by is missing" in str(caught.value)
    assert f'.key_by("user_id").{name}(...)' in str(caught.value)
    assert hasattr(stream.key_by("n"), name)
    assert not hasattr(stream, name)


def test_other_names_are_plain_attribute_errors(stream):
    with pytest.raises(AttributeError, match="`Stream` has no attribute `agregate`"):
        stream.agregate  # noqa: B018
    assert copy.copy(stream) is not None


def test_key_by_of_a_function_is_answered_with_key_with(stream):
    with pytest.raises(PlanError) as caught:
        stream.key_by(lambda row: row.n)
    assert "`function`" in caught.value.message
    assert "key_with takes a function" in caught.value.fix
