"""The world outside a simulated job: numbered records in, transactions out. It survives all crashes.

Everything a job must not do to the outside raises `Violation` at the moment it does it, and is kept in
`World.violations`, since the job would take the exception for a failure and restart.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pyarrow as pa

from headgate.errors import StorageError
from headgate.operators.base import OperatorContext
from headgate.operators.elements import Batch, ColumnBatch, ObjectBatch
from headgate.operators.sink import GlobalCommit, Guarantee, Sink, SinkWriter
from headgate.operators.source import Source, SourceReader
from headgate.state.snapshot import CommitPermit
from headgate.testing.loop import START_MS

from .process import is_dead

SPLITS = 4
KEYS = 12
"""A multiple of SPLITS: all numbers of a key come from one split, in order."""


class Violation(Exception):
    """A promise was broken."""


class InjectedError(Exception):
    """The exception that user code raises now and then."""


@dataclass(slots=True)
class OutsideFaults:
    """Probabilities per call of user code."""

    map_rate: float = 0.0
    prepare_rate: float = 0.0
    commit_rate: float = 0.0
    table_rate: float = 0.0
    """How often the target of a sink that commits globally does not answer."""

    def heal(self) -> None:
        """From now on no user code fails."""
        self.table_rate = 0.0
        self.map_rate = self.prepare_rate = self.commit_rate = 0.0


@dataclass(slots=True)
class Transaction:
    """The output of one subtask of a sink between two barriers."""

    attempt: int
    sink: str
    subtask: int
    checkpoint_id: int
    records: list[tuple[int, ...]]
    state: str = "prepared"


@dataclass
class World:
    """Of one simulation."""

    rng: random.Random
    rows: int
    check: Callable[[World, tuple[int, ...]], None]
    """Raises Violation if this record must not become visible now."""
    seed: int = 0
    batch_rows: int = 8
    pause_s: float = 0.02
    """Mean time between two batches of a split's reader."""
    bounded: bool = True
    """The source says when it has nothing more; else somebody has to stop the job."""
    appeared: list[int] = field(default_factory=lambda: [0])
    """The splits that exist, of a source of which they become more."""
    growth_rate: float = 0.3
    """The probability that another one has appeared when the job looks for splits."""
    listing_rate: float = 1.0
    """The probability that a listing has a split that exists."""
    faults: OutsideFaults = field(default_factory=OutsideFaults)
    completed: set[int] = field(default_factory=set)
    """Ids of checkpoints in the job log."""
    begun_with: set[int] = field(default_factory=set)
    """Ids of the savepoints that runs began with."""
    cuts: dict[int, dict[int, tuple[int, Any]]] = field(default_factory=dict)
    """By checkpoint and key, of jobs that clients query: the attempt that took the snapshot, and the value
    in it."""
    live: dict[int, dict[int, int]] = field(default_factory=dict)
    """By attempt and key, of such jobs: the count at this moment, of keys that the attempt has seen."""
    restored: dict[int, int] = field(default_factory=dict)
    """By attempt, of such jobs: the checkpoint that it began with."""
    closed: set[tuple[int, int]] = field(default_factory=set)
    """Attempt and index of the subtasks of such jobs that have ended."""
    attempts: dict[tuple[str, int], int] = field(default_factory=dict)
    """By sink and subtask: the newest that was opened; older ones are fenced."""
    transactions: dict[bytes, Transaction] = field(default_factory=dict)
    markers: dict[tuple[str, str], int] = field(default_factory=dict)
    """By sink that commits globally, and run: the newest checkpoint that was committed."""
    visible: list[tuple[int, ...]] = field(default_factory=list)
    by_key: dict[int, list[tuple[int, ...]]] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    on_effect: Callable[[str], None] = lambda _: None
    """A function that is called with all that happens here."""
    on_violation: Callable[[], None] = lambda: None
    """A function that is called when a promise is broken."""

    def violated(self, text: str) -> Violation:
        """Keep a broken promise in mind."""
        self.violations.append(text)
        self.on_violation()
        return Violation(text)

    def perhaps_fail(self, rate: float, what: str) -> None:
        """Raise, now and then, as user code does."""
        if self.rng.random() < rate:
            raise InjectedError(what)

    # -- transactions -------------------------------------------------------------------------------

    def begin_attempt(self, context: OperatorContext) -> None:
        """A subtask of a sink begins: fence its older attempts, and abort what they left behind the
        restored checkpoint. The first one does so for those that a higher parallelism had, too."""
        own = context.subtask_index

        def ours(sink: str, subtask: int) -> bool:
            orphaned = own == 0 and subtask >= context.parallelism
            return sink == context.operator_name and (subtask == own or orphaned)

        mine = {key for key in self.attempts if ours(*key)} | {(context.operator_name, own)}
        for key in mine:
            self.attempts[key] = max(self.attempts.get(key, 0), context.attempt)
        for transaction in self.transactions.values():
            dead = (
                ours(transaction.sink, transaction.subtask)
                and transaction.attempt < context.attempt
                and transaction.checkpoint_id > context.restored_checkpoint
            )
            if dead and transaction.state == "prepared":
                transaction.state = "aborted"

    def prepare(self, name: bytes, transaction: Transaction) -> None:
        """Pre-commit; may be repeated."""
        self.perhaps_fail(self.faults.prepare_rate, "no pre-commit")
        if transaction.attempt < self.attempts[transaction.sink, transaction.subtask]:
            raise InjectedError("fenced by a younger attempt")
        self.transactions.setdefault(name, transaction)
        self.on_effect(f"prepare {name.decode()}")
        self.perhaps_fail(self.faults.prepare_rate, "no answer to a pre-commit")

    def commit(self, name: bytes, permit: CommitPermit) -> None:
        """Make a transaction visible; may be repeated."""
        self.perhaps_fail(self.faults.commit_rate, "no commit")
        self._show(name, permit)
        self.perhaps_fail(self.faults.commit_rate, "no answer to a commit")

    def commit_table(self, commit: GlobalCommit) -> None:
        """Make the output of a whole checkpoint visible, with a marker that says so; may be repeated.

        Whatever the marker of a run has passed counts as committed, as in a table that records only the
        newest checkpoint.
        """
        if self.rng.random() < self.faults.table_rate:
            raise StorageError("the table does not answer")
        self.perhaps_fail(self.faults.commit_rate, "no commit")
        for epoch in commit.epochs:
            runs = {name.decode().split("|")[0] for name in epoch.committables}
            for run in sorted(runs):
                if epoch.checkpoint_id <= self.markers.get((commit.sink, run), 0):
                    continue
                for name in epoch.committables:
                    if name.decode().startswith(f"{run}|"):
                        self._show(name, commit.permit)
                self.markers[commit.sink, run] = epoch.checkpoint_id
        self.perhaps_fail(self.faults.commit_rate, "no answer to a commit")

    def _show(self, name: bytes, permit: CommitPermit) -> None:
        if permit.checkpoint_id not in self.completed | self.begun_with:
            raise self.violated(f"commit without a completed checkpoint {permit} {name!r}")
        transaction = self.transactions.get(name)
        if transaction is None or transaction.state == "aborted":
            raise self.violated(f"commit of an unknown or aborted transaction {permit} {name!r}")
        if transaction.checkpoint_id > permit.checkpoint_id:
            raise self.violated(f"commit ahead of its checkpoint {permit} {name!r}")
        if transaction.state == "prepared":
            transaction.state = "committed"
            self.on_effect(f"commit {name.decode()} {permit.checkpoint_id}")
            for record in transaction.records:
                self.check(self, record)
                self.visible.append(record)
                self.by_key.setdefault(record[0], []).append(record)


