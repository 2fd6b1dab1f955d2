"""One subtask's snapshots without a job: operators that are models, a store, and a coordinator in small."""

from __future__ import annotations

import asyncio
import itertools
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pyarrow as pa
import pytest

from headgate.operators.base import Operator
from headgate.operators.elements import CheckpointBarrier, CheckpointOptions
from headgate.runtime.protocol.checkpoints.manifest import files_written_by
from headgate.runtime.storage.memory import MemoryStore
from headgate.runtime.task.chain import ChainedOperator, ChainOutput, OperatorChain
from headgate.runtime.task.environment import TaskSettings
from headgate.runtime.task.segments import SegmentWriter
from headgate.runtime.task.snapshots import SnapshotRunner
from headgate.runtime.task.state_restore import StateReader
from headgate.state.keygroups import KeyGroupRange, key_group_range
from headgate.state.snapshot import (
    CollectedFiles,
    FilesCut,
    ItemsCut,
    LocalFile,
    StateSnapshot,
    TableCut,
)
from headgate.tests.support.tasks import Reports, task_environment

GROUPS = 16
SCHEMA = pa.schema([("key_group", pa.int32()), ("key", pa.int64()), ("value", pa.int64())])
file_ids = itertools.count()


def group_of(key):
    return key * 7 % GROUPS


def table_of(rows, deleted=None):
    """Rows `{key: value}`, sorted by key group; with `deleted` keys it is a delta."""
    keys = sorted({*rows, *(deleted or ())}, key=lambda key: (group_of(key), key))
    columns = {
        "key_group": pa.array([group_of(key) for key in keys], pa.int32()),
        "key": pa.array(keys, pa.int64()),
        "value": pa.array([rows.get(key) for key in keys], pa.int64()),
    }
    table = pa.table(columns)
    if deleted is None:
        return table
    return table.append_column("deleted", pa.array([key not in rows for key in keys], pa.bool_()))


def rows_of(table):
    return dict(zip(table["key"].to_pylist(), table["value"].to_pylist(), strict=True))


class ModelTable:
    """A table whose every change has a number; counts what becomes of its cuts."""

    def __init__(self, restored=None):
        self.rows = dict(restored or {})
        self.epoch = 1 if restored else 0
        self.touched = {}
        self.made, self.discarded, self.confirmed = [], 0, []
        self.fails = None

    def put(self, key, value):
        self.rows[key] = value
        self.touched[key] = self.epoch + 1

    def delete(self, key):
        self.rows.pop(key, None)
        self.touched[key] = self.epoch + 1

    def cut(self):
        self.epoch += 1
        rows, touched = dict(self.rows), dict(self.touched)

        def make(since):
            self.made.append(since)
            if self.fails is not None:
                raise self.fails
            if since is None:
                return table_of(rows)
            if self.confirmed:
                assert since >= self.confirmed[-1], "marks before the confirmed cut are gone"
            changed = {key for key, epoch in touched.items() if epoch > since}
            return table_of({k: rows[k] for k in changed if k in rows}, changed - rows.keys())

        def discard():
            self.discarded += 1

        return TableCut(make, ("key",), self.epoch, discard, self.confirmed.append)


class ModelFiles:
    """State in local files: one new file per cut, and the older ones while they are fewer than four."""

    def __init__(self, directory):
        self.directory = directory
        self.files = []
        self.collected = self.released = 0

    def add(self, rows):
        directory = self.directory
        directory.mkdir(parents=True, exist_ok=True)
        id_ = f"file-{next(file_ids)}"
        path = directory / id_
        path.write_bytes(repr(rows).encode() * 10)
        groups = sorted({group_of(key) for key in rows})
        self.files.append(LocalFile(id_, path, len(rows), groups[0], groups[-1]))

    def cut(self):
        files = list(self.files)

        def collect():
            self.collected += 1
            return CollectedFiles(files, repr([file.id for file in files]).encode())

        def tables():
            yield table_of({3: 3})
            yield table_of({1: 1})

        def release():
            self.released += 1

        return FilesCut(collect, tables, ("key",), release)


class ModelOperator(Operator):
    def __init__(self, directory):
        self.table = ModelTable()
        self.files = None
        self.items = []
        self.raises = None
        self.infos = ()
        self.directory = directory

    def snapshot(self, checkpoint_id):
        if self.raises is not None:
            raise self.raises
        snapshot = StateSnapshot(tables={"rows": self.table.cut()})
        if self.files is not None:
            snapshot.files["runs"] = self.files.cut()
        if self.items:
            snapshot.items["list"] = ItemsCut(list(self.items), "union")
        return snapshot

    def states(self):
        return self.infos


