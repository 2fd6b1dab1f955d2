"""Which state of a checkpoint goes to which subtask of a plan (features.md 3.6, 3.7).

Keyed state goes by key groups: each subtask gets what overlaps its own range, and reads only that.
Operator state goes by its items: *split* items each to one subtask, *union* items all to everyone,
*broadcast* items as one copy each. Handles of different old subtasks are never mixed in one snapshot:
their deltas, and their local files, belong together.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeAlias

import msgspec
import xxhash

from ...errors import CorruptError, StateError
from ...state.keygroups import KeyGroupRange, key_group_range
from ...state.snapshot import HANDLE_KINDS, OperatorSnapshot, Redistribution, StateHandle, StateInfo
from ..options.state import RECOVERY_ACCEPT_CHANGES
from ..plan import PhysicalPlan, Vertex
from ..protocol.checkpoints.manifest import Manifest, ManifestOperator
from ..protocol.redistribution import broadcast, spread_splits
from ..savepoint.compare import changed_meanings, declared_states, unclaimed_states

ITEMS = "items"
ReadHandle: TypeAlias = Callable[[str, StateHandle], Coroutine[Any, Any, bytes]]
"""(operator, handle) -> its verified bytes."""


def check_restorable(
    manifest: Manifest,
    plan: PhysicalPlan,
    *,
    allow_non_restored: bool,
    accepted: frozenset[str] = frozenset(),
) -> None:
    """Raise StateError unless `plan` has an operator that means the same for each state of `manifest`.

    `accepted` are the operators that go on with state of another meaning, because the user says so.
    """
    if manifest.max_parallelism != plan.max_parallelism:
        raise StateError(
            f"the number of key groups is frozen with the first checkpoint "
            f"checkpoint=`{manifest.max_parallelism}` job=`{plan.max_parallelism}`",
            fix=f"set pipeline.max-parallelism to {manifest.max_parallelism}, or to nothing: it is then "
            f"taken from the checkpoint; or start fresh",
        )
    check_whole(manifest)
    declared = declared_states(plan)
    for operator, changes in changed_meanings(manifest, declared).items():
        if operator not in accepted:
            raise StateError(
                f"checkpoint {manifest.checkpoint_id} holds other state of step `{operator}`: "
                + "; ".join(changes),
                fix="set it back, or give what changed another name (an aggregate of another name starts "
                f"empty), or go on with the old state: -D {RECOVERY_ACCEPT_CHANGES.key}={operator}",
            )
    unclaimed = unclaimed_states(manifest, declared)
    if unclaimed and not allow_non_restored:
        operators = sorted({text.rpartition(".")[0] for text in unclaimed})
        raise StateError(
            f"checkpoint {manifest.checkpoint_id} holds state that no operator of the job claims "
            f"operators=`{', '.join(operators)}` states=`{', '.join(unclaimed)}`",
            fix="give the operator its old name back, or drop the state with "
            "--allow-non-restored-state, or start with --fresh",
        )


def check_whole(manifest: Manifest) -> None:
    """Raise CorruptError unless `manifest` has the pieces that a checkpoint has, each of a known kind."""
    for operator in manifest.operators:
        found = sorted(subtask.subtask for subtask in operator.subtasks)
        if found != list(range(operator.parallelism)):
            raise _not_whole(
                manifest,
                f"an operator of parallelism {operator.parallelism} has the subtasks {found}",
                operator.name,
            )
        for subtask in operator.subtasks:
            for snapshot in subtask.snapshots:
                if snapshot.operator != operator.name:
                    text = f"subtask {subtask.subtask} has state of `{snapshot.operator}`"
                    raise _not_whole(manifest, text, operator.name)
                for handle in snapshot.handles:
                    if handle.kind not in HANDLE_KINDS:
                        text = f"state `{handle.state}` is of the unknown kind `{handle.kind}`"
                        raise _not_whole(manifest, text, operator.name)


def _not_whole(manifest: Manifest, text: str, operator: str) -> CorruptError:
    return CorruptError(
        f"the manifest of checkpoint {manifest.checkpoint_id} cannot be true: {text} operator=`{operator}`",
        fix="restore an older checkpoint or a savepoint; was the manifest made by another program?",
    )


def continues(manifest: Manifest, plan: PhysicalPlan) -> bool:
    """True if each operator runs as it did: then the next checkpoint may build on this one."""
    before = {operator.name: operator.parallelism for operator in manifest.operators}
    now = {node.name: vertex.parallelism for vertex in plan.vertices for node in vertex.nodes}
    return all(now.get(name, width) == width for name, width in before.items())


async def assign_state(
    manifest: Manifest, plan: PhysicalPlan, vertex: Vertex, read: ReadHandle
) -> list[tuple[OperatorSnapshot, ...]]:
    """For each subtask of `vertex`, the snapshots it is restored from: one per old subtask.

    Raises:
        StateError: items that must be redistributed cannot be read.
    """
    by_name = {operator.name: operator for operator in manifest.operators}
    assigned: list[list[OperatorSnapshot]] = [[] for _ in range(vertex.parallelism)]
    for node in vertex.nodes:
        operator = by_name.get(node.name)
        if operator is None:
            continue
        if operator.parallelism == vertex.parallelism:
            shares = await _unchanged(operator, read)
        else:
            shares = await _rescaled(operator, vertex.parallelism, plan.max_parallelism, read)
        for index, snapshots in enumerate(shares):
            assigned[index].extend(snapshots)
    return [tuple(snapshots) for snapshots in assigned]


def finished_subtasks(manifest: Manifest, vertex: Vertex) -> frozenset[int]:
    """Subtasks of `vertex` that had reached the end of their data.

    After a rescale: all of them if all of the old ones had, else none.
    """
    operator = next((o for o in manifest.operators if o.name == vertex.head.name), None)
    if operator is None:
        return frozenset()
    finished = frozenset(s.subtask for s in operator.subtasks if s.finished)
    if operator.parallelism == vertex.parallelism:
        return finished
    everyone = len(finished) == operator.parallelism
    return frozenset(range(vertex.parallelism)) if everyone else frozenset()


async def _unchanged(operator: ManifestOperator, read: ReadHandle) -> list[list[OperatorSnapshot]]:
    """Everything stays where it is; union items are collected and given to all."""
    united = await _items(operator, "union", read)
    shares: list[list[OperatorSnapshot]] = [[] for _ in range(operator.parallelism)]
    for subtask in operator.subtasks:
        for snapshot in subtask.snapshots:
            if any(handle.channel is not None for handle in snapshot.handles):
                continue  # they go to the receivers, see `in_flight.py`
            kept = tuple(handle for handle in snapshot.handles if not _is_union(handle))
            shares[subtask.subtask].append(msgspec.structs.replace(snapshot, handles=kept))
    handles = tuple(_inline(state, _flat(lists), "union") for state, lists in united.items())
    if handles:
        for share in shares:
            share.append(OperatorSnapshot(operator=operator.name, handles=handles))
    return shares


async def _rescaled(
    operator: ManifestOperator, parallelism: int, max_parallelism: int, read: ReadHandle
) -> list[list[OperatorSnapshot]]:
    ranges = [key_group_range(index, parallelism, max_parallelism) for index in range(parallelism)]
    shares: list[list[OperatorSnapshot]] = [[] for _ in range(parallelism)]
    for subtask in sorted(operator.subtasks, key=lambda s: s.subtask):
        old = key_group_range(subtask.subtask, operator.parallelism, max_parallelism)
        for snapshot in subtask.snapshots:
            for share, own in zip(shares, ranges, strict=True):
                keyed = _overlapping(snapshot.handles, own) if old.overlaps(own) else ()
                if keyed:
                    share.append(msgspec.structs.replace(snapshot, handles=keyed))
    for share, handles in zip(
        shares, await _redistributed(operator, parallelism, read), strict=True
    ):
        if handles:
            states = _infos(operator)
            share.append(OperatorSnapshot(operator=operator.name, handles=handles, states=states))
    return shares


def _overlapping(handles: Sequence[StateHandle], own: KeyGroupRange) -> tuple[StateHandle, ...]:
    """The part of an old subtask's keyed state that a subtask with the key groups `own` needs.

    The meta of files has the key groups of the subtask, and goes along even without a file: it may hold
    rows itself. A delta may say that rows of the base are gone, so a chain is cut by the key groups of
    each of its parts alone.
    """
    return tuple(
        handle
        for handle in handles
        if handle.kind != ITEMS
        and handle.channel is None
        and KeyGroupRange(handle.first_key_group, handle.last_key_group).overlaps(own)
    )


async def _redistributed(
    operator: ManifestOperator, parallelism: int, read: ReadHandle
) -> list[tuple[StateHandle, ...]]:
    """The items of all states, for each new subtask."""
    found: list[list[StateHandle]] = [[] for _ in range(parallelism)]
    split = await _items(operator, "split", read)
    flat = {state: _flat(lists) for state, lists in split.items()}
    for state, shares in spread_splits(flat, parallelism).items():
        for handles, share in zip(found, shares, strict=True):
            if share:
                handles.append(_inline(state, share, "split"))
    for state, lists in (await _items(operator, "union", read)).items():
        for handles in found:
            handles.append(_inline(state, _flat(lists), "union"))
    for state, lists in (await _items(operator, "broadcast", read)).items():
        copies = broadcast(list(lists.values()), parallelism)
        for handles, copy in zip(found, copies, strict=True):
            handles.append(_inline(state, copy, "broadcast"))
    return [tuple(handles) for handles in found]


async def _items(
    operator: ManifestOperator, redistribution: Redistribution, read: ReadHandle
) -> dict[str, dict[int, list[bytes]]]:
    """Items by state (in order of name) and old subtask; only subtasks that reported any."""
    found: dict[str, dict[int, list[bytes]]] = {}
    for subtask in sorted(operator.subtasks, key=lambda s: s.subtask):
        for snapshot in subtask.snapshots:
            for handle in snapshot.handles:
                if handle.kind == ITEMS and handle.redistribution == redistribution:
                    data = await read(operator.name, handle)
                    items = msgspec.msgpack.decode(data, type=list[bytes])
                    found.setdefault(handle.state, {})[subtask.subtask] = items
    return dict(sorted(found.items()))


def _flat(lists: dict[int, list[bytes]]) -> list[bytes]:
    return [item for items in lists.values() for item in items]


def _infos(operator: ManifestOperator) -> tuple[StateInfo, ...]:
    """The descriptions of the operator's states, which are the same in all its subtasks."""
    for subtask in operator.subtasks:
        for snapshot in subtask.snapshots:
            if snapshot.states:
                return snapshot.states
    return ()


def _is_union(handle: StateHandle) -> bool:
    return handle.kind == ITEMS and handle.redistribution == "union"


def _inline(state: str, items: list[bytes], redistribution: Redistribution) -> StateHandle:
    data = msgspec.msgpack.encode(items)
    return StateHandle(
        state=state,
        kind=ITEMS,
        size_bytes=len(data),
        checksum=xxhash.xxh3_64_hexdigest(data),
        rows=len(items),
        inline=data,
        redistribution=redistribution,
    )
