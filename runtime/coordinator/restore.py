"""The state that an attempt restores, and the subtask of the plan that each part of it goes to.

Keyed state is assigned by key groups: each subtask gets the handles that overlap its own range, and
reads only that range. Operator state is assigned by its items: a *split* item goes to one subtask, a
*union* item to all, and of *broadcast* items each subtask gets one copy. Handles of different old
subtasks are never mixed in one snapshot, because their deltas, and their local files, belong together.

Records that were on their way when the checkpoint was taken are read by the receiver: first those that
were overtaken in its own queue, then those that were overtaken at its senders. So the records of a
channel come back in the order in which they were sent, and senders have nothing to restore. After a
change of parallelism the partitioner of the edge decides again. All receivers of an exchange are told of
the packs of all its senders, and take from each what is theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any, Final, TypeAlias, final

import msgspec
import xxhash

from ...errors import CorruptError, MissingFileError, StateError, UsageError
from ...state.keygroups import KeyGroupRange, key_group_range
from ...state.snapshot import (
    HANDLE_KINDS,
    MANY,
    OperatorSnapshot,
    Redistribution,
    StateHandle,
    StateInfo,
)
from ..options.state import RECOVERY_ACCEPT_CHANGES, RESTORE_FALLBACK, WITHOUT_CHANNEL_STATE
from ..plan import PhysicalPlan, Vertex
from ..protocol.checkpoints.manifest import Manifest, ManifestOperator
from ..protocol.checkpoints.segments import is_piece
from ..protocol.failures import FailureKind
from ..protocol.redistribution import broadcast, heirs, receivers_after, spread_splits
from ..savepoint import store as savepoints
from ..savepoint.compare import changed_meanings, declared_states, unclaimed_states, unconnected
from ..savepoint.locate import StoredSnapshot, locate
from ..storage.base import CheckpointStore
from .environment import JobEnvironment
from .failures import Failure

_UNREADABLE: Final = (FailureKind.STATE, FailureKind.CORRUPT)
"""The kinds of failures that mean that a state could not be read."""
ITEMS: Final = "items"
ReadHandle: TypeAlias = Callable[[str, StateHandle], Coroutine[Any, Any, bytes]]
"""Returns the verified bytes of an operator's handle."""


@final
class Restored(msgspec.Struct, frozen=True):
    """The state that an attempt restores.

    Attributes:
        manifest: its state files, by operator and subtask.
        root: the address of its files; empty: they are in the job's own storage.
        text: its name for a person.
    """

    manifest: Manifest
    root: str
    text: str

    @property
    def of_this_job(self) -> bool:
        """True for a checkpoint of this job, on which the next one may build."""
        return not self.root


@final
class RestorePoints:
    """Finds the state that attempts of a job restore: a checkpoint of its own, or what the user named."""

    def __init__(self, env: JobEnvironment) -> None:
        self._env = env
        self._located: StoredSnapshot | None = None
        """Where the state is that the user named."""
        self._unreadable: set[int] = set()
        """Checkpoints that could not be restored, where the user allows an older one instead."""

    async def find(self) -> Restored | None:
        """Find what the next attempt restores.

        If the publication of a checkpoint is in doubt, it is settled first.

        Raises:
            StateError: the run was told to restore a state that does not exist.
            UsageError: the state cannot be claimed.
            StorageError: the log cannot be brought up to date.
        """
        env, spec = self._env, self._env.spec
        if env.log is not None:
            await env.log.settle()
            for logged in reversed(env.log.view.restorable):
                if logged.checkpoint_id not in self._unreadable:
                    text = f"checkpoint {logged.checkpoint_id}"
                    return Restored(logged.manifest, "", text)
        if not spec.restore_from:
            return None
        if self._located is None:
            found = await locate(env.open_at, spec.restore_from, spec.options, env.clock)
            self._located = found
        found = self._located
        if spec.claim and found.savepoint is None:
            raise UsageError(
                f"only a savepoint can be claimed, and this is {found.text}",
                fix="leave out --claim-mode claim; its job deletes its checkpoints itself",
            )
        return Restored(found.manifest, found.root, found.text)

    def fall_back(self, restored: Restored | None, failure: Failure) -> str | None:
        """Give up a checkpoint that cannot be read, if an older one may be restored instead.

        Returns:
            A text that says so; None if nothing was given up.
        """
        log, allowed = self._env.log, self._env.options.get(RESTORE_FALLBACK)
        if failure.kind not in _UNREADABLE or restored is None or not allowed:
            return None
        if log is None or not restored.of_this_job:
            return None
        self._unreadable.add(restored.manifest.checkpoint_id)
        left = [logged.checkpoint_id for logged in log.view.restorable]
        older = [id_ for id_ in left if id_ not in self._unreadable]
        if not older:
            return None
        return (
            f"{restored.text} cannot be restored; trying checkpoint {older[-1]}, "
            f"as {RESTORE_FALLBACK.key} allows"
        )

    def forget_unreadable(self) -> None:
        """Forget the checkpoints that were given up: an attempt runs, so its state could be read."""
        self._unreadable.clear()


