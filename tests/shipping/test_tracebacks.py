"""Goal: what a function raises in another process has the user's file and line in its traceback."""

from __future__ import annotations

import traceback
from typing import Any

from headgate.runtime.shipping import ship, unship


def test_code_that_travels_by_value_keeps_the_name_of_its_file() -> None:
    def outer(value: Any) -> Any:
        def inner() -> Any:
            raise ValueError("the line of the user")

        return inner() if value else (lambda: 1 // 0)()

    there = unship(ship(outer))
    assert there is not outer
    for value, name, line in (
        (1, "inner", 'raise ValueError("the line of the user")'),
        (0, "<lambda>", "return inner() if value else (lambda: 1 // 0)()"),
    ):
        try:
            there(value)
        except (ValueError, ZeroDivisionError) as error:
            frames = traceback.extract_tb(error.__traceback__)
        assert (frames[-1].filename, frames[-1].name, frames[-1].line) == (__file__, name, line)
