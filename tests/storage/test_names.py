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
    assert names.savepoint_dir("flights", "ab12") == "savepoint-flights-ab12"
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


KINDS = st.sampled_from(["table", "delta", "items", "file", "meta"])


@given(st.text(), st.text(), st.integers(0, 99), KINDS, st.text())
def test_state_files_are_safe_for_any_text(operator, state, subtask, kind, file_id):
    name = names.checkpoint_file(1, 2, operator, subtask, state, kind, file_id)
    parts = name.split("/")
    assert parts[:2] == ["chk", "1-2"]
    assert len(parts) == 3
    assert names.checkpoint_of(name) == (1, 2)
    in_savepoint = names.savepoint_file(operator, subtask, state, kind, file_id).split("/")
    assert len(in_savepoint) == 3
    for part in (parts[2], *in_savepoint):
        assert SAFE.fullmatch(part)
        assert len(part) <= 200


def test_files_of_other_writers_are_not_taken_for_state_files():
    for name in ("log/1.json", "chk/1-2", "chk/x-2/f", "_metadata", "xchk/1-2/f"):
        assert names.checkpoint_of(name) is None


def test_the_names_in_a_savepoint_are_fixed_and_readable():
    file = names.savepoint_file("Count per Origin!", 2, "window")
    assert file == "count-per-origin-9dba913a7745ea4e/window/2.parquet"
    assert names.savepoint_file("count", 0, "a b").split("/")[1] != "a-b"


def test_every_file_of_a_state_has_its_own_name():
    for name in (
        lambda kind, id_: names.checkpoint_file(1, 1, "o", 0, "s", kind, id_),
        lambda kind, id_: names.savepoint_file("o", 0, "s", kind, id_),
    ):
        kinds = ["table", "delta", "items", "meta"]
        made = [name(kind, "") for kind in kinds] + [name("file", id_) for id_ in ("a", "b", "A")]
        assert len(set(made)) == len(made)


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
