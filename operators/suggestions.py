"""Suggestions for misspelt names, in one form."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def suggest(wrong: str, known: Iterable[str], what: str) -> str:
    """Return `did you mean "amount"? columns: user_id, url` for a wrong name among `known` ones."""
    names = list(known)
    by_lower = {name.lower(): name for name in names}
    close = difflib.get_close_matches(wrong.lower(), by_lower, n=1)
    start = f"did you mean `{by_lower[close[0]]}`? " if close else ""
    return f"{start}{what}: {', '.join(names) if names else 'none'}"
