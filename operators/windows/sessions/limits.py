"""The limits of a session gap."""

from __future__ import annotations

from typing import Final

from ...time_range import DURATION_MAX_MS

GAP_MS_MAX: Final = DURATION_MAX_MS
"""The longest gap; a longer one is taken for a mistake. The bounds of sessions must fit a datetime.
"""
