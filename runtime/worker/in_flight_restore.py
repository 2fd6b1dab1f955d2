"""Gives a subtask the records back that were on their way to it when the checkpoint was taken."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import msgspec

from ...errors import check
from ...operators.elements import Batch
from ...state.snapshot import ChannelAddress, StateHandle
from ..exchange.in_flight import decode
from ..exchange.partitioners import make_partitioner
from ..plan import ExchangeEdge, PhysicalPlan, Vertex
from ..task.input_subtask import InputBatch
from .channels import rows_of

Piece: TypeAlias = tuple[StateHandle, bytes]


def recovered_batches(
    plan: PhysicalPlan, vertex: Vertex, index: int, pieces: Sequence[Piece], *, shared: bool
) -> list[InputBatch]:
    """The batches that subtask `index` of `vertex` has to process before all others. Takes its time.

    Args:
        plan: what runs now.
        vertex: the receiver.
        index: of the subtask.
        pieces: handles with their bytes, in order.
        shared: others get the same pieces: only records that the partitioner gives us are kept.
    """
    return [
        InputBatch(msgspec.structs.replace(channel, receiver=index), edge.input_index, batch)
        for channel, edge, whole in _batches(plan, vertex, pieces)
        for batch in (_own(plan, edge, vertex, index, whole) if shared else (whole,))
    ]


def _batches(
    plan: PhysicalPlan, vertex: Vertex, pieces: Sequence[Piece]
) -> Iterator[tuple[ChannelAddress, ExchangeEdge, Batch]]:
    edges = {plan.addresses(edge)(0, 0): edge for edge in plan.inputs_of(vertex)}
    for handle, data in pieces:
        channel = handle.channel
        assert channel is not None  # the coordinator sends no others
        edge = edges.get(msgspec.structs.replace(channel, sender=0, receiver=0))
        check(edge is not None, "records on their way to nowhere", channel=channel)
        assert edge is not None  # for the type checker
        for batch in decode(data):
            yield channel, edge, batch


def _own(
    plan: PhysicalPlan, edge: ExchangeEdge, vertex: Vertex, index: int, batch: Batch
) -> Iterator[Batch]:
    """What the partitioner of `edge` gives subtask `index`, if it decides by what a record is."""
    if not edge.by_content:
        yield batch
        return
    partitioner = make_partitioner(
        edge.partitioning,
        targets=vertex.parallelism,
        sender=0,
        max_parallelism=plan.max_parallelism,
        rng=random.Random(0),
        rows=rows_of(plan, edge),
    )
    for receiver, part in partitioner(batch):
        if receiver == index:
            yield part