def reader_of(store: CheckpointStore | None) -> ReadHandle:
    """Return a function that reads the bytes of a handle and verifies them."""

    async def read(operator: str, handle: StateHandle) -> bytes:
        if handle.inline is not None:
            data = handle.inline
        elif store is None or handle.file is None:
            raise StateError(
                f"state has no readable file operator=`{operator}` state=`{handle.state}`"
            )
        else:
            try:
                if is_piece(handle):
                    data = await store.read_range(handle.file, handle.offset, handle.size_bytes)
                else:
                    data = await store.read_file(handle.file)
            except MissingFileError as error:
                raise _unreadable(
                    f"state is missing: {error.message}", operator, handle, store
                ) from error
        if len(data) != handle.size_bytes or xxhash.xxh3_64_hexdigest(data) != handle.checksum:
            sizes = f"expected_bytes=`{handle.size_bytes}` bytes=`{len(data)}`"
            raise _unreadable(f"state is corrupt {sizes}", operator, handle, store)
        return data

    return read


def _unreadable(
    text: str, operator: str, handle: StateHandle, store: CheckpointStore | None
) -> CorruptError:
    place = "the manifest of the checkpoint"
    if handle.file is not None and store is not None:
        place = f"{store.describe()}: {handle.file}"
    return CorruptError(
        f"{text} operator=`{operator}` state=`{handle.state}`",
        where=place,
        fix=f"restore an older checkpoint (--from DIR@ID, or {RESTORE_FALLBACK.key}), or a savepoint",
    )


async def dispose_claimed(env: JobEnvironment) -> None:
    """Delete the savepoint that the run claimed: it has a checkpoint of its own now.

    Raises:
        StorageError: some of its files are left.
    """
    options = env.spec.options
    async with savepoints.opened(env.open_at, env.spec.restore_from, options) as store:
        savepoint = await savepoints.read(store)
        if savepoint is not None:
            await savepoints.delete(store, sorted(savepoint.manifest.files()))
            env.publish("disposed", f"deleted the claimed savepoint {env.spec.restore_from}")


def check_restorable(
    manifest: Manifest,
    plan: PhysicalPlan,
    *,
    allow_non_restored: bool,
    accepted: frozenset[str] = frozenset(),
) -> None:
    """Raise StateError unless `plan` has an operator that means the same for each state of `manifest`.

    `accepted` are the operators that go on with state of another meaning, as the user has allowed.
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
    """Raise CorruptError unless `manifest` has all pieces of a checkpoint, each of a known kind."""
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
    """Return True if each operator has the same parallelism: the next checkpoint may build on this one."""
    before = {operator.name: operator.parallelism for operator in manifest.operators}
    now = {node.name: vertex.parallelism for vertex in plan.vertices for node in vertex.nodes}
    return all(now.get(name, width) == width for name, width in before.items())


async def assign_state(
    manifest: Manifest, plan: PhysicalPlan, vertex: Vertex, read: ReadHandle
) -> list[tuple[OperatorSnapshot, ...]]:
    """Return the snapshots that each subtask of `vertex` restores: one per old subtask.

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


async def split_items(manifest: Manifest, name: str, state: str, read: ReadHandle) -> list[bytes]:
    """Return the split items that all subtasks of an operator had in a state at a checkpoint.

    Raises:
        StateError: they cannot be read.
    """
    operators = [operator for operator in manifest.operators if operator.name == name]
    found = [await _items(operator, "split", read) for operator in operators]
    return [item for items in found for item in _flat(items.get(state, {}))]


