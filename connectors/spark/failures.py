"""What went wrong in Spark, in a sentence: the root cause, and not the stack of stages above it."""

from __future__ import annotations

import re
import traceback
from typing import Any, Final

from ...errors import HeadgateError, UsageError
from .messages import Failed

DETAIL_MAX: Final = 20_000
"""Characters of what Spark said that are kept."""
_SENTENCE_MAX: Final = 400
_CAUSES_MAX: Final = 50
_STATE: Final = re.compile(r"\s*SQLSTATE: \w+\s*$", re.MULTILINE)
"""A code at the end of Spark's own messages, for programs."""


class QueryRaised(Exception):
    """The user's query function raised `__cause__`."""


def failure_of(error: BaseException) -> Failed:
    """The message for an error of the query, of Spark, or of ours."""
    if isinstance(error, HeadgateError):
        return Failed(error.message, error.fix, usage=isinstance(error, UsageError))
    raised = isinstance(error, QueryRaised)
    cause = error.__cause__ if raised and error.__cause__ is not None else error
    detail = "".join(traceback.format_exception(cause))[-DETAIL_MAX:]
    from pyspark.errors import AnalysisException, PySparkException

    if isinstance(cause, AnalysisException):
        return Failed(
            f"Spark refuses the query: {_sentence(str(cause))}", detail=detail, usage=True
        )
    if raised and not isinstance(cause, PySparkException):
        return Failed(
            f"the query function raised {type(cause).__name__}: {cause}{_place(cause)}",
            detail=detail,
        )
    return Failed(f"Spark failed: {_root_cause(cause)}", detail=detail)


def _place(error: BaseException) -> str:
    """The innermost line of the user's, that is, outside of pyspark."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if "/pyspark/" not in frame.filename and "/py4j/" not in frame.filename:
            return f" ({frame.filename}:{frame.lineno})"
    return ""


def _root_cause(error: BaseException) -> str:
    """The deepest cause that Java knows of; without Java, the message itself."""
    throwable: Any = getattr(error, "_origin", None) or getattr(error, "java_exception", None)
    if throwable is None or not hasattr(throwable, "getCause"):
        return _sentence(str(error))
    for _ in range(_CAUSES_MAX):
        cause = throwable.getCause()
        if cause is None:
            break
        throwable = cause
    text = _STATE.sub("", str(throwable.getMessage() or throwable.getClass().getName()))
    # What comes first of a Python worker is its traceback; what it raised is in its last line.
    if "Traceback (most recent call last)" in text:
        return _sentence(text.strip().splitlines()[-1])
    return _sentence(text)


def _sentence(text: str) -> str:
    """The first paragraph, on one line, and not for ever."""
    first = re.split(r"\n\s*\n|\n== |;\n|\nJVM stacktrace|\n\tat ", text.strip(), maxsplit=1)[0]
    one_line = " ".join(_STATE.sub("", first).split())
    return one_line if len(one_line) <= _SENTENCE_MAX else f"{one_line[:_SENTENCE_MAX]}..."
