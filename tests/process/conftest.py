"""The means to test a process step without its surroundings."""

from __future__ import annotations

from typing import Any

import pytest

from headgate.operators.elements import WATERMARK_MAX, WATERMARK_MIN
from headgate.tests.support.subtasks import Step, steps, streams

__all__ = ["steps"]


@pytest.fixture
def world() -> Any:
    """The means to test a process step without its surroundings."""

    class World:
        step = Step
        sources = staticmethod(streams)
        end = WATERMARK_MAX
        start = WATERMARK_MIN

    return World
