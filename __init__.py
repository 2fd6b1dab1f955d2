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
    "FailedRecord": "operators.functions.dead_letters",
    "LateRecord": "operators.windows.late",
    "Job": "runtime.job",
    "JobHandle": "runtime.handle",
    "JobOutcome": "runtime.protocol.job_result",
    "Stream": "api.stream",
    "KeyedStream": "api.keyed_stream",
    "AggregateFunction": "operators.windows.records.functions",
    "AggregatingState": "state.keyed.descriptors",
    "BroadcastState": "state.keyed.descriptors",
    "BroadcastContext": "operators.process.context",
    "BroadcastProcess": "operators.process.functions",
    "CoProcess": "operators.process.functions",
    "Context": "operators.process.context",
    "Evictor": "operators.windows.records.evictors",
    "Groups": "operators.process.batches",
    "KeyedBatchProcess": "operators.process.batches",
    "KeyedProcess": "operators.process.functions",
    "Process": "operators.process.functions",
    "ListState": "state.keyed.descriptors",
    "MapState": "state.keyed.descriptors",
    "OnError": "operators.functions.dead_letters",
    "PerWorker": "operators.functions.per_worker",
    "OperatorListState": "state.keyed.descriptors",
    "ReducingState": "state.keyed.descriptors",
    "Resources": "api.resources",
    "Retry": "operators.async_calls.call",
    "SideOutput": "operators.process.emitter",
    "StateTtl": "state.keyed.ttl",
    "TimedRecord": "operators.windows.records.evictors",
    "Timer": "operators.process.context",
    "Trigger": "operators.windows.records.triggers",
    "TriggerContext": "operators.windows.records.triggers",
    "TriggerResult": "operators.windows.records.triggers",
    "ValueState": "state.keyed.descriptors",
    "WatermarkGenerator": "operators.watermarks.generators",
    "WatermarkStrategy": "operators.watermarks.strategy",
    "Window": "operators.windows.records.window",
    "WindowAssigner": "operators.windows.records.assigners",
    "WindowContext": "operators.windows.records.functions",
    "WindowProcess": "operators.windows.records.functions",
    "attach": "runtime.handle",
    "avg": "operators.aggregation.aggregates",
    "count": "operators.aggregation.aggregates",
    "count_window": "operators.windows.kinds",
    "cumulative": "operators.windows.kinds",
    "exponential_delay": "api.restarts",
    "failure_rate": "api.restarts",
    "fixed_delay": "api.restarts",
    "no_restart": "api.restarts",
    "global_window": "operators.windows.kinds",
    "approx_count_distinct": "operators.aggregation.aggregates",
    "collect": "operators.aggregation.aggregates",
    "count_distinct": "operators.aggregation.aggregates",
    "quantile": "operators.aggregation.aggregates",
    "first": "operators.aggregation.aggregates",
    "last": "operators.aggregation.aggregates",
    "max": "operators.aggregation.aggregates",
    "max_by": "operators.aggregation.aggregates",
    "min": "operators.aggregation.aggregates",
    "min_by": "operators.aggregation.aggregates",
    "per_window": "operators.windows.records.functions",
    "per_worker": "operators.functions.per_worker",
    "session": "operators.windows.sessions.window",
    "hybrid_source": "connectors.hybrid",
    "spark_source": "connectors.spark.source",
    "static_table": "operators.joins.static_table",
    "stddev": "operators.aggregation.aggregates",
    "submit": "runtime.job",
    "sum": "operators.aggregation.aggregates",
    "variance": "operators.aggregation.aggregates",
    "sliding": "operators.windows.kinds",
    "top_n": "operators.aggregation.aggregates",
    "tumbling": "operators.windows.kinds",
    "cep": "operators.patterns.api",
    "connectors": "connectors",
    "errors": "errors",
    "evictors": "operators.windows.records.evictors",
    "triggers": "operators.windows.records.triggers",
}

_MODULES = ("cep", "connectors", "errors", "evictors", "triggers")

