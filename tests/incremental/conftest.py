"""The lab of tests/integration on storage that kills its callers, and that misses nothing.

Every worker and every coordinator has a store of its own over the same objects, as processes have. A
`Strike` picks one call of one of them; at that call a worker or the coordinator dies, before or after the
call took effect. A dead process's calls do nothing any more, not even the clean-up that a cancelled task
of this event loop attempts and a killed process does not.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import headgate as hg
from headgate.connectors import collect, generator, sequence
from headgate.errors import StorageError
from headgate.operators.clock import SystemClock
from headgate.runtime.cluster.launch import InProcessCluster
from headgate.runtime.job import runnable
from headgate.runtime.protocol import joblog, names
from headgate.runtime.protocol.checkpoints.manifest import Manifest
from headgate.runtime.protocol.joblog import CheckpointEntry
from headgate.runtime.storage.base import Created, Existed
from headgate.runtime.storage.memory import MemoryStore
from headgate.tests.support.held import Paced
from headgate.tests.support.lab import Lab, RunningJob

CHAIN_MAX = 3
LOADED = 600
"""Keys that are written once, at the start: the bulk of each base."""
HOT = 30
"""Keys that are written again and again: what deltas consist of."""
ROWS = 3_000
BATCHES = 2
"""The number of batches that follow the load from one checkpoint to the next, per subtask."""
WINDOW_MS = 200
_SUFFIXES = {
    "delta": ".delta.parquet",
    "table": ".parquet",
    "file": ".bin",
    "meta": ".meta",
    "items": ".msgpack",
    "segment": ".segment",
}


def kind_of(name: str) -> str:
    """The kind of state that a state file holds."""
    return next(kind for kind, suffix in _SUFFIXES.items() if name.endswith(suffix))


def slot_of(name: str) -> str:
    """Operator, subtask and state that a state file belongs to."""
    return name.rpartition("/")[2].rpartition("-")[0]


@dataclass(frozen=True)
class Call:
    """One call of a store, at the moment before or after it takes effect."""

    verb: str
    name: str
    moment: str
    process: Process
    data: bytes = b""

    @property
    def kind(self) -> str:
        """The kind of state that a state file holds."""
        return kind_of(self.name)

    @property
    def entry(self) -> Any:
        """The log entry that the call writes; None if it is none."""
        if self.verb != "create_if_absent" or self.name.startswith("log/generation/"):
            return None
        return joblog.ENTRIES.decode(self.data, self.name) if self.name.startswith("log/") else None


@dataclass
class Strike:
    """Kill `victim` ("worker", "coordinator" or "everybody") at the `nth` call that `when` picks."""

    when: Callable[[Disk, Call], bool]
    victim: str
    nth: int = 1
    struck: asyncio.Event = field(default_factory=asyncio.Event)
    buried: asyncio.Event = field(default_factory=asyncio.Event)
    caller: Process | None = None
    call: Call | None = None


class Process:
    """A worker or a coordinator, as its storage sees it."""

    def __init__(self, disk: Disk, role: str, name: str) -> None:
        self.disk = disk
        self.role = role
        self.name = name
        self.dying: asyncio.Event | None = None
        """Set once it is dead: until then its calls hang, so that nobody hears of its death by them."""
        self.dead = False

    async def die(self) -> None:
        """Stand in for a call whose process dies."""
        if self.dying is not None and not self.dead:
            await self.dying.wait()
        if self.dying is not None or self.dead:
            raise StorageError("of a dead process")

    def open(self, uri: str, job_name: str, options: Any) -> StruckStore:
        return StruckStore(f"{uri.removeprefix('memory://')}/{job_name}", self)


class Disk:
    """All objects of a lab's job, who calls, and what must never be."""

    def __init__(self) -> None:
        self.strikes: list[Strike] = []
        self.processes: list[Process] = []
        self.violations: list[str] = []
        self.counts: Counter[str] = Counter()
        self.objects: dict[str, bytes] = {}
        self.entries: dict[int, Any] = {}
        self.heads: dict[int, int] = {}
        self.job: Any = None

    def process(self, role: str, name: str) -> Process:
        process = Process(self, role, name)
        self.processes.append(process)
        return process

    # -- what the log says --------------------------------------------------------------------------

    def retained(self) -> list[Manifest]:
        """Manifests that a coordinator which starts now would find, oldest first."""
        head = max(self.heads.values(), default=1)
        return [
            entry.manifest
            for sequence, entry in sorted(self.entries.items())
            if sequence >= head and isinstance(entry, CheckpointEntry)
        ]

    def reachable(self) -> set[str]:
        return {file for manifest in self.retained() for file in manifest.files()}

    def unreachable(self) -> set[str]:
        """State files that no retained checkpoint needs."""
        return {n for n in self.objects if n.startswith("chk/")} - self.reachable()

    def needed(self) -> set[str]:
        """Files of retained checkpoints, and of those that a checkpoint under way builds on."""
        bases: list[Manifest] = []
        coordinator = None if self.job is None else self.job.coordinator._context
        oldest = None if coordinator is None else coordinator.checkpoints.protocol.oldest_base
        if oldest is not None:
            bases = [
                entry.manifest
                for entry in self.entries.values()
                if isinstance(entry, CheckpointEntry) and entry.checkpoint_id >= oldest
            ]
        return self.reachable().union(*(manifest.files() for manifest in bases))

    def chain_length(self, name: str) -> int:
        """Return the number of files in the newest checkpoint of the table that `name` belongs to."""
        retained = self.retained()
        files = retained[-1].files() if retained else ()
        return sum(slot_of(file) == slot_of(name) for file in files)

    def is_merge(self, name: str) -> bool:
        """True if this delta takes the place of older ones, since the chain is full."""
        return kind_of(name) == "delta" and self.chain_length(name) == CHAIN_MAX

    # -- what happens -------------------------------------------------------------------------------

    async def at(self, call: Call) -> None:
        """A call begins, or has taken effect; somebody may have to die at it."""
        await call.process.die()
        if not self.strikes or self.strikes[0].struck.is_set():
            return
        strike = self.strikes[0]
        if not strike.when(self, call):
            return
        strike.nth -= 1
        if strike.nth > 0:
            return
        strike.caller, strike.call = call.process, call
        if strike.victim in (call.process.role, "everybody"):
            call.process.dying = strike.buried
        strike.struck.set()
        await strike.buried.wait()
        await call.process.die()

    def written(self, call: Call) -> None:
        """A file is in the store."""
        kind = kind_of(call.name)
        if self.is_merge(call.name):
            kind = "merge"
        self.counts[kind] += 1

    def created(self, call: Call) -> None:
        """A record is in the store."""
        entry = call.entry
        if entry is None:
            return
        self.entries[int(call.name[4:-5])] = entry
        if isinstance(entry, CheckpointEntry):
            self.counts["completed"] += 1
            for handle in entry.manifest.handles():
                if handle.file is not None:
                    size = len(self.objects.get(handle.file, b""))
                    if size != (names.segment_bytes(handle.file) or handle.size_bytes):
                        self.violations.append(
                            f"checkpoint {entry.checkpoint_id} completes: {handle.file} has {size} "
                            f"of {handle.size_bytes} bytes"
                        )

    def put(self, call: Call) -> None:
        """A record was replaced: where the log begins now."""
        record = joblog.RECORDS.decode(call.data, call.name)
        self.heads[record.generation] = record.head

    def deleted(self, call: Call) -> None:
        """A file is gone."""
        self.counts["deleted"] += 1
        if call.name in self.needed():
            self.violations.append(f"{call.process.name} deletes {call.name}, which is needed")


