"""What a gap can be."""

from __future__ import annotations

from typing import Final

from ..time_range import DURATION_MAX_MS

GAP_MS_MAX: Final = DURATION_MAX_MS
"""A longer gap is taken for a mistake: the bounds of sessions stay within what a datetime can hold."""
