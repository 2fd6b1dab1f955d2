"""A job in small: subtasks with the runtime's own snapshots and restores, a coordinator played by hand."""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import headgate as hg
from headgate.operators.base import Operator
from headgate.operators.elements import CheckpointBarrier, CheckpointOptions
from headgate.runtime.coordinator.restore import assign_state
from headgate.runtime.job import runnable
from headgate.runtime.protocol.checkpoints.manifest import (
    Manifest,
    ManifestOperator,
    ManifestSubtask,
    files_written_by,
    unshared_files,
)
from headgate.runtime.storage.memory import MemoryStore
from headgate.runtime.task.chain import OperatorChain, build_chain, call_and_wait, open_chain
from headgate.runtime.task.environment import TaskEnvironment, TaskSettings
from headgate.runtime.task.snapshots import SnapshotRunner
from headgate.runtime.task.state_restore import StateReader
from headgate.state.hashing import hash_keys, key_groups_of
from headgate.state.keygroups import KeyGroupRange, key_group_range
from headgate.state.snapshot import OperatorSnapshot, StateHandle
from headgate.tests.support.tasks import task_environment

GROUPS = 12
CHAIN_MAX = 3
GENERATION = 1


class NoTimers:
    def call_later(self, delay_ms: int, callback: Any) -> Any:
        return lambda: None


class NoMetrics:
    def counter(self, name: str) -> Any:
        return SimpleNamespace(inc=lambda amount=1: None)

    def gauge(self, name: str, read: Any, labels: Any = None) -> None:
        return None

    def histogram(self, name: str, buckets: Any = None, labels: Any = None) -> Any:
        return SimpleNamespace(observe=lambda value: None)


@dataclass
class Reports:
    acks: dict[int, list[OperatorSnapshot]] = field(default_factory=dict)

    def acked(self, checkpoint_id: int, snapshots: Any, timing: Any) -> None:
        self.acks[checkpoint_id] = list(snapshots)

    def declined(self, checkpoint_id: int, reason: str, text: str) -> None:
        raise AssertionError(f"checkpoint {checkpoint_id} was declined: {text}")


@dataclass
class Subtask:
    env: TaskEnvironment
    chain: OperatorChain
    runner: SnapshotRunner
    reports: Reports
    own: KeyGroupRange

    @property
    def operator(self) -> Operator:
        return self.chain.head.operator


@dataclass
class Pending:
    """A checkpoint under way; `model` is what the state was at its barrier."""

    id: int
    base: int
    model: Any