class StruckStore(MemoryStore):
    """The objects, through the eyes of one process."""

    def __init__(self, root: str, process: Process) -> None:
        super().__init__(root)
        self._process = process
        self._disk = process.disk
        self._disk.objects = self._objects

    async def _call(self, verb: str, name: str, effect: Any, data: bytes = b"") -> Any:
        await self._disk.at(Call(verb, name, "before", self._process, data))
        result = await effect
        call = Call(verb, name, "after", self._process, data)
        if verb == "write_file":
            self._disk.written(call)
        elif verb == "create_if_absent" and isinstance(result, Created):
            self._disk.created(call)
        elif verb == "put":
            self._disk.put(call)
        elif verb == "delete_files":
            self._disk.deleted(call)
        await self._disk.at(call)
        return result

    async def read(self, name: str) -> bytes | None:
        await self._process.die()
        return await super().read(name)

    async def put(self, name: str, data: bytes) -> None:
        await _closing(self._call, "put", name, super().put(name, data), data)

    async def create_if_absent(self, name: str, data: bytes) -> Created | Existed:
        effect = super().create_if_absent(name, data)
        return await _closing(self._call, "create_if_absent", name, effect, data)

    async def delete(self, name: str) -> None:
        await _closing(self._call, "delete", name, super().delete(name))

    async def write_file(self, name: str, data: Any) -> None:
        await _closing(self._call, "write_file", name, super().write_file(name, data))

    async def delete_files(self, names: Sequence[str]) -> None:
        for name in names:
            await _closing(self._call, "delete_files", name, super().delete_files([name]))

    async def delete_incomplete(self, prefix: str) -> int:
        return await _closing(
            self._call, "delete_incomplete", prefix, super().delete_incomplete(prefix)
        )

    async def list_files(self, prefix: str) -> AsyncIterator[tuple[str, int]]:
        await self._disk.at(Call("list_files", prefix, "before", self._process))
        async for found in super().list_files(prefix):
            yield found


