"""What a gap can be."""

from __future__ import annotations

from typing import Final

GAP_MS_MAX: Final = 2**53
"""A gap of more, 285,000 years, is taken for a mistake: times plus gaps must fit 64 bits."""
