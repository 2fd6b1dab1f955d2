"""Splits that appear are read once, also by subtasks that were finished at the restored checkpoint."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import headgate as hg
from headgate.connectors import parquet_sink
from headgate.operators.elements import Batch, ColumnBatch
from headgate.operators.source import Source, SourceReader

SCHEMA = pa.schema([("split", pa.string()), ("n", pa.int64())])
ROWS = 20
OPEN = ("open-a=0", "open-b=1")


class Listed(Source[Any]):
    """The splits that a file lists, each with a number that decides its owner: `a=0 b=1`."""

    schema = SCHEMA
    discovers = True

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def names(self) -> list[str]:
        return (self.directory / "listed").read_text().split()

    def splits(self, parallelism: int) -> list[bytes]:
        return [msgspec.msgpack.encode((name, 0)) for name in self.names()]

    def discover(self, known: Mapping[str, bytes]) -> list[bytes]:
        return self.splits(1)

    def split_key(self, split: bytes) -> str:
        return str(msgspec.msgpack.decode(split)[0])

    def split_share(self, key: str) -> int:
        return int(key.partition("=")[2])

    def reader(self) -> SourceReader:
        return ListedReader(self.directory)


class ListedReader(SourceReader):
    """Splits end behind their last record, but those whose names begin with `open` may get more.

    The file `fail-2` makes subtask 2 fail behind a checkpoint, once.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.at: dict[str, int] = {}

    def add_splits(self, splits: Sequence[bytes]) -> None:
        self.at.update(msgspec.msgpack.decode(split) for split in splits)

    @property
    def finished(self) -> bool:
        return not self.at

    def poll(self) -> Batch | None:
        for name, at in list(self.at.items()):
            if at == ROWS:
                continue
            if name.startswith("open"):
                self.at[name] = ROWS
            else:
                del self.at[name]
            rows = {"split": [name] * (ROWS - at), "n": list(range(at, ROWS))}
            return ColumnBatch(pa.RecordBatch.from_pydict(rows, schema=SCHEMA))
        return None

    def snapshot(self) -> list[bytes]:
        return [msgspec.msgpack.encode(each) for each in self.at.items()]

    def on_checkpoint_complete(self, checkpoint_id: int) -> None:
        mark = self.directory / f"fail-{self.context.subtask_index}"
        if mark.exists():
            mark.unlink()
            raise RuntimeError("planted")


def job(
    directory: Path, *, looks: bool, parallelism: int = 4, source: Listed | None = None
) -> hg.Job:
    interval = "20ms" if looks else "0ms"
    made = hg.Job(
        "listed", parallelism=parallelism, options={"headgate.source.discovery-interval": interval}
    )
    made.checkpoint(every="1h", storage=directory / "checkpoints")
    made.restart(5, delay="0s")
    sink = parquet_sink(str(directory / "out"), guarantee="exactly_once")
    made.read(source or Listed(directory), name="in").write(sink, name="out")
    return made


def read(directory: Path) -> Counter[str]:
    files = (directory / "out").glob("[!.]*.parquet")
    return Counter(row["split"] for file in files for row in pq.read_table(file).to_pylist())


def until(done: Callable[[], bool]) -> None:
    for _ in range(3_000):
        if done():
            return
        time.sleep(0.02)
    raise AssertionError("it did not come")


def until_read(handle: hg.JobHandle, directory: Path, *names: str) -> None:
    def all_read() -> bool:
        try:
            handle.checkpoint()
        except hg.errors.HeadgateError:
            return False  # it restarts
        return set(names) <= read(directory).keys()

    until(all_read)


@pytest.mark.parametrize("failing", [0, 2])
def test_a_region_that_restarts_alone_agrees_with_the_others(tmp_path: Path, failing: int) -> None:
    """Subtasks 2 and 3 have finished without any split, when the source looked for none."""
    (tmp_path / "listed").write_text(" ".join(OPEN))
    with job(tmp_path, looks=False).start() as handle:
        until_read(handle, tmp_path, *OPEN)
    with job(tmp_path, looks=True).start() as handle:
        until_read(handle, tmp_path, *OPEN)
        (tmp_path / f"fail-{failing}").touch()
        until_read(handle, tmp_path, *OPEN)
        until(lambda: not (tmp_path / f"fail-{failing}").exists())
        until(lambda: handle.status()["restarts"] >= 1)
        new = [f"x{share}={share}" for share in range(8)]
        (tmp_path / "listed").write_text(" ".join([*OPEN, *new]))
        until_read(handle, tmp_path, *new)
    assert read(tmp_path) == dict.fromkeys([*OPEN, *new], ROWS)


def test_from_a_savepoint_in_which_all_subtasks_have_finished(tmp_path: Path) -> None:
    (tmp_path / "listed").write_text("a=0 b=1")
    with job(tmp_path, looks=True, parallelism=2).start() as handle:
        until_read(handle, tmp_path, "a=0", "b=1")
        handle.stop(drain=True)
    names = ["a=0", "b=1", "c=2", "d=3", "e=4"]
    for _ in range(2):
        (tmp_path / "listed").write_text(" ".join(names))
        with job(tmp_path, looks=True, parallelism=2).start() as handle:
            until_read(handle, tmp_path, *names)
        names.append("f=5")
    assert read(tmp_path) == dict.fromkeys(names[:-1], ROWS)


class Families(Listed):
    """A split may name a parent: `child<parent=1` is read behind `parent=0`. All are there at the start."""

    splits_have_parents = True

    def splits(self, parallelism: int) -> list[bytes]:
        return [split for split in super().splits(parallelism) if not self.split_parents(split)]

    def discover(self, known: Mapping[str, bytes]) -> list[bytes]:
        return super().splits(1)

    def split_parents(self, split: bytes) -> Sequence[str]:
        _, found, parent = self.split_key(split).partition("=")[0].partition("<")
        return [f"{parent}=0"] if found else []


@pytest.mark.parametrize("fails", [False, True])
def test_children_come_behind_a_checkpoint_with_the_end_of_their_parent(
    tmp_path: Path, fails: bool
) -> None:
    """Also if another subtask has read the parent, and after a failure."""
    names = ["a=0", "b<a=1", "c<b=1", "open=0", "d<open=0"]
    (tmp_path / "listed").write_text(" ".join(names).replace("c<b=1", "b=0 c<b=1"))
    made = job(tmp_path, looks=True, parallelism=2, source=Families(tmp_path))
    with made.start() as handle:
        until(lambda: handle.status()["status"] == "RUNNING")
        time.sleep(0.1)
        if fails:
            (tmp_path / "fail-1").touch()
        assert "b<a=1" not in read(tmp_path)
        until_read(handle, tmp_path, "a=0", "b=0", "open=0", "b<a=1", "c<b=1")
        assert "d<open=0" not in read(tmp_path)
    assert read(tmp_path) == dict.fromkeys(["a=0", "b=0", "open=0", "b<a=1", "c<b=1"], ROWS)
