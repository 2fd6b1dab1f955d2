"""Detects process functions that set timers on the machine's clock, by their bytecode."""

from __future__ import annotations

import dis
import itertools
from collections.abc import Iterator
from types import CodeType
from typing import Any, Final

from .functions import ProcessFunction

_SETS: Final = ("at", "after")


def sets_clock_timers(function: ProcessFunction[Any, Any]) -> bool:
    """Return whether a method of the function uses `processing_time.at` or `.after`.

    Indirect uses (`getattr`, `super`, helpers outside the class) are not detected: for those the
    timer itself is refused.
    """
    methods = {
        name: value
        for kind in reversed(type(function).__mro__)
        for name, value in vars(kind).items()
    }
    return any(
        here == "processing_time" and next_ in _SETS
        for method in methods.values()
        for code in _codes(getattr(method, "__code__", None))
        for here, next_ in itertools.pairwise(_attributes(code))
    )


def _codes(code: CodeType | None) -> Iterator[CodeType]:
    """Yield a function's code and that of nested functions."""
    if code is not None:
        yield code
        for inner in code.co_consts:
            if isinstance(inner, CodeType):
                yield from _codes(inner)


def _attributes(code: CodeType) -> Iterator[str]:
    """Yield the attribute names in the code, in order."""
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            yield str(step.argval)
