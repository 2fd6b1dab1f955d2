"""The origin of an exception: its type, and the frames that it came through."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import polars as pl
import pyarrow as pa
import pytest

from headgate import errors
from headgate.runtime.protocol.failures import FailureCategory, FailureKind, as_headgate_error

USER, RESOURCE, SYSTEM = FailureCategory.USER, FailureCategory.RESOURCE, FailureCategory.SYSTEM


def raised_in(module: str, call: Callable[[], Any]) -> BaseException:
    """Return what `call` raises when code of `module` calls it, without the frames of this file."""
    names: dict[str, Any] = {"__name__": module, "call": call}
    exec("def run():\n    return call()", names)
    try:
        names["run"]()
    except BaseException as error:
        at = error.__traceback__
        assert at is not None
        frames = [at]
        while frames[-1].tb_next is not None:
            frames.append(frames[-1].tb_next)
        kept = [each for each in frames if each.tb_frame.f_globals["__name__"] != __name__]
        for each, following in zip(kept, [*kept[1:], None], strict=True):
            each.tb_next = following
        return error.with_traceback(kept[0])
    raise AssertionError("nothing was raised")


def raising(error: BaseException) -> Callable[[], Any]:
    def call() -> None:
        raise error

    return call


OURS, USERS = "headgate.operators.per_record.operators", "shop.prices"
TABLE: list[tuple[str, Callable[[], Any], FailureKind, FailureCategory, bool]] = [
    (USERS, raising(ValueError("x")), FailureKind.USER_CODE, USER, True),
    (USERS, raising(ConnectionError("x")), FailureKind.USER_CODE, USER, True),
    (USERS, raising(MemoryError("x")), FailureKind.USER_CODE, USER, True),
    (USERS, lambda: json.loads("{"), FailureKind.USER_CODE, USER, True),
    (USERS, lambda: pa.array(["x"]).cast(pa.int64()), FailureKind.USER_CODE, USER, True),
    ("__main__", raising(ValueError("x")), FailureKind.USER_CODE, USER, True),
    ("headgate.examples.rbea.rbea", raising(ValueError("x")), FailureKind.USER_CODE, USER, True),
    (OURS, lambda: __import__("no_such_module"), FailureKind.USER_CODE, USER, True),
    (OURS, raising(ValueError("x")), FailureKind.INTERNAL, SYSTEM, True),
    (OURS, raising(AssertionError()), FailureKind.INTERNAL, SYSTEM, True),
    (OURS, lambda: json.loads("{"), FailureKind.INTERNAL, SYSTEM, True),
    (OURS, lambda: pa.array(["x"]).cast(pa.int64()), FailureKind.JOB, USER, True),
    (OURS, lambda: pl.Series(["x"]).cast(pl.Int64), FailureKind.JOB, USER, True),
    (OURS, raising(MemoryError("x")), FailureKind.JOB, USER, True),
    (OURS, lambda: os.listdir("/no/such/directory"), FailureKind.STORAGE, RESOURCE, True),
    (OURS, raising(ConnectionResetError("x")), FailureKind.EXCHANGE, RESOURCE, True),
    (USERS, raising(errors.StateError("x")), FailureKind.STATE, USER, False),
    (OURS, raising(errors.DataError("x")), FailureKind.DATA, FailureCategory.DATA, False),
]


@pytest.mark.parametrize(("module", "call", "kind", "category", "again"), TABLE)
def test_where_it_was_raised_and_what_decide(
    module: str, call: Callable[[], Any], kind: FailureKind, category: FailureCategory, again: bool
) -> None:
    error = raised_in(module, call)
    assert FailureKind.of(error) is kind
    assert (kind.category, kind.recoverable) == (category, again)
    judged = as_headgate_error(error, "operator `total` failed", "total")
    assert FailureKind.of(judged) is kind
    if isinstance(error, errors.HeadgateError):
        assert judged is error
        return
    assert judged.message.startswith(f"operator `total` failed: {type(error).__name__}")
    assert judged.where == "total"
    assert type(error).__name__ in judged.detail


def test_an_error_whose_text_raises_is_judged_as_well() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    judged = as_headgate_error(raised_in(USERS, raising(Mute())), "it failed")
    assert judged.message == "it failed: Mute: <its text raised RuntimeError>"
