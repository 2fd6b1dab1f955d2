"""Records that were on their way when a checkpoint was taken: who gets them after a restore.

What was overtaken at a receiver and what was overtaken at its senders are read by the receiver, in this
order: so a channel's records come back in the order in which they were sent, and senders have nothing to
restore. After a change of parallelism the partitioner of the edge decides (features.md 3.4, UNA-08).
"""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import StateError
from ...operators.partitioning import Custom, Global, HashColumns, HashFunction
from ...state.keygroups import key_group_range
from ...state.snapshot import ChannelAddress, StateHandle
from ..options.state import WITHOUT_CHANNEL_STATE
from ..plan import ExchangeEdge, PhysicalPlan, Vertex
from ..protocol.checkpoints.manifest import Manifest
from ..savepoint.compare import unconnected


@dataclass(frozen=True, slots=True)
class InFlightShares:
    """The pieces each subtask of a vertex reads, in order.

    Attributes:
        by_subtask: one tuple per subtask.
        parallelism: of the vertex when the checkpoint was taken. If it was another one, several subtasks
            read the same piece, and each keeps the records that the partitioner of the edge gives it.
    """

    by_subtask: list[tuple[StateHandle, ...]]
    parallelism: int


def in_flight_handles(manifest: Manifest) -> list[StateHandle]:
    """All pieces of a checkpoint: those of receivers, then those of senders."""
    found = [handle for handle in manifest.handles() if handle.channel is not None]
    return sorted(found, key=lambda handle: handle.kind != "input")


def check_in_flight(manifest: Manifest, plan: PhysicalPlan) -> None:
    """Raise StateError unless `plan` has a place for all records that were on their way."""
    for channel in unconnected(manifest, plan):
        raise StateError(
            f"checkpoint {manifest.checkpoint_id} holds records that were on their way between two "
            f"steps that are not connected any more from=`{channel.source}` to=`{channel.target}`",
            fix="let the old job take a savepoint, which holds no such records, and start from it; "
            f"or give the records up with {WITHOUT_CHANNEL_STATE.key}={manifest.checkpoint_id}",
        )


def assign_in_flight(manifest: Manifest, plan: PhysicalPlan, vertex: Vertex) -> InFlightShares:
    """Who reads what, of the records on their way to `vertex`."""
    width, before = vertex.parallelism, _old_parallelism(manifest, vertex)
    shares: list[list[StateHandle]] = [[] for _ in range(width)]
    edges = plan.exchanges()
    for handle in in_flight_handles(manifest):
        channel = handle.channel
        assert channel is not None  # as was asked for
        if channel.target != vertex.head.name:
            continue
        edge = edges.get(channel.exchange)
        if edge is None:
            continue
        for index in _receivers(edge, channel, before, plan, width):
            shares[index].append(handle)
    return InFlightShares([tuple(share) for share in shares], before)


def _old_parallelism(manifest: Manifest, vertex: Vertex) -> int:
    operator = next((o for o in manifest.operators if o.name == vertex.head.name), None)
    return vertex.parallelism if operator is None else operator.parallelism


def _receivers(
    edge: ExchangeEdge, channel: ChannelAddress, before: int, plan: PhysicalPlan, width: int
) -> list[int]:
    """The new subtasks that may be meant by the old one."""
    if before == width:
        return [channel.receiver]
    match edge.partitioning:
        case HashColumns() | HashFunction():
            old = key_group_range(channel.receiver, before, plan.max_parallelism)
            ranges = [key_group_range(i, width, plan.max_parallelism) for i in range(width)]
            return [index for index, own in enumerate(ranges) if own.overlaps(old)]
        case Custom():
            return list(range(width))
        case Global():
            return [0]
        case _:
            return [channel.receiver % width]
