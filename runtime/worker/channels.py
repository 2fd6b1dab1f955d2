"""Numbers the channels of a plan, makes their ends on one worker, and restores the records in them.

Numbers follow from the plan alone, so that all workers agree on them without talking. Records that were in
a channel when the checkpoint was taken go back to a subtask as `InputBatch`es. After a change of the
parallelism the partitioner of today says which of them are for which subtask.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any, TypeAlias

import msgspec

from ...errors import ExchangeError, StateError, check
from ...operators.clock import Clock
from ...operators.elements import Batch, ObjectBatch
from ...operators.partitioning import HashColumns, HashFunction
from ...operators.rows import to_rows
from ...state.snapshot import ChannelAddress, StateHandle
from ..exchange.channel_state import decode
from ..exchange.gate import InputChannelSpec, InputGate
from ..exchange.hub import ExchangeHub, WorkerAddress
from ..exchange.partition import ResultPartition
from ..exchange.partitioners import (
    Connections,
    KeyGroupSampler,
    Partitioner,
    gather_rows,
    make_partitioner,
)
from ..exchange.settings import ExchangeSettings
from ..options.state import ALLOW_PICKLE, WITHOUT_CHANNEL_STATE
from ..plan import ExchangeEdge, PhysicalPlan, Vertex
from ..protocol.redistribution import receivers_after
from ..slots import Placement
from ..task.chain import NodePartition, OutputPartition
from ..task.input_subtask import InputBatch

Piece: TypeAlias = tuple[StateHandle, bytes]


class ChannelMap:
    """The channels of one attempt of a region, seen from one worker."""

    def __init__(
        self,
        plan: PhysicalPlan,
        attempt: int,
        peers: Sequence[WorkerAddress],
        placement: Placement,
        region: int,
        hub: ExchangeHub,
        clock: Clock,
        settings: ExchangeSettings,
        *,
        overtaken: frozenset[int] = frozenset(),
    ) -> None:
        """Numbers are given, nothing is made.

        Args:
            plan: what runs.
            attempt: the number of the attempt.
            peers: its workers.
            placement: where its subtasks run.
            region: whose channels are made; they stay within it.
            hub: makes and registers the ends.
            clock: for buffer timeouts.
            settings: limits.
            overtaken: vertices on whose inputs barriers may overtake records.
        """
        self.samplers: dict[tuple[int, int], list[KeyGroupSampler]] = {}
        """The samplers of key groups, by sending subtask, once it has its partitions."""
        self._overtaken = overtaken
        self._plan = plan
        self._attempt = attempt
        self._placement = placement
        self._region = region
        self._hub = hub
        self._clock = clock
        self._settings = settings
        self._peers = {peer.worker_id: peer for peer in peers}
        self._connections: dict[int, Connections] = {}
        self._first: dict[int, int] = {}
        """The number of the first channel of each edge."""
        number = 0
        for edge in plan.edges:
            found = Connections(edge.partitioning, *self._widths(edge))
            self._connections[edge.id], self._first[edge.id] = found, number
            number += len(found)

    def check_closed(self, mine: Set[tuple[int, int]], worker_id: str) -> None:
        """Raise InternalError if a channel would join a subtask of `mine` and another one of this worker.

        That one may be of another attempt, and go on while ours are restored.
        """
        others = set(self._placement.subtasks_of(worker_id)) - mine
        for vertex, index in others:
            for edge in self._plan.edges:
                found = self._connections[edge.id]
                for v, i in mine:
                    sends = (edge.source, edge.target) == (vertex, v) and i in found.receivers_of(
                        index
                    )
                    receives = (edge.target, edge.source) == (vertex, v) and i in found.senders_of(
                        index
                    )
                    apart = sends or receives
                    check(
                        not apart,
                        "a channel between regions",
                        region=self._region,
                        peer=f"{vertex}:{index}",
                    )

    def _widths(self, edge: ExchangeEdge) -> tuple[int, int]:
        vertices = self._plan.vertices
        return vertices[edge.source].parallelism, vertices[edge.target].parallelism

    def _number(self, edge: ExchangeEdge, sender: int, receiver: int) -> int:
        return self._first[edge.id] + self._connections[edge.id].number(sender, receiver)

    def gate(self, vertex: int, index: int) -> InputGate | None:
        """The gate of a subtask, registered with the hub; None for a source."""
        edges = self._plan.inputs_of(self._plan.vertices[vertex])
        if not edges:
            return None
        specs: list[InputChannelSpec] = []
        for edge in edges:
            address = self._plan.addresses(edge)
            for sender in self._connections[edge.id].senders_of(index):
                number = self._number(edge, sender, index)
                called = address(sender, index)
                specs.append(InputChannelSpec(number, edge.input_index, called))
        gate = InputGate(specs, self._settings, overtaking=vertex in self._overtaken)
        self._hub.register_gate(gate, self._attempt, self._region)
        return gate

    def outputs(self, vertex: int, index: int) -> dict[int, list[NodePartition[OutputPartition]]]:
        """The result partitions of a subtask, by node."""
        outputs: dict[int, list[NodePartition[OutputPartition]]] = {}
        for edge in self._plan.outputs_of(self._plan.vertices[vertex]):
            sender_name = self._plan.sender(edge).name
            receivers = self._connections[edge.id].receivers_of(index)
            channels = [
                self._hub.output_channel(
                    self._number(edge, index, receiver),
                    self._peers[self._placement.worker_of(edge.target, receiver)],
                    self._attempt,
                    sender_name,
                    self._region,
                )
                for receiver in receivers
            ]
            sampler = self._sampler(edge, index) if edge.by_key else None
            partitioner = make_partitioner(
                edge.partitioning,
                targets=len(channels),
                sender=index,
                max_parallelism=self._plan.max_parallelism,
                rng=random.Random(f"{self._attempt}/{edge.id}/{index}"),
                rows=rows_of(self._plan, edge),
                sampler=sampler,
            )
            addresses = None
            if edge.target in self._overtaken:
                address = self._plan.addresses(edge)
                addresses = [address(index, receiver) for receiver in receivers]
            partition = ResultPartition(
                channels,
                partitioner,
                self._settings,
                self._clock,
                addresses,
                gather_rows(edge.partitioning, len(channels)),
                may_hold_watermarks=len(self._connections[edge.id].senders_of(receivers[0])) > 1,
            )
            leaving: NodePartition[OutputPartition] = NodePartition(edge.side, partition, edge.id)
            outputs.setdefault(edge.source_node, []).append(leaving)
        return outputs

    def _sampler(self, edge: ExchangeEdge, index: int) -> KeyGroupSampler:
        receivers = self._plan.vertices[edge.target].parallelism
        sampler = KeyGroupSampler(edge.id, receivers, self._plan.max_parallelism)
        self.samplers.setdefault((edge.source, index), []).append(sampler)
        return sampler


def rows_of(plan: PhysicalPlan, edge: ExchangeEdge) -> Callable[[Batch], Sequence[Any]]:
    """Key and partition functions get the class the user's other functions get."""
    row_type = None if edge.side is not None else plan.sender(edge).row_type

    def rows(batch: Batch) -> Sequence[Any]:
        if isinstance(batch, ObjectBatch):
            return batch.records
        return to_rows(batch.data, row_type)

    return rows


