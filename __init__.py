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
    "LateRecord": "operators.late",
    "Job": "runtime.job",
    "JobHandle": "runtime.handle",
    "JobOutcome": "runtime.protocol.job_result",
    "Stream": "operators.stream",
    "KeyedStream": "operators.keyed_stream",
    "AggregateFunction": "operators.windowing.functions",
    "AggregatingState": "state.keyed.descriptors",
    "BroadcastState": "state.keyed.descriptors",
    "BroadcastContext": "operators.process.context",
    "BroadcastProcess": "operators.process.functions",
    "CoProcess": "operators.process.functions",
    "Context": "operators.process.context",
    "Evictor": "operators.windowing.evictors",
    "Groups": "operators.process.batches",
    "KeyedBatchProcess": "operators.process.batches",
    "KeyedProcess": "operators.process.functions",
    "Process": "operators.process.functions",
    "ListState": "state.keyed.descriptors",
    "MapState": "state.keyed.descriptors",
    "OnError": "operators.dead_letters",
    "PerWorker": "operators.per_worker",
    "OperatorListState": "state.keyed.descriptors",
    "ReducingState": "state.keyed.descriptors",
    "Resources": "operators.resources",
    "Retry": "operators.async_io.retry",
    "SideOutput": "operators.process.sides",
    "StateTtl": "state.keyed.ttl",
    "TimedRecord": "operators.windowing.evictors",
    "Timer": "operators.process.context",
    "Trigger": "operators.windowing.triggers",
    "TriggerContext": "operators.windowing.trigger_context",
    "TriggerResult": "operators.windowing.triggers",
    "ValueState": "state.keyed.descriptors",
    "WatermarkGenerator": "operators.watermarks.generators",
    "WatermarkStrategy": "operators.watermarks.strategy",
    "Window": "operators.windowing.window",
    "WindowAssigner": "operators.windowing.assigners",
    "WindowContext": "operators.windowing.functions",
    "WindowProcess": "operators.windowing.functions",
    "attach": "runtime.handle",
    "avg": "operators.aggregates",
    "count": "operators.aggregates",
    "count_window": "operators.windows",
    "cumulative": "operators.windows",
    "exponential_delay": "operators.restarts",
    "failure_rate": "operators.restarts",
    "fixed_delay": "operators.restarts",
    "no_restart": "operators.restarts",
    "global_window": "operators.windows",
    "approx_count_distinct": "operators.aggregates",
    "collect": "operators.aggregates",
    "count_distinct": "operators.aggregates",
    "quantile": "operators.aggregates",
    "first": "operators.aggregates",
    "last": "operators.aggregates",
    "max": "operators.aggregates",
    "max_by": "operators.aggregates",
    "min": "operators.aggregates",
    "min_by": "operators.aggregates",
    "per_window": "operators.windowing.functions",
    "per_worker": "operators.per_worker",
    "session": "operators.sessions.window",
    "hybrid_source": "connectors.hybrid",
    "spark_source": "connectors.spark.source",
    "static_table": "operators.joins.static_table",
    "stddev": "operators.aggregates",
    "submit": "runtime.job",
    "sum": "operators.aggregates",
    "variance": "operators.aggregates",
    "sliding": "operators.windows",
    "top_n": "operators.aggregates",
    "tumbling": "operators.windows",
    "cep": "operators.cep.api",
    "connectors": "connectors",
    "errors": "errors",
    "evictors": "operators.windowing.evictors",
    "triggers": "operators.windowing.triggers",
}

_MODULES = ("cep", "connectors", "errors", "evictors", "triggers")

if TYPE_CHECKING:
    from . import connectors, errors
    from .connectors.hybrid import hybrid_source
    from .connectors.spark.source import spark_source
    from .operators.aggregates import (
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
    from .operators.async_io.retry import Retry
    from .operators.cep import api as cep
    from .operators.dead_letters import FailedRecord, OnError
    from .operators.joins.static_table import static_table
    from .operators.keyed_stream import KeyedStream
    from .operators.late import LateRecord
    from .operators.per_worker import PerWorker, per_worker
    from .operators.process.batches import Groups, KeyedBatchProcess
    from .operators.process.context import BroadcastContext, Context, Timer
    from .operators.process.functions import (
        BroadcastProcess,
        CoProcess,
        KeyedProcess,
        Process,
    )
    from .operators.process.sides import SideOutput
    from .operators.resources import Resources
    from .operators.restarts import exponential_delay, failure_rate, fixed_delay, no_restart
    from .operators.sessions.window import session
    from .operators.stream import Stream
    from .operators.watermarks.generators import WatermarkGenerator
    from .operators.watermarks.strategy import WatermarkStrategy
    from .operators.windowing import evictors, triggers
    from .operators.windowing.assigners import WindowAssigner
    from .operators.windowing.evictors import Evictor, TimedRecord
    from .operators.windowing.functions import (
        AggregateFunction,
        WindowContext,
        WindowProcess,
        per_window,
    )
    from .operators.windowing.trigger_context import TriggerContext
    from .operators.windowing.triggers import Trigger, TriggerResult
    from .operators.windowing.window import Window
    from .operators.windows import count_window, cumulative, global_window, sliding, tumbling
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
