"""`hg.cep`: patterns of records per key, for `keyed.match(pattern, name=...)`."""

from __future__ import annotations

from .match import (
    AfterMatch,
    Earlier,
    Match,
    no_skip,
    skip_past_last_event,
    skip_to_first,
    skip_to_last,
    skip_to_next,
)
from .pattern import Pattern, begin

__all__ = [
    "AfterMatch",
    "Earlier",
    "Match",
    "Pattern",
    "begin",
    "no_skip",
    "skip_past_last_event",
    "skip_to_first",
    "skip_to_last",
    "skip_to_next",
]