def receivers_before(
    plan: PhysicalPlan, vertex: Vertex, index: int, channel: ChannelAddress, *, before: int
) -> Set[int]:
    """Return the subtasks of the checkpoint whose records may be for subtask `index` of `vertex` now.

    Args:
        plan: what runs now.
        vertex: the receiver.
        index: of the subtask.
        channel: names the exchange; none are ours if it does not exist any more.
        before: parallelism of the vertex when the checkpoint was taken.
    """
    edge = plan.exchanges().get(channel.exchange)
    if edge is None:
        return frozenset()
    now, groups = vertex.parallelism, plan.max_parallelism
    if before == now:
        return frozenset((index,))
    return frozenset(
        receiver
        for receiver in range(before)
        if index in receivers_after(edge.partitioning, receiver, before, now, groups)
    )


def recovered_batches(
    plan: PhysicalPlan,
    vertex: Vertex,
    index: int,
    pieces: Sequence[Piece],
    *,
    before: int,
    allow_pickle: bool,
) -> list[InputBatch]:
    """The batches that subtask `index` of `vertex` has to process before all others. Takes its time.

    Args:
        plan: what runs now.
        vertex: the receiver.
        index: of the subtask.
        pieces: handles with their bytes, in order.
        before: parallelism of the vertex when the checkpoint was taken. If it was another one, others
            get the same pieces: only records that the partitioner gives us are kept.
        allow_pickle: Python objects may be unpickled.

    Raises:
        StateError: the key of the step is another one than it was, or objects must not be unpickled.
    """
    exchanges = plan.exchanges()
    ways: dict[ChannelAddress, _Way] = {}
    recovered: list[InputBatch] = []
    for handle, data in pieces:
        channel = handle.channel
        assert channel is not None  # the coordinator sends no others
        edge = exchanges.get(channel.exchange)
        check(edge is not None, "records on their way to nowhere", channel=channel)
        assert edge is not None  # for the type checker
        way = ways.setdefault(channel.exchange, _Way(plan, edge, vertex, index, before))
        ours = msgspec.structs.replace(channel, receiver=index)
        for batch in _decoded(data, channel, allow_pickle):
            way.check_unchanged(batch, channel)
            recovered += [
                InputBatch(ours, edge.input_index, part) for part in way.for_this_subtask(batch)
            ]
    return recovered


