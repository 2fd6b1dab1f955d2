"""Window steps by hand: the subtasks of tests/support, around steps over windows."""

from __future__ import annotations

from typing import Any

import pytest

from headgate.tests.support.subtasks import Step, steps, streams

__all__ = ["steps"]


class World:
    """A keyed stream of Python objects, and the subtasks of what is made of it."""

    Step = Step

    @staticmethod
    def stream(*, event_time: bool = True) -> Any:
        (stream,) = streams(event_time=event_time)
        return stream


@pytest.fixture(scope="session")
def world() -> World:
    return World()