WORLDS: dict[str, World] = {}
"""By token: sources and sinks are pickled on their way to the workers, and find their world here."""


# -- the source -------------------------------------------------------------------------------------


class Split(msgspec.Struct):
    """The numbers of a split, and how many of them have been read."""

    number: int
    position: int = 0


class Numbers(Source):
    """The numbers 0 to rows - 1; number n is in split n mod SPLITS. Batches are cut by chance."""

    bounded = True

    def __init__(
        self,
        token: str,
        splits: Sequence[int] = range(SPLITS),
        *,
        part: int = 0,
        rows: int = 0,
        columns: bool = False,
    ) -> None:
        """`part` 1 goes on where part 0 ends; `rows` 0 means as many as the world has."""
        self.token = token
        self.numbers = splits
        self.part = part
        self.rows = rows or WORLDS[token].rows
        self.bounded = WORLDS[token].bounded
        self.schema = COLUMNS if columns else None

    def splits(self, parallelism: int) -> list[bytes]:
        return [msgspec.msgpack.encode(Split(number)) for number in self.numbers]

    def reader(self) -> SourceReader:
        return _Reader(self)


class GrowingNumbers(Numbers):
    """The same, of which a run without state finds some splits, and the job the others while it runs.

    Those that have been read to the end leave the positions, as the files of a directory do.
    """

    discovers = True

    def splits(self, parallelism: int) -> list[bytes]:
        return _encoded(WORLDS[self.token].appeared)

    def discover(self, known: Mapping[str, bytes]) -> list[bytes]:
        """A listing, which may be incomplete."""
        world = WORLDS[self.token]
        world.perhaps_fail(world.faults.map_rate, "no listing")
        if len(world.appeared) < SPLITS and world.rng.random() < world.growth_rate:
            rest = [number for number in range(SPLITS) if number not in world.appeared]
            world.appeared.append(world.rng.choice(rest))
            world.on_effect(f"split {world.appeared[-1]} appears")
        listed = [number for number in world.appeared if world.rng.random() < world.listing_rate]
        world.rng.shuffle(listed)
        return _encoded(listed)

    def split_key(self, split: bytes) -> str:
        return f"{msgspec.msgpack.decode(split, type=Split).number}"

    def reader(self) -> SourceReader:
        return _ForgetfulReader(self)


