"""A wider job costs its coordinator no more per subtask: messages and bytes are counted, not time."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import headgate

BENCHMARKS = Path(headgate.__file__).parent / "benchmarks"
SMALL, LARGE = (25, 4), (100, 4)
"""Workers and slots: of 200 and of 800 subtasks."""
SMALL_WIDTH, LARGE_WIDTH = 100, 400
"""The parallelism at both ends of a shuffle."""
LINEAR = 1.5 * LARGE[0] / SMALL[0]
"""The most by which what all subtasks cost together may grow."""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Return a function that imports a script of the benchmark."""
    monkeypatch.syspath_prepend(str(BENCHMARKS / "scale"))
    imported: list[str] = []

    def load(name: str) -> Any:
        imported.append(name)
        return importlib.import_module(name)

    yield load
    for name in imported:
        sys.modules.pop(name, None)


def test_no_cost_per_subtask_grows(script: Callable[[str], Any]) -> None:
    scale = script("coordinator")
    small, large = (asyncio.run(scale.measure(*size)) for size in (SMALL, LARGE))
    assert (small.subtasks, large.subtasks) == (200, 800)
    assert large.deploy_bytes < LINEAR * small.deploy_bytes
    assert (small.ack_messages, large.ack_messages) == (SMALL[0], LARGE[0]), "one of each worker"
    assert large.ack_bytes < LINEAR * small.ack_bytes
    assert large.entry_bytes < LINEAR * small.entry_bytes


def test_an_unaligned_checkpoint_has_no_cost_per_channel(script: Callable[[str], Any]) -> None:
    """A shuffle between p and p subtasks has p x p channels, each with records at both ends."""
    scale = script("in_flight")
    small, large = (scale.measure(width) for width in (SMALL_WIDTH, LARGE_WIDTH))
    assert (small.handles, large.handles) == (2 * SMALL_WIDTH, 2 * LARGE_WIDTH)
    linear = 1.1 * LARGE_WIDTH / SMALL_WIDTH
    assert large.json_bytes < linear * small.json_bytes


@pytest.mark.parametrize("slots", [2, 6])
def test_a_worker_writes_one_object_for_a_checkpoint(
    script: Callable[[str], Any], slots: int
) -> None:
    measuring = script("objects").measure(slots, 3, merging=True, delay="60 s")
    assert asyncio.run(measuring)["objects per checkpoint"] == 1
