"""The conformance kit is applied to all public connectors, or its page says why not to one."""

from __future__ import annotations

import inspect
import runpy
from pathlib import Path
from typing import Any

import pytest

import headgate.connectors
from headgate.connectors import __all__ as public
from headgate.operators.sink import Sink
from headgate.operators.source import Source
from headgate.testing.connectors import SourceCase

ROOT = Path(headgate.connectors.__file__).parents[1]
PAGE = runpy.run_path(str(ROOT / "docs" / "conformance.py"))
CHECKED: dict[str, type[Any]] = {
    name.partition(" ")[0]: case for name, case in PAGE["CASES"].items()
}
WITHOUT: dict[str, str] = PAGE["WITHOUT_CASE"]


def is_made(name: str, kind: type[Any]) -> bool:
    """Return True if a public function returns connectors of a kind, or one of several classes of them."""
    function = getattr(headgate.connectors, name)
    if not inspect.isfunction(function):
        return False
    classes = str(inspect.signature(function).return_annotation).split(" | ")
    made = [inspect.unwrap(function).__globals__.get(each.partition("[")[0]) for each in classes]
    return all(isinstance(each, type) and issubclass(each, kind) for each in made)


SOURCES = [name for name in public if is_made(name, Source)]
SINKS = [name for name in public if is_made(name, Sink)]


def test_the_connectors_are_found() -> None:
    assert {"kafka_source", "from_list", "throttle", "generator"} <= set(SOURCES)
    assert {"kafka_sink", "collect", "blackhole", "print_sink"} <= set(SINKS)
    named = {name for name in public if name.endswith(("_source", "_sink"))}
    assert named <= {*SOURCES, *SINKS}


@pytest.mark.parametrize("name", [*SOURCES, *SINKS])
def test_it_is_checked_or_the_page_says_why_not(name: str) -> None:
    assert (name in CHECKED) != (name in WITHOUT), (
        "a case of tests/support belongs into docs/conformance.py, or a reason why there is none"
    )
    if name in CHECKED:
        assert issubclass(CHECKED[name], SourceCase) == (name in SOURCES)


def test_nothing_else_is_listed() -> None:
    assert {*CHECKED, *WITHOUT} <= {*SOURCES, *SINKS}
