"""Pattern steps by hand: the subtasks of tests/support, around steps of patterns."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from headgate.tests.support.subtasks import Step, steps, streams

__all__ = ["steps"]


class World:
    """A keyed stream of Python objects, the subtasks of a pattern over it, and what it finds."""

    Step = Step

    @staticmethod
    def stream(*, event_time: bool = True) -> Any:
        (stream,) = streams(event_time=event_time)
        return stream

    def step(self, pattern: Any, key: Callable[[Any], Any], parallelism: int = 1) -> Any:
        """The subtasks of a step that finds a pattern."""
        return self.Step(self.stream().key_with(key).match(pattern, name="m"), parallelism)

    def found(self, pattern: Any, text: str) -> list[str]:
        """The matches in words such as `a1 c b1`, one of which comes each millisecond, as text."""
        words = text.split()
        step = self.step(pattern, one_key)
        step.push(words, list(range(len(words))), key=one_key).end()
        return [match_text(match) for match, _ in step.take()]


def one_key(record: Any) -> str:
    return "k"


def match_text(match: Any) -> str:
    """The records of a match in the order of its stages."""
    records: Iterable[list[str]] = match.records.values()
    return " ".join(word for several in records for word in several)


@pytest.fixture(scope="session")
def world() -> World:
    return World()