class Life:
    """One life of a keyed step: attempts, at changing parallelism, on one store."""

    def __init__(self, job: hg.Job, options: dict[str, str], path: Path, threads: Any) -> None:
        self.options, self.path, self.threads = options, path, threads
        self.job, self.spec = job, runnable(job).spec()
        self.store = MemoryStore("job", {})
        self.savepoints: dict[str, MemoryStore] = {}
        self.attempt = 0
        self.subtasks: list[Subtask] = []
        self.ids = itertools.count(1)
        self.pending: list[Pending] = []
        self.kept: dict[int, tuple[Manifest, Any]] = {}
        """Completed checkpoints that are retained, with the model at their barriers."""
        self.wire: Callable[[Operator], None] = lambda operator: None
        """Is given each operator before it is opened."""

    # --- attempts ------------------------------------------------------------------------------

    async def start(self, parallelism: int, restored: int = 0) -> None:
        """A new attempt, from a retained checkpoint, or fresh."""
        plan = self.spec.replan(parallelism, GROUPS)
        (vertex,) = [v for v in plan.vertices if v.head.name == "step"]
        self.attempt += 1
        shares: list[Any] = [() for _ in range(parallelism)]
        if restored:
            for newer in [id_ for id_ in self.kept if id_ > restored]:
                await self._delete(newer)
            manifest = self.kept[restored][0]
            shares = await assign_state(manifest, plan, vertex, self._read)
        self.subtasks = []
        for index, share in enumerate(shares):
            subtask = self._subtask(plan, vertex, index, restored)
            self.subtasks.append(subtask)
            await open_chain(subtask.chain, subtask.env, NoTimers(), lambda: 0.0)
            if restored:
                await self._restore(subtask, share, self.kept[restored][0])

    def _subtask(self, plan: Any, vertex: Any, index: int, restored: int) -> Subtask:
        reports = Reports()
        env = task_environment(
            plan,
            vertex,
            self.path / f"{self.attempt}-{index}",
            self.threads,
            index=index,
            generation=GENERATION,
            attempt=self.attempt,
            restored_checkpoint=restored,
            options=self.options,
            settings=TaskSettings(inline_bytes_max=0, delta_chain_max=CHAIN_MAX),
            store=self.store,
            store_at=self._store_at,
            transfers=asyncio.Semaphore(2),
            reports=reports,
            metrics_of=lambda task, operator, index: NoMetrics(),
        )
        chain = build_chain(env, {})
        self.wire(chain.head.operator)
        own = key_group_range(index, vertex.parallelism, GROUPS)
        return Subtask(env, chain, SnapshotRunner(env, chain), reports, own)

    async def _restore(self, subtask: Subtask, share: Any, manifest: Manifest) -> None:
        reader = self._reader(subtask.env, self.store, subtask.own)
        head = subtask.chain.head
        mine = [snapshot for snapshot in share if snapshot.operator == head.name]
        await call_and_wait(head, head.operator.restore, await reader.load(head.name, mine))
        if manifest.operators[0].parallelism == subtask.env.vertex.parallelism:
            subtask.runner.restored(mine, {head.name: head.operator.states()})

    def _reader(self, env: TaskEnvironment, store: Any, own: KeyGroupRange) -> StateReader:
        return StateReader(
            store,
            subtask=env.task_name,
            own=own,
            threads=self.threads,
            transfers=env.transfers,
            directory=env.directory,
            progress=lambda count: None,
        )

    async def _read(self, operator: str, handle: StateHandle) -> bytes:
        assert handle.inline is not None
        return handle.inline

    @asynccontextmanager
    async def _store_at(self, address: str) -> Any:
        yield self.savepoints.setdefault(address, MemoryStore(address, {}))

    async def end(self) -> None:
        """The attempt is over, as in a failure: nothing more is written."""
        for pending in list(self.pending):
            await self.abort(pending)
        for subtask in self.subtasks:
            await subtask.runner.cancel()
            subtask.operator.close()
            shutil.rmtree(subtask.env.directory.path, ignore_errors=True)

    def twin(self) -> Life:
        """Another life that can begin from what this one has completed, while this one goes on."""
        twin = Life(self.job, self.options, self.path / f"twin-{next(self.ids)}", self.threads)
        twin.store, twin.kept, twin.wire = self.store, dict(self.kept), self.wire
        twin.ids, twin.attempt = self.ids, 1_000
        return twin

    # --- records -------------------------------------------------------------------------------

    def owner(self, key: Any) -> Subtask:
        group = int(key_groups_of(hash_keys([key]), GROUPS)[0])
        return next(subtask for subtask in self.subtasks if group in subtask.own)

    # --- checkpoints ---------------------------------------------------------------------------

    def trigger(self, model: Any) -> Pending:
        """The barrier passes all subtasks; writing goes on beside."""
        pending = Pending(next(self.ids), max(self.kept, default=0), model)
        self._take(pending.id, CheckpointOptions(base=pending.base))
        self.pending.append(pending)
        return pending

    def _take(self, checkpoint_id: int, options: CheckpointOptions) -> None:
        for subtask in self.subtasks:
            subtask.runner.begin(checkpoint_id)
            barrier = CheckpointBarrier(checkpoint_id, 0, options)
            subtask.runner.take(barrier, 0.0, False, dict)

    async def complete(self, pending: Pending, retain: int) -> None:
        """All have acknowledged; older ones under way are given up, older completed ones deleted."""
        for subtask in self.subtasks:
            await subtask.runner.drain()
        for older in [one for one in self.pending if one.id < pending.id]:
            await self.abort(older)
        self.pending.remove(pending)
        self.kept[pending.id] = (self._manifest(pending.id), pending.model)
        for subtask in self.subtasks:
            subtask.runner.completed(pending.id)
        # The base of a checkpoint under way stays until that is over.
        needed = {one.base for one in self.pending}
        subsumed = [id_ for id_ in sorted(self.kept)[:-retain] if id_ not in needed]
        await self._delete(*subsumed)

    async def _delete(self, *checkpoint_ids: int) -> None:
        gone = [self.kept.pop(id_)[0] for id_ in checkpoint_ids]
        left = [manifest for manifest, _ in self.kept.values()]
        await self.store.delete_files(unshared_files(gone, left))

    def _manifest(self, checkpoint_id: int) -> Manifest:
        subtasks = tuple(
            ManifestSubtask(subtask=index, snapshots=tuple(subtask.reports.acks[checkpoint_id]))
            for index, subtask in enumerate(self.subtasks)
        )
        operator = ManifestOperator(name="step", parallelism=len(subtasks), subtasks=subtasks)
        return Manifest(
            checkpoint_id=checkpoint_id,
            trigger_ms=0,
            completed_ms=0,
            duration_ms=0,
            max_parallelism=GROUPS,
            operators=(operator,),
        )

    async def abort(self, pending: Pending) -> None:
        """Give it up, and delete what it alone has written."""
        self.pending.remove(pending)
        for subtask in self.subtasks:
            subtask.runner.abort(pending.id)
        for subtask in self.subtasks:
            await subtask.runner.drain()
            written = subtask.reports.acks.get(pending.id, ())
            await self.store.delete_files(files_written_by(written, GENERATION, pending.id))

    # --- looking -------------------------------------------------------------------------------

    async def tables(self) -> dict[str, list[dict[str, Any]]]:
        """All state now, by a savepoint in canonical format: rows by state, each key once."""
        checkpoint_id = next(self.ids)
        address = f"savepoint-{checkpoint_id}"
        self._take(checkpoint_id, CheckpointOptions(savepoint=address))
        for subtask in self.subtasks:
            await subtask.runner.drain()
        everything = KeyGroupRange(0, GROUPS - 1)
        found: dict[str, list[dict[str, Any]]] = {}
        for subtask in self.subtasks:
            reader = self._reader(subtask.env, self.savepoints[address], everything)
            state = await reader.load("step", subtask.reports.acks[checkpoint_id])
            assert not state.files
            for name, table in state.tables.items():
                groups = table.column("key_group").to_pylist()
                assert groups == sorted(groups)
                assert all(group in subtask.own for group in groups)
                found.setdefault(name, []).extend(table.to_pylist())
        del self.savepoints[address]
        return found

    def unreachable(self) -> set[str]:
        """Files in the store that no retained checkpoint needs."""
        reachable = frozenset[str]().union(*(m.files() for m, _ in self.kept.values()))
        return {name for name in self.store._objects if name.startswith("chk/")} - reachable


@pytest.fixture(scope="module")
def threads() -> Iterator[Any]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


@pytest.fixture(scope="module")
def new_life(threads: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Makes lives."""
    numbers = itertools.count()
    root = tmp_path_factory.mktemp("lives")

    def make(job: hg.Job, options: dict[str, str]) -> Life:
        return Life(job, options, root / str(next(numbers)), threads)

    return make
