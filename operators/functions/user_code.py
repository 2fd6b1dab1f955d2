"""Errors of the user's functions: the step, the line, the record, and the original exception."""

from __future__ import annotations

import asyncio
import hashlib
import pickle
import reprlib
import sys
import traceback
from typing import Any, Final

import msgspec

from ...errors import UserCodeError
from ..origin import Origin, is_own_module

TEXT_MAX: Final = 2_000
"""The most characters kept of an exception's text."""
RECORD_TEXT_MAX = 300
"""The most characters of a record shown in an error."""

_EXCEPTIONS: Final = (Exception, asyncio.CancelledError)

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 120
_short.maxdict = _short.maxlist = _short.maxtuple = 12


class Several(msgspec.Struct, frozen=True):
    """Stands for several records, one of which failed."""

    text: str


def user_failures() -> tuple[type[BaseException], ...]:
    """Return the exceptions of a user's function.

    Code that is called, not awaited, is never cancelled from outside. A bug inside Polars raises a
    panic, which is no `Exception`, and only where Polars is loaded.
    """
    # Another thread may be in the middle of the import, and the module is there without its names.
    panic = getattr(sys.modules.get("polars.exceptions"), "PanicException", None)
    return _EXCEPTIONS if panic is None else (*_EXCEPTIONS, panic)


def is_failure(error: BaseException) -> bool:
    """Return whether a user's function may have raised this exception."""
    return isinstance(error, user_failures())


def describe_record(record: Any) -> str:
    """Return the record as text, at most `RECORD_TEXT_MAX` characters; never raises."""
    if isinstance(record, Several):
        record = record.text
    try:
        if isinstance(record, str | bytes | dict | list | tuple):
            text = _short.repr(record)
        else:
            text = repr(record)
    except Exception as error:
        text = f"<{type(record).__name__}: its repr raised {type(error).__name__}>"
    return text if len(text) <= RECORD_TEXT_MAX else f"{text[: RECORD_TEXT_MAX - 1]}…"


def record_id(record: Any) -> str:
    """Return an id that is equal for equal records, also in another process; empty if unknown.

    Never raises.
    """
    if record is None or isinstance(record, Several):
        return ""
    try:
        text = repr(record)
        # A repr with an address differs each time.
        data = pickle.dumps(record) if " at 0x" in text else text.encode(errors="replace")
    except Exception:
        return ""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def text_of(error: BaseException, characters_max: int) -> str:
    """Return the text of an exception, cut to a length; never raises."""
    try:
        text = str(error).strip()
    except Exception as failure:
        text = f"<its text raised {type(failure).__name__}>"
    # Invalid text, such as half of a surrogate pair, fits neither a column nor a message between
    # processes.
    text = text.encode(errors="backslashreplace").decode()
    return text if len(text) <= characters_max else f"{text[: characters_max - 1]}…"


def is_own_cancellation(error: BaseException) -> bool:
    """Return True if the running task is being cancelled, False if the user's coroutine raised it
    itself."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


def traceback_text(error: BaseException) -> str:
    """Return the traceback of an exception as text, without our calls that led to the user's code."""
    first = error.__traceback__
    while first is not None and is_own_module(str(first.tb_frame.f_globals.get("__name__"))):
        first = first.tb_next
    return "".join(traceback.format_exception(type(error), error, first or error.__traceback__))


def user_error(step: str, origin: Origin, record: Any, error: BaseException) -> UserCodeError:
    """Return the error to raise, `from error`, when the function of `step` failed on `record`."""
    reason = text_of(error, TEXT_MAX)
    shown = f"{type(error).__name__}: {reason}" if reason else type(error).__name__
    return UserCodeError(
        f"the function of `{step}` raised {shown} record=`{describe_record(record)}`",
        where=str(origin),
        detail=traceback_text(error),
        step=step,
        record_id=record_id(record),
    )


def bad_result(
    step: str, origin: Origin, record: Any, problem: str, fix: str = ""
) -> UserCodeError:
    """Return the error to raise when the function of `step` returned something of the wrong kind."""
    return UserCodeError(
        f"the function of `{step}` {problem} record=`{describe_record(record)}`",
        where=str(origin),
        fix=fix,
        step=step,
        record_id=record_id(record),
    )
