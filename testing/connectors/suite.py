"""The checks as test functions, and as a list."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any
from unittest import SkipTest

from ...errors import UsageError
from . import (  # noqa: F401
    acknowledging_checks,
    plain_sink_checks,
    savepoint_checks,
    unrepeated_checks,
)
from . import sink_checks as of_sinks
from . import source_checks as of_sources
from .cases import Case, Check, Feature, SinkCase, SourceCase


def source_checks() -> list[Check[SourceCase]]:
    """Return all checks of sources."""
    return list(of_sources.CHECKS.all)


def sink_checks() -> list[Check[SinkCase]]:
    """Return all checks of sinks."""
    return list(of_sinks.CHECKS.all)


def connector_tests(
    make: Callable[[], Case], kind: type[Case] | None = None, *, thorough: bool = False
) -> dict[str, Callable[[], None]]:
    """Return a test function for each promise, by name, for pytest or any other runner of functions.

    A function whose check does not apply is skipped, and says why.

    Args:
        make: makes the case, once for each test; a subclass of `SourceCase` or `SinkCase`.
        kind: `SourceCase` or `SinkCase`, if `make` is no class.
        thorough: also the checks that take minutes with a real server.

    Raises:
        UsageError: it cannot be told whether this is a source or a sink.
    """
    kind = kind or (make if isinstance(make, type) else None)
    checks: list[Any]
    if kind is not None and issubclass(kind, SourceCase):
        checks, prefix = source_checks(), "test_source_"
    elif kind is not None and issubclass(kind, SinkCase):
        checks, prefix = sink_checks(), "test_sink_"
    else:
        raise UsageError(
            "connector_tests takes a case of a source or of a sink",
            fix="derive a class from SourceCase or SinkCase; with a function, name the kind",
        )
    return {
        prefix + check.name: _test_of(prefix + check.name, check, make)
        for check in checks
        if thorough or not check.thorough
    }


def _test_of(name: str, check: Check[Any], make: Callable[[], Case]) -> Callable[[], None]:
    def test() -> None:
        case = make()
        missing, excluded = check.needs - case.features, check.unless & case.features
        if missing:
            raise SkipTest(f"it does not have: {_named(missing)}")
        if excluded:
            raise SkipTest(f"it has: {_named(excluded)}")
        asyncio.run(check.run(case))

    test.__name__ = name
    test.__doc__ = check.promise
    return test


def _named(features: Iterable[Feature]) -> str:
    return ", ".join(sorted(each.value for each in features))
