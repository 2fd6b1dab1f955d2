"""A connector over a directory whose mistakes can be chosen: each check of the kit has to find its own.

Records are lines of JSON in the file `records`. What the sink has pre-committed is in files whose names
begin with a dot. The file `down` stands for a server that does not answer.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from headgate.errors import DataError, JobError, StorageError
from headgate.operators.elements import Batch, ObjectBatch
from headgate.operators.sink import Guarantee, GuaranteeLike, Sink, SinkWriter, parse_guarantee
from headgate.operators.source import Source, SourceReader
from headgate.state.snapshot import CommitPermit
from headgate.testing.connectors import Feature, SinkCase, SourceCase

SECRET = "open sesame"
BAD = "not JSON"
MEMORY: dict[str, list[Any]] = {}
"""The data that the planted sink keeps in its process instead of in its directory."""


LOOKS_MAX = 6_000


def is_down(directory: Path) -> bool:
    """Look whether the server is away. That of a sink starts again when its thread has looked."""
    down = (directory / "down").exists()
    if down:
        (directory / ".looked").touch()
    return down


def check_up(directory: Path) -> None:
    if is_down(directory):
        raise StorageError(f"{directory} does not answer")


def log_in(password: str, bug: str) -> None:
    if password != SECRET:
        if bug == "shows the password":
            raise StorageError(f"wrong password: `{SECRET}` was expected")
        if bug == "a raw error":
            raise KeyError(password)
        if bug != "takes any password":
            raise StorageError("wrong password")


def told(bug: str) -> str:
    """The answer about a connection."""
    if bug == "shows the password at the check":
        return f"logged in with {SECRET}"
    return "" if bug == "says nothing" else "a shelf"


class ShelfSource(Source[Any]):
    def __init__(
        self,
        directory: Path,
        bug: str,
        *,
        live: bool = False,
        bad: str = "fail",
        password: str = SECRET,
    ) -> None:
        self.directory, self.bug, self.bad, self.password = directory, bug, bad, password
        self.bounded = not live

    def check_connection(self, options: Mapping[str, str]) -> str:
        log_in(self.password, self.bug)
        if self.bug == "confirms at the check":
            (self.directory / "confirmed").write_text("1")
        return told(self.bug)

    def splits(self, parallelism: int) -> list[bytes]:
        log_in(self.password, self.bug)
        end = len(self.lines()) if self.bounded else None
        return [json.dumps([0, end]).encode()]

    def lines(self) -> list[str]:
        file = self.directory / "records"
        return file.read_text().splitlines() if file.exists() else []

    def reader(self) -> SourceReader:
        return ShelfReader(self)

    def __repr__(self) -> str:
        return f"shelf({self.password})" if self.bug == "shows the password" else "shelf"


class ShelfReader(SourceReader):
    def __init__(self, source: ShelfSource) -> None:
        self.source, self.bug = source, source.bug
        self.at, self.end = 0, 0
        self.failed = False
        self.snapshots: dict[int, int] = {}
        self.checkpoint = 0

    def add_splits(self, splits: Sequence[bytes]) -> None:
        if self.bug == "belongs to subtask 0" and self.context.subtask_index:
            return
        for split in splits:
            self.at, self.end = json.loads(split)
        if self.bug == "a record from nowhere" and not self.end:
            self.at = -1

    @property
    def finished(self) -> bool:
        if self.end is None:
            return self.bug == "ends when nothing is there" and not self.source.lines()
        return self.at >= self.end

    def poll(self) -> Batch | None:
        if self.bug == "ends when the server is away" and is_down(self.source.directory):
            self.end = self.at
            return None
        check_up(self.source.directory)
        if self.at < 0:
            self.at = 0
            return ObjectBatch([None])
        lines = self.source.lines()
        while self.at < (len(lines) if self.end is None else self.end):
            line = lines[self.at]
            self.at += 1
            if line != BAD:
                return ObjectBatch([json.loads(line)])
            if self.source.bad == "fail":
                raise DataError("a record cannot be read")
            if self.source.bad == "side_output":
                self.reject(ObjectBatch([line]))
            if self.bug == "drops the neighbour":
                self.at += 1
        return None

    async def wait(self) -> None:
        await asyncio.sleep(0.001)

    def begin_checkpoint(self, checkpoint_id: int) -> None:
        self.checkpoint = checkpoint_id

    def snapshot(self) -> list[bytes]:
        self.snapshots[self.checkpoint] = self.at
        if self.bug == "confirms at the barrier":
            self.confirm(self.at)
        at = self.at - 1 if self.bug == "one record behind" and self.at else self.at
        return [] if self.finished else [json.dumps([at, self.end]).encode()]

    def lag_records(self) -> Mapping[str, int]:
        left = (self.end or len(self.source.lines())) - self.at
        return {"shelf": left + (self.bug == "one too many left")}

    def on_checkpoint_complete(self, checkpoint_id: int) -> None:
        now = self.bug == "confirms what it has read"
        self.confirm(self.at if now else self.snapshots[checkpoint_id])

    def confirm(self, at: int) -> None:
        (self.source.directory / "confirmed").write_text(str(at))


class ShelfSink(Sink):
    guarantees = frozenset(Guarantee)

    def __init__(
        self, directory: Path, bug: str, guarantee: GuaranteeLike, password: str = SECRET
    ) -> None:
        self.directory, self.bug, self.password = directory, bug, password
        self.guarantee = parse_guarantee(guarantee)

    def writer(self) -> SinkWriter:
        return ShelfWriter(self)

    def check_connection(self, options: Mapping[str, str]) -> str:
        log_in(self.password, self.bug)
        if self.bug == "writes at the check":
            (self.directory / "check").write_text("1\n")
        if self.bug == "leaves a draft at the check":
            (self.directory / ".0-0-0.draft").touch()
        return told(self.bug)

    def describe(self) -> str:
        return f"shelf({self.password})" if self.bug == "shows the password" else "shelf"


class ShelfWriter(SinkWriter):
    def __init__(self, sink: ShelfSink) -> None:
        self.sink, self.directory, self.bug = sink, sink.directory, sink.bug
        self.exactly = sink.guarantee is Guarantee.EXACTLY_ONCE
        self.records: list[Any] = []

    def prepare(self) -> None:
        log_in(self.sink.password, self.bug)
        if self.bug == "leaves drafts":
            return
        for draft in self.directory.glob(".*.draft"):
            attempt, checkpoint, subtask = map(int, draft.name.split(".")[1].split("-"))
            mine = subtask % self.context.parallelism == self.context.subtask_index
            if self.bug == "leaves drafts of others":
                mine = subtask == self.context.subtask_index
            dead = attempt < self.context.attempt and checkpoint > self.context.restored_checkpoint
            if self.bug == "takes drafts for dead that are not":
                dead = attempt < self.context.attempt and not mine
                mine = True
            if dead and mine:
                draft.unlink(missing_ok=True)

    def write(self, batch: Batch) -> None:
        self.records += batch.records if isinstance(batch, ObjectBatch) else []
        if self.bug == "visible at once":
            self.append(self.directory / "early", self.records[-len(batch) :])
            self.records = []

    def append(self, file: Path, records: Sequence[Any]) -> None:
        with file.open("a") as output:
            output.writelines(json.dumps(record) + "\n" for record in records)

    def roll(self, checkpoint_id: int) -> Callable[[], list[bytes]] | None:
        if not self.records or self.bug == "writes at the end":
            return None
        records, self.records = self.records, []
        context = self.context
        name = f"{context.attempt}-{checkpoint_id}-{context.subtask_index}"

        def draft() -> list[bytes]:
            if self.bug == "does not see that the server is away":
                if is_down(self.directory):
                    return []
            else:
                check_up(self.directory)
            if not self.exactly:
                kept = records[:-1] if self.bug == "forgets the last record" else records
                file = self.directory / name
                if self.bug == "one file for all":
                    file = self.directory / "all"
                    file.unlink(missing_ok=True)
                self.append(file, kept)
                return []
            if self.bug == "keeps drafts in memory":
                MEMORY[name] = records
            else:
                (self.directory / f".{name}.draft").write_text(
                    "".join(json.dumps(record) + "\n" for record in records)
                )
            return [name.encode()]

        return draft

    def commit(self, committables: list[bytes], permit: CommitPermit) -> None:
        check_up(self.directory)
        names = [name.decode() for name in committables]
        if self.bug == "commits the newest only":
            names = names[-1:]
        if self.bug == "commits once in a run":
            there = [file.name.split("-")[1] for file in self.directory.glob("[!.]*-*")]
            newest = max(map(int, there), default=0)
            names = [name for name in names if int(name.split("-")[1]) > newest]
        for name in names:
            if self.bug == "commits its own only" and int(name[-1]) != self.context.subtask_index:
                continue
            self.publish(name)

    def publish(self, name: str) -> None:
        draft, target = self.directory / f".{name}.draft", self.directory / name
        if self.bug == "keeps drafts in memory":
            self.append(target, MEMORY.pop(name, []))
        elif self.bug == "looks before it copies":
            if not target.exists():
                time.sleep(0.3)  # long enough for another attempt to look as well
                self.append(target, [json.loads(line) for line in draft.read_text().splitlines()])
        elif self.bug == "copies again":
            self.append(target, [json.loads(line) for line in draft.read_text().splitlines()])
        else:
            with suppress(
                FileNotFoundError
            ):  # it was committed before, or another attempt was faster
                draft.rename(target)
            silent = ("takes what is gone for committed", "takes drafts for dead that are not")
            if not target.exists() and self.bug not in silent:
                fix = "" if self.bug == "knows no way out" else "begin with another savepoint"
                raise JobError(f"{name} is gone", fix=fix)

    def close(self) -> None:
        if self.bug == "writes at the end":
            self.append(self.directory / f"{self.context.attempt}", self.records)


class Switch:
    """The server of a shelf, which is up as long as there is no file `down`."""

    def __init__(self, *, seen: bool) -> None:
        """Make a server that is up; `seen`: it starts again when somebody has seen that it was away."""
        self.directory = Path()
        self.seen = seen

    def start(self) -> None:
        for _ in range(LOOKS_MAX if self.seen else 0):
            if (self.directory / ".looked").exists():
                break
            time.sleep(0.01)
        (self.directory / "down").unlink(missing_ok=True)

    def kill(self) -> None:
        (self.directory / ".looked").unlink(missing_ok=True)
        (self.directory / "down").touch()


class _Shelf:
    secrets = (SECRET,)

    def __init__(self, bug: str = "") -> None:
        self.bug = bug
        self.server = Switch(seen=isinstance(self, SinkCase))

    @contextmanager
    def place(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory() as directory:
            self.server.directory = Path(directory)
            yield Path(directory)

    def records(self) -> list[Any]:
        return list(range(12))


class ShelfSourceCase(_Shelf, SourceCase):
    features = frozenset(
        {
            *(Feature.SERVER, Feature.LIVE, Feature.BAD_RECORDS),
            *(Feature.LAG, Feature.CONFIRMS, Feature.MISTAKES, Feature.CONNECTS),
        }
    )

    def put(self, place: Path, records: Sequence[Any]) -> None:
        with (place / "records").open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)

    def put_bad(self, place: Path) -> None:
        with (place / "records").open("a") as file:
            file.write(BAD + "\n")

    def source(self, place: Path) -> Source:
        return ShelfSource(place, self.bug)

    def live(self, place: Path) -> Source:
        return ShelfSource(place, self.bug, live=True)

    def tolerant(self, place: Path, on_bad_record: str) -> Source:
        return ShelfSource(place, self.bug, bad=on_bad_record)

    def confirmed(self, place: Path) -> int:
        file = place / "confirmed"
        return int(file.read_text()) if file.exists() else 0

    def mistakes(self, place: Path) -> Mapping[str, tuple[Source, str]]:
        return {"a wrong password": (ShelfSource(place, self.bug, password="?"), "wrong password")}


class ShelfSinkCase(_Shelf, SinkCase):
    features = frozenset(
        {
            *(Feature.SERVER, Feature.EXACTLY_ONCE, Feature.AT_LEAST_ONCE),
            *(Feature.PENDING, Feature.MISTAKES, Feature.CONNECTS),
        }
    )

    def batches(self, records: Sequence[Any]) -> list[Batch]:
        return [ObjectBatch(list(records[at : at + 2])) for at in range(0, len(records), 2)]

    def sink(self, place: Path, guarantee: GuaranteeLike) -> Sink:
        return ShelfSink(place, self.bug, guarantee)

    def visible(self, place: Path) -> list[Any]:
        files = sorted(file for file in place.glob("[!.]*") if file.name != "down")
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]

    def pending(self, place: Path) -> Sequence[Any]:
        return [file.name for file in place.glob(".*.draft")]

    def mistakes(self, place: Path) -> Mapping[str, tuple[Sink, str]]:
        wrong = ShelfSink(place, self.bug, "exactly_once", password="?")
        return {"a wrong password": (wrong, "wrong password")}


class PlainShelfCase(ShelfSinkCase):
    """A sink that promises nothing for a crash."""

    features = frozenset()

    def sink(self, place: Path, guarantee: GuaranteeLike) -> Sink:
        return ShelfSink(place, self.bug, "none")
