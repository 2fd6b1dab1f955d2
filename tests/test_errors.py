"""The tree of errors: all survive the way between processes, and read as promised."""

from __future__ import annotations

import pickle

import pytest

from headgate import errors
from headgate.errors import HeadgateError, InternalError, ManifestErrors, PlanError, UserCodeError


def all_kinds(kind: type[HeadgateError] = HeadgateError) -> list[type[HeadgateError]]:
    return [kind, *(below for sub in kind.__subclasses__() for below in all_kinds(sub))]


KINDS = [kind for kind in all_kinds() if kind.__module__ == "headgate.errors"]


def make(kind: type[HeadgateError]) -> HeadgateError:
    if kind is ManifestErrors:
        return ManifestErrors([PlanError("a", where="job.yaml:3"), PlanError("b", fix="drop it")])
    if kind is UserCodeError:
        return UserCodeError("it broke", where="job.py:7", fix="look there", detail="ValueError: 1")
    return kind("it broke", where="job.py:7", fix="look there")


def picture(error: HeadgateError) -> object:
    return [
        (name, [picture(item) for item in value] if name == "problems" else value)
        for name, value in sorted(vars(error).items())
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_errors_survive_pickling(kind: type[HeadgateError]) -> None:
    error = make(kind)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert copy.args == error.args
    assert picture(copy) == picture(error)
    assert str(copy) == str(error)


def test_the_tree_at_the_top_of_the_module_is_complete() -> None:
    drawn = errors.__doc__ or ""
    assert [kind.__name__ for kind in KINDS if kind.__name__ not in drawn] == []
    assert len(KINDS) >= 14


def test_message_place_and_fix_stand_on_lines_of_their_own() -> None:
    assert str(PlanError("no sink")) == "no sink"
    assert str(PlanError("no sink", where="job.py:7", fix="add .write(...)")) == (
        "no sink\n  at job.py:7\n  add .write(...)"
    )
    assert str(PlanError("no sink", fix="add one")) == "no sink\n  add one"


def test_manifest_errors_list_every_problem() -> None:
    assert str(make(ManifestErrors)) == (
        "2 mistakes in the manifest:\na\n  at job.yaml:3\nb\n  drop it"
    )
    assert str(ManifestErrors([PlanError("a")])) == "1 mistake in the manifest:\na"


def test_check_raises_our_bug_with_its_context() -> None:
    errors.check(True, "fine")
    with pytest.raises(InternalError, match=r"^two leaders job=`a` generation=`3`$"):
        errors.check(False, "two leaders", job="a", generation=3)