def _encoded(numbers: Sequence[int]) -> list[bytes]:
    return [msgspec.msgpack.encode(Split(number)) for number in numbers]


class _Reader(SourceReader):
    def __init__(self, source: Numbers) -> None:
        self._source = source
        self._world = WORLDS[source.token]
        self._splits: list[Split] = []
        self._ready_s = 0.0

    def add_splits(self, splits: Sequence[bytes]) -> None:
        added = [msgspec.msgpack.decode(split, type=Split) for split in splits]
        self._splits += added
        for split in added:
            self.context.splits.opened(f"{split.number}")
            if self._left(split) == 0:
                self.context.splits.ended(f"{split.number}")

    def _left(self, split: Split) -> int:
        return len(range(split.number, self._source.rows, SPLITS)) - split.position

    def poll(self) -> Batch | None:
        world = self._world
        open_ = [split for split in self._splits if self._left(split) > 0]
        if not open_ or self.context.clock.monotonic() < self._ready_s:
            return None
        split = world.rng.choice(open_)
        count = min(self._left(split), world.rng.randint(1, world.batch_rows))
        first = self._source.part * self._source.rows + split.number + split.position * SPLITS
        split.position += count
        self.context.splits.reading(f"{split.number}")
        if self._left(split) == 0:
            self.context.splits.ended(f"{split.number}")
        self._ready_s = self.context.clock.monotonic() + world.rng.expovariate(1 / world.pause_s)
        numbers = [first + index * SPLITS for index in range(count)]
        return ObjectBatch(numbers) if self._source.schema is None else columns_of(numbers)

    async def wait(self) -> None:
        if any(self._left(split) > 0 for split in self._splits):
            await asyncio.sleep(max(0.0, self._ready_s - self.context.clock.monotonic()))
        else:
            await asyncio.Event().wait()  # an unbounded source that has nothing more

    @property
    def finished(self) -> bool:
        return self._source.bounded and not any(self._left(split) > 0 for split in self._splits)

    def snapshot(self) -> list[bytes]:
        return [msgspec.msgpack.encode(split) for split in self._splits]


class _ForgetfulReader(_Reader):
    """Has no position of a split that has ended, and says when it has nothing to read at present."""

    @property
    def finished(self) -> bool:
        return not any(self._left(split) > 0 for split in self._splits)

    def snapshot(self) -> list[bytes]:
        return [msgspec.msgpack.encode(split) for split in self._splits if self._left(split) > 0]


COLUMNS = pa.schema([("key", pa.int64()), ("number", pa.int64()), ("at", pa.int64())])


def columns_of(numbers: list[int]) -> ColumnBatch:
    """Numbers with their keys and times."""
    rows = [[n % KEYS for n in numbers], numbers, [time_of(n) for n in numbers]]
    arrays = [pa.array(values, pa.int64()) for values in rows]
    return ColumnBatch(pa.RecordBatch.from_arrays(arrays, schema=COLUMNS))


def time_of(number: int) -> int:
    """When a number happened, in ms: 50 ms behind the one before in its split, or up to 130 ms earlier."""
    return START_MS + number // SPLITS * 50 - number * 7919 % 3 * 65


# -- the sink ---------------------------------------------------------------------------------------


class Ledger(Sink):
    """Two-phase commit into the world's transactions."""

    guarantees = frozenset({Guarantee.EXACTLY_ONCE})
    guarantee = Guarantee.EXACTLY_ONCE

    def __init__(self, token: str) -> None:
        self.token = token

    def writer(self) -> SinkWriter:
        return _Writer(self.token)


class GlobalLedger(Ledger):
    """The same, with one commit per checkpoint for all subtasks."""

    commits_globally = True

    def __init__(self, token: str) -> None:
        super().__init__(token)
        WORLDS[token].faults.table_rate = 0.2

    def commit_globally(self, commit: GlobalCommit) -> None:
        WORLDS[self.token].commit_table(commit)


class _Writer(SinkWriter):
    def __init__(self, token: str) -> None:
        self._world = WORLDS[token]
        self._records: list[tuple[int, ...]] = []

    def prepare(self) -> None:
        self._world.begin_attempt(self.context)

    def write(self, batch: Batch) -> None:
        if isinstance(batch, ColumnBatch):
            self._records += zip(
                *(column.to_pylist() for column in batch.data.columns), strict=True
            )
        else:
            self._records += batch.records

    def roll(self, checkpoint_id: int) -> Callable[[], list[bytes]] | None:
        if not self._records or is_dead():
            return None
        records, self._records = self._records, []
        context = self.context
        sink, subtask = context.operator_name, context.subtask_index
        name = f"{context.run_id}|{context.attempt}-{checkpoint_id}-{sink}-{subtask}".encode()
        transaction = Transaction(context.attempt, sink, subtask, checkpoint_id, records)

        def precommit() -> list[bytes]:
            self._world.prepare(name, transaction)
            return [name]

        return precommit

    def commit(self, committables: list[bytes], permit: CommitPermit) -> None:
        for name in committables:
            self._world.commit(name, permit)
