"""A new savepoint from an old one, or from nothing: states are taken over, replaced, added, left out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import pyarrow as pa

from ...errors import StateError
from ...operators.suggestions import suggest
from ...state.keygroups import check_max_parallelism
from ...state.snapshot import OperatorSnapshot, StateHandle, StateInfo
from ..protocol import names
from ..protocol.checkpoints.manifest import Manifest, ManifestOperator, ManifestSubtask
from ..savepoint import store as savepoints
from ..savepoint.locate import savepoint_address
from ..savepoint.store import savepoint_of
from .files import OpenStore
from .pieces import INLINE_BYTES_MAX, CopyTask, Goal, WrittenFile, write_table
from .placing import SUBTASK_COLUMN, Placing
from .snapshot import Snapshot, StoredState

StateKey = tuple[str, str]


@dataclass(frozen=True, slots=True)
class DeclaredOperator:
    """A job's declaration of one of its operators: its parallelism, and its states by name."""

    parallelism: int
    states: Mapping[str, StateInfo]


@dataclass(slots=True)
class SavepointEditor:
    """The plan of a new savepoint; `begin`, the files, and `publish` make it.

    Attributes:
        job: name of the job that it is for.
        base: a snapshot to begin with; None: nothing.
        declared: the operators of the job, for states that the base does not have.
        max_parallelism: the number of key groups.
        options: what the storage of the new savepoint needs.
        now_ms: when it is made, ms since 1970 UTC.
    """

    job: str
    base: Snapshot | None
    declared: Mapping[str, DeclaredOperator]
    max_parallelism: int
    options: Mapping[str, str]
    now_ms: int
    _written: dict[StateKey, Placing] = field(default_factory=dict)
    _removed: set[StateKey] = field(default_factory=set)

    # -- what it consists of ------------------------------------------------------------------------

    def remove(self, operator: str, state: str | None = None) -> None:
        """Leave out a state of the base, or all of an operator.

        Raises:
            StateError: the base has no such state.
        """
        there = {(one.operator, one.name) for one in self._stored()}
        gone = {key for key in there if key[0] == operator and state in (None, key[1])}
        if not gone:
            known = sorted({key[0] for key in there} if state is None else {k[1] for k in there})
            raise StateError(
                f"the base has no such state operator=`{operator}` state=`{state or 'any'}`",
                fix=suggest(state or operator, known, "there are"),
            )
        self._removed |= gone

    def placing(self, operator: str, state: str) -> Placing:
        """Rows of this state are about to be written, in place of those of the base, if any.

        Raises:
            StateError: neither the base nor the job knows the state, or it cannot be written.
        """
        info = self._info(operator, state)
        placing = Placing(
            operator, info, self.max_parallelism, self._parallelism(operator), self.now_ms
        )
        placing.schema  # noqa: B018  raises if the state cannot be written
        self._written[operator, state] = placing
        return placing

    def _info(self, operator: str, state: str) -> StateInfo:
        stored = {(one.operator, one.name): one.info for one in self._stored()}
        info = stored.get((operator, state))
        known = self.declared.get(operator)
        if info is None and known is not None:
            info = known.states.get(state)
        if info is None:
            names_ = {f"{key[0]}.{key[1]}" for key, one in stored.items() if one is not None}
            names_ |= {f"{name}.{s}" for name, one in self.declared.items() for s in one.states}
            raise StateError(
                f"nothing says what the state is operator=`{operator}` state=`{state}`",
                fix="give the job that declares it; "
                + suggest(f"{operator}.{state}", sorted(names_), "known states"),
            )
        return info

    def _stored(self) -> list[StoredState]:
        return [] if self.base is None else list(self.base.states())

    def _parallelism(self, operator: str) -> int:
        stored = {one.name: one.parallelism for one in self._operators()}
        width = stored.get(operator) or self.declared[operator].parallelism
        check_max_parallelism(self.max_parallelism, width)
        return width

    def _operators(self) -> Sequence[ManifestOperator]:
        return () if self.base is None else self.base.located.manifest.operators

    # -- making it ----------------------------------------------------------------------------------

    def begin(self, target: str, token: str) -> Goal:
        """The place for the files: a new directory below `target`; `token` makes its name unique."""
        address = savepoint_address(target, self.job, token)
        return Goal(address, dict(self.options), self.max_parallelism)

    def copies(self, goal: Goal) -> list[CopyTask]:
        """The keyed state that is taken over from the base, by subtask.

        Raises:
            StateError: the base holds records on their way.
        """
        tasks = []
        self._check_base()
        for state in self._stored():
            if not state.keyed or not self._is_kept(state):
                continue
            width = self._parallelism(state.operator)
            assert self.base is not None
            tasks += [CopyTask(goal, state, self.base.options, n, width) for n in range(width)]
        return tasks

    def _check_base(self) -> None:
        handles = () if self.base is None else self.base.located.manifest.handles()
        if any(handle.channel is not None for handle in handles):
            raise StateError(
                "the checkpoint holds records on their way between steps",
                fix="take a savepoint of the job, and give that as the base",
            )

    def _is_kept(self, state: StoredState) -> bool:
        key = (state.operator, state.name)
        return key not in self._removed and key not in self._written

    def publish(self, goal: Goal, written: Iterable[WrittenFile]) -> None:
        """Make the savepoint exist; files of attempts that came to nothing are deleted.

        Raises:
            StorageError: the storage refused.
        """
        with OpenStore(goal.root, goal.options, writable=True) as opened:
            manifest = self._manifest(opened, written)
            opened.run(_delete_others(opened, manifest.files()))
            savepoint = savepoint_of(manifest, self.job, native=False)
            opened.run(savepoints.publish(opened.store, savepoint))

    def abort(self, goal: Goal) -> None:
        """Delete the savepoint as far as it is there, even if it is not known whether it was published."""
        with OpenStore(goal.root, goal.options) as opened:
            opened.run(_delete_all(opened))

    def _manifest(self, opened: OpenStore, written: Iterable[WrittenFile]) -> Manifest:
        handles: dict[tuple[str, int], list[StateHandle]] = {}
        for one in [*written, *self._items(opened)]:
            handles.setdefault((one.operator, one.subtask), []).append(one.handle)
        operators = [self._operator(one, handles) for one in self._operators()]
        there = {one.name for one in operators}
        for name in dict.fromkeys(operator for operator, _ in self._written):
            if name not in there:
                operators.append(
                    self._operator(_new_operator(name, self._parallelism(name)), handles)
                )
        return Manifest(
            checkpoint_id=1 if self.base is None else self.base.located.manifest.checkpoint_id,
            trigger_ms=self.now_ms,
            completed_ms=self.now_ms,
            duration_ms=0,
            max_parallelism=self.max_parallelism,
            operators=tuple(operators),
        )

    def _operator(
        self, operator: ManifestOperator, handles: Mapping[tuple[str, int], list[StateHandle]]
    ) -> ManifestOperator:
        infos = {
            name: info
            for name, info in operator.infos().items()
            if (operator.name, name) not in self._removed
        }
        written = {key[1]: p.info for key, p in self._written.items() if key[0] == operator.name}
        states = tuple({**infos, **written}.values())
        subtasks = []
        for subtask in operator.subtasks:
            mine = tuple(handles.get((operator.name, subtask.subtask), ()))
            snapshot = OperatorSnapshot(operator=operator.name, handles=mine, states=states)
            kept = (snapshot,) if mine or states else ()
            subtasks.append(msgspec.structs.replace(subtask, snapshots=kept))
        return msgspec.structs.replace(operator, subtasks=tuple(subtasks))

    def _items(self, opened: OpenStore) -> list[WrittenFile]:
        """Items of the base, which go along as they are."""
        found: list[WrittenFile] = []
        states = [one for one in self._stored() if not one.keyed and self._is_kept(one)]
        if not states or self.base is None:
            return found
        with OpenStore(self.base.located.root, self.base.options) as base:
            for state in states:
                for piece in state.pieces:
                    for handle in piece.handles:
                        moved = _moved(base, opened, state.operator, piece.subtask, handle)
                        found.append(WrittenFile(state.operator, piece.subtask, moved))
        return found


