"""Which process functions set timers by the machine's clock, as far as their code says."""

from __future__ import annotations

import dis
import itertools
from collections.abc import Iterator
from types import CodeType
from typing import Any, Final

from .functions import ProcessFunction

_SETS: Final = ("at", "after")


def sets_clock_timers(function: ProcessFunction[Any, Any]) -> bool:
    """Whether a method of the function has `processing_time.at` or `.after` in it.

    What goes ways of its own (`getattr`, `super`, helpers outside of the class) is not seen: for that there
    is the refusal of the timer itself.
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
    """A function's code and that of the functions in it."""
    if code is not None:
        yield code
        for inner in code.co_consts:
            if isinstance(inner, CodeType):
                yield from _codes(inner)


def _attributes(code: CodeType) -> Iterator[str]:
    """The names behind dots, in order."""
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            yield str(step.argval)
