"""headgate: a stateful stream processor for Python people.

    import headgate as hg

    job = hg.Job("clicks")
    ...
    job.run()

Names are loaded when they are first used, so that `import headgate` stays quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "FailedRecord": "operators.dead_letters",
    "Job": "runtime.job",
    "JobOutcome": "runtime.coordinator.job",
    "Stream": "operators.stream",
    "KeyedStream": "operators.keyed_stream",
    "AggregatingState": "state.descriptors",
    "BroadcastState": "state.descriptors",
    "BroadcastContext": "operators.process.context",
    "BroadcastProcess": "operators.process.functions",
    "CoProcess": "operators.process.functions",
    "Context": "operators.process.context",
    "Groups": "operators.process.batches",
    "KeyedBatchProcess": "operators.process.batches",
    "KeyedProcess": "operators.process.functions",
    "ListState": "state.descriptors",
    "MapState": "state.descriptors",
    "OnError": "operators.dead_letters",
    "OperatorListState": "state.descriptors",
    "ReducingState": "state.descriptors",
    "Retry": "operators.async_io.retry",
    "SideOutput": "operators.process.sides",
    "StateTtl": "state.keyed.ttl",
    "Timer": "operators.process.context",
    "ValueState": "state.descriptors",
    "WatermarkGenerator": "operators.watermarks.generators",
    "WatermarkStrategy": "operators.watermarks.strategy",
    "avg": "operators.aggregates",
    "count": "operators.aggregates",
    "count_window": "operators.windows",
    "cumulative": "operators.windows",
    "global_window": "operators.windows",
    "max": "operators.aggregates",
    "min": "operators.aggregates",
    "session": "operators.sessions.window",
    "sum": "operators.aggregates",
    "sliding": "operators.windows",
    "tumbling": "operators.windows",
    "connectors": "connectors",
    "errors": "errors",
}

if TYPE_CHECKING:
    from . import connectors, errors
    from .operators.aggregates import avg, count, max, min, sum
    from .operators.async_io.retry import Retry
    from .operators.dead_letters import FailedRecord, OnError
    from .operators.keyed_stream import KeyedStream
    from .operators.process.batches import Groups, KeyedBatchProcess
    from .operators.process.context import BroadcastContext, Context, Timer
    from .operators.process.functions import BroadcastProcess, CoProcess, KeyedProcess
    from .operators.process.sides import SideOutput
    from .operators.sessions.window import session
    from .operators.stream import Stream
    from .operators.watermarks.generators import WatermarkGenerator
    from .operators.watermarks.strategy import WatermarkStrategy
    from .operators.windows import count_window, cumulative, global_window, sliding, tumbling
    from .runtime.coordinator.job import JobOutcome
    from .runtime.job import Job
    from .state.descriptors import (
        AggregatingState,
        BroadcastState,
        ListState,
        MapState,
        OperatorListState,
        ReducingState,
        ValueState,
    )
    from .state.keyed.ttl import StateTtl

__all__ = [
    "AggregatingState",
    "BroadcastContext",
    "BroadcastProcess",
    "BroadcastState",
    "CoProcess",
    "Context",
    "FailedRecord",
    "Groups",
    "Job",
    "JobOutcome",
    "KeyedBatchProcess",
    "KeyedProcess",
    "KeyedStream",
    "ListState",
    "MapState",
    "OnError",
    "OperatorListState",
    "ReducingState",
    "Retry",
    "SideOutput",
    "StateTtl",
    "Stream",
    "Timer",
    "ValueState",
    "WatermarkGenerator",
    "WatermarkStrategy",
    "__version__",
    "avg",
    "connectors",
    "count",
    "count_window",
    "cumulative",
    "errors",
    "global_window",
    "max",
    "min",
    "session",
    "sum",
    "sliding",
    "tumbling",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module `headgate` has no attribute `{name}`")
    module = importlib.import_module(f".{home}", __name__)
    value = module if name in ("connectors", "errors") else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