class Bench:
    """A subtask's snapshot runner, with the coordinator's part played by hand."""

    def __init__(
        self, path, store, *, index=0, parallelism=1, generation=1, segments=None, **settings
    ):
        self.threads = ThreadPoolExecutor(2)
        self.store = store
        self.savepoints = {}
        self.reports = Reports()
        self.path = path / f"{generation}-{index}-{parallelism}"
        self.own = key_group_range(index, parallelism, GROUPS)
        self.env = task_environment(
            SimpleNamespace(job_name="job", max_parallelism=GROUPS),
            SimpleNamespace(id=0, name="count", parallelism=parallelism),
            self.path,
            self.threads,
            index=index,
            generation=generation,
            settings=TaskSettings(**{"inline_bytes_max": 0, "delta_chain_max": 5, **settings}),
            store=store,
            store_at=self._store_at,
            transfers=asyncio.Semaphore(2),
            reports=self.reports,
            segments=SegmentWriter(f"worker-{generation}", lambda attempt: 1, self.threads),
        )
        self.env.segments.configure(segments)
        self.operators = {name: ModelOperator(self.path / name) for name in ("head", "tail")}
        chained = [
            ChainedOperator(i, name, operator, ChainOutput(name))
            for i, (name, operator) in enumerate(self.operators.items())
        ]
        self.chain = OperatorChain(chained, [])
        self.runner = SnapshotRunner(self.env, self.chain)

    @property
    def table(self):
        return self.operators["head"].table

    @asynccontextmanager
    async def _store_at(self, address):
        yield self.savepoints.setdefault(address, MemoryStore(address, {}))

    def take(self, checkpoint_id, **options):
        """The barrier is here; the asynchronous part goes on beside."""
        self.runner.begin(checkpoint_id)
        barrier = CheckpointBarrier(checkpoint_id, 0, CheckpointOptions(**options))
        self.runner.take(barrier, 0.0, False, dict)

    async def checkpoint(self, checkpoint_id, **options):
        """Take one and wait; returns its snapshots."""
        self.take(checkpoint_id, **options)
        await self.runner.drain()
        assert checkpoint_id not in self.reports.declines, self.reports.declines
        return self.reports.acks[checkpoint_id][0]

    async def abort(self, checkpoint_id):
        """As the coordinator does: what this checkpoint alone wrote is deleted, and all are told."""
        self.runner.abort(checkpoint_id)
        await self.runner.drain()
        snapshots, _ = self.reports.acks.get(checkpoint_id, ((), None))
        await self.store.delete_files(
            files_written_by(snapshots, self.env.generation, checkpoint_id)
        )

    def reader(self, store=None, progress=lambda count: None, own=None):
        return StateReader(
            store or self.store,
            subtask=self.env.task_name,
            own=own or self.own,
            threads=self.threads,
            transfers=self.env.transfers,
            directory=self.env.directory,
            progress=progress,
        )

    async def restore(self, checkpoint_id, snapshots):
        """Load state of one old subtask at unchanged parallelism, and go on with its chains."""
        self.env.restored_checkpoint = checkpoint_id
        for name, operator in self.operators.items():
            mine = [snapshot for snapshot in snapshots if snapshot.operator == name]
            state = await self.reader().load(name, mine)
            if "rows" in state.tables:
                operator.table = ModelTable(rows_of(state.tables["rows"]))
        infos = {name: operator.infos for name, operator in self.operators.items()}
        self.runner.restored(snapshots, infos)

    def close(self):
        self.threads.shutdown()


@pytest.fixture
def make_bench(tmp_path):
    benches = []

    def make(store=None, **arguments):
        bench = Bench(tmp_path, store if store is not None else MemoryStore("job", {}), **arguments)
        benches.append(bench)
        return bench

    yield make
    for bench in benches:
        bench.close()


@pytest.fixture
def model():
    """The pieces above, for tests that build their own."""
    return SimpleNamespace(
        table_of=table_of,
        rows_of=rows_of,
        group_of=group_of,
        groups=GROUPS,
        all_groups=KeyGroupRange(0, GROUPS - 1),
        schema=SCHEMA,
        files=ModelFiles,
        table=ModelTable,
    )
