"""headgate: a stateful stream processor for Python people.

    import headgate as hg

    job = hg.Job("clicks")
    ...
    job.run()

Names are loaded when they are first used, so that `import headgate` stays quick.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# NumPy has a thread of OpenBLAS for each core. Without work one spins for 2**26 cycles before it sleeps,
# also after the import: with this it is 2**20 cycles, less than a millisecond.
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "20")

_NAMES = {
    "api.keyed_stream": ("KeyedStream",),
    "api.resources": ("Resources",),
    "api.restarts": ("exponential_delay", "failure_rate", "fixed_delay", "no_restart"),
    "api.stream": ("Stream",),
    "connectors.hybrid": ("hybrid_source",),
    "connectors.spark.source": ("spark_source",),
    "operators.aggregation.aggregates": (
        "approx_count_distinct",
        "avg",
        "collect",
        "count",
        "count_distinct",
        "first",
        "last",
        "max",
        "max_by",
        "min",
        "min_by",
        "quantile",
        "stddev",
        "sum",
        "top_n",
        "variance",
    ),
    "operators.async_calls.call": ("Retry",),
    "operators.functions.dead_letters": ("FailedRecord", "OnError"),
    "operators.functions.per_worker": ("PerWorker", "per_worker"),
    "operators.joins.static_table": ("static_table",),
    "operators.process.batches": ("Groups", "KeyedBatchProcess"),
    "operators.process.context": ("BroadcastContext", "Context", "Timer"),
    "operators.process.emitter": ("SideOutput",),
    "operators.process.functions": ("BroadcastProcess", "CoProcess", "KeyedProcess", "Process"),
    "operators.watermarks.generators": ("WatermarkGenerator",),
    "operators.watermarks.strategy": ("WatermarkStrategy",),
    "operators.windows.kinds": (
        "count_window",
        "cumulative",
        "global_window",
        "sliding",
        "tumbling",
    ),
    "operators.windows.late": ("LateRecord",),
    "operators.windows.records.assigners": ("WindowAssigner",),
    "operators.windows.records.evictors": ("Evictor", "TimedRecord"),
    "operators.windows.records.functions": (
        "AggregateFunction",
        "WindowContext",
        "WindowProcess",
        "per_window",
    ),
    "operators.windows.records.triggers": ("Trigger", "TriggerContext", "TriggerResult"),
    "operators.windows.records.window": ("Window",),
    "operators.windows.sessions.window": ("session",),
    "runtime.handle": ("JobHandle", "attach"),
    "runtime.job": ("Job", "submit"),
    "runtime.protocol.job_result": ("JobOutcome",),
    "runtime.savepoint.inspection": ("SavepointInfo", "inspect_savepoint"),
    "state.keyed.descriptors": (
        "AggregatingState",
        "BroadcastState",
        "ListState",
        "MapState",
        "OperatorListState",
        "ReducingState",
        "ValueState",
    ),
    "state.keyed.ttl": ("StateTtl",),
    "state.queryable": ("Queryable",),
}
"""The public names, by the module that each is in."""
_MODULES = {
    "cep": "operators.patterns.cep",
    "connectors": "connectors",
    "errors": "errors",
    "evictors": "operators.windows.records.evictors",
    "query": "runtime.query",
    "triggers": "operators.windows.records.triggers",
}
"""The public names of modules."""
_HOMES = {name: home for home, names in _NAMES.items() for name in names} | _MODULES

if TYPE_CHECKING:  # the same names, which type checkers take from imports only
    from . import connectors as connectors
    from . import errors as errors
    from .api.keyed_stream import KeyedStream as KeyedStream
    from .api.resources import Resources as Resources
    from .api.restarts import exponential_delay as exponential_delay
    from .api.restarts import failure_rate as failure_rate
    from .api.restarts import fixed_delay as fixed_delay
    from .api.restarts import no_restart as no_restart
    from .api.stream import Stream as Stream
    from .connectors.hybrid import hybrid_source as hybrid_source
    from .connectors.spark.source import spark_source as spark_source
    from .operators.aggregation.aggregates import approx_count_distinct as approx_count_distinct
    from .operators.aggregation.aggregates import avg as avg
    from .operators.aggregation.aggregates import collect as collect
    from .operators.aggregation.aggregates import count as count
    from .operators.aggregation.aggregates import count_distinct as count_distinct
    from .operators.aggregation.aggregates import first as first
    from .operators.aggregation.aggregates import last as last
    from .operators.aggregation.aggregates import max as max
    from .operators.aggregation.aggregates import max_by as max_by
    from .operators.aggregation.aggregates import min as min
    from .operators.aggregation.aggregates import min_by as min_by
    from .operators.aggregation.aggregates import quantile as quantile
    from .operators.aggregation.aggregates import stddev as stddev
    from .operators.aggregation.aggregates import sum as sum
    from .operators.aggregation.aggregates import top_n as top_n
    from .operators.aggregation.aggregates import variance as variance
    from .operators.async_calls.call import Retry as Retry
    from .operators.functions.dead_letters import FailedRecord as FailedRecord
    from .operators.functions.dead_letters import OnError as OnError
    from .operators.functions.per_worker import PerWorker as PerWorker
    from .operators.functions.per_worker import per_worker as per_worker
    from .operators.joins.static_table import static_table as static_table
    from .operators.patterns import cep as cep
    from .operators.process.batches import Groups as Groups
    from .operators.process.batches import KeyedBatchProcess as KeyedBatchProcess
    from .operators.process.context import BroadcastContext as BroadcastContext
    from .operators.process.context import Context as Context
    from .operators.process.context import Timer as Timer
    from .operators.process.emitter import SideOutput as SideOutput
    from .operators.process.functions import BroadcastProcess as BroadcastProcess
    from .operators.process.functions import CoProcess as CoProcess
    from .operators.process.functions import KeyedProcess as KeyedProcess
    from .operators.process.functions import Process as Process
    from .operators.watermarks.generators import WatermarkGenerator as WatermarkGenerator
    from .operators.watermarks.strategy import WatermarkStrategy as WatermarkStrategy
    from .operators.windows.kinds import count_window as count_window
    from .operators.windows.kinds import cumulative as cumulative
    from .operators.windows.kinds import global_window as global_window
    from .operators.windows.kinds import sliding as sliding
    from .operators.windows.kinds import tumbling as tumbling
    from .operators.windows.late import LateRecord as LateRecord
    from .operators.windows.records import evictors as evictors
    from .operators.windows.records import triggers as triggers
    from .operators.windows.records.assigners import WindowAssigner as WindowAssigner
    from .operators.windows.records.evictors import Evictor as Evictor
    from .operators.windows.records.evictors import TimedRecord as TimedRecord
    from .operators.windows.records.functions import AggregateFunction as AggregateFunction
    from .operators.windows.records.functions import WindowContext as WindowContext
    from .operators.windows.records.functions import WindowProcess as WindowProcess
    from .operators.windows.records.functions import per_window as per_window
    from .operators.windows.records.triggers import Trigger as Trigger
    from .operators.windows.records.triggers import TriggerContext as TriggerContext
    from .operators.windows.records.triggers import TriggerResult as TriggerResult
    from .operators.windows.records.window import Window as Window
    from .operators.windows.sessions.window import session as session
    from .runtime import query as query
    from .runtime.handle import JobHandle as JobHandle
    from .runtime.handle import attach as attach
    from .runtime.job import Job as Job
    from .runtime.job import submit as submit
    from .runtime.protocol.job_result import JobOutcome as JobOutcome
    from .runtime.savepoint.inspection import SavepointInfo as SavepointInfo
    from .runtime.savepoint.inspection import inspect_savepoint as inspect_savepoint
    from .state.keyed.descriptors import AggregatingState as AggregatingState
    from .state.keyed.descriptors import BroadcastState as BroadcastState
    from .state.keyed.descriptors import ListState as ListState
    from .state.keyed.descriptors import MapState as MapState
    from .state.keyed.descriptors import OperatorListState as OperatorListState
    from .state.keyed.descriptors import ReducingState as ReducingState
    from .state.keyed.descriptors import ValueState as ValueState
    from .state.keyed.ttl import StateTtl as StateTtl
    from .state.queryable import Queryable as Queryable


if not TYPE_CHECKING:  # to a type checker it would say that any name is there
    __all__ = ["__version__", *_HOMES]

    def __getattr__(name: str) -> Any:
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module `headgate` has no attribute `{name}`")
        module = importlib.import_module(f".{home}", __name__)
        value = module if name in _MODULES else getattr(module, name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(["__version__", *_HOMES])
