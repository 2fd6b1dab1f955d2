"""What a worker tells of failures."""

from __future__ import annotations

import pickle
from typing import Any

from ...errors import HeadgateError, InternalError
from ..control.messages import SubtaskFailed
from ..protocol.failures import FailureKind


def failure_of(
    attempt: int,
    task_name: str,
    error: Exception,
    vertex: int = -1,
    index: int = -1,
    region: int = -1,
) -> SubtaskFailed:
    """A failure as a message; an error that does not pickle travels as its text."""
    if not isinstance(error, HeadgateError):
        error = InternalError(f"{type(error).__name__}: {error}")
    kind = FailureKind.of(error)
    detail: Any = getattr(error, "detail", "")
    try:
        pickled = pickle.dumps(error)
    except Exception:
        pickled = pickle.dumps(InternalError(str(error)))
    return SubtaskFailed(
        attempt=attempt,
        vertex=vertex,
        index=index,
        task_name=task_name,
        error=pickled,
        text=str(error),
        detail=str(detail),
        kind=kind.value,
        region=region,
    )
