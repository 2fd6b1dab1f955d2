"""The snapshot of one subtask: a short synchronous cut, then an asynchronous upload and acknowledgement.

`SnapshotRunner` takes the cuts and answers the coordinator. `StateWriter` writes the state that the cuts
describe: tables become Parquet, items a msgpack list, local files are uploaded unchanged. Small state is
stored inline in the checkpoint's manifest. Everything has a checksum, verified on each read. In every
outcome, each cut is either made or discarded, once, and each set of local files released.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import pyarrow as pa
import xxhash
from msgspec.structs import replace

from ...errors import HeadgateError
from ...operators.elements import CheckpointBarrier, CheckpointOptions
from ...state.chain import (
    Chain,
    ChainBook,
    ChainPlan,
    StateKey,
    Written,
    extend,
    may_continue,
    plan,
    restored_chain,
)
from ...state.checked_files import measure_file
from ...state.keygroups import KeyGroupRange, key_group_range
from ...state.snapshot import (
    CollectedFiles,
    FilesCut,
    ItemsCut,
    LocalFile,
    OperatorSnapshot,
    StateHandle,
    StateInfo,
    StateSnapshot,
    TableCut,
)
from ..protocol import names
from ..protocol.barriers.handler import SnapshotGuard, SnapshotVerdict
from ..protocol.failures import CheckpointFailure
from ..protocol.ids import CheckpointId
from ..storage.base import CLEAN_UP_S, CheckpointStore
from .chain import OperatorChain, with_context
from .channel_state_writer import InFlightCut, write_in_flight
from .concurrency import all_of, in_thread
from .environment import SnapshotTiming, TaskEnvironment
from .local_files import SnapshotTarget, SubtaskDirectory
from .parquet_files import EncodedTable, encode_tables
from .segments import Pieces, Places, SegmentKey

T = TypeVar("T")

INLINE_ITEMS_BYTES_MAX: Final = 1 << 20
"""Items up to this size, in bytes, are stored inline, so that a change of parallelism need not read
them."""
_log = logging.getLogger("headgate.checkpoint")


class _Running(msgspec.Struct):
    """The asynchronous part of one snapshot.

    It is only cancelled once it has begun, so that it always discards what it does not make.
    """

    task: asyncio.Task[None] | None = None
    begun: bool = False
    unwanted: bool = False

    def cancel(self) -> None:
        self.unwanted = True
        if self.begun and self.task is not None:
            self.task.cancel()


class SnapshotRunner:
    """Runs the snapshots of one subtask, and owns every running asynchronous part."""

    def __init__(self, env: TaskEnvironment, chain: OperatorChain) -> None:
        self._env = env
        self._chain = chain
        self._guard = SnapshotGuard()
        self.book = ChainBook()
        """The files of the checkpoints of this attempt."""
        self._running: dict[int, _Running] = {}
        self._key_groups = key_group_range(
            env.index, env.vertex.parallelism, env.plan.max_parallelism
        )
        self.start_delay_ms = 0.0
        """The time from the trigger to the first barrier here, of the last snapshot."""
        self.alignment_ms = 0.0
        """The time from the first barrier to the last, of the last snapshot."""

    def restored(
        self,
        snapshots: Sequence[OperatorSnapshot],
        states: Mapping[str, Sequence[StateInfo]],
    ) -> None:
        """Let the first checkpoint build on the restored one, of which this subtask got its own part.

        Args:
            snapshots: the restored state, of this subtask alone.
            states: by operator, the current declarations of its states.
        """
        written = Written()
        for snapshot in snapshots:
            before = {info.name: info for info in snapshot.states}
            now = {info.name: info for info in states.get(snapshot.operator, ())}
            for state in {handle.state for handle in snapshot.handles}:
                key = (snapshot.operator, state)
                if not may_continue(before.get(state), now.get(state)):
                    continue
                handles = [handle for handle in snapshot.handles if handle.state == state]
                written.chains[key] = restored_chain(handles)
                written.files[key] = {h.file_id: h for h in handles if h.kind == "file"}
        self._acknowledged(self._env.restored_checkpoint, written)

    def _acknowledged(self, checkpoint_id: int, written: Written) -> None:
        """Note what the subtask's part of a checkpoint consists of in the store."""
        env = self._env
        self.book.acknowledged(checkpoint_id, written)
        if env.segments is not None:
            ledger = env.segments.ledger
            ledger.note(checkpoint_id, (env.vertex.id, env.index), written.handles())

    def begin(self, checkpoint_id: int) -> SnapshotVerdict:
        """Decide, once all barriers are here, whether to take, cancel or ignore the snapshot."""
        return self._guard.on_trigger(CheckpointId(checkpoint_id))

    def decline(self, checkpoint_id: int, reason: str, text: str) -> None:
        """Tell the coordinator that the alignment was aborted."""
        self._guard.on_declined(CheckpointId(checkpoint_id))
        self._env.reports.declined(checkpoint_id, reason, text)

    def prepare(self, checkpoint_id: int) -> None:
        """Prepare operators before the barrier is sent, head to tail: they may still emit into the
        epoch."""
        for chained in self._chain.operators:
            with_context(chained, chained.operator.prepare_snapshot, checkpoint_id)

    def take(
        self,
        barrier: CheckpointBarrier,
        alignment_ms: float,
        finished: bool,
        extra_items: Callable[[], dict[str, ItemsCut]],
        in_flight: InFlightCut | None = None,
        processed_bytes: int = 0,
    ) -> None:
        """Run the synchronous part, tail to head; the rest continues in a task of its own.

        Args:
            barrier: of the checkpoint.
            alignment_ms: from the first barrier to this snapshot.
            finished: whether the subtask had reached the end of its data.
            extra_items: state of the head beyond its operator's own.
            in_flight: the records that the barrier overtakes here, if it may.
            processed_bytes: of records since the first barrier.
        """
        started = self._env.clock.monotonic()
        self.alignment_ms = alignment_ms
        since_trigger_ms = self._env.clock.now_ms() - barrier.trigger_ms
        self.start_delay_ms = max(0.0, since_trigger_ms - alignment_ms)
        works: list[OperatorWork] = []
        running = _Running()
        try:
            self._cut(barrier, works, extra_items)
        except BaseException:
            running.unwanted = True  # the attempt is over, and the cuts so far are discarded
            raise
        finally:
            sync_ms = 1000 * (self._env.clock.monotonic() - started)
            timing = SnapshotTiming(
                sync_ms=sync_ms,
                async_ms=0.0,
                alignment_ms=alignment_ms,
                start_delay_ms=self.start_delay_ms,
                finished=finished,
                unaligned=barrier.options.unaligned,
                processed_bytes=processed_bytes,
                wrote=self._chain.wrote(),
            )
            self._start(running, barrier, works, timing, in_flight)

    def _cut(
        self,
        barrier: CheckpointBarrier,
        works: list[OperatorWork],
        extra_items: Callable[[], dict[str, ItemsCut]],
    ) -> None:
        options = barrier.options
        base = Written() if options.savepoint else self.book.base(options.base)
        head = self._chain.head
        for chained in reversed(self._chain.operators):
            cut = with_context(chained, chained.operator.snapshot, barrier.checkpoint_id)
            if options.savepoint:
                with_context(chained, chained.operator.drop_point, barrier.checkpoint_id)
            if chained is head and (extra := extra_items()):
                cut = cut or StateSnapshot()
                cut.items.update(extra)
            if cut is not None:
                work = self._plan(chained.name, cut, base, options)
                works.append(work)
                work.states = tuple(with_context(chained, chained.operator.states))
        if not options.savepoint:
            confirmations = {
                work.key: (work.cut.epoch, work.cut.confirm)
                for operator in works
                for work in operator.works
                if isinstance(work, TableWork) and work.cut.confirm is not None
            }
            self.book.taken(barrier.checkpoint_id, options.base, confirmations)

    def _plan(
        self, name: str, cut: StateSnapshot, base: Written, options: CheckpointOptions
    ) -> OperatorWork:
        """Plan how each state of an operator is written."""
        work = OperatorWork(name, ())
        files_max = self._env.settings.delta_chain_max
        for state, table in cut.tables.items():
            chain = base.chains.get((name, state), Chain())
            planned = plan(chain, table.epoch, files_max) if table.keys else ChainPlan()
            work.works.append(TableWork((name, state), table, chain, planned))
        for state, files in cut.files.items():
            canonical = bool(options.savepoint) and not options.native
            known = base.files.get((name, state), {})
            work.works.append(FilesWork((name, state), files, known, canonical))
        for state, items in cut.items.items():
            work.works.append(ItemsWork((name, state), items))
        return work

    # -- the asynchronous part ----------------------------------------------------------------------

    def _start(
        self,
        running: _Running,
        barrier: CheckpointBarrier,
        works: list[OperatorWork],
        timing: SnapshotTiming,
        in_flight: InFlightCut | None,
    ) -> None:
        checkpoint_id = barrier.checkpoint_id
        running.task = asyncio.get_running_loop().create_task(
            self._complete(running, barrier, works, timing, in_flight),
            name=f"snapshot {checkpoint_id} of {self._env.task_name}",
        )
        self._running[checkpoint_id] = running
        running.task.add_done_callback(lambda _: self._running.pop(checkpoint_id, None))

    async def _complete(
        self,
        running: _Running,
        barrier: CheckpointBarrier,
        works: list[OperatorWork],
        timing: SnapshotTiming,
        in_flight: InFlightCut | None,
    ) -> None:
        env, checkpoint_id = self._env, barrier.checkpoint_id
        started = env.clock.monotonic()
        running.begun = True
        pieces, sparse = None, frozenset[str]()
        if env.segments is not None and env.store is not None and not barrier.options.savepoint:
            key = SegmentKey(env.attempt, env.generation, checkpoint_id)
            pieces = Pieces(env.segments, key)
            sparse = env.segments.ledger.sparse(barrier.options.base)
        writer = StateWriter(
            works,
            threads=env.io_threads,
            transfers=env.transfers,
            directory=env.directory,
            key_groups=self._key_groups,
            pieces=pieces,
            sparse=sparse,
        )
        try:
            async with self._target(barrier) as target:
                try:
                    if running.unwanted:
                        return
                    result = await writer.write(target, barrier.options.base)
                    await writer.close()
                    written_s = env.clock.monotonic()
                    if in_flight is not None:
                        await in_flight.complete()
                    waited_s = env.clock.monotonic() - written_s
                    overtaken = await self._write_in_flight(in_flight, target, writer.begun)
                except BaseException:
                    await self._discard(target.store, writer.begun)
                    raise
        except Exception as error:
            self.book.forget(checkpoint_id)
            ours = isinstance(error, HeadgateError)
            reason = CheckpointFailure.IO if ours else CheckpointFailure.ASYNC_EXCEPTION
            text = f"{type(error).__name__}: {error}"
            if not ours:
                _log.exception("writing a snapshot failed task=`%s`", env.task_name)
            env.reports.declined(checkpoint_id, reason.value, text)
            return
        finally:
            if in_flight is not None:
                in_flight.release()
            await writer.close()
        if not barrier.options.savepoint:
            self._acknowledged(checkpoint_id, result.written)
        in_flight_bytes = sum(h.size_bytes for each in overtaken for h in each.handles)
        if in_flight is not None and in_flight.inputs is not None:
            self.alignment_ms = float(in_flight.inputs.alignment_ms)
            timing = replace(
                timing,
                alignment_ms=self.alignment_ms,
                processed_bytes=in_flight.inputs.processed_bytes,
            )
        timing = replace(
            timing,
            async_ms=1000 * (env.clock.monotonic() - started - waited_s),
            written_bytes=result.written_bytes + in_flight_bytes,
            in_flight_bytes=in_flight_bytes,
        )
        env.reports.acked(checkpoint_id, [*result.snapshots, *overtaken], timing)

    async def _write_in_flight(
        self, in_flight: InFlightCut | None, target: SnapshotTarget, begun: list[str]
    ) -> list[OperatorSnapshot]:
        """Write the records that the barrier overtook."""
        if in_flight is None:
            return []
        written = await write_in_flight(
            in_flight,
            self._chain.head.name,
            target,
            threads=self._env.io_threads,
            transfers=self._env.transfers,
            begun=begun.append,
        )
        return [] if written is None else [written]

    @contextlib.asynccontextmanager
    async def _target(self, barrier: CheckpointBarrier) -> AsyncIterator[SnapshotTarget]:
        env = self._env
        if barrier.options.savepoint:
            async with env.store_at(barrier.options.savepoint) as store:
                yield SnapshotTarget(store, self._name_in_savepoint, inline_bytes_max=-1)
            return

        def name_of(operator: str, state: str, kind: str, file_id: str) -> str:
            return names.checkpoint_file(
                env.generation, barrier.checkpoint_id, operator, env.index, state, kind, file_id
            )

        copies = env.copies
        if copies is not None:
            copies.begun(barrier.checkpoint_id, barrier.options.base)
        inline_bytes_max = env.settings.inline_bytes_max
        yield SnapshotTarget(env.store, name_of, inline_bytes_max, copies, barrier.checkpoint_id)

    def _name_in_savepoint(self, operator: str, state: str, kind: str, file_id: str) -> str:
        return names.savepoint_file(operator, self._env.index, state, kind, file_id)

    async def _discard(self, store: CheckpointStore | None, begun: list[str]) -> None:
        """Delete the files of an abandoned snapshot; best effort, in bounded time."""
        if not begun or store is None:
            return
        try:
            async with asyncio.timeout(CLEAN_UP_S):
                await store.delete_files(begun)
        except (HeadgateError, TimeoutError) as error:
            _log.info("files of a snapshot were left over first=`%s`: %s", begun[0], error)

    # -- outcomes of checkpoints
    # ---------------------------------------------------------------------

    def completed(self, checkpoint_id: int) -> None:
        """Note that the checkpoint is durable: tables may forget rows deleted before it."""
        self.book.completed(checkpoint_id)

    def give_up(self, checkpoint_id: int) -> None:
        """Cancel the asynchronous part, whose result is no longer needed."""
        running = self._running.get(checkpoint_id)
        if running is not None:
            running.cancel()
        self.book.forget(checkpoint_id)
        if self._env.segments is not None:
            self._env.segments.ledger.forget(checkpoint_id)

    def abort(self, checkpoint_id: int) -> None:
        """Cancel the asynchronous part, or never start it if its barrier has yet to come."""
        self.give_up(checkpoint_id)
        self._guard.on_abort_notice(CheckpointId(checkpoint_id))

    async def drain(self) -> None:
        """Wait until all running asynchronous parts are done."""
        await asyncio.gather(*self._tasks(), return_exceptions=True)

    async def cancel(self) -> None:
        """Cancel all running asynchronous parts and wait for them to end."""
        tasks = self._tasks()
        for running in list(self._running.values()):
            running.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _tasks(self) -> list[asyncio.Task[None]]:
        return [running.task for running in self._running.values() if running.task is not None]