if TYPE_CHECKING:
    from . import connectors, errors
    from .api.keyed_stream import KeyedStream
    from .api.resources import Resources
    from .api.restarts import exponential_delay, failure_rate, fixed_delay, no_restart
    from .api.stream import Stream
    from .connectors.hybrid import hybrid_source
    from .connectors.spark.source import spark_source
    from .operators.aggregation.aggregates import (
        approx_count_distinct,
        avg,
        collect,
        count,
        count_distinct,
        first,
        last,
        max,
        max_by,
        min,
        min_by,
        quantile,
        stddev,
        sum,
        top_n,
        variance,
    )
    from .operators.async_calls.call import Retry
    from .operators.functions.dead_letters import FailedRecord, OnError
    from .operators.functions.per_worker import PerWorker, per_worker
    from .operators.joins.static_table import static_table
    from .operators.patterns import api as cep
    from .operators.process.batches import Groups, KeyedBatchProcess
    from .operators.process.context import BroadcastContext, Context, Timer
    from .operators.process.emitter import SideOutput
    from .operators.process.functions import (
        BroadcastProcess,
        CoProcess,
        KeyedProcess,
        Process,
    )
    from .operators.watermarks.generators import WatermarkGenerator
    from .operators.watermarks.strategy import WatermarkStrategy
    from .operators.windows.kinds import count_window, cumulative, global_window, sliding, tumbling
    from .operators.windows.late import LateRecord
    from .operators.windows.records import evictors, triggers
    from .operators.windows.records.assigners import WindowAssigner
    from .operators.windows.records.evictors import Evictor, TimedRecord
    from .operators.windows.records.functions import (
        AggregateFunction,
        WindowContext,
        WindowProcess,
        per_window,
    )
    from .operators.windows.records.triggers import Trigger, TriggerContext, TriggerResult
    from .operators.windows.records.window import Window
    from .operators.windows.sessions.window import session
    from .runtime.handle import JobHandle, attach
    from .runtime.job import Job, submit
    from .runtime.protocol.job_result import JobOutcome
    from .state.keyed.descriptors import (
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
    "AggregateFunction",
    "AggregatingState",
    "BroadcastContext",
    "BroadcastProcess",
    "BroadcastState",
    "CoProcess",
    "Context",
    "Evictor",
    "FailedRecord",
    "LateRecord",
    "Groups",
    "Job",
    "JobHandle",
    "JobOutcome",
    "KeyedBatchProcess",
    "KeyedProcess",
    "KeyedStream",
    "ListState",
    "MapState",
    "OnError",
    "OperatorListState",
    "PerWorker",
    "Process",
    "ReducingState",
    "Resources",
    "Retry",
    "SideOutput",
    "StateTtl",
    "Stream",
    "TimedRecord",
    "Timer",
    "Trigger",
    "TriggerContext",
    "TriggerResult",
    "ValueState",
    "WatermarkGenerator",
    "WatermarkStrategy",
    "Window",
    "WindowAssigner",
    "WindowContext",
    "WindowProcess",
    "__version__",
    "approx_count_distinct",
    "attach",
    "avg",
    "collect",
    "cep",
    "connectors",
    "count",
    "count_distinct",
    "count_window",
    "cumulative",
    "errors",
    "evictors",
    "first",
    "exponential_delay",
    "failure_rate",
    "fixed_delay",
    "no_restart",
    "global_window",
    "hybrid_source",
    "last",
    "max",
    "max_by",
    "min",
    "min_by",
    "per_window",
    "per_worker",
    "session",
    "quantile",
    "spark_source",
    "static_table",
    "stddev",
    "submit",
    "sum",
    "sliding",
    "top_n",
    "triggers",
    "tumbling",
    "variance",
]


if not TYPE_CHECKING:  # to a type checker it would say that any name is there

    def __getattr__(name: str) -> Any:
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module `headgate` has no attribute `{name}`")
        module = importlib.import_module(f".{home}", __name__)
        value = module if name in _MODULES else getattr(module, name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
