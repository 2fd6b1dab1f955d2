"""Goal: the service for standing queries gives the answer of a loop over all events, whatever happens.

Method: events and queries in pieces through the harness, with crashes and other parallelisms in between.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from headgate.testing import harness

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
EVENTS, USERS, PIECES = 4_000, 40, 8


@pytest.fixture
def modules(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.syspath_prepend(str(EXAMPLES / "rbea"))
    names = ("query_file", "rbea", "answer", "demo", "run")
    yield {name: importlib.import_module(name) for name in names}
    for name in names:
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("parallelism", "crash", "then"), [(1, False, 1), (2, True, 2), (2, True, 3), (3, False, 1)]
)
def test_it_equals_a_loop_over_all_events(modules, parallelism, crash, then):
    rbea = modules["rbea"]
    every = rbea.EVERY_MS
    messages = [
        modules["query_file"].Message(int(share * EVENTS) * every, **message)
        for share, message in modules["run"].PLAN
    ]
    rows = rbea.events(EVENTS, USERS).make(0, EVENTS).data
    size = EVENTS // PIECES
    with harness(rbea.make_job(), seed=3, parallelism=parallelism) as h:
        for piece in range(PIECES):
            if piece == PIECES // 2:
                h.checkpoint()
            low, high = piece * size * every, (piece + 1) * size * every
            h.push("events", rows.slice(piece * size, size))
            h.push("queries", [message for message in messages if low <= message.at < high])
            if piece == PIECES // 2 and crash:
                h.crash()
            if piece == PIECES // 2 and then != parallelism:
                h.rescale(then)
        h.end()
        results, failures = h.drain("results"), h.drain("broken")
    expected = modules["answer"].answer(messages, EVENTS, USERS)
    assert all(expected)
    assert (sorted(results, key=repr), sorted(failures, key=repr)) == expected
