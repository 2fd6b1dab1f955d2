"""Failures as messages of a worker."""

from __future__ import annotations

import pickle

from ...errors import InternalError
from ..control.messages import SubtaskFailed
from ..protocol.failures import FailureKind, as_headgate_error


def failure_of(
    attempt: int,
    task_name: str,
    error: Exception,
    vertex: int = -1,
    index: int = -1,
    region: int = -1,
) -> SubtaskFailed:
    """A failure as a message; an error that does not pickle travels as its text."""
    error = as_headgate_error(error, f"{task_name} failed", task_name)
    kind = FailureKind.of(error)
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
        detail=error.detail,
        kind=kind.value,
        region=region,
    )