class TableWork(msgspec.Struct):
    """A cut of a table, and how it continues the table's chain."""

    key: StateKey
    cut: TableCut
    chain: Chain
    plan: ChainPlan
    begun: bool = False


class FilesWork(msgspec.Struct):
    """A cut in local files, with the handles of those already in the store."""

    key: StateKey
    cut: FilesCut
    known: dict[str, StateHandle]
    canonical: bool
    """Write the content as a table instead of files."""


class ItemsWork(msgspec.Struct):
    """A cut of operator state."""

    key: StateKey
    cut: ItemsCut


Work = TableWork | FilesWork | ItemsWork


class OperatorWork(msgspec.Struct):
    """The work to be done for one operator."""

    operator: str
    states: tuple[StateInfo, ...]
    works: list[Work] = msgspec.field(default_factory=list)


class UploadResult(msgspec.Struct, frozen=True):
    """The outcome in the store.

    Attributes:
        snapshots: one per operator.
        written: the base for the next checkpoint.
        written_bytes: the new bytes.
    """

    snapshots: list[OperatorSnapshot]
    written: Written
    written_bytes: int


class StateWriter:
    """Writes all states of one subtask for one checkpoint or savepoint."""

    def __init__(
        self,
        works: Sequence[OperatorWork],
        *,
        threads: Executor,
        transfers: asyncio.Semaphore,
        directory: SubtaskDirectory,
        key_groups: KeyGroupRange,
        pieces: Pieces | None = None,
        sparse: frozenset[str] = frozenset(),
    ) -> None:
        """Create a writer.

        Args:
            works: the states to write.
            threads: for blocking work.
            transfers: limits what all subtasks of this worker encode and upload at once.
            directory: for large tables to be uploaded.
            key_groups: of this subtask.
            pieces: collects what shares a segment with other state; None: nothing does.
            sparse: segments whose pieces are to be written anew.
        """
        self._works = works
        self._pieces = pieces
        self._sparse = sparse
        self._threads = threads
        self._transfers = transfers
        self._directory = directory
        self._key_groups = key_groups
        self._closed = False
        self.begun: list[str] = []
        """The names of the files that were, or may have been, written."""

    async def write(self, target: SnapshotTarget, base: int) -> UploadResult:
        """Write all states, some of them concurrently.

        Raises:
            HeadgateError: the store refused, or a sink's pre-commit failed.
            Exception: whatever a cut raised.
        """
        written = Written(base)
        new_bytes = [0]
        jobs = [self._write(w, target, written, new_bytes) for o in self._works for w in o.works]
        parts = iter(await all_of(jobs))
        places: Places = {}
        if self._pieces is not None:
            places = await self._pieces.place(target, self._transfers)
            self.begun += {file for file, _ in places.values()}
            written.replace(lambda handle: _placed(handle, places))
        snapshots = [
            OperatorSnapshot(
                operator=work.operator,
                handles=tuple(_placed(h, places) for _ in work.works for h in next(parts)),
                states=work.states,
            )
            for work in self._works
        ]
        return UploadResult(snapshots, written, new_bytes[0])

    async def close(self) -> None:
        """Discard cuts that were not made, and release collected ones.

        Call it once, in every outcome.
        """
        if self._closed:
            return
        self._closed = True
        if self._pieces is not None:
            self._pieces.close()
        endings: list[Callable[[], None]] = []
        for operator in self._works:
            for work in operator.works:
                if isinstance(work, FilesWork):
                    endings.append(work.cut.release)
                elif isinstance(work, TableWork) and not work.begun and work.cut.discard:
                    endings.append(work.cut.discard)
        if endings:
            await self._in_thread(lambda: _call_all(endings))

    # -- one state ----------------------------------------------------------------------------------

    async def _write(
        self, work: Work, target: SnapshotTarget, written: Written, new_bytes: list[int]
    ) -> tuple[StateHandle, ...]:
        """Return the handles of one state, old and new."""
        match work:
            case ItemsWork():
                handles, new = await self._items(work, target)
            case TableWork():
                handles, new = await self._table(work, target, written)
            case FilesWork() if work.canonical:
                handles, new = await self._canonical(work, target)
            case FilesWork():
                handles, new = await self._files(work, target, written)
        new_bytes[0] += sum(handle.size_bytes for handle in new)
        return tuple(handles)

    async def _items(
        self, work: ItemsWork, target: SnapshotTarget
    ) -> tuple[list[StateHandle], list[StateHandle]]:
        made = work.cut.items
        values = await self._in_thread(made) if callable(made) else made
        if not values or target.store is None:
            return [], []
        data = msgspec.msgpack.encode(values)
        handle = await self._store_bytes(
            work.key, "items", data, target, INLINE_ITEMS_BYTES_MAX, rows=len(values)
        )
        handle = msgspec.structs.replace(handle, redistribution=work.cut.redistribution)
        return [handle], [handle]

    async def _table(
        self, work: TableWork, target: SnapshotTarget, written: Written
    ) -> tuple[list[StateHandle], list[StateHandle]]:
        if target.store is None:
            return [], []
        cut, since = work.cut, work.plan.since
        async with self._transfers:
            work.begun = True
            kind = "table" if since is None else "delta"
            async with self._encoded(lambda: [cut.make(since)]) as encoded:
                handle = await self._store_table(work.key, kind, encoded, target, cut.keys)
        kept = await self._kept(work.key, work.chain.handles[: work.plan.keep], target)
        chain = extend(work.chain, work.plan, handle, cut.epoch).replace(lambda h: kept.get(h, h))
        written.chains[work.key] = chain
        return list(chain.handles), [*filter(None, (handle,)), *kept.values()]

    async def _canonical(
        self, work: FilesWork, target: SnapshotTarget
    ) -> tuple[list[StateHandle], list[StateHandle]]:
        cut = work.cut
        async with self._transfers, self._encoded(cut.tables) as encoded:
            handle = await self._store_table(work.key, "table", encoded, target, cut.keys)
        handles = [handle] if handle is not None else []
        return handles, handles

    async def _files(
        self, work: FilesWork, target: SnapshotTarget, written: Written
    ) -> tuple[list[StateHandle], list[StateHandle]]:
        if target.store is None:
            return [], []
        collected: CollectedFiles = await self._in_thread(work.cut.collect)
        missing = [file for file in collected.files if file.id not in work.known]
        uploaded = await all_of([self._upload(work.key, file, target) for file in missing])
        needed = [work.known[file.id] for file in collected.files if file.id in work.known]
        kept = await self._kept(work.key, needed, target)
        known = {handle.file_id: handle for handle in (*needed, *kept.values(), *uploaded)}
        written.files[work.key] = {file.id: known[file.id] for file in collected.files}
        meta = await self._store_bytes(
            work.key, "meta", collected.meta, target, target.inline_bytes_max
        )
        own = self._key_groups
        meta = msgspec.structs.replace(meta, first_key_group=own.first, last_key_group=own.last)
        new = [meta, *uploaded, *kept.values()]
        return [meta, *written.files[work.key].values()], new

    async def _kept(
        self, key: StateKey, handles: Sequence[StateHandle], target: SnapshotTarget
    ) -> dict[StateHandle, StateHandle]:
        """Write pieces anew that lie in sparse segments; return the new handle of each of them.

        Raises:
            StorageError: a piece cannot be read, or is not the one that was written.
        """
        moved: dict[StateHandle, StateHandle] = {}
        for handle in handles:
            if handle.file not in self._sparse:
                continue
            async with self._transfers:
                data = await target.read_piece(handle, self._threads)
                origin = f"{handle.file_id}@{handle.file}@{handle.offset}"
                name = await self._put(target, key, handle.kind, origin, data)
            moved[handle] = msgspec.structs.replace(handle, file=name, offset=0)
        return moved

    @asynccontextmanager
    async def _encoded(
        self, tables: Callable[[], Iterable[pa.Table]]
    ) -> AsyncIterator[EncodedTable | None]:
        """Yield the tables as one file, which is removed afterwards, even if it was not used."""
        large: list[Path] = []

        def path_for_large() -> Path:
            large.append(self._directory.temporary_file())
            return large[-1]

        try:
            yield await self._in_thread(lambda: encode_tables(tables(), path_for_large))
        finally:
            for path in large:
                path.unlink(missing_ok=True)

    # -- into the store -----------------------------------------------------------------------------

    async def _store_table(
        self,
        key: StateKey,
        kind: str,
        encoded: EncodedTable | None,
        target: SnapshotTarget,
        keys: tuple[str, ...],
    ) -> StateHandle | None:
        if encoded is None:
            return None
        handle = StateHandle(
            state=key[1],
            kind=kind,
            size_bytes=encoded.size_bytes,
            checksum=encoded.checksum,
            rows=encoded.rows,
            first_key_group=encoded.first_key_group,
            last_key_group=encoded.last_key_group,
            keys=keys,
        )
        if isinstance(encoded.data, bytes) and encoded.size_bytes <= target.inline_bytes_max:
            return msgspec.structs.replace(handle, inline=encoded.data)
        name = await self._put(target, key, kind, "", encoded.data)
        return msgspec.structs.replace(handle, file=name, footer=encoded.footer)

    async def _store_bytes(
        self,
        key: StateKey,
        kind: str,
        data: bytes,
        target: SnapshotTarget,
        inline_bytes_max: int,
        rows: int = 0,
    ) -> StateHandle:
        handle = StateHandle(
            state=key[1],
            kind=kind,
            size_bytes=len(data),
            checksum=xxhash.xxh3_64_hexdigest(data),
            rows=rows,
        )
        if len(data) <= inline_bytes_max:
            return msgspec.structs.replace(handle, inline=data)
        async with self._transfers:
            name = await self._put(target, key, kind, "", data)
        return msgspec.structs.replace(handle, file=name)

    async def _upload(self, key: StateKey, file: LocalFile, target: SnapshotTarget) -> StateHandle:
        async with self._transfers:
            size, checksum = await self._in_thread(lambda: measure_file(file.path))
            name = await self._put(target, key, "file", file.id, file.path)
        return StateHandle(
            state=key[1],
            kind="file",
            size_bytes=size,
            checksum=checksum,
            rows=file.rows,
            file=name,
            first_key_group=file.first_key_group,
            last_key_group=file.last_key_group,
            file_id=file.id,
        )

    async def _put(
        self, target: SnapshotTarget, key: StateKey, kind: str, file_id: str, data: bytes | Path
    ) -> str:
        """Write state as a file, or collect it as a piece that is placed later, under the same name."""
        name = target.name_of(*key, kind, file_id)
        pieces = self._pieces
        size = data.stat().st_size if isinstance(data, Path) else len(data)
        if pieces is not None and pieces.reserve(size):
            content = await self._in_thread(data.read_bytes) if isinstance(data, Path) else data
            pieces.add(name, content)
            return name
        self.begun.append(name)
        await target.write(name, data, self._threads)
        return name

    async def _in_thread(self, call: Callable[[], T]) -> T:
        return await in_thread(self._threads, call)


def _placed(handle: StateHandle, places: Places) -> StateHandle:
    """Return the handle of a piece at its place; others stay as they are."""
    if handle.file is None or handle.file not in places:
        return handle
    file, offset = places[handle.file]
    return msgspec.structs.replace(handle, file=file, offset=offset)


def _call_all(endings: Iterable[Callable[[], None]]) -> None:
    for ending in endings:
        try:
            ending()
        except Exception as error:
            _log.warning("a cut could not be discarded: %s: %s", type(error).__name__, error)
