"""Gives a subtask the records back that were on their way to it when the checkpoint was taken."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import msgspec

from ...errors import ExchangeError, StateError, check
from ...operators.elements import Batch
from ...operators.partitioning import HashColumns, HashFunction
from ...state.snapshot import ChannelAddress, StateHandle
from ..exchange.in_flight import decode
from ..exchange.partitioners import Partitioner, make_partitioner
from ..options.state import ALLOW_PICKLE, WITHOUT_CHANNEL_STATE
from ..plan import ExchangeEdge, PhysicalPlan, Vertex
from ..task.input_subtask import InputBatch
from .channels import rows_of

Piece: TypeAlias = tuple[StateHandle, bytes]


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
            recovered += [InputBatch(ours, edge.input_index, part) for part in way.own(batch)]
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

        A step may have got another key, or one at all. Records would be processed where the state of
        their key is not, or, after a change of parallelism, by nobody.
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

    def own(self, batch: Batch) -> Iterator[Batch]:
        """The records of a batch that are for this subtask."""
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