def _new_operator(name: str, parallelism: int) -> ManifestOperator:
    subtasks = tuple(ManifestSubtask(subtask=index) for index in range(parallelism))
    return ManifestOperator(name=name, parallelism=parallelism, subtasks=subtasks)


def _moved(
    base: OpenStore, opened: OpenStore, operator: str, subtask: int, handle: StateHandle
) -> StateHandle:
    """Items that lie in the metadata, or in a file of the new savepoint."""
    data = base.content(handle)
    if len(data) <= INLINE_BYTES_MAX:
        return msgspec.structs.replace(handle, inline=data, file=None)
    name = names.savepoint_file(operator, subtask, handle.state, "items")
    opened.run(opened.store.write_file(name, data))
    return msgspec.structs.replace(handle, file=name)


async def _delete_others(opened: OpenStore, kept: frozenset[str]) -> None:
    await opened.store.delete_files([one for one in await _files(opened) if one not in kept])


async def _delete_all(opened: OpenStore) -> None:
    await savepoints.delete(opened.store, await _files(opened))


async def _files(opened: OpenStore) -> list[str]:
    """The files of the savepoint, its metadata excepted."""
    found = [name async for name, _ in opened.store.list_files("")]
    return [name for name in found if names.is_savepoint_file(name)]


def write_here(
    editor: SavepointEditor,
    target: str,
    token: str,
    rows: Mapping[StateKey, pa.Table],
) -> str:
    """Make the savepoint in this process; `rows` by operator and state. Returns its address.

    Raises:
        StateError: rows do not fit their state, or the base cannot be read.
        StorageError: the storage refused.
    """
    goal = editor.begin(target, token)
    try:
        written: list[WrittenFile | None] = []
        for (operator, state), table in rows.items():
            placing = editor.placing(operator, state)
            placing.check_columns(table.schema, placing.schema)
            with OpenStore(goal.root, goal.options) as opened:
                written += write_placed(placing, opened, [placing.place(table)], token)
        written += [task.run(token) for task in editor.copies(goal)]
        editor.publish(goal, [one for one in written if one is not None])
    except BaseException:
        editor.abort(goal)
        raise
    return goal.root


def write_placed(
    placing: Placing, opened: OpenStore, tables: Iterable[pa.Table], attempt: str
) -> list[WrittenFile]:
    """Write placed rows, all of each subtask; they are sorted here."""
    everything = pa.concat_tables(list(tables))
    order = [(SUBTASK_COLUMN, "ascending"), ("key_group", "ascending")]
    rows = everything.sort_by(order)
    written = []
    for subtask in rows.column(SUBTASK_COLUMN).unique().to_pylist():
        mine = rows.filter(pa.compute.equal(rows.column(SUBTASK_COLUMN), subtask))
        one = write_table(
            opened, placing.operator, subtask, placing.info.name, placing.info.keys,
            placing.checked([mine.drop_columns([SUBTASK_COLUMN])]), attempt,
        )  # fmt: skip
        written += [one] if one is not None else []
    return written
