"""Which worker has which key groups of a queryable state, for clients that read it there directly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...state.keygroups import key_group_range
from ..exchange.hub import WorkerAddress
from ..options.network import QUERY_TIMEOUT
from ..protocol.ids import SubtaskId
from ..reads.wire import ticket_of
from .context import JobContext
from .queries import check_running, find_state, worker_of


def describe_owners(job: JobContext, token: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return which subtasks have the key groups of a state, and where their workers listen.

    Args:
        job: the job.
        token: of the job; the ticket for direct reads is made of it.
        given: `state`, the name.

    Raises:
        StateNotFound: the job has no queryable state of that name.
        JobNotReady: the job does not run just now, or some subtask restarts.
        JobError: the job has ended.
    """
    plan = job.attempt.plan
    vertex, node, state = find_state(plan, given.get("state"))
    check_running(job, "queried")
    owners = []
    for index in range(vertex.parallelism):
        found, attempt = worker_of(job, SubtaskId(vertex.id, index), f"state=`{state.name}`")
        address = WorkerAddress.decode(found.address)
        groups = key_group_range(index, vertex.parallelism, plan.max_parallelism)
        owners.append(
            {
                "subtask": index,
                "attempt": attempt,
                "first_key_group": groups.first,
                "last_key_group": groups.last,
                "worker": found.worker_id,
                "host": address.host,
                "port": address.tcp_port,
                "machine": address.host_id,
                "socket": address.uds_path,
            }
        )
    return {
        "job": job.env.spec.name,
        "run": job.env.spec.run,
        "state": state.name,
        "kind": state.kind,
        "step": node.name,
        "stored_as": state.state,
        "vertex": vertex.id,
        "generation": job.env.generation,
        "max_parallelism": plan.max_parallelism,
        "timeout_ms": job.env.options.get(QUERY_TIMEOUT),
        "ticket": ticket_of(token),
        "owners": owners,
    }
