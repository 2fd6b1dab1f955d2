"""Which state of a checkpoint goes to which subtask of the new plan (features.md 3.6, 3.7)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ...errors import StateError
from ...state.keygroups import KeyGroupRange, key_group_range
from ...state.snapshot import OperatorSnapshot, StateHandle
from ..plan import PhysicalPlan, Vertex
from ..protocol.manifest import Manifest, ManifestOperator

INLINE_ITEMS = "items"


def check_restorable(manifest: Manifest, plan: PhysicalPlan, *, allow_non_restored: bool) -> None:
    """Raise StateError unless every state of `manifest` has an operator in `plan` that claims it."""
    if manifest.max_parallelism != plan.max_parallelism:
        raise StateError(
            f"the number of key groups is frozen with the first checkpoint "
            f"checkpoint=`{manifest.max_parallelism}` job=`{plan.max_parallelism}`",
            fix=f"set pipeline.max-parallelism to {manifest.max_parallelism}, or start fresh",
        )
    names = {node.name for vertex in plan.vertices for node in vertex.nodes}
    orphans = sorted(
        operator.name
        for operator in manifest.operators
        if operator.name not in names and any(s.snapshots for s in operator.subtasks)
    )
    if orphans and not allow_non_restored:
        raise StateError(
            f"checkpoint {manifest.checkpoint_id} holds state that no operator of the job claims "
            f"operators=`{', '.join(orphans)}`",
            fix="give the operator its old name back, or drop the state with "
            "--allow-non-restored-state, or start with --fresh",
        )


def assign_state(
    manifest: Manifest, plan: PhysicalPlan, vertex: Vertex
) -> list[tuple[OperatorSnapshot, ...]]:
    """For each subtask of `vertex`, the snapshots it is restored from.

    Keyed tables go to every subtask whose key groups they overlap (the reader filters rows); items
    are spread round robin, in the order of the old subtasks.
    """
    by_name = {operator.name: operator for operator in manifest.operators}
    assigned: list[list[OperatorSnapshot]] = [[] for _ in range(vertex.parallelism)]
    for node in vertex.nodes:
        operator = by_name.get(node.name)
        if operator is None:
            continue
        for index, handles in enumerate(_assign_operator(operator, plan, vertex.parallelism)):
            assigned[index].append(OperatorSnapshot(operator=node.name, handles=tuple(handles)))
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


def _assign_operator(
    operator: ManifestOperator, plan: PhysicalPlan, parallelism: int
) -> list[list[StateHandle]]:
    if operator.parallelism == parallelism:
        same: list[list[StateHandle]] = [[] for _ in range(parallelism)]
        for subtask in operator.subtasks:
            for snapshot in subtask.snapshots:
                same[subtask.subtask].extend(snapshot.handles)
        return same
    handles = [
        handle
        for subtask in sorted(operator.subtasks, key=lambda s: s.subtask)
        for snapshot in subtask.snapshots
        for handle in snapshot.handles
    ]
    tables = [handle for handle in handles if handle.kind == "table"]
    ranges = [key_group_range(i, parallelism, plan.max_parallelism) for i in range(parallelism)]
    result = [
        [h for h in tables if KeyGroupRange(h.first_key_group, h.last_key_group).overlaps(own)]
        for own in ranges
    ]
    for index, spread in enumerate(_spread_items(operator.name, handles, parallelism)):
        result[index].extend(spread)
    return result


def _spread_items(
    operator: str, handles: Sequence[StateHandle], parallelism: int
) -> list[list[StateHandle]]:
    """Redistribute items of all states round robin; they must lie inline to be cut apart."""
    spread: list[list[StateHandle]] = [[] for _ in range(parallelism)]
    start = 0
    states = sorted({handle.state for handle in handles if handle.kind == INLINE_ITEMS})
    for state in states:
        items: list[bytes] = []
        for handle in handles:
            if handle.kind != INLINE_ITEMS or handle.state != state:
                continue
            if handle.inline is None:
                raise StateError(
                    f"operator state too large to be redistributed operator=`{operator}` "
                    f"state=`{state}` bytes=`{handle.size_bytes}`",
                    fix="restore at the old parallelism",
                )
            items.extend(msgspec.msgpack.decode(handle.inline, type=list[bytes]))
        shares: list[list[bytes]] = [[] for _ in range(parallelism)]
        for position, item in enumerate(items):
            shares[(start + position) % parallelism].append(item)
        start = (start + len(items)) % parallelism
        for index, share in enumerate(shares):
            if share:
                spread[index].append(_inline_items(state, share))
    return spread


def _inline_items(state: str, items: list[bytes]) -> StateHandle:
    import xxhash

    data = msgspec.msgpack.encode(items)
    return StateHandle(
        state=state,
        kind=INLINE_ITEMS,
        size_bytes=len(data),
        checksum=xxhash.xxh3_64_hexdigest(data),
        rows=len(items),
        inline=data,
    )
