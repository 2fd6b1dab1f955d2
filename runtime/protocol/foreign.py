"""Classifies exceptions that are not headgate's own, in one place.

An exception that leaves a subtask, a deployment or the coordinator without having been turned into
a `HeadgateError` is classified by its type and by the frames of its traceback:

| the exception | becomes | its failure kind |
|---|---|---|
| any, with a frame of the user's modules | `UserCodeError` | `user_code` |
| `ImportError` | `UserCodeError` | `user_code` |
| `ConnectionError` | `ExchangeError` | `exchange` |
| another `OSError` | `StorageError` | `storage` |
| `MemoryError`, or one that Arrow, Polars or NumPy define | `JobError` | `job` |
| any other | `InternalError` | `internal` |
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Final

from ...errors import (
    ExchangeError,
    HeadgateError,
    InternalError,
    JobError,
    StorageError,
    UserCodeError,
)
from ...operators.origin import is_own_module
from ...operators.user_code import TEXT_MAX, text_of, traceback_text

_COLUMNS: Final = frozenset({"numpy", "polars", "pyarrow"})
"""The packages whose own exceptions mean that a step could not process its columns."""
_LIBRARIES: Final = (
    _COLUMNS
    | sys.stdlib_module_names
    | frozenset(
        {
            "aiobotocore",
            "aiohttp",
            "boto3",
            "botocore",
            "cloudpickle",
            "msgspec",
            "prometheus_client",
        }
    )
    | frozenset(
        {"py4j", "pyspark", "ray", "rich", "rocksdict", "typer", "uvloop", "xxhash", "yaml"}
    )
)
"""The packages that headgate itself calls: their frames are not the user's."""


def as_headgate_error(error: BaseException, what: str, where: str = "") -> HeadgateError:
    """Return the error itself if it is headgate's own, else one of the type in the table above.

    Args:
        error: the exception.
        what: the beginning of the message: what failed.
        where: the user's line, or the name of the step.
    """
    if isinstance(error, HeadgateError):
        return error
    message = f"{what}: {type(error).__name__}: {text_of(error, TEXT_MAX)}"
    judged = _type_of(error)(message, where=where)
    judged.detail = traceback_text(error)
    return judged


def _type_of(error: BaseException) -> type[HeadgateError]:
    if isinstance(error, ImportError) or any(map(_is_users, _modules(error))):
        return UserCodeError
    if isinstance(error, ConnectionError):
        return ExchangeError
    if isinstance(error, OSError):
        return StorageError
    package = type(error).__module__.partition(".")[0]
    # A panic of Polars is defined in a module of its own.
    if isinstance(error, MemoryError) or package in _COLUMNS or package == "pyo3_runtime":
        return JobError
    return InternalError


def _modules(error: BaseException) -> Iterator[str]:
    """Yield the modules of the traceback's frames."""
    at = error.__traceback__
    while at is not None:
        yield str(at.tb_frame.f_globals.get("__name__", ""))
        at = at.tb_next


def _is_users(module: str) -> bool:
    return not is_own_module(module) and module.partition(".")[0] not in _LIBRARIES