async def _closing(call: Any, verb: str, name: str, effect: Any, data: bytes = b"") -> Any:
    """Whatever happens, the effect's coroutine is not left behind unawaited."""
    try:
        return await call(verb, name, effect, data)
    finally:
        effect.close()


class StruckCluster(InProcessCluster):
    """Each worker has a store of its own."""

    def __init__(self, disk: Disk) -> None:
        super().__init__(clock=SystemClock(), open_store=disk.process("worker", "none").open)
        self._disk = disk

    async def start_worker(self, worker_id: str, control: Any, group: str) -> Any:
        self._open_store = self._disk.process("worker", worker_id).open
        return await super().start_worker(worker_id, control, group)


class StruckJob(RunningJob):
    """Each coordinator has a store of its own, and dies as a process does."""

    def __init__(self, spec: Any, cluster: Any, disk: Disk) -> None:
        self._disk = disk
        super().__init__(spec, cluster, disk.process("coordinator", "none").open)
        disk.job = self

    def begin(self) -> None:
        self._process = self._disk.process("coordinator", f"coordinator-{self.takeovers}")
        self._open_store = self._process.open
        super().begin()

    async def execute(self, strike: Strike) -> None:
        """Wait until `strike` strikes, and kill its victim, for good."""
        waiting = asyncio.ensure_future(strike.struck.wait())
        await asyncio.wait({waiting, self.task}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        assert strike.struck.is_set(), f"nothing struck, and the job ended: {self.task}"
        caller = strike.caller
        assert caller is not None
        live = self.live()
        if strike.victim == "worker":
            mine = [worker for worker in live if worker.worker_id == caller.name]
            for worker in (mine or live)[:1]:  # none if all are dead already
                self._kill(worker)
            self._bury(strike)
            return
        if strike.victim == "everybody":
            for worker in live:
                self._kill(worker)
        self._process.dead = True
        await self._crash(strike)

    def forget(self) -> None:
        """Forget all earlier announcements."""
        self._seen = len(self.events)

    def _kill(self, worker: Any) -> None:
        for process in self._disk.processes:
            if process.name == worker.worker_id:
                process.dead = True
        worker.kill()

    async def _crash(self, strike: Strike) -> None:
        self.task.cancel()
        await asyncio.sleep(0)
        self._bury(strike)  # what its calls still wait for is over
        await asyncio.gather(self.task, return_exceptions=True)
        for task in asyncio.all_tasks():
            if task.get_name().startswith("client "):
                task.cancel()
        await self.coordinator.close()
        driver = self.coordinator._context.checkpoints if self.coordinator._context else None
        if driver is not None:
            await driver.close()  # in a process that dies its tasks die too
        self.takeovers += 1
        self.begin()

    def _bury(self, strike: Strike) -> None:
        strike.buried.set()
        self._disk.strikes.remove(strike)


class StruckLab(Lab):
    """Runs jobs on a disk."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.disk = Disk()

    def begin(self, spec: Any, opener: Any, unix_dir: Any) -> Any:
        return StruckJob(spec, StruckCluster(self.disk), self.disk)


# -- the job ------------------------------------------------------------------------------------------


class Everything(hg.KeyedProcess[int, tuple[int, int], tuple[int, int, int, int]]):
    """Counts records in three kinds of state, which must agree."""

    total = hg.ValueState[int](default=0)
    recent = hg.ListState[int]()
    parities = hg.MapState[bool, int]()

    def on_record(self, record: Any, ctx: Any) -> list[tuple[int, int, int, int]]:
        self.total.set(self.total.get() + 1)
        self.recent.add(record[1])
        even = record[1] % 2 == 0
        self.parities.put(even, (self.parities.get(even) or 0) + 1)
        return [(ctx.key, self.total.get(), len(self.recent.get()), sum(self.parities.values()))]


def key_of(n: int) -> int:
    return n if n < LOADED else (n - LOADED) % HOT


@dataclass
class Shop:
    """A job with keyed state of every kind, its sinks, and what they must hold in the end."""

    storage: str
    backend: str = "hashmap"
    every: str = "20ms"
    retain: int = 1
    rows: int = ROWS
    merging: bool = False
    """Small state shares objects; else the name of each file says what is in it."""
    sinks: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("running", "reduced", "processed", "windows"):
            self.sinks.setdefault(name, collect(guarantee="exactly_once"))

    def job(self, *, hurried: bool = False, parallelism: int = 2, **options: str) -> hg.Job:
        """The job; a hurried one waits for no checkpoint."""
        job = hg.Job("job", parallelism=parallelism, max_parallelism=12)
        job.checkpoint(every=self.every, storage=self.storage, retain=self.retain)
        job.restart(attempts=20, delay="1ms")
        runnable(job).override(
            {
                "state.backend.type": self.backend,
                "execution.checkpointing.data-inline-threshold": "0 b",
                "headgate.checkpoint.delta-chain-max": str(CHAIN_MAX),
                "state.backend.rocksdb.writebuffer.size": "64 kb",
                "execution.checkpointing.file-merging.enabled": str(self.merging).lower(),
                "execution.checkpointing.file-merging.max-space-amplification": "1.2",
            }
            | options
        )
        load = self._source(LOADED)
        more = self._source(self.rows - LOADED)
        if not hurried:
            more = Paced(more, BATCHES)
        load = self._read(job, "load", load, "n", "n AS k")
        more = self._read(job, "more", more, f"n + {LOADED} AS n", f"n % {HOT} AS k")
        timed = load.union(more)
        by_key = timed.key_by("k")
        by_key.agg(c=hg.count(), name="running").write(self.sinks["running"], name="to_running")
        by_key.window(hg.tumbling(f"{WINDOW_MS}ms")).agg(
            c=hg.count(), s=hg.sum("n"), name="windows"
        ).write(self.sinks["windows"], name="to_windows")
        pairs = timed.map(lambda r: (r.k, r.n))
        pairs.map(lambda p: (p[0], 1)).key_with(lambda p: p[0]).reduce(
            lambda a, b: (a[0], a[1] + b[1]), name="reduced"
        ).write(self.sinks["reduced"], name="to_reduced")
        pairs.key_with(lambda p: p[0]).process(Everything(), name="processed").write(
            self.sinks["processed"], name="to_processed"
        )
        return job

    def _source(self, rows: int) -> Any:
        return generator({"n": sequence()}, rows=rows, batch_rows=10)

    def _read(self, job: hg.Job, name: str, source: Any, *columns: str) -> Any:
        return (
            job.read(source, name=name).select(*columns).event_time("n", max_out_of_order="100ms")
        )

    def loaded(self) -> bool:
        """All of the load is in a completed checkpoint: from now on deltas are small."""
        return {k for k, _ in self.sinks["reduced"].rows} >= set(range(HOT, LOADED))

    def check_at_least_once(self) -> None:
        """Everything is there, perhaps some of it again; nothing else is."""
        per_key = Counter(key_of(n) for n in range(self.rows))
        counted = {(k, i) for k, count in per_key.items() for i in range(1, count + 1)}
        assert set(self.sinks["reduced"].rows) == counted
        assert set(self.sinks["processed"].rows) == {(k, i, i, i) for k, i in counted}

    def check(self) -> None:
        """Everything is there, once."""
        per_key = Counter(key_of(n) for n in range(self.rows))
        counted = [(k, i) for k, count in per_key.items() for i in range(1, count + 1)]
        assert sorted(self.sinks["reduced"].rows) == sorted(counted)
        assert sorted(self.sinks["processed"].rows) == sorted((k, i, i, i) for k, i in counted)
        windows: dict[tuple[int, int], list[int]] = {}
        for n in range(self.rows):
            windows.setdefault((key_of(n), n // WINDOW_MS), []).append(n)
        found = [
            (r["k"], int(r["window_start"].timestamp() * 1000) // WINDOW_MS, r["c"], r["s"])
            for r in self.sinks["windows"].rows
        ]
        assert sorted(found) == sorted((*w, len(ns), sum(ns)) for w, ns in windows.items())
        # A running aggregate tells the newest row of each key of a batch: never the same twice, and
        # the last one of all.
        running = [(r["k"], r["c"]) for r in self.sinks["running"].rows]
        assert len(set(running)) == len(running)
        assert {k: max(c for key, c in running if key == k) for k in per_key} == per_key


@pytest.fixture
def lab(tmp_path: Path) -> Any:
    lab = StruckLab(tmp_path)
    yield lab
    for root in list(MemoryStore._shared):
        if root.startswith(lab.storage.removeprefix("memory://")):
            MemoryStore.forget(root)


@pytest.fixture
def shop(lab: Any) -> Callable[..., Shop]:
    return lambda **settings: Shop(lab.storage, **settings)


@pytest.fixture
def plain_lab(tmp_path: Path) -> Any:
    """A lab on real storage."""
    return Lab(tmp_path)


@pytest.fixture
def goods_at() -> type[Shop]:
    """A job with its checkpoints at an address."""
    return Shop


@pytest.fixture
def strike() -> type[Strike]:
    return Strike
