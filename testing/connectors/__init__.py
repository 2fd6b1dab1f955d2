"""A conformance kit for sources and sinks, for the built-in connectors and for your own.

    class MySource(SourceCase):
        features = frozenset({Feature.LIVE})
        ...

    globals().update(connector_tests(MySource))   # one test function for each promise

A check raises AssertionError, which names the broken promise and the place.
"""

from .cases import Case, Check, Feature, Server, SinkCase, SourceCase
from .context import (
    CheckMetrics,
    CheckTimers,
    make_context,
    open_reader,
    read_all,
    read_batches,
    records_of,
)
from .sink_checks import CrashPoint, check_sink, commit
from .source_checks import check_source
from .suite import connector_tests, sink_checks, source_checks

__all__ = [
    "Case",
    "Check",
    "CheckMetrics",
    "CheckTimers",
    "CrashPoint",
    "Feature",
    "Server",
    "SinkCase",
    "SourceCase",
    "check_sink",
    "check_source",
    "commit",
    "connector_tests",
    "make_context",
    "open_reader",
    "read_all",
    "read_batches",
    "records_of",
    "sink_checks",
    "source_checks",
]
