"""The user's key function, called for many records at a time.

Most key functions read one attribute or item of the record and do nothing else, such as `lambda bid:
bid.bidder`. C code that reads the same takes a third of the time of a call in Python, so such a function is
called only where its read fails: then the error and its traceback are those of the user's line.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, Final, final

from .bytecode import direct_place, direct_read

_TOOLS_MAX: Final = 6
"""The number of tools that `sys.monitoring` of Python 3.12 and later has places for."""


@final
class KeyFunction:
    """A key function of one subtask."""

    def __init__(self, function: Callable[[Any], Hashable]) -> None:
        """Find out how to call it; a debugger, or a tool that measures coverage, sees all calls."""
        self._function = function
        watched = is_watched()
        self._read = None if watched else direct_read(function)
        self.place = None if watched else direct_place(function)
        """The place of a tuple that the function reads, and does nothing else; None: it is another one."""

    def extend(self, keys: list[Any], records: Sequence[Any]) -> None:
        """Append the key of each record to `keys`, which is empty.

        If the function raises, `records[len(keys)]` is the record.
        """
        if self._read is not None:
            with suppress(Exception):
                keys.extend(map(self._read, records))
        while len(keys) < len(records):
            keys.extend(map(self._function, islice(records, len(keys), None)))
            if len(keys) < len(records):  # `map` takes a StopIteration for the end of the records
                keys.append(self._function(records[len(keys)]))


def is_watched() -> bool:
    """Return True if something in this process follows which lines run."""
    if sys.gettrace() is not None or sys.getprofile() is not None:
        return True
    monitoring = getattr(sys, "monitoring", None)
    return monitoring is not None and any(map(monitoring.get_tool, range(_TOOLS_MAX)))
