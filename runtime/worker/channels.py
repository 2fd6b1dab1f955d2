"""Numbers the channels of a plan and makes their ends for the subtasks of one worker.

Numbers follow from the plan alone, so that all workers agree on them without talking.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence, Set
from typing import Any

from ...errors import check
from ...operators.clock import Clock
from ...operators.elements import Batch, ObjectBatch
from ...operators.rows import to_rows
from ..control.messages import Deploy
from ..exchange.gate import InputChannelSpec, InputGate
from ..exchange.hub import ExchangeHub, WorkerAddress
from ..exchange.key_group_sampler import KeyGroupSampler
from ..exchange.partition import ResultPartition
from ..exchange.partitioners import connections, make_partitioner
from ..exchange.settings import ExchangeSettings
from ..plan import ExchangeEdge, PhysicalPlan


class ChannelMap:
    """The channels of one attempt of a region, seen from one worker."""

    def __init__(
        self,
        plan: PhysicalPlan,
        message: Deploy,
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
            message: where its subtasks run.
            region: whose channels are made; they stay within it.
            hub: makes and registers the ends.
            clock: for buffer timeouts.
            settings: limits.
            overtaken: vertices on whose inputs barriers may overtake records.
        """
        self.samplers: dict[tuple[int, int], list[KeyGroupSampler]] = {}
        """By sending subtask, once it has its partitions: what counts its records by key group."""
        self._overtaken = overtaken
        self._plan = plan
        self._message = message
        self._region = region
        self._hub = hub
        self._clock = clock
        self._settings = settings
        self._peers = {id_: WorkerAddress.decode(data) for id_, data in message.peers.items()}
        self._numbers: dict[int, dict[tuple[int, int], int]] = {}
        number = 0
        for edge in plan.edges:
            numbers: dict[tuple[int, int], int] = {}
            for pair in connections(edge.partitioning, *self._widths(edge)):
                numbers[pair] = number
                number += 1
            self._numbers[edge.id] = numbers

    def check_closed(self, mine: Set[tuple[int, int]], worker_id: str) -> None:
        """Raise InternalError if a channel would join a subtask of `mine` and another one of this worker.

        That one may be of another attempt, and go on while ours are restored.
        """
        here = {subtask for subtask, owner in self._message.placement.items() if owner == worker_id}
        for edge in self._plan.edges:
            for sender, receiver in self._numbers[edge.id]:
                ends = {(edge.source, sender), (edge.target, receiver)}
                others = [f"{v}:{i}" for v, i in ends - mine]
                apart = len(others) == 1 and others[0] in here
                check(not apart, "a channel between regions", region=self._region, peer=others)

    def _widths(self, edge: ExchangeEdge) -> tuple[int, int]:
        vertices = self._plan.vertices
        return vertices[edge.source].parallelism, vertices[edge.target].parallelism

    def gate(self, vertex: int, index: int) -> InputGate | None:
        """The gate of a subtask, registered with the hub; None for a source."""
        edges = self._plan.inputs_of(self._plan.vertices[vertex])
        if not edges:
            return None
        specs: list[InputChannelSpec] = []
        for edge in edges:
            address = self._plan.addresses(edge)
            for (sender, receiver), number in self._numbers[edge.id].items():
                if receiver == index:
                    called = address(sender, receiver)
                    specs.append(InputChannelSpec(number, edge.input_index, called))
        gate = InputGate(specs, self._settings, overtaking=vertex in self._overtaken)
        self._hub.register_gate(gate, self._message.attempt, self._region)
        return gate

    def partitions(self, vertex: int, index: int) -> dict[int, list[tuple[str | None, Any]]]:
        """The result partitions of a subtask: by node, with the side output they carry."""
        partitions: dict[int, list[tuple[str | None, Any]]] = {}
        for edge in self._plan.outputs_of(self._plan.vertices[vertex]):
            sender_name = self._plan.sender(edge).name
            channels = [
                self._hub.output_channel(
                    number,
                    self._peers[self._message.placement[f"{edge.target}:{receiver}"]],
                    self._message.attempt,
                    sender_name,
                    self._region,
                )
                for (sender, receiver), number in self._numbers[edge.id].items()
                if sender == index
            ]
            sampler = self._sampler(edge, index) if edge.by_key else None
            partitioner = make_partitioner(
                edge.partitioning,
                targets=len(channels),
                sender=index,
                max_parallelism=self._plan.max_parallelism,
                rng=random.Random(f"{self._message.attempt}/{edge.id}/{index}"),
                rows=rows_of(self._plan, edge),
                sampler=sampler,
            )
            addresses = None
            if edge.target in self._overtaken:
                address = self._plan.addresses(edge)
                pairs = self._numbers[edge.id]
                addresses = [address(*pair) for pair in pairs if pair[0] == index]
            partition = ResultPartition(
                channels, partitioner, self._settings, self._clock, addresses
            )
            partitions.setdefault(edge.source_node, []).append((edge.side, partition))
        return partitions

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
