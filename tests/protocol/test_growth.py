"""The work for one subtask does not grow with the number of subtasks: counted, and never timed."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from headgate.operators.partitioning import HashColumns, Partitioning, Rescale
from headgate.runtime.coordinator.restore import assign_in_flight, assign_state, sent_packs
from headgate.runtime.exchange.partitioners import Connections
from headgate.runtime.protocol.checkpoints.manifest import (
    Manifest,
    ManifestOperator,
    ManifestSubtask,
)
from headgate.runtime.protocol.checkpoints.statistics import (
    CheckpointHistory,
    CheckpointRecord,
    SubtaskPart,
)
from headgate.state.keygroups import key_group_range
from headgate.state.snapshot import MANY, ChannelAddress, OperatorSnapshot, StateHandle

SMALL, LARGE = 200, 800
GROUPS = 2048
LINEAR = 1.5 * LARGE / SMALL
"""The most by which work for all subtasks may grow from few to many of them."""


def calls_of(work: Callable[[], Any]) -> int:
    """Return the number of calls of functions that `work` makes, of those written in C as well."""
    calls = 0

    def count(_: Any, event: str, __: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
    return calls


class Counted(str):
    """A name that counts how often it is hashed, as an element of a set is."""

    hashes = 0

    def __hash__(self) -> int:
        Counted.hashes += 1
        return super().__hash__()

    __eq__ = str.__eq__


def acknowledge(width: int) -> int:
    names = [Counted(f"step {index}") for index in range(width)]
    history = CheckpointHistory(3)
    Counted.hashes = 0
    history.started(CheckpointRecord(1, "checkpoint", 0, [(name, 0) for name in names]))
    for name in names:
        assert history.acknowledged(1, SubtaskPart(name, 0, 1, 1, 1, 1, 1, 10, 30))
        assert not history.acknowledged(1, SubtaskPart(name, 0, 1, 1, 1, 1, 1, 10, 30))
    return Counted.hashes


def test_acknowledgements() -> None:
    assert acknowledge(LARGE) < LINEAR * acknowledge(SMALL)


def handle(index: int, width: int, **fields: Any) -> StateHandle:
    own = key_group_range(index, width, GROUPS)
    return StateHandle(
        state="counts",
        kind="table",
        size_bytes=1,
        checksum="",
        rows=1,
        file=f"file-{index}",
        first_key_group=own.first,
        last_key_group=own.last,
        **fields,
    )


def manifest(handles: list[StateHandle]) -> Manifest:
    subtasks = tuple(
        ManifestSubtask(
            subtask=index, snapshots=(OperatorSnapshot(operator="op", handles=(each,)),)
        )
        for index, each in enumerate(handles)
    )
    operator = ManifestOperator(name="op", parallelism=len(handles), subtasks=subtasks)
    return Manifest(
        checkpoint_id=1, trigger_ms=0, completed_ms=0, duration_ms=0, max_parallelism=GROUPS,
        operators=(operator,),
    )  # fmt: skip


def planned(after: int, edges: dict[Any, Any]) -> tuple[Any, Any]:
    node = SimpleNamespace(name="op")
    vertex = SimpleNamespace(nodes=[node], head=node, parallelism=after)
    return SimpleNamespace(max_parallelism=GROUPS, exchanges=lambda: edges), vertex


async def no_items(operator: str, handle: StateHandle) -> bytes:
    raise AssertionError(handle)


def restore(width: int) -> int:
    stored = manifest([handle(index, width) for index in range(width)])
    plan, vertex = planned(width - 1, {})
    return calls_of(lambda: asyncio.run(assign_state(stored, plan, vertex, no_items)))


def test_restore_with_one_subtask_less() -> None:
    assert restore(LARGE) < LINEAR * restore(SMALL)


def restore_in_flight(width: int) -> int:
    addresses = [
        ChannelAddress(source="in", side="", target="op", input_index=0, sender=0, receiver=index)
        for index in range(width)
    ]
    stored = manifest(
        [handle(index, width, channel=address) for index, address in enumerate(addresses)]
    )
    edge = SimpleNamespace(partitioning=HashColumns(("key",)))
    plan, vertex = planned(width - 1, {addresses[0].exchange: edge})
    return calls_of(lambda: assign_in_flight(stored, plan, vertex))


def test_restore_of_records_in_flight() -> None:
    assert restore_in_flight(LARGE) < LINEAR * restore_in_flight(SMALL)


def told_of_sent_records(width: int) -> int:
    """The handles in a deployment for the records of senders, each of which has some for all receivers."""
    addresses = [
        ChannelAddress(
            source="in", side="", target="op", input_index=0, sender=index, receiver=MANY
        )
        for index in range(width)
    ]
    stored = manifest(
        [handle(index, width, channel=address) for index, address in enumerate(addresses)]
    )
    edge = SimpleNamespace(partitioning=HashColumns(("key",)))
    plan, vertex = planned(width - 1, {addresses[0].exchange: edge})
    shares = assign_in_flight(stored, plan, vertex)
    return sum(map(len, shares.by_subtask)) + len(sent_packs(stored, {"op"}))


def test_all_receivers_are_told_at_once_of_what_senders_had() -> None:
    assert told_of_sent_records(SMALL) == SMALL


@pytest.mark.parametrize("partitioning", [HashColumns(("key",)), Rescale()])
def test_channels_are_numbered_without_a_table(partitioning: Partitioning) -> None:
    def number(width: int) -> int:
        def one() -> None:
            connections = Connections(partitioning, width, width - 1)
            len(connections)
            connections.number(width - 1, connections.receivers_of(width - 1)[-1])
            connections.senders_of(0)

        return calls_of(one)

    assert number(LARGE) == number(SMALL)
