"""Each subtask gets its state, for every kind of state and change of parallelism."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from headgate.runtime.coordinator.restore import assign_state, finished_subtasks
from headgate.runtime.protocol.checkpoints.manifest import (
    Manifest,
    ManifestOperator,
    ManifestSubtask,
)
from headgate.state.keygroups import key_group_range
from headgate.state.snapshot import OperatorSnapshot, StateHandle

GROUPS = 12
FILES: dict[str, bytes] = {}
CHANGES = [(1, 2), (2, 3), (3, 7), (7, 3), (3, 1), (4, 8), (3, 3)]


def items(state: str, values: list[bytes], redistribution: str, *, file: str = "") -> StateHandle:
    data = msgspec.msgpack.encode(values)
    if file:
        FILES[file] = data
    return StateHandle(
        state=state, kind="items", size_bytes=len(data), checksum="", rows=len(values),
        inline=None if file else data, file=file or None, redistribution=redistribution,  # type: ignore[arg-type]
    )  # fmt: skip


def keyed(kind: str, name: str, first: int, last: int) -> StateHandle:
    return StateHandle(
        state="keyed" if kind in ("table", "delta") else "files", kind=kind, size_bytes=1,
        checksum="", rows=1, file=name, first_key_group=first, last_key_group=last,
    )  # fmt: skip


def manifest(parallelism: int, *, finished: frozenset[int] = frozenset()) -> Manifest:
    subtasks = []
    for index in range(parallelism):
        own = key_group_range(index, parallelism, GROUPS)
        handles = (
            keyed("table", f"base-{index}", own.first, own.last),
            keyed("delta", f"delta-{index}", own.first, own.last),
            keyed("file", f"file-{index}", own.first, own.last),
            keyed("meta", f"meta-{index}", own.first, own.last),
            # Rows in the description itself, and no file.
            msgspec.structs.replace(
                keyed("meta", f"alone-{index}", own.first, own.last), state="without files"
            ),
            items("split", [b"%d.%d" % (index, n) for n in range(5)], "split", file=f"s-{index}"),
            items("union", [b"u%d" % index], "union"),
            items("broadcast", [b"copy"], "broadcast"),
        )
        snapshot = OperatorSnapshot(operator="op", handles=handles)
        subtasks.append(
            ManifestSubtask(subtask=index, snapshots=(snapshot,), finished=index in finished)
        )
    operator = ManifestOperator(name="op", parallelism=parallelism, subtasks=tuple(subtasks))
    return Manifest(
        checkpoint_id=1, trigger_ms=0, completed_ms=0, duration_ms=0, max_parallelism=GROUPS,
        operators=(operator,),
    )  # fmt: skip


async def read(operator: str, handle: StateHandle) -> bytes:
    return FILES[handle.file] if handle.inline is None else handle.inline


def assign(before: int, after: int) -> list[list[OperatorSnapshot]]:
    node: Any = SimpleNamespace(name="op")
    vertex: Any = SimpleNamespace(nodes=[node], head=node, parallelism=after)
    plan: Any = SimpleNamespace(max_parallelism=GROUPS)
    return [list(s) for s in asyncio.run(assign_state(manifest(before), plan, vertex, read))]


def found(snapshots: list[OperatorSnapshot], state: str) -> list[bytes]:
    return [
        item
        for snapshot in snapshots
        for handle in snapshot.handles
        if handle.state == state
        for item in msgspec.msgpack.decode(
            FILES[handle.file] if handle.inline is None else handle.inline, type=list[bytes]
        )
    ]


@pytest.mark.parametrize(("before", "after"), CHANGES)
def test_each_subtask_gets_the_files_its_key_groups_lie_in(before: int, after: int) -> None:
    for index, snapshots in enumerate(assign(before, after)):
        own = key_group_range(index, after, GROUPS)
        overlapping = {
            old for old in range(before) if key_group_range(old, before, GROUPS).overlaps(own)
        }
        for kind in ("base", "delta", "file", "meta", "alone"):
            names = [
                h.file for s in snapshots for h in s.handles if (h.file or "").startswith(kind)
            ]
            assert sorted(names) == sorted(f"{kind}-{old}" for old in overlapping)
        for snapshot in snapshots:  # never two old subtasks in one
            assert len([h for h in snapshot.handles if h.kind == "table"]) <= 1


@pytest.mark.parametrize(("before", "after"), CHANGES)
def test_split_items_go_to_one_subtask_each_also_from_files(before: int, after: int) -> None:
    shares = [found(snapshots, "split") for snapshots in assign(before, after)]
    everything = [b"%d.%d" % (index, n) for index in range(before) for n in range(5)]
    assert sorted(item for share in shares for item in share) == sorted(everything)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize(("before", "after"), CHANGES)
def test_union_items_go_to_all_and_broadcast_items_as_one_copy(before: int, after: int) -> None:
    for snapshots in assign(before, after):
        assert found(snapshots, "union") == [b"u%d" % index for index in range(before)]
        assert found(snapshots, "broadcast") == [b"copy"]


def test_finished_subtasks_stay_so_only_if_all_were() -> None:
    head: Any = SimpleNamespace(name="op")
    three: Any = SimpleNamespace(head=head, parallelism=3)
    two: Any = SimpleNamespace(head=head, parallelism=2)
    partly, wholly = manifest(2, finished=frozenset({1})), manifest(2, finished=frozenset({0, 1}))
    assert finished_subtasks(partly, two) == {1}
    assert finished_subtasks(partly, three) == frozenset()
    assert finished_subtasks(wholly, three) == {0, 1, 2}
