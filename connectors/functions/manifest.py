"""The fields of functions as sinks in a manifest."""

from __future__ import annotations

from typing import Any, Final

from ...api.manifest.fields import (
    REFERENCE,
    ChoiceKind,
    Field,
    IntegerKind,
    NumberKind,
    Section,
    duration,
    size,
)
from ...api.manifest.references import resolve_instance
from ...operators.async_calls.call import Retry
from ...operators.sink import Sink
from .sink import FORMS, function_sink
from .write_ahead import write_ahead_sink

_RECORDS: Final = Field(
    ChoiceKind(FORMS), "the form of the function's argument: list, or arrow for a RecordBatch; list"
)
_RETRY: Final = Field(
    Section(
        "retry",
        {
            "attempts": Field(IntegerKind(1, 1000), "the most calls, the first one included; 3"),
            "delay": Field(duration(), "between the first call and the second; 100ms"),
            "factor": Field(NumberKind(1), "growth of each further delay; 1"),
            "longest": Field(duration(), "the longest delay; 1m"),
        },
    ),
    "when a call that raised is made again; absent: never",
)
FUNCTION: Final = Section(
    "function",
    {
        "function": Field(
            REFERENCE,
            "is called with each record, or with some of them, `module:function`",
            required=True,
        ),
        "rows": Field(IntegerKind(1), "call it with a list of at most this many records"),
        "within": Field(duration(), "with rows: the longest time a record waits for others; 1s"),
        "maxInFlight": Field(
            IntegerKind(1), "for a coroutine function: the most calls at the same time; 1"
        ),
        "timeout": Field(
            duration(), "for a coroutine function: of a call, all attempts included; 1m"
        ),
        "retry": _RETRY,
        "records": _RECORDS,
    },
)
WRITE_AHEAD: Final = Section(
    "writeAhead",
    {
        "function": Field(
            REFERENCE,
            "is called with records of completed checkpoints and their identity, `module:function`",
            required=True,
        ),
        "rows": Field(IntegerKind(1), "the most records of a call; 1000"),
        "buffer": Field(size(), "most bytes that a subtask stages between two checkpoints; 128mb"),
        "records": _RECORDS,
    },
)


def made_function_sink(*, function: str, retry: Any = None, **arguments: Any) -> Sink:
    """Return the sink of a manifest with these fields, named as the arguments of `function_sink`."""
    again = None if retry is None else Retry(**retry)
    return function_sink(resolve_instance(function), retry=again, **arguments)


def made_write_ahead_sink(*, function: str, **arguments: Any) -> Sink:
    """Return the sink of a manifest with these fields, named as the arguments of `write_ahead_sink`."""
    return write_ahead_sink(resolve_instance(function), **arguments)
