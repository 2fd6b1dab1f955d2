"""Views of a job as JSON that are not part of its status: subtasks, configuration, plan, metrics.

Clients get them from the same functions, whichever way they come.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final

from ...errors import UsageError
from ...operators.elements import WATERMARK_MIN
from ..control.messages import SubtaskStatistics
from ..explain import describe_partitioning, explain_plan
from ..job_spec import JobSpec
from ..observe.metrics import MetricsRegistry
from ..plan import PhysicalPlan, Vertex
from ..protocol import names
from ..protocol.ids import SubtaskId
from ..storage.open_store import join_address
from .context import JobContext

MASKED: Final = "******"
_SECRET_KEY = re.compile(
    r"password|secret|(?<!-)token$|access-?key|api-?key|account\.key|credential"
)
_USERINFO = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def describe_subtasks(job: JobContext, vertex_id: int) -> dict[str, Any]:
    """What each subtask of a vertex last reported, and where it runs.

    Raises:
        UsageError: the plan has no such vertex.
    """
    vertex = next((each for each in job.plan.vertices if each.id == vertex_id), None)
    if vertex is None:
        known = ", ".join(str(each.id) for each in job.plan.vertices)
        raise UsageError(f"no such vertex id=`{vertex_id}`", fix=f"the job has {known}")
    return {
        "vertex": vertex.id,
        "name": vertex.name,
        "subtasks": [_subtask(job, vertex, index) for index in range(vertex.parallelism)],
    }


def _subtask(job: JobContext, vertex: Vertex, index: int) -> dict[str, Any]:
    subtask = SubtaskId(vertex.id, index)
    said = job.statistics.get((vertex.id, index))
    return {
        "index": index,
        "worker": job.executions.placement.get(subtask),
        "attempt": job.executions.attempt_of(subtask),
        "reported": said is not None,
        **({} if said is None else _figures(said)),
    }


def _figures(said: SubtaskStatistics) -> dict[str, Any]:
    return {
        "records_in": said.records_in,
        "records_out": said.records_out,
        "records_written": said.records_written,
        "busy": said.busy_ms_per_second,
        "idle": said.idle_ms_per_second,
        "backpressured": said.backpressured_ms_per_second,
        "full": said.full_ms_per_second,
        "watermark": None if said.watermark == WATERMARK_MIN else said.watermark,
        "queued": said.queued,
    }


def describe_config(job: JobContext) -> dict[str, Any]:
    """All options in effect, and those that the user set; the values of secrets are masked."""
    explicit = job.options.explicit()
    checkpoint = job.spec.checkpoint
    return {
        "options": {
            key: {"value": masked(key, value), "explicit": key in explicit}
            for key, value in sorted(job.options.effective().items())
        },
        "checkpoint_storage": None if checkpoint is None else masked("", checkpoint.storage),
        "checkpoint_interval_ms": None if checkpoint is None else checkpoint.every_ms,
        "checkpoints_retained": None if checkpoint is None else checkpoint.retain,
    }


def masked(key: str, value: str) -> str:
    """`value`, unless `key` says that it is a secret; a user name and password in an address are hidden."""
    return MASKED if _SECRET_KEY.search(key) else _USERINFO.sub(MASKED, value)


def checkpoint_directory(spec: JobSpec) -> str:
    """The address below which a job's checkpoints are, without credentials; empty: it keeps none."""
    if spec.checkpoint is None:
        return ""
    return masked("", join_address(spec.checkpoint.storage, names.job_dir(spec.name)))


def describe_plan(job: JobContext) -> dict[str, Any]:
    """The physical plan that runs now, and the text that `headgate explain` prints."""
    spec = replace(job.spec, plan=job.plan, parallelism=job.parallelism)
    return {
        "parallelism": job.parallelism,
        "max_parallelism": job.plan.max_parallelism,
        "vertices": [_vertex(vertex) for vertex in job.plan.vertices],
        "edges": list(_edges(job.plan)),
        "text": _USERINFO.sub(MASKED, explain_plan(spec)),
    }


def _vertex(vertex: Vertex) -> dict[str, Any]:
    operators = [
        {
            "name": node.name,
            "kind": node.kind,
            "detail": _USERINFO.sub(MASKED, node.detail),
            "stateful": node.stateful,
        }
        for node in vertex.nodes
    ]
    return {
        "id": vertex.id,
        "name": vertex.name,
        "parallelism": vertex.parallelism,
        "slot_sharing_group": vertex.group,
        "operators": operators,
    }


def _edges(plan: PhysicalPlan) -> Iterable[dict[str, Any]]:
    for edge in plan.edges:
        yield {
            "source": edge.source,
            "target": edge.target,
            "partitioning": describe_partitioning(edge.partitioning),
            "side": edge.side or None,
        }
    for loop in plan.loops:
        yield {
            "source": loop.tail,
            "target": loop.head,
            "partitioning": "forward",
            "side": f"back to the begin of {loop.name}",
        }


def describe_metrics(registry: MetricsRegistry, endpoints: list[dict[str, str]]) -> dict[str, Any]:
    """The metrics of the coordinator's process, and where each process serves its own to Prometheus."""
    samples = [
        {
            "name": sample.name,
            "labels": dict(sample.labels),
            "value": float(sample.value) if math.isfinite(sample.value) else None,
        }
        for family in registry.collect()
        for sample in family.samples
    ]
    return {"endpoints": endpoints, "samples": samples}
