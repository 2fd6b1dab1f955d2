"""A failure in the log reads the same for every later reader."""

from __future__ import annotations

import msgspec
import pytest

from headgate.errors import HeadgateError, ManifestErrors, UsageError, UserCodeError
from headgate.runtime.protocol.job_result import _TYPES, TEXT_MAX, JobFailure


def logged(error: HeadgateError) -> JobFailure:
    """Through a log."""
    failure = JobFailure.of("user_code", "it raised", "map (0)", error)
    return msgspec.json.decode(msgspec.json.encode(failure), type=JobFailure)


@pytest.mark.parametrize("name", sorted(_TYPES))
def test_every_error_comes_back_as_it_was(name: str) -> None:
    error = _TYPES[name]("a `thing` broke", where="job.py:7", fix="mend it")
    again = logged(error).as_error()
    assert type(again) is type(error)
    assert str(again) == str(error)


def test_the_line_of_the_user_is_kept_of_a_long_traceback() -> None:
    error = UserCodeError("raised", detail="x" * TEXT_MAX + "job.py:7")
    again = logged(error).as_error()
    assert isinstance(again, UserCodeError)
    assert again.detail.endswith("job.py:7")
    assert len(again.detail) == TEXT_MAX


def test_types_of_others_come_back_as_the_nearest_of_ours() -> None:
    class Own(UserCodeError):
        """An exception of a user's module."""

    assert type(logged(Own("raised")).as_error()) is UserCodeError
    assert type(logged(ManifestErrors([Own("raised")])).as_error()) is UsageError
    newer = msgspec.structs.replace(logged(Own("raised")), error="AddedLater")
    assert str(newer.as_error()) == "raised"
