"""A wider job costs its coordinator no more per subtask: messages and bytes are counted, not time."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import headgate

BENCHMARKS = Path(headgate.__file__).parent / "benchmarks"
SMALL, LARGE = (25, 4), (100, 4)
"""Workers and slots: of 200 and of 800 subtasks."""
LINEAR = 1.5 * LARGE[0] / SMALL[0]
"""The most by which what all subtasks cost together may grow."""


@pytest.fixture
def scale(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(BENCHMARKS / "scale"))
    import coordinator

    yield coordinator
    sys.modules.pop("coordinator", None)


def test_no_cost_per_subtask_grows(scale: Any) -> None:
    small, large = (asyncio.run(scale.measure(*size)) for size in (SMALL, LARGE))
    assert (small.subtasks, large.subtasks) == (200, 800)
    assert large.deploy_bytes < LINEAR * small.deploy_bytes
    assert (small.ack_messages, large.ack_messages) == (SMALL[0], LARGE[0]), "one of each worker"
    assert large.ack_bytes < LINEAR * small.ack_bytes
    assert large.entry_bytes < LINEAR * small.entry_bytes