def _decoded(data: bytes, channel: ChannelAddress, allow_pickle: bool) -> Iterator[Batch]:
    try:
        yield from decode(data, allow_pickle=allow_pickle)
    except ExchangeError as error:
        raise StateError(
            f"{error.message} from=`{channel.source}` to=`{channel.target}`",
            fix=error.fix
            or f"{ALLOW_PICKLE.key} is false: restore a savepoint, which holds no such records",
        ) from error


class _Way:
    """One exchange's choice of receivers for records: that of now, and that of the checkpoint."""

    def __init__(
        self, plan: PhysicalPlan, edge: ExchangeEdge, vertex: Vertex, index: int, before: int
    ) -> None:
        self._index = index
        self._now: Partitioner | None = None
        if edge.by_content and vertex.parallelism != before:
            self._now = _partitioner(plan, edge, vertex.parallelism)
        self._then: Partitioner | None = None
        if isinstance(edge.partitioning, HashColumns | HashFunction):
            self._then = _partitioner(plan, edge, before)

    def check_unchanged(self, batch: Batch, channel: ChannelAddress) -> None:
        """Raise StateError unless the records would take the same channel again.

        A step may have got another key, or its first one. Records would be processed where the state of
        their key is not, or, after a change of parallelism, not at all.
        """
        if self._then is None:
            return
        if any(receiver != channel.receiver for receiver, _ in self._then(batch)):
            raise StateError(
                f"the checkpoint holds records that were on their way to a step whose key was another one "
                f"from=`{channel.source}` to=`{channel.target}`",
                fix="let the old job take a savepoint, which holds no such records, and start from it; "
                f"or give the records up with {WITHOUT_CHANNEL_STATE.key}=<id of the checkpoint>",
            )

    def for_this_subtask(self, batch: Batch) -> Iterator[Batch]:
        """Yield the records of a batch that are for this subtask."""
        if self._now is None:
            yield batch
            return
        for receiver, part in self._now(batch):
            if receiver == self._index:
                yield part


def _partitioner(plan: PhysicalPlan, edge: ExchangeEdge, width: int) -> Partitioner:
    return make_partitioner(
        edge.partitioning,
        targets=width,
        sender=0,
        max_parallelism=plan.max_parallelism,
        rng=random.Random(0),
        rows=rows_of(plan, edge),
    )
