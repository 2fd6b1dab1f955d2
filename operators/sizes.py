"""Sizes as users write them: "32kb", "1 mb".

Internally bytes. Units are powers of 1,024, as in Flink.
"""

from __future__ import annotations

import re
from typing import Final

from ..errors import UsageError

_UNIT_BYTES: Final[dict[str, int]] = {
    "b": 1,
    "bytes": 1,
    **dict.fromkeys(("k", "kb", "ki", "kib", "kibibytes"), 1 << 10),
    **dict.fromkeys(("m", "mb", "mi", "mib", "mebibytes"), 1 << 20),
    **dict.fromkeys(("g", "gb", "gi", "gib", "gibibytes"), 1 << 30),
    **dict.fromkeys(("t", "tb", "ti", "tib", "tebibytes"), 1 << 40),
}
_SIZE = re.compile(r"\s*(\d+)\s*([a-zA-Z]+)\s*")
_SHOWN: Final = (("tb", 1 << 40), ("gb", 1 << 30), ("mb", 1 << 20), ("kb", 1 << 10))
_FIX = 'write a number with a unit, such as "32kb" or "1 mb"'


def parse_size(value: str, what: str = "size") -> int:
    """Return the bytes of a size.

    Raises:
        UsageError: not a size; bare numbers are refused.
    """
    found = _SIZE.fullmatch(value) if isinstance(value, str) else None
    unit = None if found is None else _UNIT_BYTES.get(found[2].lower())
    if found is None or unit is None:
        raise UsageError(f"{what} is not a size with a unit value=`{value}`", fix=_FIX)
    return int(found[1]) * unit


def format_size(size_bytes: int) -> str:
    """Return a text that `parse_size` reads back exactly: 32768 is "32kb"."""
    for unit, factor in _SHOWN:
        if size_bytes and size_bytes % factor == 0:
            return f"{size_bytes // factor}{unit}"
    return f"{size_bytes}b"
