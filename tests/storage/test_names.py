"""Object names: fixed for ever, safe in any file system, and never shared by two things."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.errors import InternalError
from headgate.runtime.protocol import names

SAFE = re.compile(r"[a-z0-9_.-]+")


def test_the_names_of_records_are_fixed():
    """Stored jobs depend on them: a change here is a change of format."""
    assert names.log_entry(1) == "log/00000000000000000001.json"
    assert names.log_entry(12345) == "log/00000000000000012345.json"
    assert names.generation_record(7) == "log/generation/0000000007.json"
    assert names.probe("ab") == "probe/ab.json"
    assert names.savepoint_dir("flights", 12) == "savepoint-flights-12"
    file = names.checkpoint_file(3, 17, "Count per Origin!", 2, "window")
    assert file == "chk/3-17/count-per-origin-2-window-948e15254b0e934b.parquet"
    assert names.job_dir("Flights") == "flights-6dc0f039897082ee"


def test_entries_and_generations_are_numbered_from_one():
    for author in (names.log_entry, names.generation_record):
        with pytest.raises(InternalError):
            author(0)


def test_names_of_entries_sort_like_their_numbers():
    numbers = [1, 2, 9, 10, 99, 100, 10**6, 2**63 - 1]
    listed = [names.log_entry(number) for number in numbers]
    assert listed == sorted(listed)


@given(st.text(), st.text(), st.integers(0, 99), st.sampled_from(["table", "items"]))
def test_checkpoint_files_are_safe_for_any_text(operator, state, subtask, kind):
    parts = names.checkpoint_file(1, 2, operator, subtask, state, kind).split("/")
    assert parts[:2] == ["chk", "1-2"]
    assert len(parts) == 3
    assert SAFE.fullmatch(parts[2])
    assert len(parts[2]) <= 200
    assert names.checkpoint_file(1, 2, operator, subtask, state, kind).split("/") == parts


@given(st.lists(st.tuples(st.text(), st.text()), unique=True, max_size=20))
def test_different_states_have_different_files(pairs):
    files = {names.checkpoint_file(1, 1, operator, 0, state) for operator, state in pairs}
    assert len(files) == len(pairs)


def test_look_alikes_have_different_files():
    look_alikes = [("a b", "c"), ("a-b", "c"), ("A B", "c"), ("a", "b-c"), ("a", "b c"), ("é", "c")]
    look_alikes += [("ü", "c"), ("x" * 50, "c"), ("x" * 51, "c"), ("a\0b", "c"), ("a", "b\0c")]
    files = {names.checkpoint_file(1, 1, operator, 0, state) for operator, state in look_alikes}
    assert len(files) == len(look_alikes)


def test_a_plain_job_name_is_its_directory_and_others_get_a_hash():
    assert names.job_dir("flights-per_hour") == "flights-per_hour"
    others = ["Flights", "flights/x", "..", "", " ", "flüge", "f" * 41, "-x"]
    directories = [names.job_dir(name) for name in others]
    assert len(set(directories)) == len(others)
    for directory in directories:
        assert SAFE.fullmatch(directory)
        assert re.search(r"-[0-9a-f]{16}$", directory)
