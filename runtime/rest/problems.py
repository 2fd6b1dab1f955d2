"""Errors of the REST API as RFC 9457 problem details, and back: the text is the one that the CLI prints."""

from __future__ import annotations

from http import HTTPStatus

import msgspec

from ...errors import (
    HeadgateError,
    InternalError,
    JobNotFound,
    JobNotReady,
    StorageError,
    UsageError,
)
from ..protocol.job_result import JobFailure

PROBLEM_TYPE = "application/problem+json"


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """Why a request was refused, or why an operation failed (RFC 9457)."""

    type: str = "about:blank"
    title: str
    """The meaning of the status code."""
    status: int
    detail: str
    """The text of the error, as the CLI prints it."""
    error: str = ""
    """The name of the error's type."""
    message: str = ""
    where: str = ""
    fix: str = ""
    """What to do about it."""


class RequestProblem(Exception):
    """A request that is refused."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.problem = problem(status, detail)


def problem(status: int, detail: str) -> Problem:
    """A problem with the request itself."""
    return Problem(title=HTTPStatus(status).phrase, status=status, detail=detail)


def problem_of(error: HeadgateError) -> Problem:
    """The problem that tells an error of the job."""
    status = _status(error)
    failure = JobFailure.of("", "", "", error)
    return Problem(
        title=HTTPStatus(status).phrase,
        status=status,
        detail=str(error),
        error=failure.error,
        message=failure.message,
        where=failure.where,
        fix=failure.fix,
    )


def error_of(found: Problem) -> HeadgateError:
    """The error that a problem tells, for callers in Python."""
    error = found.error or ("UsageError" if found.status < 500 else "JobError")
    return JobFailure(
        kind="",
        text="",
        vertex="",
        error=error,
        message=found.message or found.detail,
        where=found.where,
        fix=found.fix,
    ).as_error()


def _status(error: HeadgateError) -> int:
    match error:
        case UsageError():
            return HTTPStatus.BAD_REQUEST
        case JobNotFound():
            return HTTPStatus.NOT_FOUND
        case StorageError() | JobNotReady():
            return HTTPStatus.SERVICE_UNAVAILABLE
        case InternalError():
            return HTTPStatus.INTERNAL_SERVER_ERROR
    return HTTPStatus.CONFLICT  # the job is not in a state for it, or failed
