"""Window steps by hand: the means of tests/process, around steps over windows."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

_PATH = Path(__file__).parents[1] / "process" / "conftest.py"
_spec = importlib.util.spec_from_file_location("process_conftest", _PATH)
assert _spec is not None
assert _spec.loader is not None
_process = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = _process
_spec.loader.exec_module(_process)

steps = _process.steps


class World:
    """A keyed stream of Python objects, and the subtasks of what is made of it."""

    Step = _process.Step

    @staticmethod
    def stream(*, event_time: bool = True) -> Any:
        (stream,) = _process.streams(event_time=event_time)
        return stream


@pytest.fixture(scope="session")
def world() -> World:
    return World()