def finished_subtasks(manifest: Manifest, vertex: Vertex) -> frozenset[int]:
    """Return the subtasks of `vertex` that had reached the end of their data.

    After a rescale these are all subtasks if all old ones had reached it, and none otherwise.
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
    """Assign everything to the subtask that had it; union items are collected and given to all."""
    united = await _items(operator, "union", read)
    shares: list[list[OperatorSnapshot]] = [[] for _ in range(operator.parallelism)]
    for subtask in operator.subtasks:
        for snapshot in subtask.snapshots:
            if any(handle.channel is not None for handle in snapshot.handles):
                continue  # they go to the receivers, see `assign_in_flight`
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
        owners = heirs(subtask.subtask, operator.parallelism, parallelism, max_parallelism)
        for snapshot in subtask.snapshots:
            for index in owners:
                keyed = _overlapping(snapshot.handles, ranges[index])
                if keyed:
                    shares[index].append(msgspec.structs.replace(snapshot, handles=keyed))
    for share, handles in zip(
        shares, await _redistributed(operator, parallelism, read), strict=True
    ):
        if handles:
            states = _infos(operator)
            share.append(OperatorSnapshot(operator=operator.name, handles=handles, states=states))
    return shares


def _overlapping(handles: Sequence[StateHandle], own: KeyGroupRange) -> tuple[StateHandle, ...]:
    """Return the part of an old subtask's keyed state that a subtask with the key groups `own` needs.

    The meta of files has the key groups of the subtask, and is included even without a file, because
    it may hold rows itself. A delta may say that rows of the base were deleted, so each part of a
    chain is selected by its own key groups only.
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
    """Return the items of all states, for each new subtask."""
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
    """Return items by state (in order of name) and old subtask, of subtasks that reported any."""
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
    """Return the descriptions of the operator's states, which are the same in all its subtasks."""
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


class InFlightShares(msgspec.Struct, frozen=True):
    """The in-flight records that each subtask of a vertex reads, in order.

    Attributes:
        by_subtask: one tuple of handles per subtask.
        parallelism: that of the vertex when the checkpoint was taken. If it was another one, several
            subtasks read the same piece, and each keeps the records that the partitioner of the edge
            gives to it.
    """

    by_subtask: list[tuple[StateHandle, ...]]
    parallelism: int


def in_flight_handles(manifest: Manifest) -> list[StateHandle]:
    """Return all in-flight records of a checkpoint: those of receivers, then those of senders."""
    found = [handle for handle in manifest.handles() if handle.channel is not None]
    return sorted(found, key=lambda handle: handle.kind != "input")


def check_in_flight(manifest: Manifest, plan: PhysicalPlan) -> None:
    """Raise StateError unless `plan` has a channel for all records that were on their way."""
    for channel in unconnected(manifest, plan):
        raise StateError(
            f"checkpoint {manifest.checkpoint_id} holds records that were on their way between two "
            f"steps that are not connected any more from=`{channel.source}` to=`{channel.target}`",
            fix="let the old job take a savepoint, which holds no such records, and start from it; "
            f"or give the records up with {WITHOUT_CHANNEL_STATE.key}={manifest.checkpoint_id}",
        )


def sent_packs(manifest: Manifest, targets: Collection[str]) -> tuple[StateHandle, ...]:
    """Return the packs of senders to the operators `targets`.

    The list in a pack says which receivers it has records for. They find out themselves, so that neither
    the manifest nor the messages of a deployment grow with the number of channels.
    """
    return tuple(
        handle
        for handle in in_flight_handles(manifest)
        if handle.channel is not None
        and handle.channel.receiver == MANY
        and handle.channel.target in targets
    )


def assign_in_flight(manifest: Manifest, plan: PhysicalPlan, vertex: Vertex) -> InFlightShares:
    """Assign the records that were on their way to `vertex` to its subtasks, but for `sent_packs`."""
    width, before = vertex.parallelism, _old_parallelism(manifest, vertex)
    shares: list[list[StateHandle]] = [[] for _ in range(width)]
    edges = plan.exchanges()
    for handle in in_flight_handles(manifest):
        channel = handle.channel
        assert channel is not None  # `in_flight_handles` returns no others
        if channel.target != vertex.head.name or channel.receiver == MANY:
            continue
        edge = edges.get(channel.exchange)
        if edge is None:
            continue
        for index in receivers_after(
            edge.partitioning, channel.receiver, before, width, plan.max_parallelism
        ):
            shares[index].append(handle)
    return InFlightShares([tuple(share) for share in shares], before)


def _old_parallelism(manifest: Manifest, vertex: Vertex) -> int:
    operator = next((o for o in manifest.operators if o.name == vertex.head.name), None)
    return vertex.parallelism if operator is None else operator.parallelism
