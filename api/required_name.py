"""Names are required exactly where state or external effects depend on them; the error explains why."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from ..errors import PlanError
from ..operators.origin import capture_origin

P = ParamSpec("P")
R = TypeVar("R")


def named(what: str, why: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Turn a missing `name=` into a PlanError with the user's line, instead of Python's TypeError."""

    def decorate(method: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(method)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            if not kwargs.get("name"):
                raise PlanError(
                    f"{what} has no name", where=str(capture_origin()), fix=f'{why}; add name="..."'
                )
            return method(*args, **kwargs)

        return checked

    return decorate
